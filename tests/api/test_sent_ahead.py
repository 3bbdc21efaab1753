"""Tasks that a worker is sent ahead run as any others: once, and only if nobody has cancelled them
before. They do not wait for a long one."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.exceptions import TaskCancelledError, WorkerCrashedError
from gpunb.scheduler import timers
from tests.sessions import assert_idle, both, forked, session
from tests.waiting import PATIENCE, Gate, eventually

MANY = 100
"""Tasks that take longer to run than to hand in the same number of further tasks."""

echo = print  # what the code in workers does


@pytest.fixture(scope="module", params=["fork"])
def started(request: pytest.FixtureRequest, by_value: None) -> Iterator[None]:
    with session(num_cpus=2, start_method=request.param):
        yield


@pytest.fixture
def two(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free."""
    yield
    assert_idle()


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent ahead is not taken back after some time."""
    monkeypatch.setattr(timers.Timers, "set_ahead_end", lambda self, now: None)


@pytest.fixture
def notes(tmp_path: Path) -> str:
    """A file to which each task adds its number."""
    return str(tmp_path / "notes")


def get(refs: Any) -> Any:
    return gpunb.get(refs, timeout=PATIENCE)


@gpunb.remote(max_retries=0)
def step(number: int, notes: str = "", what: Any = None, *more: Any) -> int:
    if notes:
        with open(notes, "a") as file:
            file.write(f"{number}\n")
    if what:
        what(*more)
    return number


alone = step.options(num_cpus=2)
"""Tasks that run one after the other, in one worker."""


def hold(gate: Gate, name: str, then: Any = None, *more: Any) -> None:
    gate.enter(name)
    if then:
        then(*more)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> None:
    echo(text)


def sleep(seconds: float) -> None:
    time.sleep(seconds)  # by the clock: the session has to interrupt it


def receive(refs: list[Any]) -> None:
    gpunb.get(refs)


def child(number: int) -> None:
    assert gpunb.get(step.remote(number)) == number


def ran(notes: str) -> dict[str, int]:
    """How often each task ran."""
    return Counter(Path(notes).read_text().split())


def next_in_line() -> list[int]:
    """The tasks that workers were sent ahead."""
    waiting = gpunb.status()["waiting"]
    return [each["id"] for each in waiting if each["waits_for"] == "is next in line"]


def held(task: Any, gate: Gate, notes: str, *then: Any) -> tuple[Any, list[Any]]:
    """Let a task wait at the gate, while its worker has been sent others ahead. Return that task,
    and all that come after it, with the numbers from 1."""
    attempts = iter(range(1_000))

    def tries() -> tuple[Any, list[Any]] | None:
        name = f"held {next(attempts)}"
        [task.remote(-1) for _ in range(MANY)]
        holds = task.remote(0, "", hold, gate, name, *then)
        after = [task.remote(at + 1, notes) for at in range(MANY)]
        gate.await_(name)
        if next_in_line():
            return holds, after
        gate.open()  # the machine was too busy: the tasks came one by one
        get(after)
        gate.close()
        os.unlink(notes)
        return None

    return eventually(tries, "tasks were sent ahead")


@both
@pytest.mark.parametrize("task", [step, alone], ids=["two-workers", "one-worker"])
def test_each_runs_once(two: None, ahead: list[int], notes: str, task: Any) -> None:
    refs = [task.remote(number, notes) for number in range(1_000)]
    assert get(refs) == list(range(1_000))
    assert ran(notes) == {str(number): 1 for number in range(1_000)}
    assert len(ahead) > 200


def test_one_that_the_worker_has_got_can_be_cancelled(
    two: None, lasting: None, gate: Gate, notes: str
) -> None:
    holds, after = held(alone, gate, notes)
    for at in (0, 1, 50):
        gpunb.cancel(after[at])
        with pytest.raises(TaskCancelledError):
            get(after[at])
    gate.open()
    left = [at + 1 for at in range(MANY) if at not in (0, 1, 50)]
    assert get([holds, *(after[number - 1] for number in left)]) == [0, *left]
    assert ran(notes) == {str(number): 1 for number in left}


def test_the_running_task_can_be_cancelled(
    two: None, lasting: None, gate: Gate, notes: str
) -> None:
    holds, after = held(alone, gate, notes)
    gpunb.cancel(holds)
    with pytest.raises(TaskCancelledError):
        get(holds)
    assert get(after) == list(range(1, MANY + 1))
    assert ran(notes) == {str(at + 1): 1 for at in range(MANY)}


def test_a_long_task_does_not_hold_the_others(
    two: None, gate: Gate, notes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers, "AHEAD_FOR", 1.0)  # for `held` to see them
    holds, after = held(step, gate, notes)
    assert get(after) == list(range(1, MANY + 1))
    gate.open()
    assert get(holds) == 0


def test_the_end_of_the_worker_loses_only_the_running_task(
    two: None, lasting: None, gate: Gate, notes: str
) -> None:
    holds, after = held(alone, gate, notes, crash)
    gate.open()
    with pytest.raises(WorkerCrashedError):
        get(holds)
    assert get(after) == list(range(1, MANY + 1))
    assert ran(notes) == {str(at + 1): 1 for at in range(MANY)}


def test_a_task_that_waits_for_one_sent_to_another_worker_gets_it(
    two: None, lasting: None, gate: Gate, notes: str
) -> None:
    holds, after = held(step, gate, notes)
    assert get(step.remote(MANY + 1, "", receive, after)) == MANY + 1
    gate.open()
    assert get(holds) == 0


def test_a_child_does_not_wait_for_the_tasks_behind_its_parent(
    two: None, lasting: None, gate: Gate, notes: str
) -> None:
    holds, after = held(alone, gate, notes, child, MANY)
    gate.open()
    assert get([holds, *after]) == list(range(MANY + 1))


def test_what_a_task_prints_is_its_own(two: None, noted: list[Any], ahead: list[int]) -> None:
    speak = (60, 61, 75)
    for first in range(0, 20 * MANY, MANY):
        noted.clear()
        get(
            [
                step.remote(at, "", *([say, f"text {at}"] if at % MANY in speak else []))
                for at in range(first, first + MANY)
            ]
        )
        eventually(lambda: all(noted[at].said for at in speak), "all text is there")
        assert {at: each.said for at, each in enumerate(noted) if each.said} == {
            at: f"text {first + at}\n" for at in speak
        }
    assert len(ahead) > 100


def test_a_change_of_the_environment_reaches_all_tasks_after_it(
    two: None, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    @gpunb.remote
    def read() -> int:
        return int(os.environ["GPUNB_TEST_NUMBER"])

    refs = []
    for number in range(20):
        monkeypatch.setenv("GPUNB_TEST_NUMBER", str(number))
        refs += [read.remote() for _ in range(MANY)]
        get(refs[-MANY:][:30])  # the others wait while it changes
    assert all(value >= at // MANY for at, value in enumerate(get(refs)))
    assert len(ahead) > 100


def test_one_that_takes_too_long_is_stopped_and_the_others_run(two: None, notes: str) -> None:
    [alone.remote(-1) for _ in range(MANY)]
    slow = alone.options(timeout=0.3).remote(0, "", sleep, PATIENCE)
    after = [alone.remote(at + 1, notes) for at in range(MANY)]
    with pytest.raises(TimeoutError):
        get(slow)
    assert get(after) == list(range(1, MANY + 1))


def test_a_fork_of_the_kernel_takes_none_away(
    two: None, lasting: None, gate: Gate, notes: str
) -> None:
    holds, after = held(alone, gate, notes)
    with forked() as child:
        if not child:
            os._exit(0)
    gate.open()
    assert get([holds, *after]) == list(range(MANY + 1))


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_tasks_and_cancels(two: None, seed: int, notes: str) -> None:
    """Each task runs at most once; those that nobody cancelled run, and those that were cancelled
    while they waited do not."""
    dice = random.Random(seed)
    refs: list[Any] = []
    cancelled: set[int] = set()
    for _ in range(600):
        refs.append(step.remote(len(refs), notes))
        if dice.random() < 0.02:
            at = dice.randrange(max(0, len(refs) - 100), len(refs))
            gpunb.cancel(refs[at])
            cancelled.add(at)
    done = set()
    for number, ref in enumerate(refs):
        try:
            assert get(ref) == number
            done.add(number)
        except TaskCancelledError:
            assert number in cancelled
    assert set(range(600)) - cancelled <= done
    times = ran(notes)
    assert set(times.values()) == {1}
    assert {str(number) for number in done} <= set(times)
