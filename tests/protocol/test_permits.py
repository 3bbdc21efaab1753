"""Permits go to the worker or back to the kernel, and to both in the order of their numbers."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from gpunb.protocol.permits import PermitReader, Permits
from tests.sessions import forked


@pytest.fixture
def permits() -> Iterator[Permits]:
    made = Permits()
    yield made
    made.close()


def numbers(permits: Permits, count: int) -> range:
    """Those of so many new permits."""
    first = permits.grant(count)
    return range(first, first + count)


def test_a_permit_is_taken_once(permits: Permits) -> None:
    reader = PermitReader(permits.fileno())
    first, second = numbers(permits, 2)
    assert reader.take(first)
    assert reader.take(second)
    assert permits.take_back() == 0


def test_what_was_taken_back_cannot_be_taken(permits: Permits) -> None:
    reader = PermitReader(permits.fileno())
    granted = numbers(permits, 3)
    assert reader.take(granted[0])
    assert permits.take_back() == 2
    assert not reader.take(granted[1])
    assert not reader.take(granted[2])


def test_a_permit_for_a_later_call_is_kept_for_it(permits: Permits) -> None:
    reader = PermitReader(permits.fileno())
    old, _ = numbers(permits, 2)
    assert permits.take_back() == 2
    new, last = numbers(permits, 2)
    assert not reader.take(old)
    assert permits.take_back() == 1, "the reader has the first of the new ones already"
    assert reader.take(new)
    assert not reader.take(last)


def test_what_was_left_at_the_end_is_known_afterwards() -> None:
    permits = Permits()
    reader = PermitReader(permits.fileno())
    granted = numbers(permits, 3)
    assert reader.take(granted[0])
    assert permits.take_back() == 2
    permits.close()
    assert permits.take_back() == 2
    assert permits.take_back() == 2


def test_closing_takes_nothing_away(permits: Permits) -> None:
    """As in a forked child of the kernel, which closes what it has inherited."""
    number = permits.grant(1)
    reader = PermitReader(os.dup(permits.fileno()))
    with forked() as child:
        if not child:
            permits.close()
            os._exit(0)
    assert reader.take(number)


@pytest.mark.parametrize("seed", range(5))
def test_both_sides_agree_on_what_has_begun(permits: Permits, seed: int) -> None:
    """A worker in another thread takes what it can, while the kernel takes back at any time."""
    calls, answer = os.pipe()
    begun: list[int] = []

    def work() -> None:
        reader = PermitReader(permits.fileno())
        with os.fdopen(calls, "rb") as sent:
            while data := sent.read(8):
                number = int.from_bytes(data, "little")
                if reader.take(number):
                    begun.append(number)

    worker = threading.Thread(target=work)
    worker.start()
    dice, expected, ahead = random.Random(seed), [], []
    with os.fdopen(answer, "wb", buffering=0) as sent:
        for _ in range(3000):
            if dice.random() < 0.8:
                for number in numbers(permits, dice.choice([1, 2, 6])):
                    ahead.append(number)
                    sent.write(number.to_bytes(8, "little"))
            else:
                kept = len(ahead) - permits.take_back()
                expected += ahead[:kept]
                ahead.clear()
        expected += ahead[: len(ahead) - permits.take_back()]
    worker.join()
    assert begun == expected
