"""Interrupts, one after the other, at the steps of something; a program of its own.

``python -m tests.interrupted WORK MOST`` does the work again and again, with an interrupt at
another step each time: at each that there is (0), or at MOST that are spread over them. With -NTH
it is done once, with an interrupt at that step. It fails unless each interrupt is raised once, what
it hit has happened or has not, and nothing is left.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import gpunb
from tests.sessions import marked, open_files
from tests.stepping import Interrupts
from tests.waiting import PATIENCE, eventually

SETTINGS: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "preload": ()}


@gpunb.remote(num_cpus=0)
def same(value: Any) -> Any:
    return value


def held() -> dict[str, Any]:
    """What an interrupt could leave behind."""
    gc.collect()
    with open("/proc/self/maps") as file:
        mappings = [line for line in file if "memfd:gpunb" in line]
    running = gpunb.is_initialized()
    status = gpunb.status() if running else {}
    files = [re.sub(r"\d+", "", each) for each in open_files().values()]
    return {
        "mappings": len(mappings),
        "threads": sorted(each.name for each in threading.enumerate()),
        "objects": status["objects"]["objects"] if running else 0,
        "tasks": len(status["running"]) + status["queued"] if running else 0,
        # With a session there are more of both as it pleases.
        "descriptors": sorted(each for each in files if not running or "memfd:gpunb" in each),
        "processes": [] if running else sorted(marked()),
    }


def held_at_rest() -> dict[str, Any]:
    """The same, once it has not changed for half a second: other threads still let go of what the
    last call used."""
    last, since = held(), time.monotonic()
    while time.monotonic() < since + 0.5:
        time.sleep(0.05)
        if (now := held()) != last:
            last, since = now, time.monotonic()
    return last


def works() -> None:
    assert gpunb.get(same.remote(1), timeout=PATIENCE) == 1


class Work:
    """Something that is interrupted, with what comes before and after it."""

    def before(self) -> None: ...

    def do(self) -> None: ...

    def after(self) -> None: ...


class Arrays(Work):
    """In a session that stays."""

    array = np.arange(1 << 14)

    def do(self) -> None:
        ref = gpunb.put(self.array)
        assert gpunb.get(ref)[-1] == self.array[-1]

    after = do


class Results(Work):
    array = np.arange(1 << 14)

    def do(self) -> None:
        assert gpunb.get(same.remote(self.array), timeout=PATIENCE)[-1] == self.array[-1]

    after = do


class Calls(Work):
    """Calls of an executor that would not end by themselves. One runs, one waits."""

    def do(self) -> None:
        executor = gpunb.Executor()
        try:
            executor.submit(time.sleep, 3600)
            executor.submit(time.sleep, 3600)
            executor.stop()
        except KeyboardInterrupt:  # as joblib
            executor.stop()
            raise

    def after(self) -> None:
        works()


class Begin(Work):
    def do(self) -> None:
        gpunb.init(**SETTINGS)

    def after(self) -> None:
        if not gpunb.is_initialized():
            gpunb.init(**SETTINGS)
        works()
        gpunb.shutdown()


class End(Work):
    def before(self) -> None:
        gpunb.init(**SETTINGS)
        works()

    def do(self) -> None:
        gpunb.shutdown()

    def after(self) -> None:
        if gpunb.is_initialized():
            works()
        gpunb.shutdown()
        gpunb.init(**SETTINGS)
        works()
        gpunb.shutdown()


WORKS: dict[str, type[Work]] = {
    "arrays": Arrays,
    "results": Results,
    "calls": Calls,
    "init": Begin,
    "shutdown": End,
}


def interrupted(work: Work, nth: int) -> Interrupts:
    """Do the work with an interrupt at its nth step, unless it has fewer."""
    steps = Interrupts(nth, lambda: os.kill(os.getpid(), signal.SIGINT), gpunb)
    raised = 0
    work.before()
    try:
        with steps.counted():
            work.do()
        if steps.left <= 0:
            time.sleep(PATIENCE)  # one that hit a destructor comes a moment later
    except KeyboardInterrupt:
        raised += 1
    assert raised == (steps.left <= 0), f"step {nth}: {raised} raised, {steps.left} left"
    work.after()
    return steps


def places(count: int, most: int) -> Iterator[int]:
    """At most so many of the steps, spread evenly."""
    stride = max(1.0, count / most) if most else 1.0
    return iter(sorted({1 + int(n * stride) for n in range(int(count / stride))}))


def main(name: str, most: int) -> None:
    work = WORKS[name]()
    if most < 0:
        interrupted(work, -most)
        eventually(lambda: not held()["processes"], f"no processes, not {held()}")
        assert held()["threads"] == ["MainThread"]
        return
    lasting = name in ("arrays", "results", "calls")
    if lasting:
        gpunb.init(**SETTINGS)
    far = 1 << 30
    interrupted(work, far)
    count = far - interrupted(work, far).left
    before = held_at_rest()
    for nth in places(count, most):
        interrupted(work, nth)
        eventually(lambda: held() == before, f"step {nth}: {before} again, not {held()}")
    sys.stdout.write(f"{count}\n")
    if lasting:
        gpunb.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
