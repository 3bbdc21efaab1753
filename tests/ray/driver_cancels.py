"""Cancels tasks at every moment of their lives, and prints how many; for `test_cancels.py`.

usage: python -m tests.ray.driver_cancels COUNT SEED
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpunb

LONGEST = 0.03
"""Seconds that a task takes at most, and until it is cancelled."""


@gpunb.remote
def work(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@gpunb.remote(num_gpus=0.5, max_calls=0)
def on_gpu(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@gpunb.remote
def stream(seconds: float) -> Iterator[float]:
    yield from itertools.repeat(seconds, 3)


@gpunb.remote
def nested(seconds: float) -> None:
    ref = work.remote(seconds)
    time.sleep(seconds / 2)
    gpunb.cancel(ref)


@gpunb.remote
class Actor:
    def work(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def main(count: int, seed: int) -> None:
    draw = random.Random(seed)
    gpunb.init("ray", num_cpus=4, num_gpus=1)
    actor = Actor.remote()
    kinds: list[Callable[[float], Any]] = [
        work.remote, work.remote, on_gpu.remote, stream.remote, nested.remote, actor.work.remote
    ]  # fmt: skip
    for number in range(count):
        seconds = draw.choice([0, 0, draw.uniform(0, LONGEST)])
        ref = draw.choice(kinds)(seconds)
        match draw.randrange(3):
            case 0:  # at once, as soon as it is over, or some time in between
                with contextlib.suppress(Exception):
                    for each in ref if isinstance(ref, gpunb.ObjectRefGenerator) else [ref]:
                        gpunb.get(each)
            case 1:
                time.sleep(draw.uniform(0, LONGEST))
            case _:
                pass
        gpunb.cancel(ref, recursive=draw.random() < 0.5)
        if draw.random() < 0.1:
            gpunb.cancel(ref)
        if number % 100 == 99:
            assert gpunb.get(work.remote(0), timeout=60) == 0
    assert gpunb.get(actor.work.remote(0), timeout=60) == 0
    print(f"{count} cancels")  # noqa: T201 - the test reads it
    gpunb.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
