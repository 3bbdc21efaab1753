"""A task that ended without a result of its own has an error that says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunb.engine.actors import ActorTable
from gpunb.engine.errors import error_of, memory_was_short
from gpunb.engine.jobs import Job
from gpunb.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    DeadlockError,
    GpunbError,
    InfeasibleRequestError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskPlacementGroupRemoved,
    WorkerCrashedError,
)
from gpunb.protocol.backend import Call
from gpunb.scheduler import tasks
from gpunb.scheduler.resources import UNIT, Demand, Within
from gpunb.scheduler.tasks import ActorSpec
from tests.engine.parts import actor_record, call, constructor, method, worker_process

GROUP = ActorSpec(bundles=(Demand(gpus=UNIT),))
DIED = tasks.ActorDied(7, "its process was killed")


def job(made: Call | None = None, *, attempt: int = 1, pid: int | None = None) -> Job:
    """Task #8, whose process has this id."""
    job = Job(8, made or call("train"), [], [])
    job.attempt = attempt
    job.process = worker_process(1, pid) if pid is not None else None
    return job


@pytest.mark.parametrize(
    ("outcome", "kind", "text"),
    [
        (tasks.Cancelled(), TaskCancelledError, "train (#8) was cancelled"),
        (
            tasks.TimedOut(1.5),
            TimeoutError,
            "train (#8) ran longer than its timeout of 1.5 s and was stopped",
        ),
        (
            tasks.TimedOut(1.5, left=True),
            TimeoutError,
            "train (#8) ran longer than its timeout of 1.5 s. Its thread goes on",
        ),
        (
            tasks.Crashed("it was killed by SIGKILL"),
            WorkerCrashedError,
            "train (#8): its worker process ended before the task did: it was killed by SIGKILL",
        ),
        (
            tasks.Crashed("it was killed", out_of_memory=True),
            OutOfMemoryError,
            (
                "its worker process ended before the task did: it was killed\n"
                "The machine was short of memory."
            ),
        ),
        (
            tasks.Crashed("it used 12 GiB of 10 GiB", stopped=True),
            OutOfMemoryError,
            "train (#8) was stopped: it used 12 GiB of 10 GiB",
        ),
        (
            tasks.Refused("there are only 2 GPUs"),
            InfeasibleRequestError,
            "train (#8): there are only 2 GPUs",
        ),
        (
            DIED,
            ActorDiedError,
            "train (#8): the actor #7 is gone: its process was killed",
        ),
        (
            tasks.ActorUnavailable(7, "it was killed"),
            ActorUnavailableError,
            "the process of the actor #7 ended, and it starts again without its state: it was",
        ),
        (
            tasks.Deadlocked("#9 waits for it"),
            DeadlockError,
            "train (#8) can never run: #9 waits for it",
        ),
        (tasks.Succeeded(), GpunbError, "train (#8) ended without a report: Succeeded(cell=False)"),
    ],
)
def test_error_of_each_outcome(outcome: tasks.Outcome, kind: type[Exception], text: str) -> None:
    error = error_of(job(), outcome, ActorTable())
    assert type(error) is kind
    assert text in str(error)


@pytest.mark.parametrize(
    ("attempt", "pid", "text"),
    [
        (1, 4711, "its worker process 4711 ended before the task did: killed"),
        (3, 4711, "its worker process 4711 ended before the task did (attempt 3): killed"),
        (1, None, "its worker process ended before the task did: killed"),
    ],
)
def test_crash_names_the_process_and_the_attempt(attempt: int, pid: int | None, text: str) -> None:
    error = error_of(job(attempt=attempt, pid=pid), tasks.Crashed("killed"), ActorTable())
    assert text in str(error)


@pytest.mark.parametrize(
    ("outcome", "has"),
    [
        (tasks.Crashed("killed"), True),
        (tasks.Crashed("killed", out_of_memory=True), True),
        (DIED, True),
        (tasks.ActorUnavailable(7, "killed"), True),
        (tasks.Crashed("too much memory", stopped=True), False),
        (tasks.Cancelled(), False),
    ],
)
def test_error_of_a_process_that_died_has_its_last_words(outcome: tasks.Outcome, has: bool) -> None:
    made = job()
    made.feed("stderr", b"CUDA error: an illegal memory access\n")
    made.feed("stdout", b"epoch 1\n")
    text = str(error_of(made, outcome, ActorTable()))
    assert ("The last lines of its standard error were:\nCUDA error" in text) is has
    assert "epoch" not in text


@pytest.mark.parametrize(
    ("made", "label"),
    [
        (constructor(), "Counter(3) (#8) was cancelled"),
        (method(8), "Counter(3).add (#8) was cancelled"),
        (method(7), "Counter.add (#8) was cancelled"),
    ],
)
def test_error_names_an_actor_by_its_title(made: Call, label: str) -> None:
    actors = ActorTable()
    actors.add(actor_record(8, title="Counter(3)"))
    assert str(error_of(job(made), tasks.Cancelled(), actors)) == label


def test_error_of_a_call_has_the_reason_that_is_remembered_of_its_actor() -> None:
    actors = ActorTable()
    actor = actor_record(7)
    actors.add(actor)
    actors.ended(actor, "its constructor failed: no such file")
    error = error_of(job(method(7)), tasks.ActorDied(7, "it is gone"), actors)
    assert "the actor #7 is gone: its constructor failed: no such file" in str(error)


# -------------------------------------------------------------------------------- placement groups


def in_group(outcome: tasks.Outcome, *, there: bool, leaving: bool = False) -> Exception:
    """The error of a task in the placement group #7, which is still there or not."""
    actors = ActorTable()
    if there:
        actors.add(actor_record(7, rules=GROUP, leaving=leaving))
    made = call("train", demand=Demand(within=Within(7)))
    return error_of(job(made), outcome, actors)


@pytest.mark.parametrize(("there", "leaving"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (tasks.Crashed("it was removed"), "train (#8): it was removed"),
        (
            tasks.ActorDied(7, "it was removed"),
            "train (#8): placement group #7 is gone: it was removed",
        ),
    ],
)
def test_task_ends_with_its_placement_group(
    outcome: tasks.Outcome, text: str, there: bool, leaving: bool
) -> None:
    error = in_group(outcome, there=there, leaving=leaving)
    assert type(error) is TaskPlacementGroupRemoved
    assert str(error) == text


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (tasks.Crashed("killed"), WorkerCrashedError),
        (tasks.Cancelled(), TaskCancelledError),
    ],
)
def test_task_in_a_group_that_lives_has_an_error_of_its_own(
    outcome: tasks.Outcome, kind: type[Exception]
) -> None:
    assert type(in_group(outcome, there=True)) is kind


def test_cancelled_task_of_a_group_that_is_gone_was_cancelled() -> None:
    assert type(in_group(tasks.Cancelled(), there=False)) is TaskCancelledError


def test_placement_group_that_was_never_placed_is_gone() -> None:
    error = error_of(job(constructor("group", rules=GROUP)), DIED, ActorTable())
    assert type(error) is TaskPlacementGroupRemoved
    assert str(error) == "group (#8) is gone: its process was killed"


# ------------------------------------------------------------------------------ memory of the host


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Any]:
    """Writes the file in which the system counts the processes that it has killed."""
    path = tmp_path / "memory.events"

    def write(text: str) -> str:
        path.write_text(text)
        memory_was_short(str(path))
        return str(path)

    yield write
    memory_was_short()  # of this system again


def test_each_kill_of_the_system_is_noticed_once(events: Any) -> None:
    path = events("low 0\noom 1\noom_kill 3\n")
    assert not memory_was_short(path)
    Path(path).write_text("low 0\noom 2\noom_kill 4\n")
    assert memory_was_short(path)
    assert not memory_was_short(path)


@pytest.mark.parametrize("text", ["", "oom_kill many\n", "oom_kill\n", "low 7\n"])
def test_unknown_counts_are_no_kills(events: Any, text: str) -> None:
    path = events("oom_kill 0\n")
    Path(path).write_text(text)
    assert not memory_was_short(path)


def test_system_without_the_file_says_nothing(events: Any) -> None:
    path = events("oom_kill 0\n")
    Path(path).unlink()
    assert not memory_was_short(path)
