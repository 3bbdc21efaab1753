"""A scheduler with a virtual clock, and a world that carries out its decisions.

`World` carries out decisions in its own records. After every event it checks first the decisions,
from the events and decisions alone, then that the scheduler's own records agree with each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from gpunb.scheduler import events as ev
from gpunb.scheduler.actor_queue import AHEAD
from gpunb.scheduler.groups import group_of
from gpunb.scheduler.line import key_of
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.resources import (
    UNIT,
    Allocation,
    Demand,
    Device,
    Gang,
    Machine,
    Shares,
    Within,
)
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.snapshot import why
from gpunb.scheduler.tasks import (
    ActorDied,
    ActorId,
    ActorSpec,
    ActorUnavailable,
    Cancelled,
    Deadlocked,
    Exited,
    Outcome,
    Raised,
    Refused,
    Report,
    Succeeded,
    TaskId,
    TaskSpec,
    WorkerId,
)
from tests.scheduler.records import check, check_allocation, check_at_rest, concurrency_group

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
    """A scheduler, a clock, and records of the effects of its decisions.

    Attributes:
        settled: the outcome of each task that is over.
        runs: the running attempt of each task, as it was decided.
        ended: the outcome of later calls of each actor that has ended.
        blocked: the last `Blocked` of each blocked task.
        disowned: running tasks that were cancelled together with their children.
        exited: actors with a call that asked for their end.
        live: workers that were started, until their exit is reported.
        ending: workers that get no more work and will exit: killed, retired, or after their last
            task.
        log: every event with its time.
        checks: False to skip all checks, which is faster.
        broken: True once a check failed; later checks would mean nothing.
        history: the tasks that each worker has run.
        latest: the last of these, as it was when it started.
        lost: the reason for each lost device, by key.
        others: units of each device that other kernels hold, and the units that their actors hold.
        reported: `others` as of the last report to the scheduler.
        claim: the shares of the last `Claim`.
        depths: the depth of each task, after the last event.
        deepened: tasks that somebody waited for who was not above them: they left their lines.
        waited: whether any task was blocked.
        sent_ahead: whether any task was sent ahead.
        grown: how often each task got a larger demand.
        submitted: the first specification of these tasks.
        refused: decided attempts that cannot start, because others hold their devices.
        parking: workers that were asked to park and have not replied.
        parked: the shares that each parked worker had.
        prepared: workers with a context on a device, which wait for their first task.
        ahead: the tasks that each worker was sent ahead, and has not begun as far as anybody knows.
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
        self.latest: dict[WorkerId, TaskSpec] = {}
        self.ending: set[WorkerId] = set()
        self.killed: set[WorkerId] = set()
        self.seen: set[WorkerId] = set()
        self.lost: dict[str, str] = {}
        self.others: dict[str, tuple[int, int]] = {}
        self.reported: dict[str, tuple[int, int]] = {}
        self.claim: Shares | None = None
        self.claimed = ev.Claim(None)
        self.refused: list[ev.Run | ev.Prepare | ev.Restore] = []
        self.prepared: set[WorkerId] = set()
        self.ahead: dict[WorkerId, list[TaskId]] = {}
        self.parking: set[WorkerId] = set()
        self.parked: dict[WorkerId, Shares] = {}
        self.restored: dict[WorkerId, int] = {}
        self.depths: dict[TaskId, int] = {}
        self.deepened: set[TaskId] = set()
        self.waited = False
        self.sent_ahead = False
        self.grown: Counter[TaskId] = Counter()
        self.submitted: dict[TaskId, TaskSpec] = {}
        self._refusing = False
        self.broken = False
        self.checks = True
        self._ids = iter(range(1, 1_000_000))

    # ---------------------------------------------------------------------------------- what to do

    def send(self, event: ev.Event) -> list[ev.Decision]:
        before = self._take_back_before(event)
        return before + self._send(event)

    def _take_back_before(self, event: ev.Event) -> list[ev.Decision]:
        """Take back what was sent ahead, where an event may end a waiting call or a worker."""
        decisions: list[ev.Decision] = []
        for worker, sent in list(self.ahead.items()):
            exits = isinstance(event, ev.WorkerExited) and event.worker == worker
            waits = isinstance(event, ev.Blocked) and self.history[worker][0] not in self.rules
            if sent and (exits or waits or isinstance(event, ev.DISTURBING)):
                decisions += self.take_back(worker)
        return decisions

    def take_back(self, worker: WorkerId, begun: int = 0) -> list[ev.Decision]:
        """Take back the tasks that a worker was sent, of which it has begun so many; none if it is
        about to end."""
        begun = 0 if worker in self.ending else begun
        count = len(self.ahead[worker]) - begun
        return self._send(ev.TakenBack(worker, count))

    def _send(self, event: ev.Event) -> list[ev.Decision]:
        self.log.append((event, self.now))
        self.broken = True
        kept = self._before(event)
        grown = self.grown[kept] if kept is not None else 0
        if isinstance(event, ev.DeviceLost) and event.device in self.scheduler.capacity.position:
            self.lost.setdefault(event.device, event.reason)
        decisions = self.scheduler.handle(event, self.now)
        self.answers.append(decisions)
        for decision in decisions:
            self._carry_out(decision)
        if isinstance(event, ev.Finished):
            self._leaves_bundle(event.worker, ev.Retire(event.worker) in decisions)
        tasks = self.scheduler.tasks.values()
        self.deepened |= {
            each.id for each in tasks if self.depths.get(each.id, each.depth) < each.depth
        }
        if kept is not None:
            again = isinstance(event, ev.Finished) and event.short and self.grown[kept] > grown
            assert again or ev.Settle(kept, Succeeded()) in decisions, "a result was thrown away"
        if self.checks:
            check(self)
        self.broken = False
        return decisions if self._refusing else decisions + self._refuse_all()

    def _leaves_bundle(self, worker: WorkerId, retired: bool) -> None:
        """An idle worker without devices holds nothing of a bundle. An actor is never idle."""
        held = self.live.get(worker)
        if held is None or self.history[worker][0] in self.rules:
            return
        idle = (retired or worker not in self.ending) and not self.tasks_on(worker)
        if idle and not held.shares and held.within is not None:
            self.live[worker] = Allocation()

    def _refuse_all(self) -> list[ev.Decision]:
        """Report refused leases before any other event."""
        decisions: list[ev.Decision] = []
        self._refusing = True
        while self.refused:
            decisions += self.report_peers() + self.refuse(self.refused[0])
        self._refusing = False
        return decisions

    def _before(  # noqa: C901 - one case for each event
        self, event: ev.Event
    ) -> TaskId | None:
        """Update the records from the event alone. Returns the task that must now succeed."""
        match event:
            case ev.TimeReached():
                self.wake = None
            case ev.WorkerExited(worker):
                self._gone(worker)
            case ev.TakenBack(worker, count):
                sent = self.ahead[worker]
                del sent[len(sent) - count :]
            case ev.PeersChanged(shares):
                self.reported = {each.device: (each.units, each.lasting) for each in shares}
            case ev.LeaseRefused(worker) if worker in self.live:
                self._not_leased(worker)
            case ev.Parked(worker, problem) if worker in self.parking - self.killed:
                self._parked(worker, problem)
            case ev.CancelRequested(task, recursive=recursive):
                self.cancelled.add(task)
                if recursive:
                    self.disowned |= self._family(task) & set(self.runs)
            case ev.Blocked(task, attempt) | ev.Unblocked(task, attempt):
                if task in self.runs and self.runs[task].attempt == attempt:
                    self.blocked.pop(task, None)
                    if isinstance(event, ev.Blocked):
                        self.blocked[task] = event
                        self.waited = True
            case ev.Finished():
                return self._finishes(event)
        return None

    def _finishes(self, event: ev.Finished) -> TaskId | None:
        task, worker, report = event.task, event.worker, event.report
        run = self.runs.get(task)
        if run and (run.attempt, run.worker) == (event.attempt, worker):
            self._stops(task)
            if task not in self.calls:
                self.parked.pop(worker, None)
            if isinstance(report, Exited):
                self._exits(task, worker)
            stays = worker not in self.ending and self.history[worker][0] not in self.rules
            if stays and not self.live[worker].shares and not self.tasks_on(worker):
                self.live[worker] = Allocation()  # it holds nothing of a bundle any more
            known = self.scheduler.tasks[task]
            lost = known.stop == "kill" or (known.stop == "cancel" and known.actor is not None)
            if report == Succeeded() and not lost and not known.settled:
                return task
        return None

    def _not_leased(self, worker: WorkerId) -> None:
        tasks = self.tasks_on(worker)
        if worker in self.parked and tasks:
            self._stops(tasks[0])
            self.restored[worker] -= 1
            self.live[worker] = replace(self.live[worker], shares=())
            return
        for task in tasks:
            self.attempts[task] -= 1
        self._gone(worker)

    def _parked(self, worker: WorkerId, problem: str) -> None:
        self.parking.discard(worker)
        if not problem:
            self.parked[worker] = self.live[worker].shares
            self.live[worker] = replace(self.live[worker], shares=())

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
        """The task and all its unfinished descendants."""
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
        cleanup: bool = False,
        alike: str | None = None,
        **spec: object,
    ) -> TaskId:
        """Hand in a task; without a demand it asks for one CPU."""
        task = next(self._ids)
        demand = ask(cpus=1) if demand is None else demand
        made = TaskSpec(f"t{task}", demand, **spec)  # type: ignore[arg-type]
        self.specs[task] = made
        event = ev.Submitted(task, made, tuple(needs), parent, cleanup, alike)
        self._hand_in(event, task, parent)
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
        cleanup: bool = False,
        **rules: Any,
    ) -> ActorId:
        ident = next(self._ids)
        spec = TaskSpec(f"a{ident}", demand or Demand(), f"class {ident}", timeout=timeout)
        rules_of = self.rules[ident] = ActorSpec(**rules)
        self.specs[ident] = spec
        if rules_of.bundles:
            self.specs[ident] = replace(spec, demand=Gang.of(rules_of.bundles))
        event = ev.ActorCreated(ident, spec, rules_of, tuple(needs), parent, cleanup)
        self._hand_in(event, ident, parent)
        return ident

    def group(self, *bundles: Demand, **options: Any) -> ActorId:
        """A placement group."""
        return self.actor(bundles=bundles, **options)

    def ready_actor(self, demand: Demand | None = None, **rules: Any) -> ActorId:
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
        cleanup: bool = False,
        group: str = "",
        alike: str | None = None,
    ) -> TaskId:
        task = next(self._ids)
        spec = TaskSpec(
            f"c{task}", Demand(), "method", timeout=timeout, max_retries=retries, group=group
        )
        self.specs[task] = spec
        self.calls[task] = actor
        event = ev.CallSubmitted(task, actor, spec, tuple(needs), parent, cleanup, alike)
        self._hand_in(event, task, parent)
        return task

    def _hand_in(
        self,
        event: ev.Submitted | ev.ActorCreated | ev.CallSubmitted,
        task: TaskId,
        parent: TaskId | None,
    ) -> None:
        self.needs[task] = {need for need in event.needs if need not in self.settled}
        self.parents[task] = parent
        disowned = parent in self.disowned and not event.cleanup
        known = self.scheduler.tasks
        above = known[parent].depth if parent is not None and parent in known else -1
        self.send(event)
        assert task not in known or known[task].depth > above, "not deeper than its parent"
        assert disowned == (self.settled.get(task) == Cancelled())

    def finish(
        self,
        task: TaskId,
        report: Report | None = None,
        *,
        short: bool = False,
        steady: bool = False,
    ) -> list[ev.Decision]:
        run = self.runs[task]
        report = Succeeded() if report is None else report
        return self.send(ev.Finished(task, run.attempt, run.worker, report, short, steady))

    def done(
        self,
        task: TaskId,
        report: Report | None = None,
        *,
        short: bool = False,
        steady: bool = False,
    ) -> list[ev.Decision]:
        """The task finishes, and its worker is gone if it does no more."""
        worker = self.runs[task].worker
        decisions = self.finish(task, report, short=short, steady=steady)
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

    def peers_hold(self, at: int, gpus: float, lasting: float = 0, *, report: bool = True) -> None:
        """Let other kernels hold a share of a device, as far as our workers leave it free."""
        key = self.machine.devices[at].key
        free = UNIT - self.held(key)
        units = min(free, round(gpus * UNIT))
        self.others[key] = (units, min(units, round(lasting * UNIT)))
        if report:
            self.report_peers()

    def held(self, key: str) -> int:
        """The units of a device that our workers hold, with the groups and without what is in
        them."""
        live = (each for each in self.live.values() if each.within is None)
        return sum(dict(each.shares).get(key, 0) for each in live)

    def inside(self, group: ActorId) -> list[WorkerId]:
        """The workers that hold a part of a placement group."""
        return [each for each, held in self.live.items() if group_of(held) == group]

    def report_peers(
        self, wanted: Iterable[str] = (), used: Iterable[str] = ()
    ) -> list[ev.Decision]:
        """Report the shares of other kernels to the scheduler."""
        shares = [ev.PeerShare(key, *held) for key, held in self.others.items() if held[0]]
        return self.send(ev.PeersChanged(tuple(shares), frozenset(wanted), frozenset(used)))

    def refuse(self, run: ev.Run | ev.Prepare | ev.Restore) -> list[ev.Decision]:
        """The worker of a run was not started."""
        self.refused.remove(run)
        return self.send(ev.LeaseRefused(run.worker))

    def left(self) -> Machine:
        """The machine without the devices that are lost."""
        devices = [each for each in self.machine.devices if each.key not in self.lost]
        return replace(self.machine, devices=tuple(devices))

    def block(
        self, task: TaskId, *on: TaskId, count: int | None = None, sure: bool = True
    ) -> list[ev.Decision]:
        """The task waits for all of these, or for so many."""
        count = len(on) if count is None else count
        return self.send(ev.Blocked(task, self.runs[task].attempt, on, count, sure))

    def unblock(self, task: TaskId) -> list[ev.Decision]:
        return self.send(ev.Unblocked(task, self.runs[task].attempt))

    def advance(self, seconds: float) -> list[ev.Decision]:
        """Let time pass, with an event at each time that the scheduler asked for."""
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

    def why(self, task: TaskId) -> str | None:
        """The reason why it waits, in words."""
        return why(self.scheduler, task, self.now)

    def free(self) -> list[float]:
        return [each / UNIT for each in self.scheduler.capacity.shares]

    # ---------------------------------------------------------------------- carrying out decisions

    def _carry_out(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Run():
                self._run(decision)
            case ev.SendAhead():
                self._send_ahead(decision)
            case ev.Prepare() | ev.Park() | ev.Restore():
                self._move_memory(decision)
            case ev.Settle(task, outcome):
                self._settle(task, outcome)
            case ev.Chosen(task, choice):
                assert self.waits(task)
                self.specs[task] = replace(self.specs[task], demand=choice.demand)
            case ev.Grown(task, shares, demand):
                assert self.specs[task].grow
                assert task not in self.runs
                assert task not in self.calls, "the state of an actor would be lost"
                assert shares[0][1] < UNIT
                self.submitted.setdefault(task, self.specs[task])
                self.specs[task] = replace(self.specs[task], demand=demand)
                self.grown[task] += 1
            case ev.ActorEnded(actor, outcome):
                assert actor not in self.ended, f"actor #{actor} ended twice"
                self.ended[actor] = outcome
                if self.checks:
                    self._check_end(actor, outcome)
            case ev.Interrupt() | ev.Retire() | ev.Kill():
                self._end(decision)
            case ev.Claim(shares):
                assert decision != self.claimed, "said again what it claims"
                self.claim, self.claimed = shares, decision
            case ev.WakeAt(time):
                assert self.wake is None or time < self.wake
                self.wake = time

    def _send_ahead(self, decision: ev.SendAhead) -> None:
        assert decision.tasks
        for task, _ in decision.tasks:
            self._check_ahead(task, decision.worker)
            self.ahead.setdefault(decision.worker, []).append(task)
        self.sent_ahead = True
        assert len(self.ahead[decision.worker]) <= AHEAD

    def _check_ahead(self, task: TaskId, worker: WorkerId) -> None:
        assert self.waits(task)
        assert worker in self.live
        assert worker not in self.ending
        assert all(self._has_result(task, need) for need in self.needs[task])
        if task in self.calls:
            assert self.calls[task] == self.history[worker][0]
            runs = [each for each in self.answers[-1] if isinstance(each, ev.Run)]
            assert worker in {each.worker for each in runs}, "behind a call that may be over"
        else:
            self._check_task_ahead(task, worker)

    def _check_task_ahead(self, task: TaskId, worker: WorkerId) -> None:
        """A first attempt is sent behind a task of its kind, while no others are in line, and
        nobody waits for it above all."""
        spec, (before,) = self.specs[task], self.tasks_on(worker)
        assert not self.live[worker].shares
        assert not spec.max_calls
        assert not self.attempts.get(task)
        for name in ("demand", "function"):
            assert getattr(spec, name) == getattr(self.specs[before], name)
        queued = [each for each in self.scheduler.tasks.values() if each.state == "queued"]
        assert {key_of(each) for each in queued} <= {(spec.demand, 0, spec.priority)}
        assert not self.scheduler.tasks[task].depth

    def _end(self, decision: ev.Interrupt | ev.Retire | ev.Kill) -> None:
        match decision:
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

    def _settle(self, task: TaskId, outcome: Outcome) -> None:
        assert task in self.specs, "settled what was never handed in"
        assert task not in self.settled, f"settled #{task} twice"
        self.settled[task] = outcome
        assert task not in self.runs or self._is_left(task), f"settled #{task} while it runs"
        self.blocked.pop(task, None)
        if self.checks:
            self._check_outcome(task, outcome)

    def _move_memory(self, decision: ev.Prepare | ev.Park | ev.Restore) -> None:
        match decision:
            case ev.Prepare():
                self._prepare(decision)
            case ev.Restore():
                self._restore(decision)
            case ev.Park(worker):
                assert worker in self.live
                assert worker not in self.ending
                assert worker not in self.parking
                assert not self.tasks_on(worker), "parked while it works"
                assert self.history[worker][0] in self.rules, "parked what is no actor"
                self.parking.add(worker)

    def _prepare(self, decision: ev.Prepare) -> None:
        assert decision.worker not in self.seen
        assert not self.scheduler.queue.lines, "took the room of tasks that wait"
        ((key, _),) = decision.allocation.shares
        assert key not in self.lost
        assert key not in self.scheduler.state.wanted
        others = self.prepared - self.ending
        assert all(key not in dict(self.live[each].shares) for each in others)
        self._check_room(decision)
        self.seen.add(decision.worker)
        self.prepared.add(decision.worker)
        self.live[decision.worker] = decision.allocation
        self.history[decision.worker] = [0]  # no task yet

    def _restore(self, restore: ev.Restore) -> None:
        worker, shares = restore.worker, restore.allocation.shares
        assert worker in self.live
        assert worker not in self.ending
        assert shares == self.parked[worker], "other devices than before"
        assert not self.tasks_on(worker)
        assert not self.lost.keys() & dict(shares)
        assert restore.attempt == self.restored.get(worker, 0) + 1
        self._check_room(restore)
        self.restored[worker] = restore.attempt
        self.live[worker] = restore.allocation
        self.runs[restore.task] = ev.Run(
            restore.task, restore.attempt, worker, restore.allocation, new=False, last=False
        )

    def _check_room(self, decision: ev.Run | ev.Prepare | ev.Restore) -> None:
        """The devices of a worker have room for it, beyond the room that it has already."""
        own = dict(self.live[decision.worker].shares) if decision.worker in self.live else {}
        over = False
        for key, share in decision.allocation.shares:
            more = self.held(key) + share - own.get(key, 0)
            assert more + self.reported.get(key, (0, 0))[0] <= UNIT, (
                "was given what others are known to hold"
            )
            over = over or more + self.others.get(key, (0, 0))[0] > UNIT
        if over:
            self.refused.append(decision)

    def _is_left(self, task: TaskId) -> bool:
        """Whether the task is a call in a thread that reached its timeout."""
        limit = self.specs[task].timeout
        threads = task in self.calls and self.rules[self.calls[task]].threads
        late = limit is not None and self.now >= self.started[task] + limit
        return threads and late and self.scheduler.tasks[task].settled

    def _check_outcome(self, task: TaskId, outcome: Outcome) -> None:
        match outcome:
            case ActorUnavailable(actor):
                assert self.calls[task] == actor
                match self.log[-1][0]:
                    case ev.WorkerExited():
                        pass
                    case ev.CallSubmitted(spec=spec):
                        assert self.scheduler.state.actors[actor].restarting, "it could take calls"
                        assert spec.max_retries == 0
                    case ev.Finished(report=report):
                        assert isinstance(report, Exited), "it was not in flight"
                        assert report.failed
                    case event:
                        raise AssertionError(f"lost by {event}")
                assert not self._is_over(actor), "it will not be started again"
            case ActorDied(actor):
                group = group_of(self.specs[task].demand)
                assert actor in (self.calls.get(task, task), group) or self._is_over(actor)
                assert self._is_over(actor), "the actor goes on"
                assert outcome == self.ended.get(actor, outcome) or "ended" in outcome.reason
            case Deadlocked():
                assert not self.could_run(task), f"#{task} could have run"
            case Refused():
                assert self._is_refused(self.specs[task].demand), "it could have been met"

    def _is_refused(self, demand: Demand) -> bool:
        """Whether the machine, or the bundle, can never meet the demand."""
        plain, idle = replace(demand, within=None), Capacity(self.machine)
        for key, reason in self.lost.items():
            idle.lose(idle.position[key], reason)
        there = self.bundles(demand.within) if demand.within is not None else ()
        fits = [idle.bundle(each).place(plain) for each in there] or [idle.place(plain)]
        return fits == [None] * len(fits)

    def bundles(self, within: Within) -> tuple[Allocation, ...]:
        """The bundle of a placed group, or all if it names none; empty before it is placed."""
        for worker, held in self.live.items():
            if held.bundles and self.history[worker][0] == within.group:
                return held.bundles if within.bundle < 0 else (held.bundles[within.bundle],)
        return ()

    def _is_over(self, actor: ActorId) -> bool:
        book = self.scheduler.state.actors
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
        within = [task for task, each in self.specs.items() if group_of(each.demand) == actor]
        assert all(task in self.settled for task in within), "a task of the group is not settled"
        assert not self.inside(actor), "a process of the group is there"
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
        assert all(self._has_result(task, need) for need in self.needs[task])
        self.attempts[task] = run.attempt
        self.started[task] = self.now
        if run.new:
            assert run.worker not in self.seen
            self.seen.add(run.worker)
            self.history[run.worker] = []
            if run.allocation.within is None:
                self._check_room(run)
        elif run.prepared:
            assert run.worker in self.prepared
            assert run.worker not in self.ending, "given to a worker that is about to end"
            ((key, _),) = self.live[run.worker].shares
            assert [key] == [each for each, _ in run.allocation.shares], "on another device"
            self._check_room(run)
            self.prepared.discard(run.worker)
            self.history[run.worker] = []
        else:
            assert run.worker in self.live, "given to a worker that is gone"
            assert run.worker not in self.ending, "given to a worker that is about to end"
            self._check_reuse(run, spec)
        sent = self.ahead.get(run.worker)
        assert run.ahead == bool(sent), "the worker would begin another call"
        if sent:
            assert sent.pop(0) == task, "the worker begins another call"
        if task not in self.calls:
            assert not self.lost.keys() & dict(run.allocation.shares), "on a device that is lost"
        self.live[run.worker] = run.allocation
        self.history[run.worker].append(task)
        self.latest[run.worker] = spec
        self.runs[task] = run
        if task not in self.calls:
            check_allocation(self.machine, spec.demand, run.allocation)
            if run.allocation.within is not None:
                self._check_bundle(run.allocation.within, spec.demand)
        else:
            self._check_order(task)
        if run.last:
            self.ending.add(run.worker)

    def _check_bundle(self, within: Within, demand: Demand) -> None:
        """The workers in a bundle, with a new one, do not hold more than the bundle has."""
        assert demand.within is not None
        assert (within.group, within.bundle) in (
            (demand.within.group, demand.within.bundle),
            (demand.within.group, max(0, within.bundle)),
        )
        (bundle,) = self.bundles(within)
        assert within.group not in self.runs, "the group is not placed yet"
        assert within.group not in self.scheduler.capacity.closed, "the group is removed"
        there = [each for each in self.live.values() if each.within == within]
        for name, most in (*bundle.shares, *bundle.resources):
            parts = (dict((*each.shares, *each.resources)).get(name, 0) for each in there)
            assert sum(parts) <= most, "a bundle is over-subscribed"
        names = {name for name, _ in (*bundle.shares, *bundle.resources)}
        assert all(dict((*each.shares, *each.resources)).keys() <= names for each in there)

    def _has_result(self, task: TaskId, need: TaskId) -> bool:
        """Whether the result that a task takes of another one is there."""
        outcome = self.settled.get(need)
        spared = outcome.spared if isinstance(outcome, Raised) else ()
        return outcome == Succeeded() or task in spared

    def _check_order(self, task: TaskId) -> None:
        """No call was passed over that its caller made before, or that could start as well."""
        actor = self.calls[task]
        rules = self.rules[actor]
        group = concurrency_group(rules, self.specs[task])
        ordered = rules.limits[group] == 1
        held_up: set[TaskId | None] = set()
        for other in sorted(each for each, owner in self.calls.items() if owner == actor):
            if other == task:
                break
            if other in self.settled or other in self.runs:
                continue
            if concurrency_group(rules, self.specs[other]) != group:
                continue
            caller = self.parents[other]
            assert not (ordered and caller == self.parents[task]), "not in the caller's order"
            ready = all(self._has_result(other, need) for need in self.needs[other])
            assert not ready or (ordered and caller in held_up), "an earlier one could start"
            held_up.add(caller)

    def _most_attempts(self, task: TaskId) -> float:
        if task in self.rules:
            most = self.rules[task].max_restarts
        elif task in self.calls:
            most = self.specs[task].max_retries
        else:
            most = self.specs[task].max_retries
        return math.inf if most < 0 else most + 1 + self.grown[task]

    def _check_reuse(self, run: ev.Run, spec: TaskSpec) -> None:
        if run.task in self.calls:
            assert self.calls[run.task] == self.history[run.worker][0]
            return
        assert run.task not in self.rules, "an actor in a used worker"
        assert run.ahead or not self.tasks_on(run.worker), "two tasks in one worker"
        assert not spec.fresh, "a fresh task in a used worker"
        last = self.latest[run.worker]  # that one was like those before it
        assert last.environment == spec.environment
        assert last.owner == spec.owner
        devices = {each.demand if each.demand.wants_device else None for each in (last, spec)}
        assert len(devices) == 1, "devices and none, or other devices, in one worker"
        if spec.demand.wants_device:
            assert last.function == spec.function
        if spec.max_calls:
            past = [self.specs[task].function for task in self.history[run.worker]]
            calls = past.count(spec.function)
            assert calls < spec.max_calls, "called too often in one worker"
            assert run.last == (calls + 1 == spec.max_calls)

    def _gone(self, worker: WorkerId) -> None:
        for task in self.tasks_on(worker):
            self._stops(task)
        self.live.pop(worker, None)
        self.ending.discard(worker)
        self.killed.discard(worker)
        self.prepared.discard(worker)
        self.parking.discard(worker)
        self.parked.pop(worker, None)
        self.ahead.pop(worker, None)

    # ------------------------------------------------------------------------------ what could be

    def copy(self) -> World:
        """A world with the same past, that is not checked."""
        other = World(self.machine, self.scheduler.state.policy)
        other.checks = False
        for books in ("specs", "rules", "calls", "parents", "needs"):
            getattr(other, books).update(getattr(self, books))
        other.specs.update(self.submitted)
        for event, now in self.log[:-1]:
            other.now = now
            other._send(event)
        other.now = self.now
        return other

    def could_run(self, task: TaskId) -> bool:
        """Whether the task runs if, before the last event, whatever can end by itself ends."""
        other = self.copy()
        other.scheduler.state.policy = replace(self.scheduler.state.policy, deadlock_after=math.inf)
        before = other.attempts.get(task, 0)
        other.play_on()
        return other.attempts.get(task, 0) > before

    def play_on(self, *, kill: bool = False) -> None:
        """Let all tasks end that can, and all that waited for them. Time passes only as far as lent
        CPUs may be idle.

        Then release idle actors, and with `kill` kill them.
        """
        self.others.clear()
        if self.reported:
            self.report_peers()
        for _ in range(10_000):
            if not self._play() and not self._wait_for_loan():
                idle = [each for each in self.scheduler.state.actors if self._is_idle(each)]
                kept = [each for each in idle if not self.scheduler.state.actors[each].released]
                if kept:
                    self.release(kept[0])
                elif kill and idle:
                    self.kill(idle[0])
                else:
                    return
        raise AssertionError("does not come to an end")

    def _wait_for_loan(self) -> bool:
        due = self.scheduler.timers.loan_check
        if due is not None:
            self.now = max(self.now, due)
            self.send(ev.TimeReached())
        return due is not None

    def _is_idle(self, actor: ActorId) -> bool:
        """Whether no call of the actor runs, and nothing in the group."""
        inside = (group_of(run.allocation) for run in self.runs.values())
        return actor not in {*inside, *(self.calls.get(task, task) for task in self.runs)}

    def park(self, actor: ActorId, problem: str | None = "") -> list[ev.Decision]:
        """Ask for an actor to be parked; its worker replies, unless the problem is None."""
        decisions = self.send(ev.ParkRequested(actor))
        for each in decisions:
            if isinstance(each, ev.Park) and problem is not None:
                decisions = decisions + self.send(ev.Parked(each.worker, problem))
        return decisions

    def _reply(self) -> bool:
        """Let a worker reply that was asked to park."""
        for worker in sorted(self.parking - self.killed):
            self.send(ev.Parked(worker))
            return True
        return False

    def _play(self) -> bool:
        if self._reply():
            return True
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
        if (
            wait is None
            or not wait.on
            or not wait.sure
            or known.stop
            or known.spec.timeout is not None
        ):
            return True
        over = sum(each in self.settled or each not in self.specs for each in wait.on)
        return over >= min(wait.count, len(wait.on))

    def _dies(self, worker: WorkerId) -> bool:
        return worker in self.killed or self.history[worker][0] in self.exited

    # ------------------------------------------------------------------------------------- the end

    def drain(self) -> None:
        """Everything ends: tasks finish, actors are killed, workers exit, time passes."""
        self.others.clear()
        self.report_peers()
        if self.scheduler.state.policy.prepare:
            self.send(ev.ReleaseRequested())  # after this no worker is prepared any more
        for ident in list(self.scheduler.state.actors):
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
        scheduler = Scheduler(self.machine, self.scheduler.state.policy)
        assert [scheduler.handle(event, now) for event, now in self.log] == self.answers

    def _drain_some(self) -> None:
        if self._reply():
            return
        if self.runs:
            self.done(min(self.runs))
        elif self.ending:
            self.exit(min(self.ending))
        elif self.scheduler.tasks and self.scheduler.state.actors:
            # An actor that nobody released may hold what others wait for.
            self.kill(min(self.scheduler.state.actors))
        else:
            assert not self.scheduler.tasks, "something waits and nothing runs"
            self.advance(self.scheduler.state.policy.idle_limit)

    def _check_empty(self) -> None:
        assert set(self.settled) == set(self.specs), "not every task was settled"
        assert set(self.ended) == set(self.rules), "not every actor has ended"
        assert self.claim is None
        check_at_rest(self.scheduler)
