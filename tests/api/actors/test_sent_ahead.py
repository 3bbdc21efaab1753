"""Calls that an actor's worker is sent ahead run as any others: once, in order, and only if nobody
has cancelled them before."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.actor import exit_actor
from gpunb.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    TaskCancelledError,
)
from gpunb.protocol.permits import Permits
from tests.api.actors.counter import back, get
from tests.sessions import both, forked
from tests.waiting import PATIENCE, Gate, eventually

MANY = 60
"""Calls that take longer to run than to hand in the same number of further calls."""

echo = print  # what the code in workers does


@gpunb.remote
class Steps:
    """Notes the calls that it runs."""

    def __init__(self) -> None:
        self.ran: list[int] = []

    def step(self, number: int, what: str = "", *more: Any) -> int:
        self.ran.append(number)
        if what:
            getattr(self, what)(*more)
        return number

    def all(self) -> list[int]:
        return self.ran

    def hold(self, gate: Gate) -> None:
        gate.enter("held")

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self) -> None:
        exit_actor()

    def say(self, text: str) -> None:
        echo(text)

    def write(self, text: str) -> None:
        os.write(1, text.encode())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # by the clock: the session has to interrupt it


def held(actor: Any, ahead: list[int], gate: Gate) -> tuple[Any, list[Any]]:
    """Let a call wait at the gate, while the worker has been sent calls ahead. Return the call, and
    all that come after it."""

    def tries() -> tuple[Any, list[Any]] | None:
        ahead.clear()
        [actor.step.remote(-1) for _ in range(MANY)]
        holds = actor.step.remote(0, "hold", gate)
        after = [actor.step.remote(at + 1) for at in range(20)]
        gate.await_("held")
        if len(ahead) >= MANY // 2 + 8:
            return holds, after
        gate.open()  # the machine was too busy: the calls came one by one
        get(after)
        gate.close()
        return None

    return eventually(tries, "calls were sent ahead")


def ran(actor: Any) -> list[int]:
    """The numbers of the calls that have run, without those before the gate."""
    return [each for each in get(actor.all.remote()) if each > 0]


@both
def test_calls_run_once_and_in_order(four, ahead):
    actor = Steps.remote()
    refs = [actor.step.remote(number) for number in range(1, 500)]
    assert get(refs) == list(range(1, 500))
    assert ran(actor) == list(range(1, 500))
    assert len(ahead) > 100


def test_a_call_that_the_worker_has_got_can_be_cancelled(four, ahead, gate):
    actor = Steps.remote()
    holds, after = held(actor, ahead, gate)
    for each in (after[2], after[3], after[15]):
        gpunb.cancel(each)
        with pytest.raises(TaskCancelledError):
            get(each)
    gate.open()
    assert get(holds) == 0
    left = [at + 1 for at in range(20) if at not in (2, 3, 15)]
    assert get([after[number - 1] for number in left]) == left
    assert ran(actor) == left


def test_the_running_call_can_be_cancelled(four, ahead, gate):
    actor = Steps.remote()
    holds, after = held(actor, ahead, gate)
    gpunb.cancel(holds)
    with pytest.raises(TaskCancelledError):
        get(holds)
    assert get(after) == ran(actor) == list(range(1, 21))


def test_the_end_of_the_process_loses_only_the_running_call(four, ahead, gate):
    actor = Steps.options(max_restarts=1).remote()
    get(actor.step.remote(-1))
    holds, after = held(actor, ahead, gate)
    os.kill(actor_pid(actor), signal.SIGKILL)
    with pytest.raises(ActorUnavailableError):
        get(holds)
    assert get(after) == list(range(1, 21))
    assert ran(actor) == list(range(1, 21))


def test_a_fork_of_the_kernel_takes_no_call_away(four, ahead, gate):
    actor = Steps.remote()
    holds, after = held(actor, ahead, gate)
    with forked() as child:
        if not child:
            os._exit(0)
    gate.open()
    assert get([holds, *after]) == list(range(21))


def actor_pid(actor: Any) -> int:
    (pid,) = [each["pid"] for each in gpunb.status()["actors"] if each["id"] == actor._gpunb_id]
    return int(pid)


@pytest.mark.parametrize("restart", [False, True])
def test_a_killed_actor_runs_none_of_the_calls_that_its_worker_has_got(four, ahead, gate, restart):
    actor = Steps.options(max_restarts=1).remote()
    holds, after = held(actor, ahead, gate)
    gpunb.kill(actor, no_restart=not restart)
    with pytest.raises(ActorUnavailableError if restart else ActorDiedError):
        get(holds)
    gate.open()
    if restart:
        assert get(after) == ran(actor) == list(range(1, 21))
        return
    for each in after:
        with pytest.raises(ActorDiedError, match="it was killed"):
            get(each)


def test_an_actor_that_leaves_runs_no_call_that_it_has_got(four):
    actor = Steps.remote()
    [actor.step.remote(number) for number in range(MANY)]
    leaves = actor.step.remote(MANY, "leave")
    after = [actor.step.remote(number) for number in range(20)]
    for each in (leaves, *after):
        with pytest.raises(ActorDiedError, match="exit_actor"):
            get(each)


def test_the_error_of_a_crash_shows_where_it_was(four):
    actor = Steps.options(max_restarts=-1).remote()
    for _ in range(5):
        before = [actor.step.remote(number) for number in range(MANY)]
        crashes = actor.step.remote(MANY, "crash")
        after = [actor.step.remote(number) for number in range(5)]
        assert get(before) == list(range(MANY))
        with pytest.raises(ActorUnavailableError, match=r"SIGSEGV(.|\n)*in crash"):
            get(crashes)
        assert get(after) == list(range(5))
        back(actor.all)


def test_what_a_call_prints_is_its_own(four, noted, ahead):
    actor = Steps.remote()
    get(actor.step.remote(0))
    for first in range(0, 20 * MANY, MANY):
        noted.clear()
        refs = [
            actor.step.remote(at, *(["say", f"text {at}"] if at % MANY in (30, 31, 45) else []))
            for at in range(first, first + MANY)
        ]
        get(refs)
        eventually(lambda: noted[45].said, "all text is there")
        assert {at: each.said for at, each in enumerate(noted) if each.said} == {
            at: f"text {first + at}\n" for at in (30, 31, 45)
        }
    assert len(ahead) > 100


def test_what_a_call_writes_without_python_is_not_lost(four, noted):
    actor = Steps.remote()
    for _ in range(5):
        noted.clear()
        [actor.step.remote(number) for number in range(MANY)]
        get(actor.step.remote(0, "write", "text"))
        eventually(lambda: "".join(each.said for each in noted) == "text", "it was shown")


def test_a_call_that_takes_too_long_is_stopped_and_the_next_ones_run(four):
    actor = Steps.remote()
    [actor.step.remote(-1) for _ in range(MANY)]
    slow = actor.step.options(timeout=0.3).remote(0, "sleep", PATIENCE)
    after = [actor.step.remote(number) for number in range(1, 21)]
    with pytest.raises(TimeoutError):
        get(slow)
    assert get(after) == ran(actor) == list(range(1, 21))


def test_a_call_that_waits_for_a_later_one_gets_an_error(four):
    """The later call would begin after it, also if the worker has it already."""

    @gpunb.remote
    class Waits:
        def step(self) -> None:
            pass

        def wait(self, name: str) -> int:
            return gpunb.get(gpunb.get_actor(name).last.remote())

        def last(self) -> int:
            return 1

    actor = Waits.options(name="waits").remote()
    [actor.step.remote() for _ in range(MANY)]
    waits = actor.wait.remote("waits")
    after = [actor.step.remote() for _ in range(20)]
    with pytest.raises(gpunb.exceptions.GpunbError, match="turn"):
        get(waits)
    get(after)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_calls_and_cancels(four, seed, tmp_path: Path):
    """Each call runs at most once and in order; those that nobody cancelled run, and those that
    were cancelled while they waited do not."""
    dice = random.Random(seed)
    actor = Steps.options(max_restarts=-1, num_gpus=0.5).remote()
    refs: list[Any] = []
    cancelled: set[int] = set()
    for _ in range(400):
        refs.append(actor.step.remote(len(refs)))
        if dice.random() < 0.1:
            at = dice.randrange(max(0, len(refs) - 30), len(refs))
            gpunb.cancel(refs[at])
            cancelled.add(at)
    done = []
    for number, ref in enumerate(refs):
        try:
            assert get(ref) == number
            done.append(number)
        except TaskCancelledError:
            assert number in cancelled
    numbers = get(actor.all.remote())
    assert numbers == sorted(set(numbers))
    assert set(done) <= set(numbers)
    assert set(range(400)) - cancelled <= set(done)


def test_an_actor_whose_process_has_no_descriptors_left_runs_its_calls(four, ahead):
    @gpunb.remote
    class Full:
        def fill(self) -> None:
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
            self.files = []
            with contextlib.suppress(OSError):
                while True:
                    self.files.append(os.dup(0))

        def step(self, number: int) -> int:
            return number

    actor = Full.remote()
    get(actor.fill.remote())
    assert get([actor.step.remote(number) for number in range(100)]) == list(range(100))
    assert not ahead


def test_an_actor_that_the_kernel_has_no_descriptors_for_runs_its_calls(four, monkeypatch):
    def fails(self: Permits) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Permits, "__init__", fails)
    actor = Steps.remote()
    assert get([actor.step.remote(number) for number in range(100)]) == list(range(100))


def test_a_task_calls_an_actor_many_times(four, ahead):
    @gpunb.remote
    def calls(actor: Any) -> list[int]:
        return gpunb.get([actor.step.remote(number) for number in range(1, 300)])

    actor = Steps.remote()
    assert get(calls.remote(actor)) == list(range(1, 300))
    assert ran(actor) == list(range(1, 300))
