"""Snapshots of busy machines, made up."""

from __future__ import annotations

from typing import Any

GIB = 2**30


def picture(devices: int = 16, jobs: int = 500, *, turn: int = 0) -> dict[str, Any]:
    """A snapshot of so many devices and jobs: two fifths run, one waits, the rest is over; another
    `turn` is some time later, when every job has changed in some way."""
    now = 1_800_000_000.0 + turn
    running = [_running(at, devices, turn) for at in range(jobs * 2 // 5)]
    waiting = [_waiting(at, turn) for at in range(1000, 1000 + jobs // 5)]
    finished = [_finished(at, devices, now) for at in range(2000 + turn, 2050 + turn)]
    return {
        "version": 1,
        "time": now,
        "session": {
            "pid": 4711,
            "user": "ada",
            "notebook": "/home/ada/experiments/sweep over learning rates.ipynb",
            "kernel": "6f1c1f5e",
            "since": now - 3600,
            "python": "3.12.1",
        },
        "devices": [_device(at, running, turn) for at in range(devices)],
        "cpus": 64.0,
        "cpus_free": 12.0,
        "total": {"CPU": 64.0, "GPU": float(devices)},
        "available": {"CPU": 12.0},
        "running": running,
        "waiting": waiting,
        "finished": finished,
        "actors": [],
        "groups": [],
        "queued": len(waiting),
        "counts": {
            "running": len(running),
            "waiting": len(waiting),
            "finished": jobs - len(running) - len(waiting) + turn,
            "actors": 0,
        },
        "totals": {"jobs": jobs, "gpu_seconds": 1234.5 + turn, "waited": 99.0, "peak": 7 * GIB},
        "unmet": {"GPU": 50.0},
        "workers": len(running),
        "objects": {"objects": 0, "references": 0, "bytes": 0},
        "object_memory": {"used": 0, "limit": 64 * GIB, "spilled": 0},
        "preload": ["numpy"],
        "notes": [],
        "warnings": ["#7 train has 12 GiB, and its share is 10 GiB"],
    }


def _memory(at: int, turn: int) -> dict[str, Any]:
    return {"now": (at % 9) * GIB + turn * 1000, "peak": 9 * GIB, "share": 10 * GIB}


def _running(at: int, devices: int, turn: int) -> dict[str, Any]:
    return {
        "id": at + 1,
        "name": f"train_with_rate_{at}",
        "state": "running",
        "seconds": 12.5 + at + turn,
        "attempt": 1,
        "parent": None,
        "worker": at + 1,
        "gpus": [[at % devices, 0.08]],
        "devices": [["GPU", at % devices, 0.08]],
        "cpus": 0.0,
        "waits_for": None,
        "pid": 10_000 + at,
        "kind": "cell" if at % 2 else "call",
        "actor": None,
        "cell": at % 40,
        "cell_id": "2f9e7a4c-13a2-4f9e-8a3e-0c5f2d1b7e6a",
        "waited": 0.25,
        "memory": _memory(at, turn),
        "has_log": True,
    }


def _waiting(at: int, turn: int) -> dict[str, Any]:
    return {
        **_running(at, 1, turn),
        "state": "queued",
        "gpus": [],
        "devices": [],
        "worker": None,
        "pid": None,
        "attempt": 0,
        "waits_for": "needs 0.5 of one GPU; the largest free share is 0.04 on GPU 3, held by #4, "
        f"#20, #36, #52 and {turn} others",
    }


def _finished(at: int, devices: int, now: float) -> dict[str, Any]:
    return {
        "id": at,
        "name": f"evaluate_{at}",
        "state": ("done", "failed", "cancelled")[at % 3],
        "seconds": 3.25,
        "gpus": [at % devices],
        "pid": 20_000 + at,
        "kind": "call",
        "actor": None,
        "cell": at % 40,
        "cell_id": "2f9e7a4c-13a2-4f9e-8a3e-0c5f2d1b7e6a",
        "devices": [["GPU", at % devices, 0.5]],
        "waited": 1.5,
        "ended": now - (2050 - at) % 50,
        "gpu_seconds": 1.625,
        "memory": {"now": None, "peak": 3 * GIB, "share": 10 * GIB},
        "hint": "used 3 of 10 GiB: 0.2 would do",
        "has_log": False,
    }


def _device(at: int, running: list[dict[str, Any]], turn: int) -> dict[str, Any]:
    held = [[job["id"], 0.08] for job in running if job["gpus"][0][0] == at]
    points = [(at * 5 + each + turn) % 101 for each in range(60)]
    return {
        "id": at,
        "key": f"GPU-8f6d3f0e-0000-4000-8000-{at:012}",
        "name": "NVIDIA H200",
        "type": "H200",
        "memory": 141 * GIB,
        "logical": False,
        "resource": "GPU",
        "vendor": "nvidia",
        "capability": "9.0",
        "free": max(0.0, round(1 - sum(share for _, share in held), 4)),
        "held": held,
        "usage": {
            "memory_used": (20 + at) * GIB + turn * 1000,
            "memory_total": 141 * GIB,
            "utilization": (37 + at + turn) % 101,
            "temperature": 61,
            "power": 412,
        },
        "others": [
            {
                "pid": 99,
                "user": "grace",
                "notebook": None,
                "job": None,
                "share": None,
                "memory": 3 * GIB,
                "since": None,
                "kind": "outsider",
            }
        ]
        * (at % 5 == 0),
        "health": None,
        "kept": None,
        "history": {"step": 5.0, "memory": points, "utilization": points, "share": points},
    }
