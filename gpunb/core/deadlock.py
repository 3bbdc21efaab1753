"""Tasks that hold one another up: found after a while, and one of them gives way.

A task that waits for others keeps its devices and custom resources; if what it waits for needs
just these, neither can ever go on. CPUs are lent meanwhile and deadlock nobody.

The search lets everything end that can, and again what can then, until nothing changes. It is
never too strict: a task that runs and waits for nobody ends, an actor without calls that wait may
be released, what has a time-out goes on. Whoever is left has to wait for ever, unless a
task fails or somebody interferes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from gpunb.core import events as ev
from gpunb.core.records import Task, Worker
from gpunb.core.resources import GPU, Allocation, Demand
from gpunb.core.tasks import ActorId, Deadlocked, TaskId, WorkerId

if TYPE_CHECKING:
    from gpunb.core.scheduler import Scheduler

Room: TypeAlias = Demand | ActorId
"""What a task lacks that has all its inputs: room on the machine, or a turn in its actor."""

Graph: TypeAlias = dict[TaskId, list[TaskId]]

_SELDOM = 5.0
_SHOWN = 4


class Deadlocks:
    """Owns the suspicion: tasks that wait for others while others wait for room.

    `due` is when to look; None while there is nothing to suspect.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._core = scheduler
        self._waiters: set[TaskId] = set()
        self._interval = 0.0
        self.due: float | None = None

    def blocked(self, task: Task, event: ev.Blocked) -> None:
        task.blocked, task.on, task.count = True, event.on, event.count
        if task.on and task.spec.timeout is None:
            self._waiters.add(task.id)
        else:
            self._waiters.discard(task.id)

    def unblocked(self, task: Task) -> None:
        if task.blocked:
            task.blocked, task.on, task.count = False, (), 0
            self._waiters.discard(task.id)

    def watch(self, now: float) -> None:
        """After each event: begin to suspect, or stop."""
        core = self._core
        if not self._waiters or core.workforce.running == len(core.tasks):
            self.due = None
        elif self.due is None:
            self._look_after(core.policy.deadlock_after, now)

    def look(self, now: float) -> None:
        """Settle one task of each deadlock. The next look comes when that had its effect."""
        core = self._core
        search = Search(core, self._waiters)
        victims = [(task, search.reason(task)) for task in search.victims()]
        for task, reason in victims:
            core.settle(task, Deadlocked(reason))
        soon = core.policy.deadlock_after
        self._look_after(soon if victims else max(soon, min(2 * self._interval, _SELDOM)), now)

    def _look_after(self, interval: float, now: float) -> None:
        self._interval = interval
        self.due = now + interval
        self._core.deadlines.doubts(self.due)


class Search:
    """What can never go on, as things are now.

    `_missing` has the tasks that the waiting ones wait for, directly or through others, with how
    many others have to be over before it goes on or lacks nothing but room; `_waits` says which.
    What ends anyway is left out. Those `_over` are, or can be in the end.
    """

    def __init__(self, scheduler: Scheduler, waiters: Iterable[TaskId]) -> None:
        self._core = scheduler
        self._tasks = scheduler.tasks
        self._free = scheduler.capacity.whole()
        self._fits: dict[int, bool] = {}
        self._flows: dict[ActorId, bool] = {}
        self._stuck: dict[WorkerId, set[TaskId]] = {}
        self._previous: dict[ActorId, dict[TaskId, TaskId]] = {}
        self._missing: dict[TaskId, int] = {}
        self._waits: Graph = {}
        self._followers: Graph = {}
        self._parked: dict[Room, list[TaskId]] = {}
        self._over: set[TaskId] = set()
        self._edges: Graph = {}
        for ident in waiters:
            self._hold(self._tasks[ident])
        if self._possible():
            self._explore([each for tasks in self._stuck.values() for each in tasks])
            self._let_end()

    # ------------------------------------------------------------------------------ what can end

    def _hold(self, task: Task) -> None:
        """What the task's worker holds is not free as long as the task waits."""
        assert task.worker is not None
        worker = self._core.workforce.workers[task.worker]
        if task.stop is not None or worker.killed or worker.state == "leaving":
            return
        if worker.id not in self._stuck:
            self._free.take(_kept(worker))
        self._stuck.setdefault(worker.id, set()).add(task.id)

    def _possible(self) -> bool:
        """A quick look: whether anybody who waits could lack anything."""
        core, free = self._core, self._free
        workers = [core.workforce.workers[ident] for ident in self._stuck]
        actors = [worker.actor for worker in workers if worker.actor is not None]
        if any(core.actors.book[actor].calls for actor in actors):
            return True
        if not any(_kept(worker) != Allocation() for worker in workers):
            return False
        lines = core.queue.lines.values()
        inputs = len(core.tasks) > core.workforce.running + sum(line.count for line in lines)
        return inputs or any(free.place(line.demand) is None for line in lines)

    def _explore(self, todo: list[TaskId]) -> None:
        while todo:
            ident = todo.pop()
            if ident in self._missing:
                continue
            before, missing = self._before(self._tasks[ident])
            # Of those that lack the same room one stands for all: the one handed in last.
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
        """The tasks that this one waits for, and how many of them have to be over."""
        if task.state == "running":
            on = [each for each in task.on if self._is_open(each)]
            return on, min(task.count, len(task.on)) - (len(task.on) - len(on))
        before = list(task.needs or ())
        if task.actor is not None and not task.constructs:
            if task.actor in self._tasks:
                before.append(task.actor)
            previous = self._previous_calls(task.actor).get(task.id)
            if previous is not None:
                before.append(previous)
        return before, len(before)

    def _is_open(self, ident: TaskId) -> bool:
        task = self._tasks.get(ident)
        return task is not None and not task.settled

    def _previous_calls(self, actor: ActorId) -> dict[TaskId, TaskId]:
        """The call that has to start before it, for each that is not the first of its line."""
        known = self._previous.get(actor)
        if known is None:
            known = self._previous[actor] = {}
            for line in self._core.actors.book[actor].calls.lines():
                last = None
                for ident in line:
                    if last is not None:
                        known[ident] = last
                    last = ident
        return known

    def _ends_anyway(self, task: Task) -> bool:
        if task.state == "running":
            return task.id not in self._stuck.get(task.worker or 0, ())
        if task.state == "queued":
            known = self._fits.get(id(task.spec))
            if known is None:
                known = self._fits[id(task.spec)] = self._has_room(task.spec.demand)
            return known
        if task.needs or task.actor is None:
            return False
        known = self._flows.get(task.actor)
        if known is None:
            known = self._flows[task.actor] = self._runs_all(task.actor)
        return known

    def _runs_all(self, ident: ActorId) -> bool:
        """Whether the actor can run all calls that wait for it."""
        calls = self._core.actors.book[ident].calls
        made = ident not in self._tasks
        return made and self._has_turn(ident) and not any(call.needs for call in calls)

    def _has_room(self, room: Room) -> bool:
        if isinstance(room, Demand):
            return self._free.place(room) is not None
        return self._has_turn(room)

    def _has_turn(self, ident: ActorId) -> bool:
        actor = self._core.actors.book[ident]
        stuck = self._stuck.get(actor.worker or 0, ())
        return len(stuck) < actor.rules.max_concurrency

    def _let_end(self) -> None:
        todo = [ident for ident, missing in self._missing.items() if missing <= 0]
        while todo:
            ident = todo.pop()
            if ident in self._over:
                continue
            task = self._tasks[ident]
            if task.state == "running":
                todo += self._release(task)
            else:
                room = _room(task)
                if room in self._parked or not self._has_room(room):
                    self._parked.setdefault(room, []).append(ident)
                    continue
            self._over.add(ident)
            for each in self._followers.get(ident, ()):
                self._missing[each] -= 1
                if self._missing[each] == 0:
                    todo.append(each)

    def _release(self, task: Task) -> list[TaskId]:
        """The task goes on; whoever finds room now."""
        assert task.worker is not None
        worker = self._core.workforce.workers[task.worker]
        stuck = self._stuck[worker.id]
        stuck.discard(task.id)
        if not stuck:
            del self._stuck[worker.id]
            self._free.give(_kept(worker))
        free = [room for room in self._parked if self._has_room(room)]
        return [each for room in free for each in self._parked.pop(room)]

    # ---------------------------------------------------------------------------- who gives way

    def victims(self) -> list[Task]:
        """For each set of tasks that wait for nobody else, the one of those without room that
        was handed in last."""
        dead = [ident for ident in self._missing if ident not in self._over]
        parked = {ident for group in self._parked.values() for ident in group}
        back: Graph = {}
        for ident in dead:
            self._edges[ident] = list(self._waits_for(ident, ident in parked))
            for each in self._edges[ident]:
                back.setdefault(each, []).append(ident)
        chosen: list[Task] = []
        done: set[TaskId] = set()
        while len(done) < len(dead):
            # Nothing but its own set is reached from where the last flood against the edges began.
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

    def _waits_for(self, ident: TaskId, is_parked: bool) -> Iterator[TaskId]:
        task = self._tasks[ident]
        if is_parked:
            for worker in self._holders(_room(task)):
                yield from self._stuck[worker.id]
        else:
            yield from (each for each in self._waits[ident] if each not in self._over)

    def _holders(self, room: Room) -> list[Worker]:
        """The workers with tasks that wait for ever, which hold what there is no room without."""
        if not isinstance(room, Demand):
            worker = self._core.actors.book[room].worker
            return [] if worker is None else [self._core.workforce.workers[worker]]
        return sorted(
            {worker for _, workers in self._lacks(room)[1] for worker in workers},
            key=lambda worker: worker.id,
        )

    def _lacks(self, demand: Demand) -> tuple[Demand, list[tuple[str, list[Worker]]]]:
        """The part of a demand that finds no room; and what is in the way, with who holds it."""
        free, held = self._free, []
        workers = [self._core.workforce.workers[ident] for ident in sorted(self._stuck)]
        lacking, scarce = Demand(), []
        fit = free.fit(demand)
        for part in fit.parts:
            if free.choose(part) is not None:
                continue
            if part.name == GPU:
                lacking = replace(demand, cpus=0, resources=())
            else:
                scarce.append((part.name, part.units))
            for at in sorted(part.positions):
                device = free.machine.devices[at]
                owners = [each for each in workers if device.key in dict(each.allocation.shares)]
                if owners:
                    held.append((f"{part.name} {device.id}", owners))
        for name, units in fit.plain:
            if units > free.resources.get(name, 0):
                scarce.append((name, units))
                owners = [each for each in workers if name in dict(each.allocation.resources)]
                held.append((repr(name), owners))
        return replace(lacking, resources=tuple(scarce)), held

    # ------------------------------------------------------------------------------------ in words

    def reason(self, task: Task) -> str:
        """Why a victim can never run, in words."""
        room = _room(task)
        if task.id not in self._parked.get(room, ()):
            names = [self._name(each) for each in self._edges[task.id]]
            return f"it waits for {_some(names)}, which {_wait(names)} for it"
        if isinstance(room, Demand):
            lacks, held = self._lacks(room)
            parts, everybody = [], set()
            for at, (thing, workers) in enumerate(held[:_SHOWN]):
                names = [self._holder(worker) for worker in workers]
                everybody.update(names)
                parts.append(f"{thing} {'' if at else 'is held '}by {_some(names)}")
            if len(held) > _SHOWN:
                parts.append(f"{len(held) - _SHOWN} more by others")
            return f"it needs {lacks}, and {_and(parts)}, which {_wait(everybody)} for it"
        names = [self._name(each) for each in self._edges[task.id]]
        actor = self._core.actors.book[room]
        return (
            f"it needs its turn in actor #{room} ({actor.spec.name}), which is taken by "
            f"{_some(names)}, which {_wait(names)} for it"
        )

    def _holder(self, worker: Worker) -> str:
        if worker.actor is None:
            return self._name(min(worker.tasks))
        return f"actor #{worker.actor} ({self._core.actors.book[worker.actor].spec.name})"

    def _name(self, ident: TaskId) -> str:
        return f"#{ident} ({self._tasks[ident].spec.name})"


def _kept(worker: Worker) -> Allocation:
    """What a worker that waits does not lend."""
    return Allocation(worker.allocation.shares, 0, worker.allocation.resources)


def _room(task: Task) -> Room:
    return task.spec.demand if task.actor is None or task.constructs else task.actor


def _flood(graph: Graph, start: TaskId, seen: set[TaskId]) -> set[TaskId]:
    """All that is reached from `start`; added to `seen`, which is not gone through again."""
    todo = [start]
    while todo:
        ident = todo.pop()
        if ident not in seen:
            seen.add(ident)
            todo.extend(graph.get(ident, ()))
    return seen


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _some(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return _and([*names[:_SHOWN], f"{more} more"] if more > 0 else names)


def _wait(names: Iterable[str]) -> str:
    return "waits" if len(set(names)) == 1 else "wait"
