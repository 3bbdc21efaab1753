"""Checks that the records of a scheduler agree with each other, with its decisions and a world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gpunb.scheduler import events as ev
from gpunb.scheduler.actor_queue import AHEAD
from gpunb.scheduler.feasibility import NOTHING
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import UNIT, Allocation, Demand, Device, Gang, Machine, Within
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.snapshot import snapshot
from gpunb.scheduler.state import Actor, Task, Worker
from gpunb.scheduler.tasks import ActorSpec, TaskId, TaskSpec

if TYPE_CHECKING:
    from tests.scheduler.world import World


def check_allocation(machine: Machine, demand: Demand, given: Allocation) -> None:
    """The allocation meets the demand, on devices that exist and suit."""
    if isinstance(demand, Gang):
        totals: Counter[str] = Counter()
        for bundle, part in zip(demand.bundles, given.bundles, strict=True):
            check_allocation(machine, bundle, part)
            totals.update(dict((*part.shares, *part.resources)))
        assert totals == Counter(dict((*given.shares, *given.resources)))
        assert given.cpus == demand.cpus
        return
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
    _check_loans(world)
    _check_snapshot(world)
    _check_peers(world)


def _check_peers(world: World) -> None:
    """Each wait for others is claimed, and no idle worker keeps a device that others want."""
    core = world.scheduler
    for worker in core.workers.idle:
        assert not core.workers.is_wanted(worker), "kept from those who wait"
    if world.claim is not None:
        assert world.reported, "claims what nobody has"
    free = core.capacity.copy()
    for worker in core.state.workers.values():
        if worker.state != "busy":
            free.give(worker.allocation)
    others = free.copy()
    for key, (units, _) in world.reported.items():
        others.shift(others.position[key], units)
    for demand, *_ in core.queue.lines:
        if free.place(demand) is None and others.place(demand) is not None:
            assert world.claim is not None, "nobody knows that it waits"
    for key, units in world.claim or ():
        assert 0 < units <= UNIT
        assert key in world.reported


def sent_ahead(decisions: list[ev.Decision]) -> list[TaskId]:
    """The tasks that workers are sent ahead."""
    sent = [each.tasks for each in decisions if isinstance(each, ev.SendAhead)]
    return [task for tasks in sent for task, _ in tasks]


def _check_decisions(world: World) -> None:
    """Checks from decisions alone: no share of a device is given out twice."""
    held: Counter[str] = Counter()
    for allocation in (each for each in world.live.values() if each.within is None):
        for key, units in allocation.shares:
            held[key] += units
    assert all(units <= UNIT for units in held.values()), "a device is over-subscribed"
    core = world.scheduler
    runs = [each for each in world.answers[-1] if isinstance(each, ev.Run)]
    given = [each.allocation for each in runs if each.new and each.allocation.within is None]
    if any(each.cpus for each in given):
        assert core.capacity.cpus >= 0, "more CPUs were given out than there are"
    chosen = [each.task for each in runs if not each.ahead]  # the others were when they were sent
    chosen += sent_ahead(world.answers[-1])
    starts = [each for each in chosen if each not in world.calls]
    if starts:
        assert core.workers.busy <= core.state.policy.max_workers
    again = {each.task for each in runs if each.attempt > 1}  # these go before others of their kind
    for task in starts:
        if not world.needs[task] and task not in again and task not in world.deepened:
            before = [each for each in _line_of(world, task) if each < task]
            if world.waited:  # then tasks of other functions may be preferred
                function = world.specs[task].function
                before = [each for each in before if world.specs[each].function == function]
            assert not before, "a later one of the same demand was first"
    event = world.log[-1][0]
    if isinstance(event, ev.KillRequested) and not event.restart:
        workers = {each for each in world.live if world.history[each][0] == event.actor}
        assert workers <= world.ending or world.inside(event.actor), "the actor lives"
        assert set(world.inside(event.actor)) <= world.ending, "a task of the group lives"


def _line_of(world: World, task: TaskId) -> list[TaskId]:
    """The tasks of the same line and expected time that never ran and had no inputs to wait for."""
    return [
        each.id
        for each in world.scheduler.tasks.values()
        if each.state == "queued"
        and not each.attempt
        and not world.needs[each.id]
        and each.spec.demand == world.specs[task].demand
        and each.spec.priority == world.specs[task].priority
        and each.spec.expected == world.scheduler.tasks[task].spec.expected
        and each.depth == world.scheduler.tasks[task].depth
        and each.id not in world.deepened
    ]


def _check_capacity(world: World) -> None:
    core = world.scheduler
    machine = core.machine
    _check_bundles(core)
    workers = [each for each in core.state.workers.values() if each.allocation.within is None]
    lasting = [w for w in workers if w.actor is not None]
    waiting = [w for w in workers if w.actor is None and w.lends_cpus]
    for capacity, holders, waits in (
        (core.capacity, workers, []),
        (core.state.obtainable, lasting, waiting),
    ):
        shares, resources = [UNIT] * len(machine.devices), dict(machine.resources)
        left = budget(machine)
        for key, held in world.reported.items():
            shares[capacity.position[key]] -= held[capacity is not core.capacity]
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
            reported = world.reported.get(machine.devices[at].key, (0, 0))[0]
            assert -reported <= each <= UNIT
        assert all(each >= 0 for each in resources.values())
    lent = sum(w.allocation.cpus for w in workers if w.lends_cpus)
    assert core.capacity.cpus == machine.cpus - sum(w.allocation.cpus for w in workers) + lent
    assert core.state.obtainable.cpus == machine.cpus - sum(w.allocation.cpus for w in lasting)


def _check_bundles(core: Scheduler) -> None:
    """The room in each bundle is what the workers in it leave."""
    placed = {
        each.actor: each.allocation.bundles
        for each in core.state.workers.values()
        if each.allocation.bundles and core.state.actors[each.actor or 0].state != "starting"
    }
    assert core.capacity.groups.keys() == core.state.obtainable.groups.keys()
    assert core.capacity.groups.keys() <= placed.keys()
    assert core.capacity.closed <= {each.actor for each in core.state.workers.values()}
    for group, bundles in core.capacity.groups.items():
        for at, (bundle, known) in enumerate(zip(placed[group], bundles, strict=True)):
            inside = [
                each
                for each in core.state.workers.values()
                if each.allocation.within == Within(group, at)
            ]
            free = core.capacity.bundle(bundle)
            for worker in inside:
                free.take(replace(worker.allocation, within=None))
                if worker.lends_cpus:
                    free.cpus += worker.allocation.cpus
            assert (free.shares, free.cpus, free.budget) == (known.shares, known.cpus, known.budget)
            assert free.resources == known.resources
            assert all(each >= 0 for each in (*free.shares, *free.resources.values()))


def _check_tasks(world: World) -> None:
    core = world.scheduler
    for ident, task in core.tasks.items():
        assert task.id == ident
        assert (ident in world.settled) == task.settled
        assert (ident in world.runs) == (task.state == "running")
        if task.state == "running":
            assert task.worker is not None
            worker = core.state.workers[task.worker]
            assert ident in worker.tasks
            assert task.attempt == world.runs[ident].attempt
            assert worker.id == world.runs[ident].worker
            if worker.id in world.parked:
                given = Allocation(worker.allocation.shares)
                check_allocation(core.machine, task.spec.demand, given)
            elif ident not in world.calls:
                check_allocation(core.machine, task.spec.demand, worker.allocation)
        else:
            assert task.worker is None
            assert not task.blocked
        wait = world.blocked.get(ident)
        assert task.blocked == (wait is not None)
        assert task.blocked_on == (wait.on if wait else ())
        assert task.blocked_count == (wait.count if wait else 0)
        assert task.disowned == (ident in world.disowned)
    over = set(world.specs) - set(world.settled)
    assert over <= set(core.tasks), "neither settled nor booked"
    assert set(world.runs) <= set(core.tasks)


def _check_workers(world: World) -> None:
    core = world.scheduler
    assert set(core.state.workers) == set(world.live)
    idle = list(core.workers.idle)
    assert {id(worker) for worker in idle} == {
        id(worker) for worker in core.state.workers.values() if worker.state == "idle"
    }
    assert core.workers.idle.warm == sum(bool(worker.allocation.shares) for worker in idle)
    assert core.workers.idle.cold == len(idle) - core.workers.idle.warm
    assert core.workers.idle.cold <= max(1, core.machine.cpus // UNIT) + core.loans.most
    assert all(core.workers.idle._groups.values()), "an empty group is kept"
    assert core.workers.busy == sum(
        worker.state == "busy" and worker.actor is None and not worker.lends_cpus
        for worker in core.state.workers.values()
    )
    found = {dict(each.allocation.shares).popitem()[0]: each for each in idle if each.prepared}
    assert core.workers.prepared == found
    assert {each.id for each in found.values()} == world.prepared - world.ending
    for worker in core.state.workers.values():
        _check_worker(world, worker)


def _check_worker(world: World, worker: Worker) -> None:
    tasks = [world.scheduler.tasks[ident] for ident in worker.tasks]
    assert all(task.worker == worker.id and task.state == "running" for task in tasks)
    assert worker.blocked == sum(task.blocked for task in tasks)
    assert worker.lends_cpus == (bool(tasks) and all(task.blocked for task in tasks))
    assert worker.killed == (worker.id in world.killed)
    if worker.actor is None:
        # Two, if it has begun one that it was sent ahead, and the end of the other is not known.
        assert len(tasks) == (worker.state == "busy") or world.sent_ahead
        assert bool(tasks) == (worker.state == "busy")
    assert [each.id for each in worker.ahead] == (
        [] if worker.actor is not None else world.ahead.get(worker.id, [])
    )
    assert all(each.state == "waiting" and not each.needs for each in worker.ahead)
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
    assert not queue._changed, "lines are left that nobody looked at"
    assert not queue.room_freed, "lines are left that nobody looked at"
    queued = Counter(
        (task.spec.demand, task.depth, task.spec.priority)
        for task in core.tasks.values()
        if task.state == "queued"
    )
    assert {key: line.count for key, line in queue.lines.items()} == dict(queued)
    for key, line in queue.lines.items():
        assert (line.demand, line.depth, line.priority) == key
        assert line.stuck
        assert line.has(line.tasks[0])
        assert len(list(line)) == line.count
        assert len(line.tasks) - line.count <= max(64, line.count), "others have left it"
    if queue.reservation:
        line = queue.reservation.line
        assert queue.lines[line.demand, line.depth, line.priority] is line, "kept for nobody"
        assert core.state.obtainable.place(line.demand), "kept in vain"


def _check_family(core: Scheduler) -> None:
    for parent, children in core.life.children.items():
        assert children
        assert all(core.tasks[child].parent == parent for child in children)
    assert set(core.life.dependents) <= set(core.tasks)
    for task in core.tasks.values():
        for need in task.needs or ():
            assert task.id in core.life.dependents[need]


def _check_actors(world: World) -> None:
    core = world.scheduler
    assert not core.actors._changed
    assert not core.actors._ended
    assert not set(core.state.actors) & set(world.ended)
    assert set(core.state.actors) | set(world.ended) == set(world.rules), "lost an actor"
    for ident, actor in core.state.actors.items():
        constructor = core.tasks.get(ident)
        waiting = sorted(actor.calls, key=lambda task: task.id)
        assert all(task.state == "waiting" and core.tasks[task.id] is task for task in waiting)
        most = 64 + 2 * len(actor.calls._lines)
        assert all(len(heads) <= most for heads in actor.calls._heads.values())
        running = Counter(
            concurrency_group(actor.rules, core.tasks[each].spec) for each in actor.running
        )
        for group, limit in actor.rules.limits.items():
            # A call that was sent ahead and has begun does not wait for a turn.
            least = -AHEAD if any(core.tasks[each].alike for each in actor.running) else 0
            assert actor.calls._free[group] == limit - running[group] >= least
        ahead = [task.id for task in actor.calls.ahead]
        sent = [each for each in world.ahead.get(actor.worker or 0, []) if each in core.tasks]
        assert ahead == sent, "the worker knows of other calls"
        assert (actor.end is not None) == (actor.state == "ending")
        if actor.worker is not None:
            worker = core.state.workers[actor.worker]
            assert worker.actor == ident
            assert worker.tasks == (actor.running or {ident} & set(world.runs))
        if actor.state == "ending" and world.inside(ident):
            assert ident in core.capacity.closed, "nobody ends the group"
        elif actor.state == "ending":
            assert actor.worker is not None
            assert actor.worker in world.ending, "nobody ends the actor"
            assert not waiting
        elif actor.state == "leaving":
            assert constructor is None
            assert actor.worker in world.ending, "nobody ends the process"
        elif actor.state == "parked":
            _check_parked(world, actor, waiting)
        elif constructor is None:
            assert actor.worker is not None
            assert (actor.worker in world.parking) == (actor.state == "parking")
            assert actor.state in ("alive", "parking")
            if actor.state == "alive":
                _check_turn(not worker.killed, actor, waiting)
        else:
            assert not actor.running
            assert actor.state == "starting"
            assert actor.worker == constructor.worker
    for worker in core.state.workers.values():
        if worker.actor is not None:
            assert core.state.actors[worker.actor].worker == worker.id


def _check_parked(world: World, actor: Actor, waiting: list[Task]) -> None:
    core = world.scheduler
    assert actor.worker is not None
    worker, task = core.state.workers[actor.worker], core.tasks.get(actor.id)
    assert world.parked[worker.id] == actor.parked
    assert bool(worker.allocation.shares) == bool(worker.tasks), "holds devices while it is parked"
    if not worker.killed:
        assert task is not None or not waiting, "nobody asks for its devices"
        assert task is None or waiting or task.state == "running", "asks for devices in vain"
        assert waiting or task or not actor.released, "nobody needs the actor and it lives"


def concurrency_group(rules: ActorSpec, spec: TaskSpec) -> str:
    return spec.group if spec.group in dict(rules.groups) else ""


def _check_turn(pumps: bool, actor: Actor, waiting: list[Task]) -> None:
    seen: set[tuple[str, TaskId | None]] = set()
    for task in waiting:
        group = concurrency_group(actor.rules, task.spec)
        if pumps and actor.calls._free[group] > 0:
            first = actor.rules.limits[group] > 1 or (group, task.parent) not in seen
            assert task.needs or not first, "a call could run and does not"
            seen.add((group, task.parent))
    if pumps and actor.released:
        assert waiting or actor.running, "nobody needs the actor and it lives"


def _check_time(world: World) -> None:
    core = world.scheduler
    timers = [timer for timer in core.timers.heap if core.timers.matters(timer)]
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
            assert mine & kinds or core.state.workers[task.worker].killed, "may run for ever"
    for actor in core.state.actors.values():
        constructor = core.tasks.get(actor.id)
        pauses = constructor is not None and constructor.state == "waiting" and actor.failed_starts
        assert not pauses or ("again", actor.id, constructor.attempt) in kinds, "never comes back"
    for worker in core.state.workers.values():
        if worker.state == "leaving":
            assert ("exit", worker.id, 0) in kinds or worker.killed
    if any(not each.prepared for each in core.workers.idle):
        assert ("idle", 0, 0) in kinds
    if any(each.ahead for each in core.state.workers.values()):
        assert ("ahead", 0, 0) in kinds, "may wait for ever behind another task"
    waiters = [
        task.id
        for task in core.tasks.values()
        if task.blocked_on and world.blocked[task.id].sure and task.spec.timeout is None
    ]
    assert core.state.waiters == set(waiters)
    assert core.workers.running == len(world.runs)
    suspicious = bool(waiters) and len(core.tasks) > len(world.runs)
    assert suspicious == (core.timers.deadlock_check is not None)
    assert suspicious == (("stuck", 0, 0) in kinds)


def _check_liveness(core: Scheduler) -> None:
    """No task waits that fits, also not one that fits without the idle workers."""
    for (demand, depth, _), line in core.queue.lines.items():
        if core.workers.full:
            break
        place = core.capacity.place(demand, core.queue.reserved_against(line))
        assert place is None or _is_held_back(core, demand, depth), "fits and waits"
        assert place is None or core.timers.loan_check is not None, "CPUs may be idle for ever"
    workers = core.state.workers.values()
    if all(w.state == "idle" or (w.actor is not None and w.state == "busy") for w in workers):
        free = _everything_free(core)
        for (demand, depth, _), line in core.queue.lines.items():
            if _is_held_back(core, demand, depth):
                continue
            # What is kept for a line that waits for others is not for idle workers to free.
            kept = core.queue.reserved_against(line) if core.peers.held else NOTHING
            assert free.place(demand, kept) is None, "waits for idle workers"


def _is_held_back(core: Scheduler, demand: Demand, depth: int) -> bool:
    """Whether tasks of this depth or of a greater one, with the tasks above them that run, would
    hold more CPUs than there are."""
    if demand.within is not None:
        return False
    there = (each for each in core.state.workers.values() if each.allocation.within is None)
    workers = [each for each in there if each.allocation.cpus]
    for least in {each.depth for each in workers if each.lends_cpus and each.depth >= depth}:
        held = sum(
            each.allocation.cpus
            for each in workers
            if (each.lends_cpus and each.keeps_loan and each.depth == least)
            or (not each.lends_cpus and (each.actor is not None or each.depth <= least))
        )
        if held + demand.cpus > core.machine.cpus:
            return True
    return False


def _check_loans(world: World) -> None:
    core = world.scheduler
    kept: Counter[int] = Counter()
    used: Counter[int] = Counter()
    for worker in core.state.workers.values():
        tasks = [core.tasks[each] for each in worker.tasks]
        if worker.actor is None and tasks:
            assert worker.depth == tasks[0].depth
        if worker.allocation.within is not None:
            assert worker.id not in core.loans.lenders
            continue
        if worker.lends_cpus and worker.keeps_loan:
            kept[worker.depth] += worker.allocation.cpus
        elif not worker.lends_cpus and worker.actor is None and worker.depth:
            used[worker.depth] += worker.allocation.cpus
        assert worker.keeps_loan or worker.lends_cpus
        keeps = worker.lends_cpus and worker.keeps_loan and worker.allocation.cpus > 0
        assert (worker.id in core.loans.lenders) == keeps
    assert core.loans.kept == {depth: units for depth, units in kept.items() if units}
    assert core.loans.used == {depth: units for depth, units in used.items() if units}
    free = {each.id for each in core.state.workers.values() if not each.keeps_loan}
    assert core.loans.let_go <= free
    for task in core.tasks.values():
        again = task.id in world.rules  # an actor that starts again has no parent any more
        assert task.depth >= world.depths.get(task.id, 0) or again, "it came up again"
        world.depths[task.id] = task.depth


def _everything_free(core: Scheduler) -> Capacity:
    capacity = core.capacity.copy()
    for worker in core.workers.idle:
        capacity.give(worker.allocation)
    return capacity


def _check_snapshot(world: World) -> None:
    core = world.scheduler
    view = snapshot(core, world.now)
    capacity = _everything_free(core)
    for worker in world.prepared & world.ending:
        capacity.give(world.live[worker])
    for at, device in enumerate(view.devices):
        if device.key in world.lost:
            assert not device.free, f"device {at} is lost"
            continue
        total = round(device.free * UNIT) + sum(round(share * UNIT) for _, share in device.held)
        total += world.reported.get(device.key, (0, 0))[0]
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
    """No task waits for a lost device, and each worker on one is about to end."""
    core = world.scheduler
    assert {core.machine.devices[at].key for at in core.capacity.lost} == set(world.lost)
    assert core.capacity.lost == core.state.obtainable.lost
    for worker in core.state.workers.values():
        if world.lost.keys() & dict(worker.allocation.shares):
            inside = worker.allocation.bundles and world.inside(worker.actor or 0)
            assert worker.killed or inside, "it goes on with a device that is lost"
            assert worker.state != "idle"
    waiting = [each for each in core.tasks.values() if not each.is_call]
    left = Capacity(world.left())
    for demand in {each.spec.demand for each in waiting if each.state != "running"}:
        assert left.feasible(replace(demand, within=None)), "it waits for ever"


def check_at_rest(core: Scheduler) -> None:
    """Nothing is left of tasks, workers and actors, and everything is free."""
    assert not core.tasks
    assert not core.state.workers
    assert not core.queue.lines
    assert not core.queue.reservation
    assert not core.life.children
    assert not core.life.dependents
    assert not core.state.actors
    assert not core.state.waiters
    assert core.timers.deadlock_check is None
    assert core.timers.ahead_end is None
    assert core.workers.running == 0
    assert not core.timers.heap
    assert not list(core.workers.idle)
    assert core.workers.busy == 0
    assert not core.loans.kept
    assert not core.loans.used
    assert not core.loans.lenders
    assert not core.loans.let_go
    assert core.timers.loan_check is None
    assert not core.peers.held
    for capacity in (core.capacity, core.state.obtainable):
        assert capacity.budget == budget(core.machine)
        assert capacity.shares == [UNIT] * len(core.machine.devices)
        assert capacity.cpus == core.machine.cpus
        assert tuple(sorted(capacity.resources.items())) == core.machine.resources
