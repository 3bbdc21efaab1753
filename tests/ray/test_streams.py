"""Generators on Ray that are cancelled at any moment end as cancelled, and their actors go on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import gpunb
from tests.waiting import eventually

pytestmark = pytest.mark.needs_ray
TIMES = 40
WITHIN = 60


class Counter:
    def count(self) -> Iterator[int]:
        yield from numbers()

    def answer(self) -> int:
        return 42


class AsyncCounter:
    async def count(self) -> AsyncIterator[int]:
        for number in range(100_000):
            yield number
            await asyncio.sleep(0.002)  # by the clock: the pace of the stream

    async def answer(self) -> int:
        return 42


def numbers() -> Iterator[int]:
    for number in range(100_000):
        yield number
        time.sleep(0.002)  # by the clock: the pace of the stream


def drain(stream: Any) -> None:
    for ref in stream:
        gpunb.get(ref, timeout=WITHIN)


def cancel_at_random(begin: Any, before: int) -> None:
    rng = random.Random(before)
    for _ in range(TIMES):
        stream = begin()
        for _ in range(before):
            gpunb.get(next(stream), timeout=WITHIN)
        time.sleep(rng.random() * 0.004)
        gpunb.cancel(stream)
        with pytest.raises(gpunb.exceptions.TaskCancelledError):
            drain(stream)
        assert next(stream, None) is None, "the error is the last value"


@pytest.mark.parametrize("before", [1, 4])
def test_of_a_function(nodes: Any, before: int) -> None:
    cancel_at_random(gpunb.remote(num_cpus=0)(numbers).remote, before)


@pytest.mark.parametrize("kind", [Counter, AsyncCounter])
def test_of_an_actor(nodes: Any, kind: Any) -> None:
    actor = gpunb.remote(num_cpus=0)(kind).remote()
    begin = actor.count.options(num_returns="streaming").remote
    cancel_at_random(begin, 1)
    assert gpunb.get(actor.answer.remote(), timeout=WITHIN) == 42


def test_one_that_had_come_to_its_end_just_ends(nodes: Any) -> None:
    @gpunb.remote(num_cpus=0)
    def few() -> Iterator[int]:
        yield from range(3)

    stream = few.remote()
    first = next(stream)
    name = stream.task_id
    eventually(lambda: any(each["id"] == name for each in gpunb.status()["finished"]), "its end")
    gpunb.cancel(stream)
    assert gpunb.get([first, *stream], timeout=WITHIN) == [0, 1, 2]
