"""What the core tests share: a scheduler with a virtual clock, and a world that obeys it.

`World` carries out decisions in its books and checks, after every event, first that the decisions
make sense to somebody who knows only the events and decisions, then that the scheduler's own
books agree with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from gpunb.core import events as ev
from gpunb.core.placement import NOTHING, Capacity, refusal
from gpunb.core.records import Actor, Task, Worker
from gpunb.core.resources import UNIT, Allocation, Demand, Device, Machine, Shares
from gpunb.core.scheduler import Policy, Scheduler
from gpunb.core.snapshot import snapshot
from gpunb.core.tasks import (
    ActorDied,
    ActorId,
    ActorSpec,
    ActorUnavailable,
    Cancelled,
    Deadlocked,
    Exited,
    Outcome,
    Refused,
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
    most: float | None = None,
) -> Machine:
    """A machine with so many logical devices, or with these (type, GiB)."""
    if isinstance(gpus, int):
        devices = [gpu(at) for at in range(gpus)]
    else:
        devices = [gpu(at, kind, size * GiB) for at, (kind, size) in enumerate(gpus)]
    limit = None if most is None else round(most * UNIT)
    return Machine(tuple(devices), round(cpus * UNIT), units(resources), limit)


def family(
    name: str, count: int, whole: bool = False, counts: tuple[int, ...] = ()
) -> list[Device]:
    """Devices of another kind than GPUs."""
    return [
        Device(f"{name}-{at}", at, f"{name} {at}", resource=name, whole=whole, counts=counts)
        for at in range(count)
    ]


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
        ended: how later calls of each actor end that is over for good.
        blocked: what each task that is blocked waits for.
        disowned: tasks that were stopped together with their children while they ran.
        exited: actors one of whose calls asked for their end.
        live: workers that were started and whose exit was not reported.
        ending: workers that get no more work and will exit: killed, retired, or after their last
            task.
        log: every event with its time.
        checks: False to let it run fast, without looking at the books.
        broken: True once a check failed, so that nothing after it means anything.
        lost: the devices that can be used no more, by key, with the reasons.
        others: what other kernels hold of each device, and what of it for good, in units.
        told: what the scheduler was told of that.
        claim: what it has said that it waits for.
        refused: attempts that are not to be, because others hold what they would take.
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
        self.parents: dict[TaskId, TaskId | None] = {}
        self.ended: dict[ActorId, Outcome] = {}
        self.blocked: dict[TaskId, ev.Blocked] = {}
        self.disowned: set[TaskId] = set()
        self.exited: set[ActorId] = set()
        self.live: dict[WorkerId, Allocation] = {}
        self.history: dict[WorkerId, list[TaskId]] = {}
        self.ending: set[WorkerId] = set()
        self.killed: set[WorkerId] = set()
        self.seen: set[WorkerId] = set()
        self.lost: dict[str, str] = {}
        self.others: dict[str, tuple[int, int]] = {}
        self.told: dict[str, tuple[int, int]] = {}
        self.claim: Shares | None = None
        self.claimed = ev.Claim(None)
        self.refused: list[ev.Run] = []
        self._refusing = False
        self.broken = False
        self.checks = True
        self._ids = iter(range(1, 1_000_000))

    # ---------------------------------------------------------------------------------- what to do

    def send(self, event: ev.Event) -> list[ev.Decision]:
        self.log.append((event, self.now))
        self.broken = True
        kept = self._before(event)
        if isinstance(event, ev.DeviceLost) and event.device in self.scheduler.capacity.position:
            self.lost.setdefault(event.device, event.reason)
        decisions = self.scheduler.handle(event, self.now)
        self.answers.append(decisions)
        for decision in decisions:
            self._carry_out(decision)
        if kept is not None:
            assert ev.Settle(kept, Succeeded()) in decisions, "a result was thrown away"
        if self.checks:
            check(self)
        self.broken = False
        return decisions if self._refusing else decisions + self._refuse_all()

    def _refuse_all(self) -> list[ev.Decision]:
        """Whoever found that others have what he was to hold says so, before anything else."""
        decisions: list[ev.Decision] = []
        self._refusing = True
        while self.refused:
            decisions += self.tell() + self.refuse(self.refused[0])
        self._refusing = False
        return decisions

    def _before(self, event: ev.Event) -> TaskId | None:
        """What the event itself says about the world; the task whose result must be kept."""
        match event:
            case ev.TimeReached():
                self.wake = None
            case ev.WorkerExited(worker):
                self._gone(worker)
            case ev.OutsideChanged(outside):
                self.told = {each.device: (each.units, each.lasting) for each in outside}
            case ev.LeaseRefused(worker) if worker in self.live:
                for task in self.tasks_on(worker):
                    self.attempts[task] -= 1
                self._gone(worker)
            case ev.CancelRequested(task, recursive=recursive):
                self.cancelled.add(task)
                if recursive:
                    self.disowned |= self._family(task) & set(self.runs)
            case ev.Blocked(task, attempt) | ev.Unblocked(task, attempt):
                if task in self.runs and self.runs[task].attempt == attempt:
                    self.blocked.pop(task, None)
                    if isinstance(event, ev.Blocked):
                        self.blocked[task] = event
            case ev.Finished(task, attempt, worker, report):
                run = self.runs.get(task)
                if run and (run.attempt, run.worker) == (attempt, worker):
                    self._stops(task)
                    if isinstance(report, Exited):
                        self._exits(task, worker)
                    known = self.scheduler.tasks[task]
                    if report == Succeeded() and known.stop != "cancel" and not known.settled:
                        return task
        return None

    def _stops(self, task: TaskId) -> None:
        del self.runs[task]
        self.blocked.pop(task, None)
        self.disowned.discard(task)

    def _exits(self, task: TaskId, worker: WorkerId) -> None:
        actor = self.calls.get(task, task)
        if actor in self.rules:
            self.exited.add(actor)
        else:
            self.ending.add(worker)

    def _family(self, task: TaskId) -> set[TaskId]:
        """The task and what its children and theirs are, as far as they are not over."""
        found, todo = set(), [task]
        while todo:
            task = todo.pop()
            found.add(task)
            todo += [
                each
                for each, parent in self.parents.items()
                if parent == task and each not in self.settled and each not in found
            ]
        return found

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
        self._hand_in(ev.Submitted(task, made, tuple(needs), parent), task, parent)
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
        event = ev.ActorCreated(ident, spec, self.rules[ident], tuple(needs), parent)
        self._hand_in(event, ident, parent)
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
        retries: int = 0,
    ) -> TaskId:
        task = next(self._ids)
        spec = TaskSpec(f"c{task}", Demand(), "method", timeout=timeout, max_retries=retries)
        self.specs[task] = spec
        self.calls[task] = actor
        self._hand_in(ev.CallSubmitted(task, actor, spec, tuple(needs), parent), task, parent)
        return task

    def _hand_in(
        self,
        event: ev.Submitted | ev.ActorCreated | ev.CallSubmitted,
        task: TaskId,
        parent: TaskId | None,
    ) -> None:
        self.needs[task] = {need for need in event.needs if need not in self.settled}
        self.parents[task] = parent
        disowned = parent in self.disowned
        self.send(event)
        assert disowned == (self.settled.get(task) == Cancelled())

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

    def lose(self, at: int, reason: str = "it fell off the bus") -> list[ev.Decision]:
        return self.send(ev.DeviceLost(f"gpu-{at}", reason))

    def exceeds(self, worker: WorkerId, reason: str = "too much") -> list[ev.Decision]:
        return self.send(ev.ShareExceeded(worker, reason))

    def hold(self, at: int, gpus: float, lasting: float = 0, *, tell: bool = True) -> None:
        """Other kernels hold so much of a device from now on, of what we do not hold."""
        key = self.machine.devices[at].key
        free = UNIT - self.held(key)
        units = min(free, round(gpus * UNIT))
        self.others[key] = (units, min(units, round(lasting * UNIT)))
        if tell:
            self.tell()

    def held(self, key: str) -> int:
        """What our workers hold of a device."""
        return sum(dict(each.shares).get(key, 0) for each in self.live.values())

    def tell(self, wanted: Iterable[str] = (), used: Iterable[str] = ()) -> list[ev.Decision]:
        """The scheduler hears how things are with other kernels."""
        outside = [ev.Outside(key, *held) for key, held in self.others.items() if held[0]]
        return self.send(ev.OutsideChanged(tuple(outside), frozenset(wanted), frozenset(used)))

    def refuse(self, run: ev.Run) -> list[ev.Decision]:
        """The worker of a run was not started."""
        self.refused.remove(run)
        return self.send(ev.LeaseRefused(run.worker))

    def left(self) -> Machine:
        """The machine without the devices that are lost."""
        devices = [each for each in self.machine.devices if each.key not in self.lost]
        return replace(self.machine, devices=tuple(devices))

    def block(self, task: TaskId, *on: TaskId, count: int | None = None) -> list[ev.Decision]:
        """The task waits for all of these, or for so many."""
        count = len(on) if count is None else count
        return self.send(ev.Blocked(task, self.runs[task].attempt, on, count))

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
                assert task not in self.runs or self._is_left(task), (
                    f"settled #{task} while it runs"
                )
                self.blocked.pop(task, None)
                if self.checks:
                    self._check_outcome(task, outcome)
            case ev.ActorEnded(actor, outcome):
                assert actor not in self.ended, f"actor #{actor} ended twice"
                self.ended[actor] = outcome
                if self.checks:
                    self._check_end(actor, outcome)
            case ev.Interrupt(worker, task, attempt):
                assert worker in self.live
                run = self.runs[task]
                assert (run.worker, run.attempt) == (worker, attempt)
                if isinstance(self.log[-1][0], ev.TimeReached):
                    assert self.now >= self.started[task] + (self.specs[task].timeout or math.inf)
            case ev.Retire(worker):
                assert worker in self.live
                assert worker not in self.ending, "retired a worker that ends anyway"
                if self.history[worker][0] not in self.exited:
                    assert not self.tasks_on(worker), "retired a worker that has work"
                self.ending.add(worker)
            case ev.Kill(worker):
                assert worker in self.live, "killed a worker that is gone"
                if isinstance(self.log[-1][0], ev.CancelRequested):
                    actor = self.history[worker][0]
                    assert actor not in self.rules or actor in self.runs, "an actor was killed"
                self.ending.add(worker)
                self.killed.add(worker)
            case ev.Claim(shares):
                assert decision != self.claimed, "said again what it claims"
                self.claim, self.claimed = shares, decision
            case ev.WakeAt(time):
                assert self.wake is None or time < self.wake
                self.wake = time

    def _is_left(self, task: TaskId) -> bool:
        """Whether it is a call in a thread whose time is over."""
        limit = self.specs[task].timeout
        threads = task in self.calls and self.rules[self.calls[task]].threads
        late = limit is not None and self.now >= self.started[task] + limit
        return threads and late and self.scheduler.tasks[task].settled

    def _check_outcome(self, task: TaskId, outcome: Outcome) -> None:
        match outcome:
            case ActorUnavailable(actor):
                assert self.calls[task] == actor
                assert isinstance(self.log[-1][0], ev.WorkerExited), "it was not in flight"
                assert not self._is_over(actor), "it will not be started again"
            case ActorDied(actor):
                assert self.calls.get(task, task) == actor
                assert self._is_over(actor), "the actor goes on"
                assert outcome == self.ended.get(actor, outcome) or "ended" in outcome.reason
            case Deadlocked():
                assert not self.could_run(task), f"#{task} could have run"
            case Refused():
                demand = self.specs[task].demand
                assert refusal(demand, self.left()) is not None, "it could have been met"

    def _is_over(self, actor: ActorId) -> bool:
        book = self.scheduler.actors.book
        return actor not in book or book[actor].end is not None

    def _check_end(self, actor: ActorId, outcome: Outcome) -> None:
        assert actor in self.rules
        assert isinstance(outcome, ActorDied)
        assert outcome.actor == actor
        assert actor in self.settled, "the constructor is not settled"
        assert all(task in self.settled for task, owner in self.calls.items() if owner == actor), (
            "calls of an actor that has ended are not settled"
        )
        assert all(self.history[each][0] != actor for each in self.live), "its process is there"
        if "could not be made" in outcome.reason:
            assert not self.could_run(actor), f"actor #{actor} could have been made"

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
            for key, share in run.allocation.shares:
                assert self.held(key) + self.told.get(key, (0, 0))[0] + share <= UNIT, (
                    "was given what others are known to hold"
                )
            if any(
                self.held(key) + self.others.get(key, (0, 0))[0] + share > UNIT
                for key, share in run.allocation.shares
            ):
                self.refused.append(run)
        else:
            assert run.worker in self.live, "given to a worker that is gone"
            assert run.worker not in self.ending, "given to a worker that is about to end"
            self._check_reuse(run, spec)
        if task not in self.calls:
            assert not self.lost.keys() & dict(run.allocation.shares), "on a device that is lost"
        self.live[run.worker] = run.allocation
        self.history[run.worker].append(task)
        self.runs[task] = run
        if task not in self.calls:
            check_allocation(self.machine, spec.demand, run.allocation)
        else:
            self._check_order(task)
        if run.last:
            self.ending.add(run.worker)

    def _check_order(self, task: TaskId) -> None:
        """No call was passed over that its caller made before, or that could start as well."""
        actor = self.calls[task]
        ordered = self.rules[actor].max_concurrency == 1
        held_up: set[TaskId | None] = set()
        for other in sorted(each for each, owner in self.calls.items() if owner == actor):
            if other == task:
                break
            if other in self.settled or other in self.runs:
                continue
            caller = self.parents[other]
            assert not (ordered and caller == self.parents[task]), "not in the caller's order"
            ready = all(self.settled.get(need) == Succeeded() for need in self.needs[other])
            assert not ready or (ordered and caller in held_up), "an earlier one could start"
            held_up.add(caller)

    def _most_attempts(self, task: TaskId) -> float:
        if task in self.rules:
            most = self.rules[task].max_restarts
        elif task in self.calls:
            most = self.specs[task].max_retries
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
        assert {each.owner for each in past} == {spec.owner}
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
            self._stops(task)
        self.live.pop(worker, None)
        self.ending.discard(worker)
        self.killed.discard(worker)

    # ------------------------------------------------------------------------------ what could be

    def copy(self) -> World:
        """A world with the same past, that is not checked."""
        other = World(self.machine, self.scheduler.policy)
        other.checks = False
        for books in ("specs", "rules", "calls", "parents", "needs"):
            getattr(other, books).update(getattr(self, books))
        for event, now in self.log[:-1]:
            other.now = now
            other.send(event)
        other.now = self.now
        return other

    def could_run(self, task: TaskId) -> bool:
        """Whether the task runs if, before the last event, whatever can end by itself ends."""
        other = self.copy()
        other.scheduler.policy = replace(self.scheduler.policy, deadlock_after=math.inf)
        before = other.attempts.get(task, 0)
        other.play_on()
        return other.attempts.get(task, 0) > before

    def play_on(self, *, kill: bool = False) -> None:
        """All that can end by itself ends, and what waited for it goes on; time stands still.
        Actors that are left are released, and killed in the end, if that may help."""
        self.others.clear()
        if self.told:
            self.tell()
        for _ in range(10_000):
            if not self._play():
                idle = [each for each in self.scheduler.actors.book if self._is_idle(each)]
                kept = [each for each in idle if not self.scheduler.actors.book[each].released]
                if kept:
                    self.release(kept[0])
                elif kill and idle:
                    self.kill(idle[0])
                else:
                    return
        raise AssertionError("does not come to an end")

    def _is_idle(self, actor: ActorId) -> bool:
        return not any(self.calls.get(task, task) == actor for task in self.runs)

    def _play(self) -> bool:
        for task in sorted(self.runs):
            if self._goes_on(task):
                self.finish(task)
                return True
        for worker in sorted(self.ending):
            if not self.tasks_on(worker) or self._dies(worker):
                self.exit(worker)
                return True
        return False

    def _goes_on(self, task: TaskId) -> bool:
        wait = self.blocked.get(task)
        known = self.scheduler.tasks[task]
        if wait is None or not wait.on or known.stop or known.spec.timeout is not None:
            return True
        over = sum(each in self.settled or each not in self.specs for each in wait.on)
        return over >= min(wait.count, len(wait.on))

    def _dies(self, worker: WorkerId) -> bool:
        return worker in self.killed or self.history[worker][0] in self.exited

    # ------------------------------------------------------------------------------------- the end

    def drain(self) -> None:
        """Everything ends: tasks finish, actors are killed, workers exit, time passes."""
        self.others.clear()
        self.tell()
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
        assert not core.workforce.workers
        assert not core.queue.lines
        assert not core.queue.reservation
        assert not core._children
        assert not core._dependents
        assert not core.actors.book
        assert set(self.ended) == set(self.rules), "not every actor has ended"
        assert not core.deadlocks._waiters
        assert core.deadlocks.due is None
        assert core.workforce.running == 0
        assert not core.deadlines.heap
        assert not list(core.workforce.idle)
        assert core.workforce.busy == 0
        assert not core.outside.held
        assert self.claim is None
        for capacity in (core.capacity, core.workforce.obtainable):
            assert capacity.budget == budget(self.machine)
            assert capacity.shares == [UNIT] * len(self.machine.devices)
            assert capacity.cpus == self.machine.cpus
            assert tuple(sorted(capacity.resources.items())) == self.machine.resources


def check_allocation(machine: Machine, demand: Demand, given: Allocation) -> None:
    """The allocation is what was asked for, on devices that exist and suit."""
    devices = {each.key: each for each in machine.devices}
    assert given.cpus == demand.cpus
    kinds = {each.resource for each in machine.devices}
    assert given.resources == tuple(each for each in demand.resources if each[0] not in kinds)
    assert len({key for key, _ in given.shares}) == len(given.shares)
    order = [each.key for each in machine.devices]
    assert [key for key, _ in given.shares] == sorted((k for k, _ in given.shares), key=order.index)
    of_kind: dict[str, list[tuple[str, int]]] = {}
    for key, share in given.shares:
        of_kind.setdefault(devices[key].resource, []).append((key, share))
    gpus = of_kind.pop("GPU", [])
    for name, units in demand.resources:
        if name in kinds:
            _check_part(units, of_kind.pop(name), devices)
    assert not of_kind, "devices that nobody asked for"
    if demand.types:
        assert all(devices[key].type in demand.types for key, _ in gpus)
    assert all((devices[key].memory or 0) >= demand.min_memory for key, _ in gpus)
    if demand.gpus:
        _check_part(demand.gpus, gpus, devices)
    elif demand.gpu_memory:
        ((key, units),) = gpus
        memory = devices[key].memory
        assert memory is not None
        assert units * memory >= demand.gpu_memory * UNIT
        assert (units - 1) * memory < demand.gpu_memory * UNIT
    else:
        assert not gpus


def _check_part(asked: int, given: list[tuple[str, int]], devices: Mapping[str, Device]) -> None:
    """The devices of one kind are as many as were asked for, and may be used so."""
    shares = [units for _, units in given]
    if asked >= UNIT:
        assert shares == [UNIT] * (asked // UNIT)
    else:
        assert shares == [asked], "split or changed"
    for key, units in given:
        assert units == UNIT or not devices[key].whole
        assert not devices[key].counts or len(given) in devices[key].counts


def budget(machine: Machine) -> int:
    """The units of GPUs that may be held at once."""
    gpus = sum(each.resource == "GPU" for each in machine.devices)
    return gpus * UNIT if machine.most is None else machine.most


# -------------------------------------------------------------------------------------- invariants


def check(world: World) -> None:
    """Everything that must hold between two events."""
    _check_decisions(world)
    _check_capacity(world)
    _check_tasks(world)
    _check_workers(world)
    _check_queue(world.scheduler)
    _check_family(world.scheduler)
    _check_actors(world)
    _check_time(world)
    _check_liveness(world.scheduler)
    _check_snapshot(world)
    _check_outside(world)


def _check_outside(world: World) -> None:
    """Whoever waits for what others hold has said so, and nothing idle is kept from them."""
    core = world.scheduler
    for worker in core.workforce.idle:
        assert not core.outside.wants(worker), "kept from those who wait"
    if world.claim is not None:
        assert world.told, "claims what nobody has"
    free = core.capacity.copy()
    for worker in core.workforce.workers.values():
        if worker.state != "busy":
            free.give(worker.allocation)
    others = free.copy()
    for key, (units, _) in world.told.items():
        others.shift(others.position[key], units)
    for demand in core.queue.lines:
        if free.place(demand) is None and others.place(demand) is not None:
            assert world.claim is not None, "nobody knows that it waits"
    for key, units in world.claim or ():
        assert 0 < units <= UNIT
        assert key in world.told


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
        assert core.workforce.busy <= core.policy.max_workers
    again = {each.task for each in runs if each.attempt > 1}  # these go before others of their kind
    for task in starts:
        if not world.needs[task] and task not in again:
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


def _check_capacity(world: World) -> None:
    core = world.scheduler
    machine = core.machine
    workers = list(core.workforce.workers.values())
    lasting = [w for w in workers if w.actor is not None]
    waiting = [w for w in workers if w.actor is None and w.lent]
    for capacity, holders, waits in (
        (core.capacity, workers, []),
        (core.workforce.obtainable, lasting, waiting),
    ):
        shares, resources = [UNIT] * len(machine.devices), dict(machine.resources)
        left = budget(machine)
        for key, told in world.told.items():
            shares[capacity.position[key]] -= told[capacity is not core.capacity]
        for worker in [*holders, *waits]:
            for key, units in worker.allocation.shares:
                shares[capacity.position[key]] -= units
                if machine.devices[capacity.position[key]].resource == "GPU":
                    left -= units
            for name, units in worker.allocation.resources:
                resources[name] -= units
        assert capacity.shares == shares
        assert capacity.resources == resources
        assert capacity.budget == left >= 0
        for at, each in enumerate(shares):
            # Until a run is refused, or when old news comes late, it takes what others hold.
            told = world.told.get(machine.devices[at].key, (0, 0))[0]
            assert -told <= each <= UNIT
        assert all(each >= 0 for each in resources.values())
    lent = sum(w.allocation.cpus for w in workers if w.lent)
    assert core.capacity.cpus == machine.cpus - sum(w.allocation.cpus for w in workers) + lent
    assert core.workforce.obtainable.cpus == machine.cpus - sum(w.allocation.cpus for w in lasting)


def _check_tasks(world: World) -> None:
    core = world.scheduler
    for ident, task in core.tasks.items():
        assert task.id == ident
        assert (ident in world.settled) == task.settled
        assert (ident in world.runs) == (task.state == "running")
        if task.state == "running":
            assert task.worker is not None
            worker = core.workforce.workers[task.worker]
            assert ident in worker.tasks
            assert task.attempt == world.runs[ident].attempt
            assert worker.id == world.runs[ident].worker
            if ident not in world.calls:
                check_allocation(core.machine, task.spec.demand, worker.allocation)
        else:
            assert task.worker is None
            assert not task.blocked
        wait = world.blocked.get(ident)
        assert task.blocked == (wait is not None)
        assert (task.on, task.count) == ((wait.on, wait.count) if wait else ((), 0))
        assert task.disowned == (ident in world.disowned)
    over = set(world.specs) - set(world.settled)
    assert over <= set(core.tasks), "neither settled nor booked"
    assert set(world.runs) <= set(core.tasks)


def _check_workers(world: World) -> None:
    core = world.scheduler
    assert set(core.workforce.workers) == set(world.live)
    idle = list(core.workforce.idle)
    assert {id(worker) for worker in idle} == {
        id(worker) for worker in core.workforce.workers.values() if worker.state == "idle"
    }
    assert core.workforce.idle.warm == sum(bool(worker.allocation.shares) for worker in idle)
    assert core.workforce.idle.cold == len(idle) - core.workforce.idle.warm
    assert core.workforce.idle.cold <= max(1, core.machine.cpus // UNIT)
    assert all(core.workforce.idle._groups.values()), "an empty group is kept"
    assert core.workforce.busy == sum(
        worker.state == "busy" and worker.actor is None and not worker.lent
        for worker in core.workforce.workers.values()
    )
    for worker in core.workforce.workers.values():
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
        assert not tasks or worker.actor in world.exited
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
        assert core.workforce.obtainable.place(line.demand), "kept in vain"


def _check_family(core: Scheduler) -> None:
    for parent, children in core._children.items():
        assert children
        assert all(core.tasks[child].parent == parent for child in children)
    assert set(core._dependents) <= set(core.tasks)
    for task in core.tasks.values():
        for need in task.needs or ():
            assert task.id in core._dependents[need]


def _check_actors(world: World) -> None:
    core = world.scheduler
    assert not core.actors._touched
    assert not core.actors._ended
    assert not set(core.actors.book) & set(world.ended)
    assert set(core.actors.book) | set(world.ended) == set(world.rules), "lost an actor"
    for ident, actor in core.actors.book.items():
        constructor = core.tasks.get(ident)
        waiting = sorted(actor.calls, key=lambda task: task.id)
        assert all(task.state == "waiting" and core.tasks[task.id] is task for task in waiting)
        assert len(actor.calls._heads) <= 64 + 2 * len(actor.calls._lines)
        assert len(actor.running) <= actor.rules.max_concurrency
        assert (actor.end is not None) == (actor.state == "ending")
        if actor.worker is not None:
            worker = core.workforce.workers[actor.worker]
            assert worker.actor == ident
            assert worker.tasks == (actor.running or {ident} & set(world.runs))
        if actor.state == "ending":
            assert actor.worker is not None
            assert actor.worker in world.ending, "nobody ends the actor"
            assert not waiting
        elif constructor is None:
            assert actor.state == "alive"
            assert actor.worker is not None
            _check_turn(not worker.killed, actor, waiting)
        else:
            assert not actor.running
            assert actor.state == "starting"
            assert actor.worker == constructor.worker
    for worker in core.workforce.workers.values():
        if worker.actor is not None:
            assert core.actors.book[worker.actor].worker == worker.id


def _check_turn(pumps: bool, actor: Actor, waiting: list[Task]) -> None:
    if pumps and len(actor.running) < actor.rules.max_concurrency:
        seen: set[TaskId | None] = set()
        for task in waiting:
            first = actor.rules.max_concurrency > 1 or task.parent not in seen
            assert task.needs or not first, "a call could run and does not"
            seen.add(task.parent)
    if pumps and actor.released:
        assert waiting or actor.running, "nobody needs the actor and it lives"


def _check_time(world: World) -> None:
    core = world.scheduler
    timers = [timer for timer in core.deadlines.heap if core.deadlines.matters(timer)]
    if timers:
        assert world.wake is not None, "a time was not announced"
        assert world.wake <= min(timers)[0]
    kinds = {(kind, ident, attempt) for _, kind, ident, attempt in timers}
    for task in core.tasks.values():
        if task.state == "running" and task.spec.timeout is not None:
            if task.id in world.settled and world.calls.get(task.id):
                continue  # it was left to itself
            assert task.worker is not None
            mine = {("timeout", task.id, task.attempt), ("overdue", task.id, task.attempt)}
            assert mine & kinds or core.workforce.workers[task.worker].killed, "may run for ever"
    for worker in core.workforce.workers.values():
        if worker.state == "leaving":
            assert ("exit", worker.id, 0) in kinds or worker.killed
    if list(core.workforce.idle):
        assert ("idle", 0, 0) in kinds
    waiters = [task.id for task in core.tasks.values() if task.on and task.spec.timeout is None]
    assert core.deadlocks._waiters == set(waiters)
    assert core.workforce.running == len(world.runs)
    suspicious = bool(waiters) and len(core.tasks) > len(world.runs)
    assert suspicious == (core.deadlocks.due is not None)
    assert suspicious == (("stuck", 0, 0) in kinds)


def _check_liveness(core: Scheduler) -> None:
    """What fits runs. What would fit if idle workers made room has them make it."""
    for demand, line in core.queue.lines.items():
        if core.workforce.full:
            break
        place = core.capacity.place(demand, core.queue.kept_from(line))
        assert place is None, "fits and waits"
    workers = core.workforce.workers.values()
    if all(w.state == "idle" or (w.actor is not None and w.state == "busy") for w in workers):
        free = _everything_free(core)
        for demand, line in core.queue.lines.items():
            # What is kept for a line that waits for others is not for idle workers to free.
            kept = core.queue.kept_from(line) if core.outside.held else NOTHING
            assert free.place(demand, kept) is None, "waits for idle workers"


def _everything_free(core: Scheduler) -> Capacity:
    capacity = core.capacity.copy()
    for worker in core.workforce.idle:
        capacity.give(worker.allocation)
    return capacity


def _check_snapshot(world: World) -> None:
    core = world.scheduler
    view = snapshot(core, world.now)
    capacity = _everything_free(core)
    for at, device in enumerate(view.devices):
        if device.key in world.lost:
            assert not device.free, f"device {at} is lost"
            continue
        total = round(device.free * UNIT) + sum(round(share * UNIT) for _, share in device.held)
        total += world.told.get(device.key, (0, 0))[0]
        lack = capacity.shares[at] < 0
        assert total > UNIT if lack else total == UNIT, f"the view of device {at} does not add up"
    assert {job.id for job in view.running} == set(world.runs)
    assert view.queued == len(core.tasks) - len(world.runs)
    assert view.workers == len(world.live)
    assert all(job.waits_for for job in view.waiting)
    assert {each.id for each in view.actors} == set(world.rules) - set(world.ended)
    running = sum(task in world.calls for task in world.runs)
    assert sum(each.running for each in view.actors) == running
    for name, free in view.available.items():
        assert 0 <= free <= view.total[name]
    _check_lost(world)


def _check_lost(world: World) -> None:
    """Nobody waits for what is lost, and whoever has a part of it is about to go."""
    core = world.scheduler
    assert {core.machine.devices[at].key for at in core.capacity.lost} == set(world.lost)
    assert core.capacity.lost == core.workforce.obtainable.lost
    for worker in core.workforce.workers.values():
        if world.lost.keys() & dict(worker.allocation.shares):
            assert worker.killed, "it goes on with a device that is lost"
            assert worker.state != "idle"
    for task in core.tasks.values():
        if task.queues and task.state != "running":
            assert refusal(task.spec.demand, world.left()) is None, "it waits for ever"
