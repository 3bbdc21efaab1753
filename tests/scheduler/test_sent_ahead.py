"""Calls of actors and tasks that workers are sent ahead, and those that are taken back."""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpunb.scheduler import events as ev
from gpunb.scheduler.actor_queue import AHEAD, FEW
from gpunb.scheduler.ahead import MANY
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.tasks import (
    ActorUnavailable,
    Cancelled,
    Exited,
    Raised,
    Report,
    Succeeded,
    TaskId,
)
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.records import sent_ahead as sent
from tests.scheduler.world import World, ask, machine

EXAMPLES = int(os.environ.get("GPUNB_EXAMPLES") or 100)


def begun(decisions: list[ev.Decision]) -> list[TaskId]:
    return [each.task for each in decisions if isinstance(each, ev.Run) and each.ahead]


def under_way(core: MakeWorld, **rules: int) -> tuple[World, list[TaskId]]:
    """An actor with eight calls: the first is over, the second runs, the others were sent ahead."""
    world = core()
    actor = world.ready_actor(**rules)
    calls = [world.call(actor, alike="a") for _ in range(8)]
    assert sent(world.finish(calls[0], steady=True)) == calls[2:]
    return world, calls


def test_a_steady_actor_is_sent_calls_ahead(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    calls = [world.call(actor, alike="a") for _ in range(AHEAD + 4)]
    decisions = world.finish(calls[0], steady=True)
    assert world.running() == [calls[1]]
    assert sent(decisions) == calls[2 : 2 + AHEAD]
    assert begun(world.finish(calls[1], steady=True)) == [calls[2]]
    assert all(world.waits(call) for call in calls[3:])


def test_an_actor_is_sent_more_when_it_has_few(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    calls = [world.call(actor, alike="a") for _ in range(2 * AHEAD + 2)]
    world.finish(calls[0], steady=True)
    last = AHEAD - FEW
    for at in range(1, last):
        assert not sent(world.finish(calls[at], steady=True))
    assert sent(world.finish(calls[last], steady=True)) == calls[2 + AHEAD : 2 + AHEAD + last]


def test_nothing_is_sent_ahead_after_a_call_that_is_not_steady(core: MakeWorld) -> None:
    world = core()
    actor = world.ready_actor()
    calls = [world.call(actor, alike="a") for _ in range(6)]
    assert not sent(world.finish(calls[0]))
    assert sent(world.finish(calls[1], steady=True)) == calls[3:]
    assert not sent(world.finish(calls[2]))


@pytest.mark.parametrize(
    "options",
    [{"alike": "b"}, {"alike": None}, {"alike": "a", "retries": 1}, {"alike": "a", "needs": True}],
)
def test_a_call_that_does_not_fit_waits_and_all_after_it(
    core: MakeWorld, options: dict[str, object]
) -> None:
    world = core()
    actor, other = world.ready_actor(), world.submit(ask(cpus=1))
    if options.get("needs"):
        options["needs"] = (other,)
    calls = [world.call(actor, alike="a") for _ in range(3)]
    world.call(actor, **options)  # type: ignore[arg-type]
    world.call(actor, alike="a")
    assert sent(world.finish(calls[0], steady=True)) == calls[2:]


def test_calls_of_other_callers_are_not_sent_ahead(core: MakeWorld) -> None:
    world = core()
    actor, caller = world.ready_actor(), world.submit(ask(cpus=1))
    calls = [world.call(actor, alike="a") for _ in range(3)]
    world.call(actor, alike="a", parent=caller)
    assert sent(world.finish(calls[0], steady=True)) == calls[2:]


@pytest.mark.parametrize("rules", [{"max_concurrency": 2}, {"groups": (("one", 1),)}])
def test_an_actor_that_runs_several_calls_at_once_is_sent_none(
    core: MakeWorld, rules: dict[str, object]
) -> None:
    world = core()
    actor = world.ready_actor(**rules)
    calls = [world.call(actor, alike="a") for _ in range(6)]
    assert not sent(world.finish(calls[0], steady=True))


def test_a_call_that_was_taken_back_is_cancelled_as_any_that_waits(core: MakeWorld) -> None:
    world, calls = under_way(core)
    world.cancel(calls[3])
    assert world.settled[calls[3]] == Cancelled()
    assert not any(world.ahead.values())
    assert sent(world.finish(calls[1], steady=True)) == calls[4:]


def test_calls_that_were_taken_back_start_in_their_order(core: MakeWorld) -> None:
    world, calls = under_way(core)
    world.take_back(world.worker(calls[1]))
    for call in calls[1:]:
        assert world.running() == [call]
        world.finish(call)


def test_calls_that_have_begun_run_before_the_end_of_the_last_is_known(core: MakeWorld) -> None:
    world, calls = under_way(core)
    assert begun(world.take_back(world.worker(calls[1]), begun=2)) == calls[2:4]
    assert world.running() == calls[1:4]
    for at in (2, 1):
        world.finish(calls[at], steady=True)
        assert world.running() == [each for each in calls[1:4] if each not in world.settled]
    world.finish(calls[3], steady=True)
    assert world.running() == [calls[4]]


def test_after_taking_back_nothing_is_sent_until_a_call_ends(core: MakeWorld) -> None:
    world, calls = under_way(core)
    world.take_back(world.worker(calls[1]))
    assert not sent(world.send(ev.TimeReached()))
    assert sent(world.finish(calls[1], steady=True)) == calls[3:]


def test_the_end_of_the_process_loses_only_what_has_begun(core: MakeWorld) -> None:
    world, calls = under_way(core, max_restarts=1)
    worker = world.worker(calls[1])
    world.take_back(worker, begun=1)
    world.exit(worker, "killed by signal 11")
    lost = [call for call in calls if isinstance(world.settled.get(call), ActorUnavailable)]
    assert lost == calls[1:3]
    world.finish(world.calls[calls[0]])
    assert world.running() == [calls[3]]


def test_an_actor_that_leaves_takes_along_what_it_has_not_begun(core: MakeWorld) -> None:
    world, calls = under_way(core)
    world.finish(calls[1], Exited())
    assert set(calls) <= set(world.settled)
    assert not world.scheduler.tasks


# ------------------------------------------------------------------------------------------- tasks


def batch(
    core: MakeWorld, count: int = MANY + AHEAD + 2, **options: Any
) -> tuple[World, list[TaskId]]:
    """Tasks of which two run, in two workers, and the others wait."""
    world = core(gpus=1, cpus=2)
    return world, [world.submit(**{"function": "f", "alike": "a", **options}) for _ in range(count)]


def test_a_steady_worker_is_sent_tasks_ahead(core: MakeWorld) -> None:
    world, tasks = batch(core)
    worker = world.worker(tasks[0])
    decisions = world.finish(tasks[0], steady=True)
    assert world.running() == tasks[1:3]
    assert sent(decisions) == tasks[3 : 3 + AHEAD]
    decisions = world.finish(tasks[2], steady=True)
    assert begun(decisions) == [tasks[3]]
    assert world.worker(tasks[3]) == worker
    assert world.why(tasks[4]) == "is next in line"


def test_a_worker_is_sent_more_when_it_has_few(core: MakeWorld) -> None:
    world, tasks = batch(core, count=MANY + 2 * AHEAD + 2)
    world.finish(tasks[0], steady=True)
    for at in range(2, 2 + AHEAD - FEW - 1):
        assert not sent(world.finish(tasks[at], steady=True))
    assert len(sent(world.finish(tasks[2 + AHEAD - FEW - 1], steady=True))) == AHEAD - FEW


@pytest.mark.parametrize(
    "options",
    [
        {"alike": None},
        {"max_calls": 2},
        {"demand": ask(gpus=0.5)},
        {"demand": ask(gpus=0.5), "max_calls": 1},
        {"count": MANY + 2},
        {"timeout": 5.0},
    ],
    ids=str,
)
def test_tasks_that_are_sent_ahead(core: MakeWorld, options: dict[str, Any]) -> None:
    world, tasks = batch(core, **options)
    assert bool(sent(world.finish(tasks[0], steady=True))) == ("timeout" in options)


def test_tasks_whose_worker_is_gone_wait_again(core: MakeWorld) -> None:
    """It may end before it was sent them: then nobody says that they were taken back."""
    world, tasks = batch(core)
    worker = world.worker(tasks[0])
    assert sent(world.finish(tasks[0], steady=True))
    world.ahead.clear()
    world.exit(worker, "killed by signal 9")
    for task in tasks[1:]:
        if task not in world.settled:
            world.finish(task)
    assert set(world.settled) == set(tasks)


REPORTS: list[Report] = [Succeeded(), Succeeded(), Raised(), Raised(retry=True), Exited()]
REPORTS.append(Exited("it has failed", failed=True))

index = st.integers(min_value=0, max_value=30)


class SentAhead(RuleBasedStateMachine):
    """What may come between tasks that follow each other."""

    world: World

    def _running(self, at: int) -> TaskId:
        running = self.world.running()
        return running[at % len(running)]

    @precondition(lambda self: self.world.runs)
    @rule(at=index, number=st.sampled_from([1, 2, 5]), steady=st.sampled_from([True, True, False]))
    def finish(self, at: int, number: int, steady: bool) -> None:
        for _ in range(number):
            if self.world.runs:
                self.world.finish(self._running(at), steady=steady)

    @precondition(lambda self: self.world.runs)
    @rule(at=index, report=st.sampled_from(REPORTS), steady=st.booleans())
    def report(self, at: int, report: Report, steady: bool) -> None:
        self.world.finish(self._running(at), report, steady=steady)

    @precondition(lambda self: any(self.world.ahead.values()))
    @rule(at=index, begun=index)
    def take_back(self, at: int, begun: int) -> None:
        full = [each for each, calls in self.world.ahead.items() if calls]
        worker = full[at % len(full)]
        self.world.take_back(worker, begun % (len(self.world.ahead[worker]) + 1))

    @precondition(lambda self: self.world.specs)
    @rule(at=index, recursive=st.booleans(), interrupt=st.booleans())
    def cancel(self, at: int, recursive: bool, interrupt: bool) -> None:
        known = sorted(self.world.specs)
        task = known[at % len(known)]
        if interrupt:
            self.world.interrupt(task)
        else:
            self.world.cancel(task, recursive=recursive)

    @precondition(lambda self: self.world.runs)
    @rule(at=index, other=index)
    def block(self, at: int, other: int) -> None:
        """A task waits for another one, perhaps for a call that was sent ahead."""
        known = sorted(self.world.specs)
        self.world.block(self._running(at), known[other % len(known)])

    @precondition(lambda self: self.world.live)
    @rule(at=index)
    def crash(self, at: int) -> None:
        live = sorted(self.world.live)
        self.world.exit(live[at % len(live)], "killed by signal 11")

    @rule(seconds=st.sampled_from([0.3, 1.0, 3.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is not None and not world.broken:
            world.drain()
            world.replay()


class Pipelines(SentAhead):
    """Two actors, calls of the kernel and of a task, and all that may come between."""

    @initialize(restarts=st.sampled_from([0, 2, -1]))
    def begin(self, restarts: int) -> None:
        self.world = World(machine(gpus=1, cpus=2), Policy(stop_grace=2, exit_grace=2))
        self.actors = [
            self.world.ready_actor(max_restarts=restarts),
            self.world.ready_actor(ask(gpus=0.5), max_restarts=restarts),
        ]

    @rule(
        at=index,
        copies=st.sampled_from([1, 3, 12]),
        alike=st.sampled_from(["a", "a", "a", "b", None]),
        retries=st.sampled_from([0, 0, 0, 1]),
        timeout=st.sampled_from([None, None, 1.0]),
        nested=st.booleans(),
    )
    def call(
        self,
        *,
        at: int,
        copies: int,
        alike: str | None,
        retries: int,
        timeout: float | None,
        nested: bool,
    ) -> None:
        parent = self._running(at) if nested and self.world.runs else None
        for _ in range(copies):
            self.world.call(
                self.actors[at % 2], alike=alike, retries=retries, timeout=timeout, parent=parent
            )

    @rule(
        at=index,
        copies=st.sampled_from([3, 12]),
        ended=st.integers(0, 3),
        begun=st.sampled_from([None, None, 0, 1, 2, 8]),
    )
    def pipeline(self, at: int, copies: int, ended: int, begun: int | None) -> None:
        """Calls follow each other fast; then what was sent may be taken back."""
        actor = self.actors[at % 2]
        self.call(at=at, copies=copies, alike="a", retries=0, timeout=None, nested=False)
        for _ in range(ended):
            running = [each for each, run in self.world.runs.items() if self._of(run, actor)]
            if running:
                self.world.finish(running[0], steady=True)
        for worker, calls in self.world.ahead.items():
            if begun is not None and self.world.history[worker][0] == actor:
                self.world.take_back(worker, min(begun, len(calls)))

    def _of(self, run: ev.Run, actor: int) -> bool:
        return self.world.calls.get(run.task, run.task) == actor

    @rule(at=index, restart=st.booleans())
    def kill(self, at: int, restart: bool) -> None:
        self.world.kill(self.actors[at % 2], restart=restart)

    @rule(at=index)
    def release(self, at: int) -> None:
        self.world.release(self.actors[at % 2])


class Batches(SentAhead):
    """Many tasks of a few kinds, and a few others."""

    @initialize(cpus=st.sampled_from([1, 2, 4]))
    def begin(self, cpus: int) -> None:
        self.world = World(machine(gpus=1, cpus=cpus), Policy(stop_grace=2, exit_grace=2))

    @rule(
        at=index,
        copies=st.sampled_from([1, MANY + 4, MANY + 12]),
        alike=st.sampled_from(["a", "a", "a", "b", None]),
        function=st.sampled_from(["f", "f", "f", "g", "h"]),
        retries=st.sampled_from([0, 2]),
        timeout=st.sampled_from([None, None, 1.0]),
        nested=st.sampled_from([False, False, False, True]),
    )
    def batch(self, *, at: int, copies: int, nested: bool, retries: int, **options: Any) -> None:
        parent = self._running(at) if nested and self.world.runs else None
        options["max_calls"] = 3 if options["function"] == "h" else 0
        for _ in range(copies):
            self.world.submit(max_retries=retries, parent=parent, **options)

    @rule(gpus=st.sampled_from([0, 0, 0.5]), cpus=st.sampled_from([0.5, 1]))
    def other(self, gpus: float, cpus: float) -> None:
        self.world.submit(ask(gpus, cpus), max_calls=1 if gpus else 0)

    @precondition(lambda self: self.world.runs)
    @rule(number=st.sampled_from([5, 20, 40]))
    def run(self, number: int) -> None:
        """The tasks follow each other fast."""
        for _ in range(number):
            if self.world.runs:
                self.world.finish(self.world.running()[0], steady=True)


@pytest.mark.timeout(3.0 * EXAMPLES)
class TestPipelines(Pipelines.TestCase):
    settings = settings(
        max_examples=EXAMPLES, stateful_step_count=40, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.timeout(3.0 * EXAMPLES)
class TestBatches(Batches.TestCase):
    settings = settings(
        max_examples=EXAMPLES, stateful_step_count=40, suppress_health_check=list(HealthCheck)
    )
