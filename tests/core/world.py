"""What the core tests share: a scheduler with a virtual clock, and a world that obeys it.

`World` carries out decisions in its books and checks, after every event, first that the decisions
make sense to somebody who knows only the events and decisions, then that the scheduler's own
books agree with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from gpunb.core import events as ev
from gpunb.core.placement import Capacity
from gpunb.core.records import Task, Worker
from gpunb.core.resources import UNIT, Allocation, Demand, Device, Machine
from gpunb.core.scheduler import Policy, Scheduler
from gpunb.core.snapshot import snapshot
from gpunb.core.tasks import (
    ActorId,
    ActorSpec,
    Outcome,
    Report,
    Succeeded,
    TaskId,
    TaskSpec,
    WorkerId,
)

GiB = 1024**3

D = TypeVar("D", bound=ev.Decision)


def gpu(at: int, kind: str | None = None, memory: int | None = None) -> Device:
    return Device(f"gpu-{at}", at, f"device {at}", kind, memory, logical=kind is None)


def machine(
    gpus: int | Iterable[tuple[str, int]] = 0,
    cpus: float = 2,
    resources: Mapping[str, float] | None = None,
) -> Machine:
    """A machine with so many logical devices, or with these (type, GiB)."""
    if isinstance(gpus, int):
        devices = [gpu(at) for at in range(gpus)]
    else:
        devices = [gpu(at, kind, size * GiB) for at, (kind, size) in enumerate(gpus)]
    return Machine(tuple(devices), round(cpus * UNIT), units(resources))


def units(resources: Mapping[str, float] | None) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((name, round(each * UNIT)) for name, each in (resources or {}).items()))


def ask(
    gpus: float = 0,
    cpus: float = 0,
    memory: int = 0,
    types: tuple[str, ...] = (),
    resources: Mapping[str, float] | None = None,
) -> Demand:
    """A demand in whole devices, CPUs and GiB."""
    return Demand(round(gpus * UNIT), memory * GiB, round(cpus * UNIT), units(resources), types)


def acts(decisions: list[ev.Decision]) -> list[ev.Decision]:
    """The decisions without the times to wake at."""
    return [each for each in decisions if not isinstance(each, ev.WakeAt)]


class World:
    """A scheduler, a clock, and books of what its decisions would have done.

    Attributes:
        settled: how each task ended.
        runs: the attempt of each task that runs, as it was asked for.
        live: workers that were started and whose exit was not reported.
        ending: workers that get no more work and will exit: killed, retired, or after their last
            task.
        log: every event with its time.
        broken: True once a check failed, so that nothing after it means anything.
    """

    def __init__(self, machine: Machine, policy: Policy | None = None) -> None:
        self.machine = machine
        self.scheduler = Scheduler(machine, policy)
        self.now = 0.0
        self.wake: float | None = None
        self.log: list[tuple[ev.Event, float]] = []
        self.answers: list[list[ev.Decision]] = []
        self.specs: dict[TaskId, TaskSpec] = {}
        self.rules: dict[ActorId, ActorSpec] = {}
        self.needs: dict[TaskId, set[TaskId]] = {}
        self.calls: dict[TaskId, ActorId] = {}
        self.settled: dict[TaskId, Outcome] = {}
        self.runs: dict[TaskId, ev.Run] = {}
        self.attempts: dict[TaskId, int] = {}
        self.started: dict[TaskId, float] = {}
        self.cancelled: set[TaskId] = set()
        self.live: dict[WorkerId, Allocation] = {}
        self.history: dict[WorkerId, list[TaskId]] = {}
        self.ending: set[WorkerId] = set()
        self.killed: set[WorkerId] = set()
        self.seen: set[WorkerId] = set()
        self.broken = False
        self._ids = iter(range(1, 1_000_000))

    # ---------------------------------------------------------------------------------- what to do

    def send(self, event: ev.Event) -> list[ev.Decision]:
        self.log.append((event, self.now))
        self.broken = True
        kept = self._before(event)
        decisions = self.scheduler.handle(event, self.now)
        self.answers.append(decisions)
        for decision in decisions:
            self._carry_out(decision)
        if kept is not None:
            assert ev.Settle(kept, Succeeded()) in decisions, "a result was thrown away"
        check(self)
        self.broken = False
        return decisions

    def _before(self, event: ev.Event) -> TaskId | None:
        """What the event itself says about the world; the task whose result must be kept."""
        match event:
            case ev.TimeReached():
                self.wake = None
            case ev.WorkerExited(worker):
                self._gone(worker)
            case ev.CancelRequested(task):
                self.cancelled.add(task)
            case ev.Finished(task, attempt, worker, report):
                run = self.runs.get(task)
                if run and (run.attempt, run.worker) == (attempt, worker):
                    del self.runs[task]
                    known = self.scheduler.tasks[task]
                    if report == Succeeded() and known.stop != "cancel" and not known.again:
                        return task
        return None

    def submit(
        self,
        demand: Demand | None = None,
        *,
        needs: Iterable[TaskId] = (),
        parent: TaskId | None = None,
        **spec: object,
    ) -> TaskId:
        """Hand in a task; without a demand it asks for one CPU."""
        task = next(self._ids)
        demand = ask(cpus=1) if demand is None else demand
        made = TaskSpec(f"t{task}", demand, **spec)  # type: ignore[arg-type]
        self.specs[task] = made
        self._will_need(task, needs)
        self.send(ev.Submitted(task, made, tuple(needs), parent))
        return task

    def fresh(self, demand: Demand, **options: object) -> TaskId:
        """Hand in a task that runs in a process of its own, as GPU tasks do by default."""
        return self.submit(demand, max_calls=1, **options)  # type: ignore[arg-type]

    def actor(
        self,
        demand: Demand | None = None,
        *,
        needs: Iterable[TaskId] = (),
        parent: TaskId | None = None,
        timeout: float | None = None,
        **rules: int,
    ) -> ActorId:
        ident = next(self._ids)
        spec = TaskSpec(f"a{ident}", demand or Demand(), f"class {ident}", timeout=timeout)
        self.specs[ident] = spec
        self.rules[ident] = ActorSpec(**rules)
        self._will_need(ident, needs)
        self.send(ev.ActorCreated(ident, spec, self.rules[ident], tuple(needs), parent))
        return ident

    def ready_actor(self, demand: Demand | None = None, **rules: int) -> ActorId:
        """An actor whose constructor has run."""
        ident = self.actor(demand, **rules)
        self.finish(ident)
        return ident

    def call(
        self,
        actor: ActorId,
        *,
        needs: Iterable[TaskId] = (),
        parent: TaskId | None = None,
        timeout: float | None = None,
    ) -> TaskId:
        task = next(self._ids)
        spec = TaskSpec(f"c{task}", Demand(), "method", timeout=timeout)
        self.specs[task] = spec
        self.calls[task] = actor
        self._will_need(task, needs)
        self.send(ev.CallSubmitted(task, actor, spec, tuple(needs), parent))
        return task

    def _will_need(self, task: TaskId, needs: Iterable[TaskId]) -> None:
        self.needs[task] = {need for need in needs if need not in self.settled}

    def finish(self, task: TaskId, report: Report | None = None) -> list[ev.Decision]:
        run = self.runs[task]
        return self.send(
            ev.Finished(task, run.attempt, run.worker, Succeeded() if report is None else report)
        )

    def done(self, task: TaskId, report: Report | None = None) -> list[ev.Decision]:
        """The task finishes, and its worker is gone if it does no more."""
        worker = self.runs[task].worker
        decisions = self.finish(task, report)
        return decisions + self.exit(worker) if worker in self.ending else decisions

    def exit(self, worker: WorkerId, reason: str = "exit code 0") -> list[ev.Decision]:
        return self.send(ev.WorkerExited(worker, reason))

    def crash(self, task: TaskId, reason: str = "killed by signal 11") -> list[ev.Decision]:
        return self.exit(self.runs[task].worker, reason)

    def cancel(self, task: TaskId, **how: bool) -> list[ev.Decision]:
        return self.send(ev.CancelRequested(task, **how))

    def interrupt(self, task: TaskId) -> list[ev.Decision]:
        return self.send(ev.InterruptRequested(task))

    def kill(self, actor: ActorId, *, restart: bool = False) -> list[ev.Decision]:
        return self.send(ev.KillRequested(actor, restart))

    def release(self, actor: ActorId) -> list[ev.Decision]:
        return self.send(ev.ActorReleased(actor))

    def block(self, task: TaskId) -> list[ev.Decision]:
        return self.send(ev.Blocked(task, self.runs[task].attempt))

    def unblock(self, task: TaskId) -> list[ev.Decision]:
        return self.send(ev.Unblocked(task, self.runs[task].attempt))

    def advance(self, seconds: float) -> list[ev.Decision]:
        """Let time pass; the timer goes off whenever it was asked to."""
        until = self.now + seconds
        decisions: list[ev.Decision] = []
        while self.wake is not None and self.wake <= until:
            self.now = max(self.now, self.wake)
            decisions += self.send(ev.TimeReached())
        self.now = until
        return decisions

    # ---------------------------------------------------------------------------------- what to see

    def worker(self, task: TaskId) -> WorkerId:
        return self.runs[task].worker

    def gpus(self, task: TaskId) -> list[int]:
        """The devices that a running task holds."""
        return [int(key.removeprefix("gpu-")) for key, _ in self.runs[task].allocation.shares]

    def running(self) -> list[TaskId]:
        return sorted(self.runs)

    def waits(self, *tasks: TaskId) -> bool:
        return all(
            self.scheduler.tasks[task].state in ("queued", "waiting") for task in tasks
        ) and not any(task in self.runs for task in tasks)

    def free(self) -> list[float]:
        return [each / UNIT for each in self.scheduler.capacity.shares]

    # ---------------------------------------------------------------------- carrying out decisions

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Run():
                self._run(decision)
            case ev.Settle(task, outcome):
                assert task in self.specs, "settled what was never handed in"
                assert task not in self.settled, f"settled #{task} twice"
                self.settled[task] = outcome
                assert task not in self.runs, f"settled #{task} while it runs"
            case ev.Interrupt(worker, task, attempt):
                assert worker in self.live
                run = self.runs[task]
                assert (run.worker, run.attempt) == (worker, attempt)
                if isinstance(self.log[-1][0], ev.TimeReached):
                    assert self.now >= self.started[task] + (self.specs[task].timeout or math.inf)
            case ev.Retire(worker):
                assert worker in self.live
                assert worker not in self.ending, "retired a worker that ends anyway"
                assert not self.tasks_on(worker), "retired a worker that has work"
                self.ending.add(worker)
            case ev.Kill(worker):
                assert worker in self.live, "killed a worker that is gone"
                if isinstance(self.log[-1][0], ev.CancelRequested):
                    actor = self.history[worker][0]
                    assert actor not in self.rules or actor in self.runs, "an actor was killed"
                self.ending.add(worker)
                self.killed.add(worker)
            case ev.WakeAt(time):
                assert self.wake is None or time < self.wake
                self.wake = time

    def tasks_on(self, worker: WorkerId) -> list[TaskId]:
        return [task for task, run in self.runs.items() if run.worker == worker]

    def _run(self, run: ev.Run) -> None:
        task, spec = run.task, self.specs[run.task]
        assert task not in self.runs, "runs twice at once"
        assert task not in self.settled or task in self.rules
        assert run.attempt > self.attempts.get(task, 0)
        assert run.attempt <= self._most_attempts(task), "tried too often"
        assert task not in self.cancelled or task in self.settled, "was cancelled"
        assert all(self.settled.get(need) == Succeeded() for need in self.needs[task])
        self.attempts[task] = run.attempt
        self.started[task] = self.now
        if run.new:
            assert run.worker not in self.seen
            self.seen.add(run.worker)
            self.history[run.worker] = []
        else:
            assert run.worker in self.live, "given to a worker that is gone"
            assert run.worker not in self.ending, "given to a worker that is about to end"
            self._check_reuse(run, spec)
        self.live[run.worker] = run.allocation
        self.history[run.worker].append(task)
        self.runs[task] = run
        if task not in self.calls:
            check_allocation(self.machine, spec.demand, run.allocation)
        if run.last:
            self.ending.add(run.worker)

    def _most_attempts(self, task: TaskId) -> float:
        if task in self.rules:
            most = self.rules[task].max_restarts
        elif task in self.calls:
            most = self.rules[self.calls[task]].max_task_retries
        else:
            most = self.specs[task].max_retries
        return math.inf if most < 0 else most + 1

    def _check_reuse(self, run: ev.Run, spec: TaskSpec) -> None:
        past = [self.specs[task] for task in self.history[run.worker]]
        if run.task in self.calls:
            assert self.calls[run.task] == self.history[run.worker][0]
            return
        assert run.task not in self.rules, "an actor in a used worker"
        assert not self.tasks_on(run.worker), "two tasks in one worker"
        assert not spec.fresh, "a fresh task in a used worker"
        assert {each.environment for each in past} == {spec.environment}
        devices = {each.demand if each.demand.wants_device else None for each in [*past, spec]}
        assert len(devices) == 1, "devices and none, or other devices, in one worker"
        if spec.demand.wants_device:
            assert {each.function for each in past} == {spec.function}
        if spec.max_calls:
            calls = sum(each.function == spec.function for each in past)
            assert calls < spec.max_calls, "called too often in one worker"
            assert run.last == (calls + 1 == spec.max_calls)

    def _gone(self, worker: WorkerId) -> None:
        for task in self.tasks_on(worker):
            del self.runs[task]
        self.live.pop(worker, None)
        self.ending.discard(worker)
        self.killed.discard(worker)

    # ------------------------------------------------------------------------------------- the end

    def drain(self) -> None:
        """Everything ends: tasks finish, actors are killed, workers exit, time passes."""
        for ident in list(self.scheduler.actors.book):
            self.release(ident)
        for _ in range(10_000):
            if not (self.runs or self.live or self.scheduler.tasks):
                break
            self._drain_some()
        else:
            raise AssertionError("does not come to an end")
        self.advance(10_000)
        self._check_empty()

    def replay(self) -> None:
        """The same events at the same times give the same decisions."""
        scheduler = Scheduler(self.machine, self.scheduler.policy)
        assert [scheduler.handle(event, now) for event, now in self.log] == self.answers

    def _drain_some(self) -> None:
        if self.runs:
            self.done(min(self.runs))
        elif self.ending:
            self.exit(min(self.ending))
        elif self.scheduler.tasks and self.scheduler.actors.book:
            # An actor that nobody released may hold what others wait for.
            self.kill(min(self.scheduler.actors.book))
        else:
            assert not self.scheduler.tasks, "something waits and nothing runs"
            self.advance(self.scheduler.policy.idle_limit)

    def _check_empty(self) -> None:
        core = self.scheduler
        assert set(self.settled) == set(self.specs), "not every task was settled"
        assert not core.tasks
        assert not core.workers
        assert not core.queue.lines
        assert not core.queue.reservation
        assert not core._children
        assert not core._dependents
        assert not core.actors.book
        assert not core.deadlines.heap
        assert not list(core.idle)
        assert core._busy == 0
        for capacity in (core.capacity, core.obtainable):
            assert capacity.shares == [UNIT] * len(self.machine.devices)
            assert capacity.cpus == self.machine.cpus
            assert tuple(sorted(capacity.resources.items())) == self.machine.resources


def check_allocation(machine: Machine, demand: Demand, given: Allocation) -> None:
    """The allocation is what was asked for, on devices that exist and suit."""
    devices = {each.key: each for each in machine.devices}
    assert given.cpus == demand.cpus
    assert given.resources == demand.resources
    assert len({key for key, _ in given.shares}) == len(given.shares)
    order = [each.key for each in machine.devices]
    assert [key for key, _ in given.shares] == sorted((k for k, _ in given.shares), key=order.index)
    if demand.types:
        assert all(devices[key].type in demand.types for key, _ in given.shares)
    if demand.gpus >= UNIT:
        assert [units for _, units in given.shares] == [UNIT] * (demand.gpus // UNIT)
    elif demand.gpus:
        assert [units for _, units in given.shares] == [demand.gpus], "split or changed"
    elif demand.gpu_memory:
        ((key, units),) = given.shares
        memory = devices[key].memory
        assert memory is not None
        assert units * memory >= demand.gpu_memory * UNIT
        assert (units - 1) * memory < demand.gpu_memory * UNIT
    else:
        assert not given.shares


# -------------------------------------------------------------------------------------- invariants


def check(world: World) -> None:
    """Everything that must hold between two events."""
    _check_decisions(world)
    _check_capacity(world.scheduler)
    _check_tasks(world)
    _check_workers(world)
    _check_queue(world.scheduler)
    _check_family(world.scheduler)
    _check_actors(world.scheduler)
    _check_time(world)
    _check_liveness(world.scheduler)
    _check_snapshot(world)


def _check_decisions(world: World) -> None:
    """What an outsider can tell: no device is given out more than once."""
    held: Counter[str] = Counter()
    for allocation in world.live.values():
        for key, units in allocation.shares:
            held[key] += units
    assert all(units <= UNIT for units in held.values()), "a device is over-subscribed"
    core = world.scheduler
    runs = [each for each in world.answers[-1] if isinstance(each, ev.Run)]
    if any(each.new and each.allocation.cpus for each in runs):
        assert core.capacity.cpus >= 0, "more CPUs were given out than there are"
    starts = [each.task for each in runs if each.task not in world.calls]
    if starts:
        assert core._busy <= core.policy.max_workers
    for task in starts:
        if not world.needs[task]:
            before = [each for each in _line_of(world, task) if each < task]
            assert not before, "a later one of the same demand was first"
    event = world.log[-1][0]
    if isinstance(event, ev.KillRequested) and not event.restart:
        workers = {each for each in world.live if world.history[each][0] == event.actor}
        assert workers <= world.ending, "the actor lives"


def _line_of(world: World, task: TaskId) -> list[TaskId]:
    """Those that wait in the same line, never ran, and stood there since they were handed in."""
    return [
        each.id
        for each in world.scheduler.tasks.values()
        if each.state == "queued"
        and not each.attempt
        and not world.needs[each.id]
        and each.spec.demand == world.specs[task].demand
    ]


def _check_capacity(core: Scheduler) -> None:
    machine = core.machine
    workers = list(core.workers.values())
    lasting = [w for w in workers if w.actor is not None]
    waiting = [w for w in workers if w.actor is None and w.lent]
    for capacity, holders, waits in (
        (core.capacity, workers, []),
        (core.obtainable, lasting, waiting),
    ):
        shares, resources = [UNIT] * len(machine.devices), dict(machine.resources)
        for worker in [*holders, *waits]:
            for key, units in worker.allocation.shares:
                shares[capacity.position[key]] -= units
            for name, units in worker.allocation.resources:
                resources[name] -= units
        assert capacity.shares == shares
        assert capacity.resources == resources
        assert all(0 <= each <= UNIT for each in shares)
        assert all(each >= 0 for each in resources.values())
    lent = sum(w.allocation.cpus for w in workers if w.lent)
    assert core.capacity.cpus == machine.cpus - sum(w.allocation.cpus for w in workers) + lent
    assert core.obtainable.cpus == machine.cpus - sum(w.allocation.cpus for w in lasting)


def _check_tasks(world: World) -> None:
    core = world.scheduler
    for ident, task in core.tasks.items():
        assert task.id == ident
        assert (ident in world.settled) == task.again
        assert (ident in world.runs) == (task.state == "running")
        if task.state == "running":
            assert task.worker is not None
            worker = core.workers[task.worker]
            assert ident in worker.tasks
            assert task.attempt == world.runs[ident].attempt
            assert worker.id == world.runs[ident].worker
            if ident not in world.calls:
                check_allocation(core.machine, task.spec.demand, worker.allocation)
        else:
            assert task.worker is None
            assert not task.blocked
    over = set(world.specs) - set(world.settled)
    assert over <= set(core.tasks), "neither settled nor booked"
    assert set(world.runs) <= set(core.tasks)


def _check_workers(world: World) -> None:
    core = world.scheduler
    assert set(core.workers) == set(world.live)
    idle = list(core.idle)
    assert {id(worker) for worker in idle} == {
        id(worker) for worker in core.workers.values() if worker.state == "idle"
    }
    assert core.idle.warm == sum(bool(worker.allocation.shares) for worker in idle)
    assert core.idle.cold == len(idle) - core.idle.warm
    assert core.idle.cold <= max(1, core.machine.cpus // UNIT)
    assert all(core.idle._groups.values()), "an empty group is kept"
    assert core._busy == sum(
        worker.state == "busy" and worker.actor is None and not worker.lent
        for worker in core.workers.values()
    )
    for worker in core.workers.values():
        _check_worker(world, worker)


def _check_worker(world: World, worker: Worker) -> None:
    tasks = [world.scheduler.tasks[ident] for ident in worker.tasks]
    assert all(task.worker == worker.id and task.state == "running" for task in tasks)
    assert worker.blocked == sum(task.blocked for task in tasks)
    assert worker.lent == (bool(tasks) and all(task.blocked for task in tasks))
    assert worker.killed == (worker.id in world.killed)
    if worker.actor is None:
        assert len(tasks) == (worker.state == "busy")
    if worker.state == "idle":
        assert worker.key is not None
        assert not worker.killed
        assert worker.id not in world.ending
        assert not worker.allocation.cpus
        assert not worker.allocation.resources
    if worker.state == "leaving":
        assert not tasks
        assert worker.id in world.ending, "nobody told the worker to end"


def _check_queue(core: Scheduler) -> None:
    queue = core.queue
    assert not queue._open, "lines are left that nobody looked at"
    assert not queue._all_open, "lines are left that nobody looked at"
    queued: Counter[Demand] = Counter(
        task.spec.demand for task in core.tasks.values() if task.state == "queued"
    )
    assert {demand: len(line) for demand, line in queue.lines.items()} == dict(queued)
    for demand, line in queue.lines.items():
        assert line.demand == demand
        assert line.stuck
        assert line.tasks[0].state == "queued"
        assert len(list(line)) == line.count
        assert len(line.tasks) <= max(64, 2 * line.count) + 1
    if queue.reservation:
        line = queue.reservation.line
        assert queue.lines[line.demand] is line, "kept for nobody"
        assert core.obtainable.place(line.demand), "kept in vain"


def _check_family(core: Scheduler) -> None:
    for parent, children in core._children.items():
        assert children
        assert all(core.tasks[child].parent == parent for child in children)
    assert set(core._dependents) <= set(core.tasks)
    for task in core.tasks.values():
        for need in task.needs or ():
            assert task.id in core._dependents[need]


def _check_actors(core: Scheduler) -> None:
    assert not core.actors._touched
    for ident, actor in core.actors.book.items():
        constructor = core.tasks.get(ident)
        waiting = [task for task in actor.calls if task.state != "over"]
        assert all(task.state == "waiting" for task in waiting)
        assert len(actor.running) <= actor.rules.max_concurrency
        if constructor is None:
            assert actor.state != "starting"
            assert actor.worker is not None
            worker = core.workers[actor.worker]
            assert worker.tasks == actor.running
            _check_turn(actor.state == "alive" and not worker.killed, actor, waiting)
        else:
            assert not actor.running
            assert actor.state != "alive"
            assert actor.worker is None
    for worker in core.workers.values():
        if worker.actor is not None and worker.actor not in core.actors.book:
            assert worker.state == "leaving"


def _check_turn(pumps: bool, actor: object, waiting: list[Task]) -> None:
    running, limit = len(actor.running), actor.rules.max_concurrency  # type: ignore[attr-defined]
    if pumps and running < limit and waiting:
        assert waiting[0].needs, "a call could run and does not"
    if pumps and actor.released:  # type: ignore[attr-defined]
        assert waiting or running, "nobody needs the actor and it lives"


def _check_time(world: World) -> None:
    core = world.scheduler
    timers = [timer for timer in core.deadlines.heap if core.deadlines.matters(timer)]
    if timers:
        assert world.wake is not None, "a time was not announced"
        assert world.wake <= min(timers)[0]
    kinds = {(kind, ident, attempt) for _, kind, ident, attempt in timers}
    for task in core.tasks.values():
        if task.state == "running" and task.spec.timeout is not None:
            assert task.worker is not None
            mine = {("timeout", task.id, task.attempt), ("overdue", task.id, task.attempt)}
            assert mine & kinds or core.workers[task.worker].killed, "may run for ever"
    for worker in core.workers.values():
        if worker.state == "leaving":
            assert ("exit", worker.id, 0) in kinds or worker.killed
    if list(core.idle):
        assert ("idle", 0, 0) in kinds


def _check_liveness(core: Scheduler) -> None:
    """What fits runs. What would fit if idle workers made room has them make it."""
    for demand, line in core.queue.lines.items():
        if core.full:
            break
        place = core.capacity.place(demand, core.queue.kept_from(line))
        assert place is None, "fits and waits"
    workers = core.workers.values()
    if all(w.state == "idle" or (w.actor is not None and w.state == "busy") for w in workers):
        free = _everything_free(core)
        for demand in core.queue.lines:
            assert free.place(demand) is None, "waits for idle workers"


def _everything_free(core: Scheduler) -> Capacity:
    capacity = core.capacity.copy()
    for worker in core.idle:
        capacity.give(worker.allocation)
    return capacity


def _check_snapshot(world: World) -> None:
    core = world.scheduler
    view = snapshot(core, world.now)
    for at, device in enumerate(view.devices):
        total = round(device.free * UNIT) + sum(round(share * UNIT) for _, share in device.held)
        assert total == UNIT, f"the view of device {at} does not add up"
    assert {job.id for job in view.running} == set(world.runs)
    assert view.queued == len(core.tasks) - len(world.runs)
    assert view.workers == len(world.live)
    assert all(job.waits_for for job in view.waiting)
    for name, free in view.available.items():
        assert 0 <= free <= view.total[name]
