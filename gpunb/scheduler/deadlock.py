"""Finds tasks that wait for each other for ever, and ends one of them.

A task that waits for other tasks keeps its devices and custom resources. If one of these other
tasks needs just these devices, neither can ever go on. CPUs are lent meanwhile and cause no
deadlock.

The search simulates the end of all tasks that can end, again and again until nothing changes. It
never reports a task that could go on: it assumes that a running task without a wait ends, that an
actor without waiting calls is released, that a placement group without blocked tasks is removed,
and that a task with a time limit goes on. The tasks that are left wait for ever, unless a task
fails or a user stops one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from gpunb.scheduler.explain import SHOWN, and_text, some_text, wait_text
from gpunb.scheduler.groups import group_of
from gpunb.scheduler.queue import Queue
from gpunb.scheduler.resources import GPU, Allocation, Demand, Gang
from gpunb.scheduler.state import State, Task, Worker
from gpunb.scheduler.tasks import ActorId, Deadlocked, Outcome, TaskId, WorkerId
from gpunb.scheduler.timers import Timers
from gpunb.scheduler.workers import Workers

Turn: TypeAlias = tuple[ActorId, str]
"""An actor, and the concurrency group in which its call runs."""

Room: TypeAlias = Demand | Turn
"""The need of a task that has all its inputs: room on the machine, or a turn in its actor."""

Graph: TypeAlias = dict[TaskId, list[TaskId]]

_LONGEST_INTERVAL = 5.0


@dataclass(slots=True, eq=False)
class Deadlocks:
    """Decides when to look for deadlocks: while tasks wait for tasks, and others for room."""

    _state: State
    _queue: Queue
    _workers: Workers
    _timers: Timers
    _settle: Callable[[Task, Outcome], None]
    _interval: float = 0.0

    def update_timer(self, now: float) -> None:
        """After each event: begin to look for deadlocks, or stop."""
        if not self._state.waiters or self._workers.running == len(self._state.tasks):
            self._timers.deadlock_check = None
        elif self._timers.deadlock_check is None:
            self._check_after(self._state.policy.deadlock_after, now)

    def check(self, now: float) -> None:
        """Settle one task of each deadlock. Check again soon after that, else more seldom."""
        search = Search(self._state, self._queue, self._workers)
        victims = [(task, search.reason(task)) for task in search.victims()]
        for task, reason in victims:
            self._settle(task, Deadlocked(reason))
        soon = self._state.policy.deadlock_after
        later = max(soon, min(2 * self._interval, _LONGEST_INTERVAL))
        self._check_after(soon if victims else later, now)

    def _check_after(self, interval: float, now: float) -> None:
        self._interval = interval
        self._timers.set_deadlock_check(now + interval)


class Search:
    """The tasks that can never go on, at one moment.

    Attributes:
        _missing: blocked tasks and all tasks that they wait for, except those that end anyway; for
            each, the number of other tasks that must end first.
        _waits: the tasks that each of them waits for.
        _parked: those that lack nothing but room, by this room.
        _over: those that end in the simulation.
        _stuck: the blocked tasks of each worker whose holdings are not free.
        _turns: the number of turns that stuck calls have.
        _groups: the number of stuck workers in each placement group.
    """

    def __init__(self, state: State, queue: Queue, workers: Workers) -> None:
        self._state = state
        self._queue = queue
        self._tasks = state.tasks
        self._free = state.capacity.whole()
        self._fits: dict[int, bool] = {}
        self._runs_all: dict[Turn, bool] = {}
        self._stuck: dict[WorkerId, set[TaskId]] = {}
        self._turns: Counter[Turn] = Counter()
        self._groups: Counter[ActorId] = Counter()
        self._previous: dict[ActorId, dict[TaskId, TaskId]] = {}
        self._missing: dict[TaskId, int] = {}
        self._waits: Graph = {}
        self._followers: Graph = {}
        self._parked: dict[Room, list[TaskId]] = {}
        self._over: set[TaskId] = set()
        self._edges: Graph = {}
        for ident in state.waiters:
            self._hold(self._tasks[ident])
        if self._may_be_deadlocked(workers.running):
            self._explore([each for tasks in self._stuck.values() for each in tasks])
            self._simulate()

    # ------------------------------------------------------------------------- tasks that can end

    def _hold(self, task: Task) -> None:
        """Take the holdings of the task's worker: they are not free while the task waits."""
        assert task.worker is not None
        worker = self._state.workers[task.worker]
        if task.stop is not None or worker.killed or worker.state == "leaving":
            return
        if worker.id not in self._stuck:
            self._free.take(worker.not_lent)
            self._count(worker, +1)
        self._stuck.setdefault(worker.id, set()).add(task.id)
        if task.is_call:
            self._turns[self._turn(task)] += 1

    def _count(self, worker: Worker, change: int) -> None:
        """Note whether a worker is stuck: while any in a placement group is, the group stays."""
        if (group := group_of(worker.allocation)) is None:
            return
        before = self._groups[group]
        self._groups[group] += change
        if not before or not self._groups[group]:
            change_room = self._free.give if before else self._free.take
            change_room(self._state.holder(group).allocation)

    def _may_be_deadlocked(self, running: int) -> bool:
        """A quick check: False only if no task can lack anything."""
        state, free = self._state, self._free
        workers = [state.workers[ident] for ident in self._stuck]
        actors = [worker.actor for worker in workers if worker.actor is not None]
        if any(state.actors[actor].calls for actor in actors):
            return True
        if not any(worker.not_lent != Allocation() for worker in workers):
            return False
        lines = self._queue.lines.values()
        inputs = len(state.tasks) > running + sum(line.count for line in lines)
        return inputs or any(free.place(line.demand) is None for line in lines)

    def _explore(self, todo: list[TaskId]) -> None:
        """Fill `_missing`, `_waits` and `_followers`, from these tasks on."""
        while todo:
            ident = todo.pop()
            if ident in self._missing:
                continue
            before, missing = self._before(self._tasks[ident])
            # Queued tasks of one spec lack the same room: the last submitted stands for all.
            alike: dict[int, tuple[Task, int]] = {}
            waits: list[TaskId] = []
            for each in before:
                task = self._tasks[each]
                if self._ends_anyway(task):
                    missing -= 1
                elif task.state == "queued":
                    last, count = alike.get(id(task.spec), (task, 0))
                    alike[id(task.spec)] = (task if task.order > last.order else last, count + 1)
                else:
                    waits.append(each)
                    self._followers.setdefault(each, []).append(ident)
            for last, count in alike.values():
                waits.append(last.id)
                self._followers.setdefault(last.id, []).extend([ident] * count)
            self._missing[ident] = missing
            self._waits[ident] = waits
            todo += waits

    def _before(self, task: Task) -> tuple[list[TaskId], int]:
        """The tasks that a task waits for, and how many of them must end first."""
        if task.state == "running":
            on = [each for each in task.blocked_on if self._state.is_unfinished(each)]
            over = len(task.blocked_on) - len(on)
            return on, min(task.blocked_count, len(task.blocked_on)) - over
        before = list(task.needs or ())
        if (group := group_of(task.spec.demand)) in self._tasks:
            before.append(group)
        if task.actor is not None and task.is_call:
            if task.actor in self._tasks:
                before.append(task.actor)
            previous = self._previous_calls(task.actor).get(task.id)
            if previous is not None:
                before.append(previous)
        return before, len(before)

    def _previous_calls(self, actor: ActorId) -> dict[TaskId, TaskId]:
        """For each waiting call the call that starts before it in its line; none for the first."""
        known = self._previous.get(actor)
        if known is None:
            known = self._previous[actor] = {
                call: previous
                for line in self._state.actors[actor].calls.lines()
                for previous, call in pairwise(line)
            }
        return known

    def _ends_anyway(self, task: Task) -> bool:
        if task.state == "running":
            return task.id not in self._stuck.get(task.worker or 0, ())
        if task.state == "queued":
            if group_of(task.spec.demand) in self._tasks:
                return False
            known = self._fits.get(id(task.spec))
            if known is None:
                known = self._fits[id(task.spec)] = self._has_room(task.spec.demand)
            return known
        if task.needs or task.actor is None:
            return False
        turn = self._turn(task)
        known = self._runs_all.get(turn)
        if known is None:
            # Whether the actor can run all calls that wait for such a turn.
            calls = self._state.actors[task.actor].calls
            needs = any(call.needs for call in calls if calls.group(call) == turn[1])
            known = task.actor not in self._tasks and self._has_turn(turn) and not needs
            self._runs_all[turn] = known
        return known

    def _has_room(self, room: Room) -> bool:
        if isinstance(room, Demand):
            group, free = group_of(room), self._free
            passes = group is not None and (group not in free.groups or group in free.closed)
            return passes or free.place(room) is not None
        return self._has_turn(room)

    def _has_turn(self, turn: Turn) -> bool:
        return self._turns[turn] < self._state.actors[turn[0]].calls.limits[turn[1]]

    def _turn(self, task: Task) -> Turn:
        assert task.actor is not None
        return task.actor, self._state.actors[task.actor].calls.group(task)

    def _room(self, task: Task) -> Room:
        return self._turn(task) if task.is_call else task.spec.demand

    def _simulate(self) -> None:
        """Let all tasks end that can: fill `_over` and `_parked`."""
        todo = [ident for ident, missing in self._missing.items() if missing <= 0]
        while todo:
            ident = todo.pop()
            if ident in self._over:
                continue
            task = self._tasks[ident]
            if task.state == "running":
                todo += self._release(task)
            else:
                room = self._room(task)
                if room in self._parked or not self._has_room(room):
                    self._parked.setdefault(room, []).append(ident)
                    continue
            self._over.add(ident)
            for each in self._followers.get(ident, ()):
                self._missing[each] -= 1
                if self._missing[each] == 0:
                    todo.append(each)

    def _release(self, task: Task) -> list[TaskId]:
        """Free the holdings of a task that ends. Returns the parked tasks that have room now."""
        assert task.worker is not None
        worker = self._state.workers[task.worker]
        stuck = self._stuck[worker.id]
        if task.is_call and task.id in stuck:
            self._turns[self._turn(task)] -= 1
        stuck.discard(task.id)
        if not stuck:
            del self._stuck[worker.id]
            self._free.give(worker.not_lent)
            self._count(worker, -1)
        free = [room for room in self._parked if self._has_room(room)]
        return [each for room in free for each in self._parked.pop(room)]

    # ------------------------------------------------------------------------------ which one ends

    def victims(self) -> list[Task]:
        """Of each set of tasks that wait for each other only, the last submitted one that lacks
        room."""
        dead = [ident for ident in self._missing if ident not in self._over]
        parked = {ident for group in self._parked.values() for ident in group}
        back: Graph = {}
        for ident in dead:
            if ident in parked:
                edges = self._holders(self._room(self._tasks[ident]))
            else:
                edges = [each for each in self._waits[ident] if each not in self._over]
            self._edges[ident] = edges
            for each in edges:
                back.setdefault(each, []).append(ident)
        chosen: list[Task] = []
        done: set[TaskId] = set()
        while len(done) < len(dead):
            # From the start of the last flood against the edges, only its own set is reached.
            seen, last = set(done), 0
            for ident in dead:
                if ident not in seen:
                    last = ident
                    _flood(back, last, seen)
            together = [self._tasks[each] for each in _flood(self._edges, last, set())]
            idle = [task for task in together if task.state != "running"]
            lacking = [task for task in idle if task.id in parked]
            if idle:
                chosen.append(max(lacking or idle, key=lambda task: (task.order, task.id)))
            _flood(back, last, done)
        return chosen

    def _holders(self, room: Room) -> list[TaskId]:
        """The stuck tasks that hold the room that is lacking."""
        if not isinstance(room, Demand):
            stuck = self._stuck.get(self._state.actors[room[0]].worker or 0, ())
            return [each for each in stuck if self._room(self._tasks[each]) == room]
        workers = {worker.id for _, workers in self._lacks(room)[1] for worker in workers}
        return [each for worker in sorted(workers) for each in self._stuck[worker]]

    def _lacks(self, demand: Demand) -> tuple[Demand, list[tuple[str, list[Worker]]]]:
        """The part of a demand that has no room, and the holders of each thing that it needs."""
        free, held, group = self._free.where(demand), [], group_of(demand)
        workers = [self._state.workers[ident] for ident in sorted(self._stuck)]
        if group is not None:
            workers = [each for each in workers if group_of(each.allocation) == group]
        kept = [(each, self._state.kept(each, group)) for each in workers]
        lacking, scarce = Demand(), []
        fit = free.fit(demand)
        for part in fit.parts:
            if free.choose(part) is not None and not isinstance(demand, Gang):
                continue
            if part.name == GPU:
                lacking = replace(demand, cpus=0, resources=())
            else:
                scarce.append((part.name, part.units))
            for at in sorted(part.positions):
                device = free.machine.devices[at]
                owners = [each for each, what in kept if device.key in dict(what.shares)]
                if owners and (thing := (f"{part.name} {device.id}", owners)) not in held:
                    held.append(thing)
        for name, units in fit.plain:
            if units > free.resources.get(name, 0):
                scarce.append((name, units))
                owners = [each for each, what in kept if name in dict(what.resources)]
                held.append((repr(name), owners))
        if demand.cpus > free.cpus:
            lacking = replace(lacking, cpus=demand.cpus)
            held.append(("a CPU", [each for each, what in kept if what.cpus]))
        return replace(lacking, resources=tuple(scarce)), held

    # ------------------------------------------------------------------------------------ in words

    def reason(self, task: Task) -> str:
        """Explain in words why a victim can never run."""
        room = self._room(task)
        if task.id not in self._parked.get(room, ()):
            names = [self._name(each) for each in self._edges[task.id]]
            return f"it waits for {some_text(names)}, which {wait_text(names)} for it"
        if isinstance(room, Demand):
            lacks, held = self._lacks(room)
            parts, everybody = [], set()
            for at, (thing, workers) in enumerate(held[:SHOWN]):
                names = [self._holder(worker) for worker in workers]
                everybody.update(names)
                parts.append(f"{thing} {'' if at else 'is held '}by {some_text(names)}")
            if len(held) > SHOWN:
                parts.append(f"{len(held) - SHOWN} more by others")
            return f"it needs {lacks}, and {and_text(parts)}, which {wait_text(everybody)} for it"
        names = [self._name(each) for each in self._edges[task.id]]
        ident, group = room
        actor = f"actor #{ident} ({self._state.actors[ident].spec.name})"
        where = f"the group {group!r} of {actor}" if group else actor
        return (
            f"it needs its turn in {where}, which is taken by {some_text(names)}, which "
            f"{wait_text(names)} for it"
        )

    def _holder(self, worker: Worker) -> str:
        if worker.actor is None:
            return self._name(min(worker.tasks))
        return f"actor #{worker.actor} ({self._state.actors[worker.actor].spec.name})"

    def _name(self, ident: TaskId) -> str:
        return f"#{ident} ({self._tasks[ident].spec.name})"


def _flood(graph: Graph, start: TaskId, seen: set[TaskId]) -> set[TaskId]:
    """Add to `seen` what `start` reaches without passing through tasks in `seen`; return `seen`."""
    todo = [start]
    while todo:
        ident = todo.pop()
        if ident not in seen:
            seen.add(ident)
            todo.extend(graph.get(ident, ()))
    return seen
