"""What is known of a session on Ray, as plain values: the snapshot, and what may be asked for."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from gpunb.core.resources import UNIT
from gpunb.core.snapshot import VERSION
from gpunb.exceptions import GpunbError
from gpunb.runtime import origin
from gpunb.runtime.ray.jobs import Job
from gpunb.runtime.trends import Trends

if TYPE_CHECKING:
    from gpunb.runtime.ray.kernel import Kernel

FINISHED = 50

_NOTHING = {"now": None, "peak": None, "share": None}
_UNMEASURED = dict.fromkeys(("memory_used", "memory_total", "utilization", "temperature"))


class Status:
    """Answers questions, from any thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._session = {**origin.about(), "kernel": None, "head": None}
        self._trends = Trends()
        self._noting = threading.Lock()

    def session(self) -> dict[str, Any]:
        return dict(self._session)

    def notes(self) -> list[str]:
        nodes = self._kernel.cluster.nodes()
        return [f"on a Ray cluster of {len(nodes)} node{'s' * (len(nodes) != 1)}"]

    def memory(self, *_: Any) -> list[Any]:
        """Ray does not say what its tasks have of a device."""
        return []

    def why(self, ident: int) -> str | None:
        """Why a job waits."""
        job = self._kernel.jobs.open.get(ident)
        return self._reason(job) if job is not None and job.began is None else None

    def timeline(self) -> dict[str, Any]:
        raise GpunbError(
            "on Ray the timeline is Ray's: ray.timeline('trace.json') writes it for "
            "chrome://tracing"
        )

    def carry_out(self, request: dict[str, Any]) -> Any:
        """What the monitor asks for."""
        kernel, what = self._kernel, request.get("do")
        match what:
            case "status":
                return self.status()
            case "cancel" | "interrupt":
                job = kernel.jobs.open.get(request.get("job", 0))
                if job is None:
                    raise GpunbError(f"there is no job #{request.get('job')} that is not over")
                if what == "cancel":
                    kernel.cancel((job.id, 0), request.get("force") is True, True)
                else:
                    kernel.interrupt((job.id, 0))
                return None
            case "kill":
                kernel.kill(int(request.get("actor", 0)), False)
                return None
            case "logs":
                log = kernel.ask("log", request.get("job", 0))
                if log is None:
                    raise GpunbError(f"nothing is kept of what job #{request.get('job')} has shown")
                return log.told()
            case _:
                raise GpunbError(f"{what!r} cannot be asked for on Ray")

    def status(self) -> dict[str, Any]:
        """The snapshot, in its schema."""
        kernel = self._kernel
        kernel.look()
        jobs = [job for job in list(kernel.jobs.open.values()) if job.kind != "create"]
        made = [job for job in list(kernel.jobs.open.values()) if job.kind == "create"]
        actors = [each for each in list(kernel.jobs.actors.values()) if not kernel.is_over(each)]
        running = [job for job in jobs if job.began is not None]
        waiting = [job for job in [*jobs, *made] if job.began is None]
        waiting = [each for each in waiting if each.kind != "create" or not self._over(each)]
        total, free = kernel.ask("total"), kernel.ask("available")
        past = list(kernel.jobs.past.values())
        finished = [self._past(each) for each in reversed(past[-FINISHED:])]
        now, devices = time.time(), self._devices()
        with self._noting:
            self._trends.note(now, devices)
            for device in devices:
                device["history"] = self._trends.of(device["key"])
        return {
            "version": VERSION,
            "time": now,
            "session": self.session(),
            "devices": devices,
            "cpus": total.get("CPU", 0),
            "cpus_free": free.get("CPU", 0),
            "total": total,
            "available": free,
            "running": [self._job(each) for each in running],
            "waiting": [self._job(each) for each in waiting],
            "finished": finished,
            "actors": [self._actor(each) for each in actors],
            "queued": len(waiting),
            "counts": {
                "running": len(running),
                "waiting": len(waiting),
                "finished": kernel.jobs.counts["ended"],
                "actors": len(actors),
            },
            "totals": {
                "jobs": kernel.jobs.counts["ended"],
                "gpu_seconds": round(sum(map(_gpu_seconds, past)), 3),
                "waited": round(sum(each.waited for each in past), 3),
                "peak": None,
            },
            "unmet": {},
            "objects": {},
            "preload": None,
            "notes": self.notes(),
            "warnings": self._warnings(waiting),
        }

    def _over(self, job: Job) -> bool:
        actor = self._kernel.jobs.actors.get(job.id)
        return actor is None or actor.ended

    def _warnings(self, waiting: list[Job]) -> list[str]:
        """Of what can only wait for nodes that are not there."""
        cluster = self._kernel.cluster
        return [
            f"{job.label} {cluster.never(job.demand)}"
            for job in waiting
            if job.kind != "method" and not job.actor and not cluster.feasible(job.demand)
        ][:5]

    def _reason(self, job: Job) -> str:
        """Why a job waits, as far as one can tell from outside Ray."""
        if job.kind == "method" or (job.actor and job.kind != "create"):
            return f"its turn at the actor #{job.actor}"
        cluster = self._kernel.cluster
        if not cluster.feasible(job.demand):
            return cluster.never(job.demand)
        return f"Ray to give it {job.demand}, or its arguments"

    def _devices(self) -> list[dict[str, Any]]:
        """The GPUs of all nodes, with what of this session is on them."""
        held: dict[tuple[str, Any], list[tuple[int, float]]] = {}
        jobs = [job for job in list(self._kernel.jobs.open.values()) if job.began is not None]
        for job in jobs:
            if job.gpus and (job.kind == "create" or not job.actor):
                for _, gpu, share in job.devices:
                    held.setdefault((job.node_id, gpu), []).append((job.id, share))
        rows = []
        for node in self._kernel.cluster.nodes():
            count = int(node.total.get("GPU", 0))
            taken = {gpu for where, gpu in held if where == node.id}
            ids: list[Any] = list(range(count))
            if not taken <= set(ids):
                ids = [*sorted(taken, key=str), *(f"? {n}" for n in range(count - len(taken)))]
            kind = node.types[0] if node.types else None
            for index, gpu in enumerate(ids):
                shares = held.get((node.id, gpu), [])
                rows.append(
                    {
                        "id": self._id(node.id, gpu),
                        "key": f"{node.id}:{index}",
                        "name": f"{kind or 'GPU'} {gpu} of {node.name} ({node.address})",
                        "type": kind,
                        "memory": None,
                        "logical": False,
                        "free": round(max(0.0, 1 - sum(share for _, share in shares)), 4),
                        "held": [list(each) for each in shares],
                        "resource": "GPU",
                        "vendor": "ray",
                        "capability": None,
                        "usage": dict(_UNMEASURED),
                        "others": [],
                        "health": None,
                    }
                )
        return rows

    def _id(self, node: str, gpu: Any) -> Any:
        """A device of the cluster: its id, with the end of the node's address if there are more."""
        nodes = {each.id: each.address for each in self._kernel.cluster.nodes()}
        if len(nodes) == 1 and node in nodes:
            return gpu
        address = nodes.get(node, "?")
        alone = list(nodes.values()).count(address) == 1
        return f"{address.rpartition('.')[2] if alone else node[:4]}:{gpu}"

    def _holds(self, job: Job | None) -> dict[str, Any]:
        """The devices that a job has, with their ids in the cluster."""
        devices = []
        if job is not None:
            devices = [[kind, self._id(job.node_id, at), share] for kind, at, share in job.devices]
        return {"gpus": [[ident, share] for _, ident, share in devices], "devices": devices}

    def _place(self, job: Job | None) -> dict[str, Any]:
        number, cell = getattr(getattr(job, "sink", None), "place", None) or (None, None)
        return {"cell": number, "cell_id": cell}

    def _job(self, job: Job) -> dict[str, Any]:
        return {
            **job.facts(),
            **self._holds(job),
            "state": "running" if job.began is not None else "queued",
            "kind": job.kind,
            "actor": job.actor or None,
            **self._place(job),
            "memory": dict(_NOTHING),
            "waits_for": None if job.began is not None else self._reason(job),
            "waited": round(job.waited, 3),
            "has_log": getattr(job.sink, "log", None) is not None,
            "background": bool(getattr(job.sink, "background", False)),
            "attempt": job.attempt,
            "parent": job.parent,
            "worker": None,
            "cpus": job.demand.cpus / UNIT,
        }

    def _past(self, job: Job) -> dict[str, Any]:
        ended, devices = job.ended or time.monotonic(), self._holds(job)["devices"]
        actor = self._kernel.jobs.actors.get(job.id)
        lived = actor if actor is not None and actor.made else None
        return {
            **job.facts(),
            "gpus": [ident for _, ident, _ in devices],
            "devices": devices,
            "name": lived.label if lived is not None else job.name,
            "kind": lived.kind if lived is not None else job.kind,
            "actor": job.actor if job.actor not in (0, job.id) else None,
            **self._place(job),
            "waited": round(job.waited, 3),
            "ended": round(time.time() - (time.monotonic() - ended), 3),
            "gpu_seconds": round(_gpu_seconds(job), 3),
            "memory": dict(_NOTHING),
            "hint": None,
            "has_log": getattr(job.sink, "log", None) is not None,
            "background": bool(getattr(job.sink, "background", False)),
        }

    def _actor(self, actor: Any) -> dict[str, Any]:
        facts = actor.facts()
        job = actor.job
        calls = [each for each in list(self._kernel.jobs.open.values()) if each.actor == actor.id]
        calls = [each for each in calls if each.kind != "create"]
        return {
            "id": actor.id,
            "name": facts["name"],
            "class": facts["class"],
            "kind": actor.kind,
            "state": facts["state"],
            "seconds": round(job.seconds, 3) if job is not None and job.began else None,
            **self._place(job),
            **self._holds(job),
            "memory": dict(_NOTHING),
            "waiting": sum(each.began is None for each in calls),
            "running": sum(each.began is not None for each in calls),
            "restarts": 0,
            "worker": None,
            "pid": facts["pid"],
        }


def _gpu_seconds(job: Job) -> float:
    """What runs in an actor has what that one holds."""
    held = job.demand.gpus / UNIT if job.gpus and job.actor in (0, job.id) else 0.0
    return job.seconds * held
