"""Whom a change in the ledger wakes: the sessions whose turn it is, and no others."""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gpunb.leases import records
from gpunb.leases.ledger import Ledger
from gpunb.scheduler.resources import UNIT

GPUS = ("GPU-0", "GPU-1")
HALF = UNIT // 2

Enter = Callable[[], Ledger]


@pytest.fixture
def enter(tmp_path: Path) -> Iterator[Enter]:
    """Makes sessions that share a folder."""
    with contextlib.ExitStack() as stack:

        def make() -> Ledger:
            ledger = Ledger(tmp_path, GPUS, {"pid": os.getpid()})
            stack.callback(ledger.close)
            return ledger

        yield make


def woken(*sessions: Ledger) -> list[int]:
    """Return the numbers of the sessions that were woken, and clear their FIFOs. A byte in a FIFO
    is there as soon as it is written."""
    ready, _, _ = select.select([each.fifo for each in sessions], [], [], 0)
    found = [number for number, each in enumerate(sessions) if each.fifo in ready]
    for number in found:
        sessions[number].clear_fifo()
    return found


def take(session: Ledger, units: int = UNIT, key: str = "GPU-0", *, lasting: bool = False) -> bool:
    return session.take({key: units}, lasting=lasting, job="train")


def give(session: Ledger, units: int = UNIT, key: str = "GPU-0") -> None:
    session.give({key: units}, lasting=False)
    session.publish()


def test_only_the_first_of_many_is_woken_for_a_device(enter):
    holder, *waiting = sessions = [enter() for _ in range(5)]
    assert take(holder)
    for each in waiting:
        each.claim({"GPU-0": UNIT})
    assert woken(*sessions) == [0]
    give(holder)
    assert woken(*sessions) == [1]
    assert take(waiting[0])
    waiting[0].claim(None)
    assert woken(*sessions) == []
    give(waiting[0])
    assert woken(*sessions) == [2]


def test_as_many_are_woken_as_there_is_room_for(enter):
    holder, *waiting = sessions = [enter() for _ in range(5)]
    assert take(holder)
    for each in waiting:
        each.claim({"GPU-0": HALF})
    woken(*sessions)
    give(holder)
    assert woken(*sessions) == [1, 2]


def test_what_nobody_has_asked_for_wakes_all_that_wait(enter):
    holder, *waiting = sessions = [enter() for _ in range(4)]
    assert take(holder)
    assert take(holder, HALF, "GPU-1")
    for each in waiting:
        each.claim({"GPU-0": UNIT})
    woken(*sessions)
    give(holder, HALF, "GPU-1")
    assert woken(*sessions) == [1, 2, 3]


def test_a_session_that_no_longer_waits_wakes_the_next_one(enter):
    holder, first, second, third = sessions = [enter() for _ in range(4)]
    assert take(holder)
    for each in (first, second, third):
        each.claim({"GPU-0": UNIT})
    give(holder)
    woken(*sessions)
    first.claim(None)
    assert woken(*sessions) == [2]


def test_a_session_that_takes_only_a_part_wakes_the_next_one(enter):
    holder, first, second = sessions = [enter() for _ in range(3)]
    assert take(holder)
    first.claim({"GPU-0": UNIT})
    second.claim({"GPU-0": HALF})
    give(holder)
    woken(*sessions)
    assert take(first, HALF)
    assert woken(*sessions) == [2]
    assert take(second, HALF)


def test_a_waiting_session_learns_that_it_is_part_of_a_deadlock(enter):
    one, two, beside = sessions = [enter() for _ in range(3)]
    assert take(one, key="GPU-0", lasting=True)
    assert take(two, key="GPU-1", lasting=True)
    one.claim({}, {"GPU-1": UNIT}, {"GPU-0": UNIT})
    beside.claim({"GPU-0": UNIT})
    woken(*sessions)
    two.claim({}, {"GPU-0": UNIT}, {"GPU-1": UNIT})
    assert woken(*sessions) == [0]
    assert "a deadlock" in one.look().circle
    assert "a deadlock" in two.look().circle


class Waiter:
    """A session that takes what it wants as soon as it is woken for it, as kernels do."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.leases: list[dict[str, int]] = []
        self.pending: dict[str, int] = {}

    def want(self, shares: dict[str, int]) -> None:
        if not self.take(shares):
            self.pending = shares
            self.claim()

    def take(self, shares: dict[str, int]) -> bool:
        taken = self.ledger.take(shares, lasting=False, job="train")
        if taken:
            self.leases.append(shares)
        return taken

    def claim(self) -> None:
        """Wait for what is pending, in total with what is held."""
        held = {key: sum(each.get(key, 0) for each in self.leases) for key in self.pending}
        total = {key: min(UNIT, held[key] + units) for key, units in self.pending.items()}
        self.ledger.claim(total or None)

    def withdraw(self) -> None:
        self.pending = {}
        self.claim()

    def give(self) -> None:
        shares = self.leases.pop(0)
        self.ledger.give(shares, lasting=False)
        self.ledger.publish()
        if self.pending:
            self.claim()

    def hurry(self, shares: dict[str, int]) -> None:
        """Take something beside what is pending."""
        if self.take(shares) and self.pending:
            self.claim()

    def step(self, data: st.DataObject, amounts: st.SearchStrategy[dict[str, int]]) -> None:
        """Do something at random, and look, as a session does after each change of its own."""
        steps = [self.give] if self.leases else []
        steps += [self.withdraw] if self.pending else []
        step = data.draw(st.sampled_from([*steps, self.hurry if self.pending else self.want]))
        if step in steps:
            step()
        else:
            step(data.draw(amounts))
        self.served()

    def served(self) -> bool:
        """Take what is pending, if that is possible now."""
        if not self.pending or not self.take(self.pending):
            return False
        self.withdraw()
        return True


@pytest.mark.parametrize("age", [0.0, records.AGE])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_nobody_waits_for_what_is_free(age, data):
    """After random steps, and after all that were woken have looked, no other session can take
    what it waits for: no wake-up is missing."""
    amounts = st.dictionaries(
        st.sampled_from(GPUS), st.sampled_from([3000, HALF, 6000, UNIT]), min_size=1
    )
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(records, "AGE", age)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ledgers = [Ledger(folder, GPUS, {"pid": os.getpid()}) for _ in range(4)]
        waiters = [Waiter(each) for each in ledgers]
        for each in ledgers:
            stack.callback(each.close)
        for left in reversed(range(data.draw(st.integers(1, 30)))):
            data.draw(st.sampled_from(waiters)).step(data, amounts)
            if left and data.draw(st.booleans()):
                continue  # the next step comes before anybody has looked
            while found := woken(*ledgers):
                for number in data.draw(st.permutations(found)):
                    waiters[number].served()
            assert not [each for each in waiters if each.served()]
