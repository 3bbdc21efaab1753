"""The tables of states: every change that they allow happens, and every other change raises."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

import gpunb.scheduler
from gpunb.scheduler.actor_queue import Calls
from gpunb.scheduler.ahead import MANY
from gpunb.scheduler.resources import Allocation
from gpunb.scheduler.state import (
    ACTOR_TRANSITIONS,
    TASK_TRANSITIONS,
    WORKER_TRANSITIONS,
    Actor,
    Task,
    Worker,
)
from gpunb.scheduler.tasks import ActorSpec, Exited, Raised, TaskSpec
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import ask

Change = tuple[type, str, str]

TABLES: dict[type, Mapping] = {
    Task: TASK_TRANSITIONS,
    Worker: WORKER_TRANSITIONS,
    Actor: ACTOR_TRANSITIONS,
}
CHANGES = [
    (record, before, after)
    for record, table in TABLES.items()
    for before in table
    for after in table
]
FAILED = Exited("it failed", failed=True)


def allowed(record: type) -> set[Change]:
    return {(record, before, after) for before, next_ in TABLES[record].items() for after in next_}


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> set[Change]:
    """The changes of state that happen during the test."""
    seen: set[Change] = set()
    for record in TABLES:

        def set_state(self, state, original=record.set_state):
            change = type(self), self.state, state
            original(self, state)
            seen.add(change)

        monkeypatch.setattr(record, "set_state", set_state)
    return seen


def test_every_allowed_change_of_a_task_happens(core: MakeWorld, changes: set[Change]) -> None:
    world = core(cpus=1)
    first = world.submit(max_retries=1)
    world.crash(first)  # waiting, queued, running, and queued again for the retry
    world.cancel(world.submit())  # queued, over
    world.cancel(world.submit(needs=[first]))  # waiting, over
    call = world.call(world.ready_actor(), retries=1)
    world.finish(call, Raised(retry=True))  # waiting, running, and waiting again for the retry
    world.finish(call)
    world = core(cpus=1)
    tasks = [world.submit(function="f", alike="a") for _ in range(MANY + 2)]
    world.finish(tasks[0], steady=True)  # queued, waiting for its worker, running
    assert {each for each in changes if each[0] is Task} == allowed(Task)


def test_every_allowed_change_of_a_worker_happens(core: MakeWorld, changes: set[Change]) -> None:
    world = core(idle_limit=10)
    for _ in range(2):
        world.finish(world.submit())  # busy, idle, busy, idle
    world.advance(11)  # leaving
    world.finish(world.submit(max_calls=1))  # busy, leaving
    assert {each for each in changes if each[0] is Worker} == allowed(Worker)


def test_every_allowed_change_of_an_actor_happens(core: MakeWorld, changes: set[Change]) -> None:
    world = core(gpus=1)
    world.crash(world.actor(max_restarts=1))  # starting, starting
    world.kill(world.actor())  # starting, ending
    leaves = world.ready_actor(max_restarts=-1, max_concurrency=2)
    calls = world.call(leaves), world.call(leaves)
    worker = world.worker(calls[0])
    for call in calls:
        world.finish(call, FAILED)  # alive, leaving, leaving
    world.exit(worker)  # starting
    world.finish(leaves)
    world.finish(world.call(leaves), FAILED)
    world.kill(leaves)  # leaving, ending
    crashes = world.ready_actor(max_restarts=1)
    world.crash(world.call(crashes))  # alive, starting
    world.kill(world.ready_actor())  # alive, ending
    for problem in (None, ""):  # while it parks, and when it is parked
        parks = world.ready_actor(ask(gpus=1), max_restarts=1)
        world.park(parks, "IPC")  # parking, alive
        (process,) = (each for each in world.live if world.history[each][0] == parks)
        world.park(parks, problem)
        world.exit(process)  # starting
        world.finish(parks)
        world.park(parks)  # parking, parked
        call = world.call(parks)
        world.finish(parks)  # alive
        world.finish(call)
        world.park(parks, problem)
        world.kill(parks)  # ending
        world.exit(world.scheduler.state.actors[parks].worker)
    assert {each for each in changes if each[0] is Actor} == allowed(Actor)


def record_of(kind: type) -> Task | Worker | Actor:
    if kind is Task:
        return Task(1, TaskSpec("t"), 0.0)
    if kind is Worker:
        return Worker(1, Allocation(), None)
    return Actor(1, TaskSpec("a"), ActorSpec(), Calls({"": 1}))


@pytest.mark.parametrize("kind", TABLES)
def test_a_record_begins_in_the_first_state_of_its_table(kind: type) -> None:
    assert record_of(kind).state == next(iter(TABLES[kind]))


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [each for each in CHANGES if each not in allowed(each[0])],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_change_that_the_table_does_not_allow_raises(kind: type, before: str, after: str) -> None:
    record = record_of(kind)
    record.state = before
    with pytest.raises(AssertionError, match=rf"{kind.__name__}\(.* from '{before}' to '{after}'"):
        record.set_state(after)
    assert record.state == before


def test_a_change_that_is_missing_in_a_table_is_found(
    core: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = core(cpus=1)
    world.submit()
    waits = world.submit()
    monkeypatch.setitem(TASK_TRANSITIONS, "queued", frozenset({"running"}))
    with pytest.raises(AssertionError, match="from 'queued' to 'over'"):
        world.cancel(waits)


def test_only_set_state_changes_a_state() -> None:
    for path in sorted(Path(gpunb.scheduler.__file__).parent.glob("*.py")):
        changed = {
            node.value.id if isinstance(node.value, ast.Name) else "?"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr == "state"
            and isinstance(node.ctx, ast.Store)
        }
        assert changed <= {"self"}, path.name
