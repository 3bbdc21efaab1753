"""The lives of tasks and workers: runs, endings, retries, time-outs, cancels, lending, reuse."""

from __future__ import annotations

import pytest

from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import UNIT, Allocation
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.tasks import (
    ActorDied,
    Cancelled,
    Crashed,
    Exited,
    Interrupted,
    Raised,
    Refused,
    Succeeded,
    TaskSpec,
    TimedOut,
    UpstreamFailed,
)
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import acts, ask, machine

CRASH = Crashed("killed by signal 11")

# ------------------------------------------------------------------------------------------ a task


def test_a_fresh_task_runs_in_a_new_worker_that_ends_after_it(core: MakeWorld) -> None:
    world = core(gpus=2)
    task = world.fresh(ask(gpus=0.5))
    given = Allocation((("gpu-0", 5000),))
    assert world.answers[-1] == [ev.Run(task, 1, 1, given, new=True, last=True)]
    assert world.finish(task) == [ev.Settle(task, Succeeded()), ev.WakeAt(5.0)]
    assert world.free() == [0.5, 1.0]
    assert world.exit(1) == []
    assert world.free() == [1.0, 1.0]


def test_the_settled_task_comes_before_the_next_run(core: MakeWorld) -> None:
    world = core(cpus=1)
    first, second = world.submit(), world.submit()
    assert acts(world.finish(first)) == [
        ev.Settle(first, Succeeded()),
        ev.Run(second, 1, 1, Allocation((), UNIT), new=False, last=False),
    ]


def test_sums_are_exact(core: MakeWorld) -> None:
    world = core(gpus=1)
    tasks = [world.fresh(ask(gpus=each)) for each in (0.8, 0.1, 0.1)]
    assert world.running() == tasks
    assert world.free() == [0.0]
    assert world.waits(world.fresh(ask(gpus=0.0001)))


def test_devices_are_free_when_the_process_is_gone(core: MakeWorld) -> None:
    world = core(gpus=1)
    first, second = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    world.finish(first)
    assert world.waits(second)
    world.exit(1)
    assert second in world.runs


def test_a_task_that_cannot_fit_is_refused(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=2)
    task = world.fresh(ask(gpus=2))
    (settled,) = world.answers[-1]
    assert isinstance(settled, ev.Settle)
    assert isinstance(settled.outcome, Refused)
    assert "a request for 2 GPU can never be met" in settled.outcome.reason
    assert not world.scheduler.tasks
    assert task not in world.runs


@pytest.mark.parametrize(
    ("report", "outcome"),
    [
        (Succeeded(), Succeeded()),
        (Raised(), Raised()),
        (Raised(retry=True), Raised(retry=True)),
        (Interrupted(), Cancelled()),
        (Exited(), Crashed("it called exit_actor() outside of an actor")),
    ],
)
def test_a_report_gives_this_outcome(core: MakeWorld, report: Succeeded, outcome: object) -> None:
    world = core()
    task = world.submit()
    world.finish(task, report)
    assert world.settled[task] == outcome


# ----------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_crashes_are_retried(core: MakeWorld, retries: int) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=1), max_retries=retries)
    for attempt in range(1, retries + 1):
        assert world.runs[task].attempt == attempt
        world.crash(task)
        assert task not in world.settled
    assert world.runs[task].attempt == retries + 1
    world.crash(task)
    assert world.settled[task] == CRASH


def test_retries_without_limit(core: MakeWorld) -> None:
    world = core()
    task = world.submit(max_retries=-1)
    for _ in range(50):
        world.crash(task)
    world.finish(task)
    assert world.settled[task] == Succeeded()


def test_a_task_with_a_retryable_exception_runs_again(core: MakeWorld) -> None:
    world = core()
    never, once = world.submit(max_retries=5), world.submit(max_retries=1)
    world.finish(never, Raised(retry=False))
    assert world.settled[never] == Raised()
    world.finish(once, Raised(retry=True))
    assert world.runs[once].attempt == 2
    world.finish(once, Raised(retry=True))
    assert world.settled[once] == Raised(retry=True)


def test_a_worker_that_could_not_be_started_counts_as_a_crash(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=1), max_retries=1)
    world.exit(1, "could not be started")
    assert world.runs[task].worker == 2
    world.exit(2, "could not be started")
    assert world.settled[task] == Crashed("could not be started")


def test_a_crash_reports_that_memory_ran_out(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=1))
    world.send(ev.WorkerExited(1, "out of memory", out_of_memory=True))
    assert world.settled[task] == Crashed("out of memory", out_of_memory=True)


# --------------------------------------------------------------------------------------- time-outs


def test_a_timeout_interrupts_and_then_kills(core: MakeWorld) -> None:
    world = core(gpus=1, stop_grace=5)
    task = world.fresh(ask(gpus=1), timeout=10, max_retries=3)
    assert world.answers[-1][-1] == ev.WakeAt(10)
    assert world.advance(10) == [ev.Interrupt(1, task, 1), ev.WakeAt(15)]
    assert world.advance(5) == [ev.Kill(1)]
    world.exit(1)
    assert world.settled[task] == TimedOut(10)


def test_an_interrupted_task_has_timed_out(core: MakeWorld) -> None:
    world = core()
    task = world.submit(timeout=10, max_retries=3)
    world.advance(10)
    world.finish(task, Interrupted())
    assert world.settled[task] == TimedOut(10)


@pytest.mark.parametrize("report", [Raised(), Raised(retry=True)])
def test_an_exception_after_the_interrupt_is_the_timeout(core: MakeWorld, report: Raised) -> None:
    world = core()
    task = world.submit(timeout=10, max_retries=3)
    world.advance(10)
    world.finish(task, report)
    assert world.settled[task] == TimedOut(10)


def test_a_result_that_arrives_after_the_interrupt_is_kept(core: MakeWorld) -> None:
    world = core()
    task = world.submit(timeout=10)
    world.advance(12)
    world.finish(task)
    assert world.settled[task] == Succeeded()
    assert not [each for each in world.advance(60) if isinstance(each, ev.Kill)]


def test_the_time_of_each_attempt_counts(core: MakeWorld) -> None:
    world = core()
    task = world.submit(timeout=10, max_retries=1)
    world.advance(9)
    world.crash(task)
    assert acts(world.advance(9)) == []
    assert acts(world.advance(1)) == [ev.Interrupt(2, task, 2)]


def test_waiting_does_not_count_as_running(core: MakeWorld) -> None:
    world = core(gpus=1)
    first = world.fresh(ask(gpus=1))
    second = world.fresh(ask(gpus=1), timeout=10)
    world.advance(100)
    world.done(first)
    assert acts(world.advance(9)) == []
    assert acts(world.advance(1)) == [ev.Interrupt(2, second, 1)]


def test_a_timeout_stops_a_task_that_ignored_its_cancel(core: MakeWorld) -> None:
    world = core(stop_grace=5)
    task = world.submit(timeout=10)
    world.cancel(task)
    assert ev.Interrupt(1, task, 1) in world.advance(10)
    assert world.advance(5) == [ev.Kill(1)]
    world.exit(1)
    assert world.settled[task] == Cancelled()


def test_a_late_or_early_timer_changes_only_the_time(core: MakeWorld) -> None:
    world = core()
    task = world.submit(timeout=10)
    assert world.send(ev.TimeReached()) == [ev.WakeAt(10)]
    world.now = 50
    assert world.send(ev.TimeReached()) == [ev.Interrupt(1, task, 1), ev.WakeAt(55)]


def test_only_the_next_time_is_announced(core: MakeWorld) -> None:
    world = core(cpus=3)
    world.submit(timeout=10)
    world.submit(timeout=20)
    assert world.answers[-1] == acts(world.answers[-1])
    world.submit(timeout=5)
    assert world.answers[-1][-1] == ev.WakeAt(5)


def test_timers_of_finished_tasks_are_dropped(core: MakeWorld) -> None:
    world = core(cpus=1)
    last = world.submit(timeout=1)
    for _ in range(3000):
        world.now += 0.001
        world.finish(last)
        last = world.submit(timeout=100_000)
    assert len(world.scheduler.timers.heap) < 1100


# ------------------------------------------------------------------------------------------ cancel


def test_cancel_of_a_queued_task(core: MakeWorld) -> None:
    world = core(gpus=1)
    world.fresh(ask(gpus=1))
    task = world.fresh(ask(gpus=1))
    assert world.cancel(task) == [ev.Settle(task, Cancelled())]
    assert not world.scheduler.queue.lines


def test_cancel_of_a_task_that_waits_for_inputs(core: MakeWorld) -> None:
    world = core()
    source = world.submit()
    task = world.submit(needs=[source])
    after = world.submit(needs=[task])
    world.cancel(task)
    assert world.settled == {task: Cancelled(), after: UpstreamFailed(task)}
    world.finish(source)


@pytest.mark.parametrize("report", [Interrupted(), Raised(), Raised(retry=True)])
def test_cancel_of_a_running_task_interrupts_it(core: MakeWorld, report: Interrupted) -> None:
    world = core()
    task = world.submit(max_retries=3)
    assert world.cancel(task) == [ev.Interrupt(1, task, 1)]
    world.finish(task, report)
    assert world.settled[task] == Cancelled()


def test_a_task_that_catches_its_interrupt_and_returns_a_value_has_it(core: MakeWorld) -> None:
    world = core()
    task = world.submit()
    world.cancel(task)
    world.finish(task)
    assert world.settled[task] == Succeeded()


def test_a_cell_that_ends_after_its_cancel_was_cancelled(core: MakeWorld) -> None:
    """Its result has the error of the interrupt."""
    world = core()
    task = world.submit()
    world.cancel(task)
    world.finish(task, Succeeded(cell=True))
    assert world.settled[task] == Cancelled()


def test_a_call_of_an_actor_that_does_so_was_cancelled(core: MakeWorld) -> None:
    world = core()
    call = world.call(world.ready_actor())
    world.cancel(call)
    world.finish(call)
    assert world.settled[call] == Cancelled()


@pytest.mark.parametrize("received", [False, True])
def test_forced_cancel_kills_the_worker(core: MakeWorld, received: bool) -> None:
    world = core()
    task = world.submit(max_retries=3)
    assert world.cancel(task, force=True) == [ev.Kill(1)]
    if received:
        world.finish(task)
        # The process is about to be killed, so nobody else may get it.
        assert world.worker(world.submit()) == 2
    world.exit(1)
    assert world.settled[task] == Cancelled()


def test_cancel_of_a_finished_or_unknown_task_changes_nothing(core: MakeWorld) -> None:
    world = core()
    task = world.submit()
    world.finish(task)
    assert world.cancel(task) == []
    assert world.cancel(task, force=True) == []
    assert world.cancel(999) == []


@pytest.mark.parametrize("recursive", [False, True])
def test_cancel_includes_children(core: MakeWorld, recursive: bool) -> None:
    world = core(cpus=2)
    parent = world.submit()
    child = world.submit(parent=parent)
    queued = world.submit(parent=child)
    decisions = world.cancel(parent, recursive=recursive)
    if recursive:
        assert decisions == [
            ev.Interrupt(1, parent, 1),
            ev.Interrupt(2, child, 1),
            ev.Settle(queued, Cancelled()),
        ]
    else:
        assert decisions == [ev.Interrupt(1, parent, 1)]


@pytest.mark.parametrize("recursive", [False, True])
def test_children_submitted_after_the_cancel_are_cancelled(
    core: MakeWorld, recursive: bool
) -> None:
    """The task may go on for a while before it notices."""
    world = core(cpus=4)
    actor = world.ready_actor()
    parent = world.submit()
    world.cancel(parent, recursive=recursive)
    if recursive:
        task = world.submit(parent=parent, needs=[parent])
        assert world.answers[-1] == [ev.Settle(task, Cancelled())]
        call = world.call(actor, parent=parent)
        assert world.answers[-1] == [ev.Settle(call, Cancelled())]
        made = world.actor(parent=parent)
        died = ActorDied(made, "it was cancelled before it was made", made)
        assert world.answers[-1] == [ev.Settle(made, Cancelled()), ev.ActorEnded(made, died)]
    else:
        assert world.submit(parent=parent) in world.runs
    world.finish(parent)
    assert world.submit(parent=parent) in world.runs


def test_cleanup_of_a_cancelled_task_runs(core: MakeWorld) -> None:
    """What it hands in once it was interrupted, such as a call that lets go of a lock."""
    world = core(cpus=4)
    actor = world.ready_actor()
    parent = world.submit()
    world.cancel(parent)
    late = world.submit(parent=parent)
    call = world.call(actor, parent=parent, cleanup=True)
    task = world.submit(parent=parent, cleanup=True)
    made = world.actor(parent=parent, cleanup=True)
    assert world.settled == {actor: Succeeded(), late: Cancelled()}
    assert {call, task, made} <= set(world.runs)
    world.cancel(parent)  # once more: by then they are children like others
    stopped = [each.task for each in world.answers[-1] if isinstance(each, ev.Interrupt)]
    assert sorted(stopped) == [parent, call, task, made]


def test_grandchildren_submitted_after_the_cancel_are_cancelled(core: MakeWorld) -> None:
    world = core(cpus=4)
    parent = world.submit()
    child = world.submit(parent=parent)
    world.cancel(child, recursive=False)
    late = world.submit(parent=child)
    assert late in world.runs
    world.cancel(parent)
    for each in (child, late):
        assert world.settled[world.submit(parent=each)] == Cancelled()


def test_cancel_of_a_finished_task_cancels_its_children(core: MakeWorld) -> None:
    world = core()
    parent = world.submit()
    child = world.submit(parent=parent)
    world.finish(parent)
    assert world.cancel(parent) == [ev.Interrupt(2, child, 1)]


def test_a_cancelled_task_that_crashes_is_cancelled(core: MakeWorld) -> None:
    world = core()
    task = world.submit(max_retries=3)
    world.cancel(task)
    world.crash(task)
    assert world.settled[task] == Cancelled()


# --------------------------------------------------------------------------------------- interrupt


@pytest.mark.parametrize(
    ("report", "outcome"),
    [(Interrupted(), Cancelled()), (Succeeded(), Succeeded()), (Raised(), Raised())],
)
def test_an_interrupted_task_ends_as_it_likes(
    core: MakeWorld, report: Interrupted, outcome: object
) -> None:
    world = core()
    task = world.submit()
    assert world.interrupt(task) == [ev.Interrupt(1, task, 1)]
    assert world.interrupt(task) == [ev.Interrupt(1, task, 1)]
    world.finish(task, report)
    assert world.settled[task] == outcome
    assert world.interrupt(task) == []


def test_an_interrupted_worker_is_not_used_again(core: MakeWorld) -> None:
    world = core(cpus=1)
    task = world.submit()
    world.cancel(task)
    assert ev.Retire(1) in world.finish(task, Interrupted())
    after = world.submit()
    assert world.runs[after].worker == 2
    world.exit(1)


def test_an_interrupt_cancels_a_waiting_task(core: MakeWorld) -> None:
    world = core(cpus=1)
    source = world.submit()
    queued, waiting = world.submit(), world.submit(needs=[source])
    assert world.interrupt(queued) == [ev.Settle(queued, Cancelled())]
    assert world.interrupt(waiting) == [ev.Settle(waiting, Cancelled())]


# ------------------------------------------------------------------------------------------ inputs


def test_a_task_waits_for_all_its_inputs(core: MakeWorld) -> None:
    world = core(cpus=4)
    first, second = world.submit(), world.submit()
    task = world.submit(needs=[first, second])
    world.finish(first)
    assert world.waits(task)
    world.finish(second)
    assert task in world.runs


def test_a_task_with_finished_inputs_starts_at_once(core: MakeWorld) -> None:
    world = core()
    source = world.submit()
    world.finish(source)
    assert world.submit(needs=[source]) in world.runs


def test_a_failure_spares_the_tasks_that_take_what_is_there(core: MakeWorld) -> None:
    world = core(cpus=4)
    source, other = world.submit(), world.submit()
    spared, waits = world.submit(needs=[source]), world.submit(needs=[source, other])
    lost = world.submit(needs=[source])
    world.finish(source, Raised(spared=(spared, waits)))
    assert world.settled[lost] == UpstreamFailed(source)
    assert world.running() == [other, spared]
    world.finish(other)
    assert waits in world.running()


@pytest.mark.parametrize("report", [Raised(), Interrupted(), None])
def test_a_failure_settles_all_dependent_tasks(core: MakeWorld, report: Raised | None) -> None:
    world = core()
    source, other = world.submit(), world.submit()
    first = world.submit(needs=[source, other])
    second = world.submit(needs=[first])
    third = world.submit(needs=[second, other])
    if report:
        world.finish(source, report)
    else:
        world.crash(source)
    assert world.settled[first] == UpstreamFailed(source)
    assert world.settled[second] == UpstreamFailed(first)
    assert world.settled[third] == UpstreamFailed(second)
    world.finish(other)


def test_two_failures_at_once_settle_once(core: MakeWorld) -> None:
    world = core()
    source = world.submit()
    left, right = world.submit(needs=[source]), world.submit(needs=[source])
    both = world.submit(needs=[left, right])
    world.finish(source, Raised())
    assert world.settled[both] in (UpstreamFailed(left), UpstreamFailed(right))


def test_a_long_chain_does_not_recurse(core: MakeWorld) -> None:
    scheduler = Scheduler(machine(cpus=1))
    spec = TaskSpec("t", ask(cpus=1))
    scheduler.handle(ev.Submitted(0, spec), 0.0)
    for task in range(1, 5000):
        scheduler.handle(ev.Submitted(task, spec, (task - 1,)), 0.0)
    out = scheduler.handle(ev.WorkerExited(1, "crash"), 0.0)
    assert len(out) == 5000
    assert not scheduler.tasks


# --------------------------------------------------------------------------------------- lending


def test_nested_tasks_may_be_deeper_than_the_number_of_cpus(core: MakeWorld) -> None:
    world = core(cpus=2)
    chain = [world.submit()]
    for _ in range(20):
        chain.append(world.submit(parent=chain[-1]))
        assert chain[-1] in world.runs
        world.block(chain[-2])
    for at in range(20, 0, -1):
        world.finish(chain[at])
        world.unblock(chain[at - 1])
    world.finish(chain[0])
    assert all(outcome == Succeeded() for outcome in world.settled.values())


def test_cpus_are_lent_and_taken_back(core: MakeWorld) -> None:
    world = core(cpus=1)
    parent = world.submit()
    child = world.submit(parent=parent)
    assert world.waits(child)
    world.block(parent)
    assert child in world.runs
    world.unblock(parent)
    assert world.scheduler.capacity.cpus == -UNIT
    third = world.submit()
    world.finish(child)
    assert world.waits(third)
    world.finish(parent)
    assert third in world.runs


def test_devices_and_custom_resources_are_not_lent(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=2, resources={"port": 1})
    parent = world.fresh(ask(gpus=1, cpus=1, resources={"port": 1}))
    world.block(parent)
    assert world.waits(world.fresh(ask(gpus=0.1)), world.submit(ask(resources={"port": 1})))


def test_blocked_twice_lends_once(core: MakeWorld) -> None:
    world = core(cpus=2)
    parent = world.submit()
    for _ in range(3):
        world.block(parent)
    assert world.scheduler.capacity.cpus == 2 * UNIT
    for _ in range(3):
        world.unblock(parent)
    assert world.scheduler.capacity.cpus == UNIT


def test_stale_blocks_change_nothing(core: MakeWorld) -> None:
    world = core(cpus=1)
    task = world.submit(max_retries=2)
    world.send(ev.Blocked(task, 2))
    world.send(ev.Blocked(task, 0))
    world.send(ev.Blocked(99, 1))
    assert world.scheduler.capacity.cpus == 0
    world.crash(task)
    world.send(ev.Blocked(task, 1))
    assert world.scheduler.capacity.cpus == 0
    world.finish(task)
    world.send(ev.Blocked(task, 2))
    world.send(ev.Unblocked(task, 2))


@pytest.mark.parametrize("how", ["finish", "crash"])
def test_a_blocked_task_that_ends_lends_nothing(core: MakeWorld, how: str) -> None:
    world = core(gpus=1, cpus=1)
    task = world.submit(ask(gpus=1, cpus=1), max_calls=1)
    world.block(task)
    getattr(world, how)(task)


def test_blocked_tasks_do_not_count_as_running(core: MakeWorld) -> None:
    world = core(cpus=8, max_workers=2)
    first, second, third = (world.submit() for _ in range(3))
    assert world.running() == [first, second]
    world.block(first)
    assert third in world.runs


def test_max_workers_limits_running_tasks(core: MakeWorld) -> None:
    world = core(gpus=2, cpus=8, max_workers=2)
    tasks = [world.submit(ask()) for _ in range(4)]
    gpu = world.fresh(ask(gpus=1))
    assert world.running() == tasks[:2]
    world.finish(tasks[0])
    assert world.running() == [tasks[1], tasks[2]]
    world.finish(tasks[1])
    world.finish(tasks[2])
    assert gpu in world.runs


def test_idle_workers_do_not_exceed_max_workers(core: MakeWorld) -> None:
    world = core(cpus=8, max_workers=1)
    first = world.submit(environment=(("A", "1"),))
    world.block(first)
    second = world.submit()
    world.finish(second)
    world.unblock(first)
    assert world.waits(world.submit())


# ----------------------------------------------------------------------------------------- reuse


def test_cpu_workers_serve_any_function(core: MakeWorld) -> None:
    world = core()
    for function in "fgh":
        task = world.submit(function=function)
        assert world.worker(task) == 1
        world.finish(task)


def test_cpu_workers_serve_one_environment(core: MakeWorld) -> None:
    world = core()
    task = world.submit(environment=(("A", "1"),))
    world.finish(task)
    task = world.submit()
    assert world.worker(task) == 2
    world.finish(task)
    assert world.worker(world.submit(environment=(("A", "1"),))) == 1


def test_workers_serve_one_owner(core: MakeWorld) -> None:
    world = core(gpus=1)
    for demand in (ask(cpus=1), ask(gpus=0.5)):
        workers = []
        for owner in (1, 2, 1, 2):
            task = world.submit(demand, function="f", owner=owner)
            workers.append(world.worker(task))
            world.finish(task)
        assert workers[:2] == workers[2:]
        assert len(set(workers)) == 2


def test_a_release_request_ends_the_idle_workers_of_one_owner(core: MakeWorld) -> None:
    world = core(gpus=1)
    workers = {}
    for owner in (1, 2):
        task = world.submit(ask(gpus=0.5), function="f", owner=owner)
        workers[owner] = world.worker(task)
        world.finish(task)
    assert acts(world.send(ev.ReleaseRequested(2))) == [ev.Retire(workers[2])]
    assert acts(world.send(ev.ReleaseRequested(3))) == []
    assert acts(world.send(ev.ReleaseRequested())) == [ev.Retire(workers[1])]


def test_a_fresh_task_gets_a_worker_of_its_own(core: MakeWorld) -> None:
    world = core()
    world.finish(world.submit())
    task = world.fresh(ask(cpus=1))
    assert world.worker(task) == 2
    world.done(task)
    assert world.worker(world.submit()) == 1


@pytest.mark.parametrize("calls", [2, 3])
def test_a_worker_ends_after_its_last_call(core: MakeWorld, calls: int) -> None:
    world = core(gpus=1)
    for at in range(2 * calls):
        task = world.submit(ask(gpus=1), function="f", max_calls=calls)
        assert world.worker(task) == 1 + at // calls
        assert world.runs[task].last == ((at + 1) % calls == 0)
        world.done(task)


def test_calls_are_counted_for_each_function(core: MakeWorld) -> None:
    world = core(cpus=1)
    functions = "fgfg"
    for function in functions:
        task = world.submit(function=function, max_calls=3)
        assert world.worker(task) == 1
        assert not world.runs[task].last
        world.finish(task)
    task = world.submit(function="g", max_calls=3)
    assert world.runs[task].last


def test_failing_calls_count(core: MakeWorld) -> None:
    world = core()
    task = world.submit(function="f", max_calls=2, max_retries=1)
    world.finish(task, Raised(retry=True))
    assert world.runs[task].worker == 1
    assert world.runs[task].last
    world.done(task)


def test_a_warm_worker_keeps_its_device_for_the_same_function(core: MakeWorld) -> None:
    world = core(gpus=2)
    task = world.submit(ask(gpus=1), function="f")
    world.finish(task)
    assert world.free() == [0.0, 1.0]
    again = world.submit(ask(gpus=1), function="f")
    assert world.worker(again) == 1
    assert world.gpus(again) == [0]
    world.finish(again)
    other = world.submit(ask(gpus=1), function="g")
    assert world.worker(other) == 2
    assert world.gpus(other) == [1]
    part = world.submit(ask(gpus=0.5), function="f")
    assert world.waits(part)
    assert acts(world.answers[-1]) == [ev.Retire(1)]
    world.exit(1)
    assert world.gpus(part) == [0]


def test_the_warm_worker_that_was_used_last_is_used_first(core: MakeWorld) -> None:
    world = core(gpus=3)
    tasks = [world.submit(ask(gpus=1), function="f") for _ in range(3)]
    for task in (tasks[1], tasks[2], tasks[0]):
        world.advance(1)
        world.finish(task)
    assert world.gpus(world.submit(ask(gpus=1), function="f")) == [0]
    assert world.gpus(world.submit(ask(gpus=1), function="f")) == [2]


def test_idle_warm_workers_hold_devices_only(core: MakeWorld) -> None:
    world = core(gpus=1, cpus=1, resources={"port": 1})
    demand = ask(gpus=1, cpus=1, resources={"port": 1})
    world.finish(world.submit(demand, function="f"))
    other = world.submit(ask(cpus=1, resources={"port": 1}))
    assert other in world.runs
    again = world.submit(demand, function="f")
    assert world.waits(again)
    world.finish(other)
    assert world.worker(again) == 1


def test_the_longest_idle_worker_makes_room(core: MakeWorld) -> None:
    world = core(gpus=3)
    tasks = [world.submit(ask(gpus=1), function=each) for each in "fgh"]
    for task in (tasks[1], tasks[0], tasks[2]):
        world.advance(1)
        world.finish(task)
    task = world.fresh(ask(gpus=1))
    assert acts(world.answers[-1]) == [ev.Retire(2)]
    world.exit(2)
    assert world.gpus(task) == [1]


def test_no_more_idle_workers_end_than_needed(core: MakeWorld) -> None:
    world = core(gpus=1)
    halves = [world.submit(ask(gpus=0.5), function=each) for each in "fg"]
    for task in halves:
        world.advance(1)
        world.finish(task)
    world.fresh(ask(gpus=0.4))
    assert acts(world.answers[-1]) == [ev.Retire(1)]
    world.fresh(ask(gpus=0.1))
    assert acts(world.answers[-1]) == []
    world.exit(1)
    assert len(world.runs) == 2


def test_no_idle_worker_ends_where_it_would_not_help(core: MakeWorld) -> None:
    world = core(gpus=2)
    idle, busy = (world.submit(ask(gpus=1), function=each) for each in "fg")
    world.finish(idle)
    large = world.fresh(ask(gpus=2))
    assert acts(world.answers[-1]) == []
    assert acts(world.finish(busy))[1:] == [ev.Retire(1), ev.Retire(2)]
    world.exit(1)
    world.exit(2)
    assert large in world.runs


def test_a_warm_worker_on_a_reserved_device_is_not_used(core: MakeWorld) -> None:
    """It is not used, and goes when the large request has the rest of what it needs."""
    world = core(gpus=2, age=10)
    busy = [world.submit(ask(gpus=1), function="f") for _ in range(2)]
    large = world.fresh(ask(gpus=2))
    world.advance(11)
    again = world.submit(ask(gpus=1), function="f")
    world.finish(busy[0])
    assert world.waits(large, again)
    assert acts(world.finish(busy[1]))[1:] == [ev.Retire(1), ev.Retire(2)]
    world.exit(1)
    world.exit(2)
    assert world.running() == [large]


def test_idle_workers_make_room_beside_reserved_devices(core: MakeWorld) -> None:
    world = core([("A100", 40), ("V100", 16)], age=10)
    kept = world.fresh(ask(gpus=0.5, types=("A100",)))
    idle = world.submit(ask(gpus=1, types=("V100",)), function="f")
    large = world.fresh(ask(gpus=1, types=("A100",)))
    world.advance(11)
    world.finish(idle)
    world.finish(kept)
    # The device that is about to be free is kept, so the warm worker on the other one has to go.
    small = world.fresh(ask(gpus=0.5))
    assert acts(world.answers[-1]) == [ev.Retire(2)]
    world.exit(1)
    world.exit(2)
    assert world.running() == [large, small]


def test_idle_workers_end_after_the_idle_limit(core: MakeWorld) -> None:
    world = core(gpus=1, idle_limit=60)
    cpu, gpu = world.submit(), world.submit(ask(gpus=1), function="f")
    world.finish(cpu)
    world.advance(30)
    world.finish(gpu)
    assert ev.Retire(1) not in world.advance(29)
    assert ev.Retire(1) in world.advance(1)
    assert ev.Retire(2) in world.advance(30)


def test_the_idle_time_starts_anew_after_each_task(core: MakeWorld) -> None:
    world = core(idle_limit=60)
    world.finish(world.submit())
    world.advance(40)
    world.finish(world.submit())
    assert ev.Retire(1) not in world.advance(59)
    assert ev.Retire(1) in world.advance(1)


def test_no_more_idle_cpu_workers_than_cpus(core: MakeWorld) -> None:
    world = core(cpus=2)
    tasks = [world.submit(ask(), environment=(("N", str(at)),)) for at in range(4)]
    for task in tasks:
        world.advance(1)
        world.finish(task)
    retired = [each.worker for answer in world.answers for each in answer if is_retire(each)]
    assert retired == [1, 2]


def is_retire(decision: ev.Decision) -> bool:
    return isinstance(decision, ev.Retire)


def test_a_worker_that_does_not_end_is_killed(core: MakeWorld) -> None:
    world = core(gpus=1, exit_grace=5)
    task = world.fresh(ask(gpus=1))
    world.finish(task)
    assert world.advance(4.9) == []
    assert world.advance(0.1) == [ev.Kill(1)]
    assert world.free() == [0.0]
    world.exit(1)


def test_a_retired_worker_that_does_not_end_is_killed(core: MakeWorld) -> None:
    world = core(idle_limit=60, exit_grace=5)
    world.finish(world.submit())
    assert world.advance(64.9) == [ev.Retire(1), ev.WakeAt(65)]
    assert world.advance(0.1) == [ev.Kill(1)]


def test_a_crash_of_an_idle_worker_frees_its_room(core: MakeWorld) -> None:
    world = core(gpus=1)
    world.finish(world.submit(ask(gpus=1), function="f"))
    world.exit(1, "killed by signal 9")
    assert world.free() == [1.0]
    assert world.worker(world.submit(ask(gpus=1), function="f")) == 2


# ------------------------------------------------------------------- late, doubled, stale, lost


def test_a_doubled_submission_changes_nothing(core: MakeWorld) -> None:
    world = core(gpus=1)
    running, waiting = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    for task in (running, waiting):
        assert world.send(ev.Submitted(task, world.specs[task])) == []
    assert [line.count for line in world.scheduler.queue.lines.values()] == [1]


@pytest.mark.parametrize(("attempt", "worker"), [(0, 1), (2, 1), (1, 2), (1, 0)])
def test_a_report_of_another_attempt_changes_nothing(
    core: MakeWorld, attempt: int, worker: int
) -> None:
    world = core()
    task = world.submit()
    assert world.send(ev.Finished(task, attempt, worker, Succeeded())) == []
    assert task in world.runs


def test_a_doubled_report_changes_nothing(core: MakeWorld) -> None:
    world = core()
    task = world.submit(max_retries=1)
    world.send(ev.Finished(task, 1, 1, Raised(retry=True)))
    assert world.runs[task].attempt == 2
    assert world.send(ev.Finished(task, 1, 1, Raised(retry=True))) == []
    world.send(ev.Finished(task, 2, 1, Succeeded()))
    assert world.send(ev.Finished(task, 2, 1, Succeeded())) == []


def test_a_report_after_the_exit_changes_nothing(core: MakeWorld) -> None:
    world = core()
    task, retried = world.submit(), world.submit(max_retries=1)
    world.exit(1, "crash")
    world.exit(2, "crash")
    assert world.settled[task] == Crashed("crash")
    assert world.send(ev.Finished(task, 1, 1, Succeeded())) == []
    assert world.send(ev.Finished(retried, 1, 2, Succeeded())) == []
    assert world.runs[retried].attempt == 2


def test_a_report_while_the_retry_waits_changes_nothing(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=1), max_retries=1)
    world.finish(task, Raised(retry=True))
    assert world.waits(task)
    assert world.send(ev.Finished(task, 1, 1, Succeeded())) == []
    world.exit(1)
    assert world.runs[task].attempt == 2


def test_a_lost_report_ends_with_the_exit(core: MakeWorld) -> None:
    world = core()
    task = world.submit()
    world.exit(1, "exit code 0")
    assert world.settled[task] == Crashed("exit code 0")


def test_a_doubled_exit_changes_nothing(core: MakeWorld) -> None:
    world = core(gpus=1)
    task = world.fresh(ask(gpus=1), max_retries=3)
    world.exit(1)
    assert world.exit(1) == []
    assert world.runs[task].worker == 2
    assert world.exit(77) == []


def test_a_late_interrupt_changes_nothing(core: MakeWorld) -> None:
    """The shell drops it, because it names the attempt; the report is what counts."""
    world = core()
    task = world.submit(timeout=10)
    world.finish(task)
    assert acts(world.advance(10)) == []
    assert world.settled[task] == Succeeded()


def test_events_of_unknown_actors_change_nothing(core: MakeWorld) -> None:
    world = core()
    assert world.kill(5) == []
    assert world.release(5) == []


def test_a_time_without_timers_changes_nothing(core: MakeWorld) -> None:
    assert core().send(ev.TimeReached()) == []


def test_a_long_run_leaves_nothing_behind(core: MakeWorld) -> None:
    world = core(gpus=2, cpus=2)
    for at in range(600):
        world.now += 0.01
        demand = ask(gpus=round(0.1 + at % 90 / 100, 4))
        options = {"function": f"f{at}", "max_calls": at % 3, "timeout": 1000.0}
        task = world.submit(demand, **options)
        while task not in world.runs:
            world.exit(min(world.ending))
        world.done(task)
    core_ = world.scheduler
    assert len(core_.state.workers) < 25
    assert len(core_.workers.idle._groups) < 25
    assert len(core_.capacity._fits) <= 256
    assert len(core_.timers.heap) < 1100


def test_a_release_request_ends_idle_workers(core: MakeWorld) -> None:
    world = core(gpus=2)
    warm = world.submit(ask(gpus=1), function="warm")
    worker = world.worker(warm)
    busy = world.submit(ask(gpus=1), function="busy")
    world.finish(warm)
    assert acts(world.send(ev.ReleaseRequested())) == [ev.Retire(worker)]
    assert world.running() == [busy]
    assert acts(world.send(ev.ReleaseRequested())) == [], "it is on its way out already"
    world.exit(worker)
    assert world.free() == [1, 0]
