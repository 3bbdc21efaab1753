"""The probes of `growth`: one size of what grows in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import bench_core, probe, processes, sessions
from benchmarks import data as arrays
from benchmarks.actors import Plain
from benchmarks.lines import Result
from benchmarks.peers import timed
from benchmarks.probe import by_value

REST, IDLE = 8.0, 4.0
"""Seconds until a session counts as idle, and over which its processor time is taken then."""


@by_value
def stays() -> None:
    """A task that keeps its device."""
    time.sleep(3600)


def idle_share() -> float:
    """The share of a core that this process and all its descendants take while nothing happens."""
    time.sleep(REST)
    before, begun = _seconds(), time.monotonic()
    time.sleep(IDLE)
    spent = sum(now - before.get(thread, 0) for thread, now in _seconds().items())
    return spent / (time.monotonic() - begun)


def _seconds() -> dict[str, float]:
    """The processor time of each thread of this process and its descendants, but for the one that
    asks."""
    found = {}
    for pid in [os.getpid(), *(pid for pid, _ in processes.names())]:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found[str(thread)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    found.pop(f"/proc/{os.getpid()}/task/{threading.get_native_id()}")
    return found


def devices(n: int) -> Result:
    import gpunb

    start = time.perf_counter()
    sessions.init(n, cpus=2)
    task = sessions.empty(num_gpus=1)
    gpunb.get(task.remote())
    sessions.settle()
    ready = time.perf_counter() - start
    for _ in range(3):
        gpunb.get([task.remote() for _ in range(2 * n)])
        time.sleep(0.1)
    found = {
        "init until all is ready": [ready],
        "fresh GPU task": timed(lambda: gpunb.get(task.remote()), 100, pause=0.02),
        "a task on each device at once, for each": [
            each / n
            for each in timed(lambda: gpunb.get([task.remote() for _ in range(n)]), 20, pause=0.2)
        ],
        "status()": timed(gpunb.status, 100),
    }
    found["idle: processor time, of a core"] = [idle_share()]
    found["idle: memory (PSS)"] = [processes.descendants()["bytes"]]
    gpunb.shutdown()
    events = bench_core.times(n, 10_000, 2000)[bench_core.EXIT]
    found["an event of the scheduler"] = [each / 1e9 for each in events]
    found["find a place"] = [each / 1e9 for each in bench_core.placement(n)]
    return found


def waiting(n: int) -> Result:
    """The devices are held while all is submitted and half is cancelled; then some of the rest
    have their turn."""
    import gpunb

    sessions.start(2, cpus=2)
    task, free = sessions.empty(num_gpus=1), sessions.empty()
    gpunb.get([task.remote() for _ in range(20)] + [free.remote() for _ in range(20)])
    held = [gpunb.remote(num_gpus=1)(stays).remote() for _ in range(2)]
    while len(gpunb.status()["running"]) < 2:
        time.sleep(0.01)
    gc.collect()
    before = processes.rollup()["Private_Dirty"]
    start = time.perf_counter()
    refs = [task.remote() for _ in range(n)]
    submitted = time.perf_counter()
    assert gpunb.status()["queued"] == n
    taken = time.perf_counter()
    gc.collect()
    memory = processes.rollup()["Private_Dirty"] - before
    found = {
        "submit, for each": [(submitted - start) / n],
        "until the scheduler has it, for each": [(taken - start) / n],
        "memory for each": [max(memory, 1) / n],
        "status()": timed(gpunb.status, 20),
        "warm CPU task beside them": timed(lambda: gpunb.get(free.remote()), 300),
    }
    dropped = refs[n // 2 :]
    start = time.perf_counter()
    for ref in dropped:
        gpunb.cancel(ref)
    assert gpunb.status()["queued"] == n - len(dropped)
    found["cancel, for each"] = [(time.perf_counter() - start) / len(dropped)]
    for ref in held:
        gpunb.cancel(ref, force=True)
    some = refs[: min(n // 2, 300)]
    start = time.perf_counter()
    gpunb.get(some)
    found["fresh GPU task from the queue"] = [(time.perf_counter() - start) / len(some)]
    left = gpunb.status()["queued"]
    start = time.perf_counter()
    gpunb.shutdown()
    if left:
        found["shutdown, for each"] = [(time.perf_counter() - start) / left]
    events = bench_core.times(16, n, max(1, n // 2))[bench_core.EXIT]
    found["an event of the scheduler"] = [each / 1e9 for each in events]
    return found


def workers(n: int) -> Result:
    import gpunb

    sessions.start(16, cpus=2)
    before = processes.descendants()["bytes"]
    made = gpunb.remote(num_gpus=0.25)(Plain)
    actors = []
    for _ in range(n):
        actors.append(made.remote())
        gpunb.get(actors[-1].nothing.remote())
    more: list[Any] = []

    def make() -> None:
        more.append(made.options(num_gpus=0).remote())
        gpunb.get(more[-1].nothing.remote())

    def kill() -> None:
        actor = more.pop()
        gpunb.kill(actor)
        with contextlib.suppress(gpunb.exceptions.ActorDiedError):
            gpunb.get(actor.nothing.remote())

    found = {"make an actor": timed(make, 5, before=1, pause=0.1)}
    found["kill an actor, until a call of it fails"] = timed(kill, 5, pause=0.1)
    call = more[0].nothing.remote
    found["a call of one"] = timed(lambda: gpunb.get(call()), 1000)
    found["a call of each at once, for each"] = [
        each / n
        for each in timed(lambda: gpunb.get([x.nothing.remote() for x in actors]), 50, pause=0.02)
    ]
    found["status()"] = timed(gpunb.status, 100)
    found["memory (PSS) of each"] = [(processes.descendants()["bytes"] - before) / n]
    found["idle: processor time, of a core"] = [idle_share()]
    gpunb.shutdown()
    return found


_OTHER = """
import sys
from benchmarks import sessions
import gpunb
sessions.start(1, cpus=2)
task = sessions.empty(num_gpus=1)
gpunb.get(task.remote())
print(flush=True)
for line in sys.stdin:
    gpunb.get([task.remote() for _ in range(int(line))])
    print(flush=True)
"""


def kernels(n: int) -> Result:
    """This one and others, each with a session of its own for the same simulated device."""
    import gpunb

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GPUNB_LEDGER_DIR"] = folder
        others = [_other() for _ in range(n - 1)]
        try:
            for each in others:
                each.stdout.readline()
            return _beside(others, n)
        finally:
            for each in others:
                each.stdin.close()
            for each in others:
                each.wait()
            gpunb.shutdown()


def _other() -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", _OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=probe.environment(),
    )


def _beside(others: list[Any], n: int) -> Result:
    import gpunb

    sessions.start(1, cpus=2)
    task = sessions.empty(num_gpus=1)
    gpunb.get([task.remote() for _ in range(5)])
    found = {
        "fresh GPU task beside idle kernels": timed(
            lambda: gpunb.get(task.remote()), 100, pause=0.02
        )
    }
    found["idle: processor time of each, of a core"] = [idle_share() / n]
    tasks = 20
    start = time.perf_counter()
    for each in others:
        print(tasks, file=each.stdin, flush=True)
    gpunb.get([task.remote() for _ in range(tasks)])
    for each in others:
        each.stdout.readline()
    found["a task of all on one device"] = [(time.perf_counter() - start) / tasks / n]
    gpunb.shutdown()
    found["take a share and give it back"] = _lease(n)
    return found


def _lease(n: int) -> list[float]:
    from benchmarks import leases

    found = leases.lease(n - 1, 500)
    return [sum(each) for each in zip(found["taken"], found["given"], strict=True)]


def data(n: int) -> Result:
    """An array of so many bytes to a fresh GPU task, to 8 of them, and back from one."""
    import numpy as np

    import gpunb

    if arrays.available() < 4 * n + (1 << 30):
        return {"skipped": "too little memory is available"}
    sessions.start(4)
    array = np.ones(n // 8)

    ends, made = (gpunb.remote(num_gpus=0.5)(each) for each in (arrays.ends, arrays.made))

    def argument() -> None:
        gpunb.get(ends.remote(array))

    def put() -> None:
        ref = gpunb.put(array)
        gpunb.get([ends.remote(ref) for _ in range(8)])

    def returned() -> None:
        gpunb.get(made.remote(n // 8))

    turns = {"argument": argument, "put, used by 8 tasks": put, "returned": returned}
    found: Result = {}
    for name, turn in turns.items():
        found[name] = []
        for _ in range(4 if n >= 1_000_000_000 else 12):
            arrays.have_memory(2 * n)
            time.sleep(0.1)
            found[name] += timed(turn, 1)
        del found[name][0]
    gpunb.shutdown()
    return found
