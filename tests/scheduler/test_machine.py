"""Any order of events, on small machines with few resources.

There is a rule for each event, which may also come late, twice, out of order or never. `World`
checks the decisions and the records after each event. At the end each task must be settled, all
room be free, and the same events must give the same decisions once more.

``GPUNB_EXAMPLES=5000 pytest tests/scheduler/test_machine.py`` tries other and more examples; the
time limit grows with their number.
"""

from __future__ import annotations

import os
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gpunb.scheduler import events as ev
from gpunb.scheduler.explain import refusal
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.resources import Demand, Gang, Within
from gpunb.scheduler.tasks import Exited, Interrupted, Raised, Report, Succeeded
from tests.scheduler.world import World, acts, ask, family, gpu, machine

EXAMPLES = int(os.environ.get("GPUNB_EXAMPLES") or 150)

LIMIT = 3.0 * EXAMPLES
"""Seconds for all examples together; each takes a tenth of one on a machine with nothing else to
do."""

MACHINES = [
    machine(gpus=1, cpus=1),
    machine(gpus=2, cpus=2, resources={"port": 1}),
    machine(gpus=3, cpus=1),
    machine(gpus=[("A100", 48), ("V100", 16)], cpus=2, resources={"port": 2}),
    machine(gpus=0, cpus=2),
    machine(gpus=3, cpus=2, most=1.5),
    machine(gpus=[("A100", 48), ("V100", 16)], cpus=2, most=0.6),
    replace(machine(cpus=2, resources={"port": 1}), devices=(gpu(0), *family("NPU", 3))),
    replace(machine(cpus=2), devices=(*family("TPU", 4, whole=True, counts=(1, 2, 4)), gpu(1))),
]
DEMANDS = [
    ask(cpus=1),
    ask(gpus=0.5),
    ask(gpus=1),
    ask(gpus=0.6, cpus=1),
    ask(gpus=2),
    ask(cpus=2),
    ask(),
    ask(gpus=0.3, resources={"port": 1}),
    ask(cpus=1, resources={"port": 1}),
    ask(memory=7),
    ask(gpus=1, types=("V100", "A100")),
    ask(gpus=1, cpus=1, resources={"port": 1}),
    ask(resources={"NPU": 0.5}),
    ask(cpus=1, resources={"NPU": 2}),
    ask(gpus=0.5, resources={"NPU": 1}),
    ask(resources={"NPU": 3, "port": 1}),
    ask(resources={"TPU": 1}),
    ask(cpus=1, resources={"TPU": 2}),
    ask(gpus=1, resources={"TPU": 4}),
]
POLICIES = [
    Policy(age=3, stop_grace=2, exit_grace=2, idle_limit=20),
    Policy(age=0, stop_grace=2, exit_grace=2, idle_limit=5, max_workers=2),
    Policy(age=1000, stop_grace=2, exit_grace=50, idle_limit=1000, max_workers=3),
    Policy(
        age=3,
        stop_grace=2,
        exit_grace=2,
        idle_limit=20,
        park_after=5,
        prepare=("gpu-0", "gpu-1"),
    ),
]
REPORTS = [Succeeded()] * 4 + [Raised(), Raised(retry=True), Interrupted(), Exited()]
REPORTS.append(Exited("it has failed", failed=True))

any_index = st.integers(min_value=0, max_value=30)
some_index = st.sampled_from([None, None, 0, 1, 2, 3])
maybe_index = st.sampled_from([None] * 12 + [0, 1, 2, 3])
seldom = st.sampled_from([False, False, False, True])


class Scheduling(RuleBasedStateMachine):
    @initialize(
        at=st.integers(min_value=0, max_value=len(MACHINES) - 1),
        policy=st.sampled_from(POLICIES),
        data=st.data(),
    )
    def begin(self, at: int, policy: Policy, data: st.DataObject) -> None:
        self.world = World(MACHINES[at], policy)
        # Contention finds more than variety: few demands, which meet on few devices.
        fitting = [each for each in DEMANDS if refusal(each, MACHINES[at]) is None]
        few = st.lists(st.sampled_from(fitting), min_size=2, max_size=6, unique=True)
        self.demands = data.draw(few)
        self.mail: list[ev.Event] = []
        self.actors: list[int] = []
        self.groups: list[int] = []

    # ---------------------------------------------------------------------------------- picking

    def _demand(self, at: int) -> Demand:
        """A demand of this example or, seldom, one that this machine can never meet."""
        return ask(gpus=9) if at == 30 else self.demands[at % len(self.demands)]

    def _task(self, at: int | None) -> tuple[int, ...]:
        """A task that is not settled, or none."""
        booked = sorted(set(self.world.specs) - set(self.world.settled))
        return () if at is None or not booked else (booked[at % len(booked)],)

    def _parent(self, at: int | None) -> int | None:
        running = self.world.running()
        return None if at is None or not running else running[at % len(running)]

    def _run(self, at: int) -> ev.Run:
        running = self.world.running()
        return self.world.runs[running[at % len(running)]]

    # ------------------------------------------------------------------------------- handing in

    @rule(
        at=any_index,
        calls=st.sampled_from([1, 1, 1, 0, 0, 2, 3]),
        function=st.sampled_from("fg"),
        retries=st.sampled_from([0, 0, 1, 2, -1]),
        timeout=st.sampled_from([None, None, None, 1.0, 4.0]),
        need=maybe_index,
        second=maybe_index,
        parent=maybe_index,
        environment=seldom,
        cleanup=seldom,
        grow=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 5, -1]),
        copies=st.sampled_from([1, 2, 3, 6]),
    )
    def submit(
        self,
        *,
        at: int,
        calls: int,
        function: str,
        retries: int,
        timeout: float | None,
        need: int | None,
        second: int | None,
        parent: int | None,
        environment: bool,
        cleanup: bool,
        grow: bool,
        priority: int,
        copies: int,
    ) -> None:
        for _ in range(copies):
            self.world.submit(
                self._demand(at),
                needs={*self._task(need), *self._task(second)},
                parent=self._parent(parent),
                cleanup=cleanup,
                function=f"{function}{calls}",
                max_calls=calls,
                max_retries=retries,
                timeout=timeout,
                environment=(("A", "1"),) if environment else (),
                grow=grow,
                priority=priority,
            )

    @rule(
        at=any_index,
        restarts=st.sampled_from([0, 0, 1, -1]),
        concurrency=st.sampled_from([1, 1, 2, 3]),
        threads=st.booleans(),
        timeout=st.sampled_from([None, None, 4.0]),
        need=maybe_index,
        parent=maybe_index,
    )
    def create(
        self,
        *,
        at: int,
        restarts: int,
        concurrency: int,
        threads: bool,
        timeout: float | None,
        need: int | None,
        parent: int | None,
    ) -> None:
        actor = self.world.actor(
            self._demand(at),
            needs=self._task(need),
            parent=self._parent(parent),
            timeout=timeout,
            max_restarts=restarts,
            max_concurrency=concurrency,
            threads=threads and concurrency > 1,
            groups=(("one", 1), ("two", 2))[: at % 3],
        )
        self.actors.append(actor)

    @precondition(lambda self: self.actors)
    @rule(
        at=any_index,
        retries=st.sampled_from([0, 0, 1, -1]),
        timeout=st.sampled_from([None, None, 1.0]),
        need=maybe_index,
        parent=some_index,
        copies=st.sampled_from([1, 2, 3, 10]),
        cleanup=seldom,
        waits=st.booleans(),
        alike=st.sampled_from([None, "a", "a", "b"]),
    )
    def call(
        self,
        *,
        at: int,
        retries: int,
        timeout: float | None,
        need: int | None,
        parent: int | None,
        copies: int,
        cleanup: bool,
        waits: bool,
        alike: str | None,
    ) -> None:
        """The kernel or a task calls; a task may then wait for the results."""
        caller = self._parent(parent)
        calls = [
            self.world.call(
                self.actors[at % len(self.actors)],
                needs=self._task(need),
                parent=caller,
                timeout=timeout,
                retries=retries,
                cleanup=cleanup,
                group=("", "one", "two")[at // len(self.actors) % 3],
                alike=alike,
            )
            for _ in range(copies)
        ]
        if waits and caller in self.world.runs:
            self.world.block(caller, *calls)

    @precondition(lambda self: self.actors)
    @rule(
        at=any_index,
        copies=st.sampled_from([2, 5, 12]),
        ended=st.sampled_from([1, 1, 2, 5]),
        parent=maybe_index,
    )
    def pipeline(self, at: int, copies: int, ended: int, parent: int | None) -> None:
        """Calls of an actor follow each other fast."""
        world, actor = self.world, self.actors[at % len(self.actors)]
        refused = {each.task for each in world.refused}
        if actor in world.runs and actor not in refused and actor not in world.blocked:
            world.finish(actor)
        caller = self._parent(parent)
        calls = [world.call(actor, parent=caller, alike="a") for _ in range(copies)]
        for call in calls[:ended]:
            if call in world.runs:
                world.finish(call, steady=True)

    @rule(
        bundles=st.lists(any_index, min_size=1, max_size=3),
        inside=st.lists(st.tuples(some_index, any_index), max_size=4),
        need=maybe_index,
        parent=maybe_index,
        leased=st.sampled_from([True, True, False]),
    )
    def create_group(
        self,
        bundles: list[int],
        inside: list[tuple[int | None, int]],
        need: int | None,
        parent: int | None,
        leased: bool,
    ) -> None:
        """A placement group, and tasks in it that are submitted before it is placed."""
        world = self.world
        demands = [self._demand(at) for at in bundles]
        group = world.group(*demands, needs=self._task(need), parent=self._parent(parent))
        self.groups.append(group)
        for bundle, at in inside:
            demand = self._inside(group, bundle, at, like=True)
            world.submit(demand, function=f"f{at % 3}", max_calls=at % 3, max_retries=at % 2)
        if leased and group in world.runs and group not in {each.task for each in world.refused}:
            world.finish(group)

    def _inside(self, group: int, bundle: int | None, at: int, *, like: bool) -> Demand:
        """A demand that fits in a bundle if it is `like` one; None stands for any bundle."""
        bundles = self.world.rules[group].bundles
        index = -1 if bundle is None else bundle % len(bundles)
        demand = bundles[max(0, index)] if like else self._demand(at)
        return replace(demand, within=Within(group, index))

    @precondition(lambda self: self.groups)
    @rule(
        which=any_index,
        bundle=some_index,
        like=st.sampled_from([True, True, False]),
        at=any_index,
        need=maybe_index,
        parent=maybe_index,
        actor=seldom,
        restarts=st.sampled_from([0, 1, -1]),
        waits=st.booleans(),
    )
    def start_in_group(
        self,
        *,
        which: int,
        bundle: int | None,
        like: bool,
        at: int,
        need: int | None,
        parent: int | None,
        actor: bool,
        restarts: int,
        waits: bool,
    ) -> None:
        """A task or an actor in a bundle, which may be too small, or gone; its parent may wait."""
        demand = self._inside(self.groups[-1 - which % len(self.groups)], bundle, at, like=like)
        caller = self._parent(parent)
        common = {"needs": self._task(need), "parent": caller}
        if actor:
            self.actors.append(self.world.actor(demand, max_restarts=restarts, **common))
            return
        task = self.world.submit(
            demand, function=f"f{at % 3}", max_calls=at % 3, max_retries=restarts, **common
        )
        if waits and caller in self.world.runs:
            self.world.block(caller, task)

    # ---------------------------------------------------------------------------------- workers

    @precondition(lambda self: self.world.runs)
    @rule(
        which=st.lists(st.tuples(any_index, st.sampled_from(REPORTS)), min_size=1, max_size=6),
        exits=st.booleans(),
        short=seldom,
        steady=st.booleans(),
    )
    def finish(
        self, which: list[tuple[int, Report]], exits: bool, short: bool, steady: bool
    ) -> None:
        for at, report in which:
            if self.world.runs:
                run = self._run(at)
                self.world.finish(run.task, report, short=short, steady=steady)
                if exits and run.worker in self.world.ending:
                    self.world.exit(run.worker)

    @precondition(lambda self: any(self.world.ahead.values()))
    @rule(at=any_index, begun=any_index)
    def take_back(self, at: int, begun: int) -> None:
        """The calls of a worker are taken back; it has begun some of them, and not reported the
        call before."""
        sent = [each for each, calls in self.world.ahead.items() if calls]
        worker = sent[at % len(sent)]
        self.world.take_back(worker, begun % (len(self.world.ahead[worker]) + 1))

    @precondition(lambda self: self.world.runs)
    @rule(at=any_index, report=st.sampled_from(REPORTS))
    def delay_report(self, at: int, report: Report) -> None:
        """The report may arrive later, or twice, or never."""
        run = self._run(at)
        self.mail.append(ev.Finished(run.task, run.attempt, run.worker, report))

    @precondition(lambda self: self.world.runs)
    @rule(at=any_index, shift=st.sampled_from([-1, 1]), what=st.integers(0, 3))
    def send_wrong_report(self, at: int, shift: int, what: int) -> None:
        """A message with the wrong attempt, or of a worker that does not run the task."""
        run = self._run(at)
        wrong = run.attempt + shift
        event: ev.Event = ev.Finished(run.task, wrong, run.worker, Succeeded())
        if what == 1:
            event = ev.Finished(run.task, run.attempt, run.worker + shift, Succeeded())
        elif what == 2:
            event = (ev.Blocked if shift > 0 else ev.Unblocked)(run.task, wrong)
        elif what == 3:
            event = ev.WorkerExited(900 + shift, "never started")
        self.world.send(ev.TimeReached())  # or what time has changed is decided together with it
        task = self.world.scheduler.tasks[run.task]
        blocked = task.blocked
        assert acts(self.world.send(event)) == []
        assert task.blocked == blocked

    @precondition(lambda self: self.mail)
    @rule(at=any_index, again=seldom)
    def deliver(self, at: int, again: bool) -> None:
        event = self.mail[at % len(self.mail)]
        if not again:
            self.mail.remove(event)
        self.world.send(event)

    @precondition(lambda self: self.world.live)
    @rule(at=any_index)
    def crash(self, at: int) -> None:
        """Any worker process is gone. The worker of a group has no process."""
        held = self.world.live
        live = sorted(each for each in held if not held[each].bundles or each in self.world.ending)
        if not live:
            return
        self.world.exit(live[at % len(live)], "killed by signal 11")

    @precondition(lambda self: self.world.ending)
    @rule(at=any_index)
    def exit(self, at: int) -> None:
        ending = sorted(self.world.ending)
        self.world.exit(ending[at % len(ending)])

    @precondition(lambda self: self.world.runs)
    @rule(
        at=any_index,
        blocks=st.sampled_from([True, True, False]),
        on=st.lists(any_index, max_size=3),
        enough=st.sampled_from([0, 0, 0, 1, 5]),
        late=seldom,
    )
    def block(self, at: int, blocks: bool, on: list[int], enough: int, late: bool) -> None:
        """A task waits for any others, over or not, or goes on."""
        run = self._run(at)
        event: ev.Event = ev.Unblocked(run.task, run.attempt)
        if blocks:
            tasks = tuple(dict.fromkeys(each for index in on for each in self._task(index)))
            event = ev.Blocked(run.task, run.attempt, tasks, max(0, len(tasks) - enough))
        if late:
            self.mail.append(event)
        else:
            self.world.send(event)

    @precondition(lambda self: self.world.runs)
    @rule(
        at=any_index,
        like=st.booleans(),
        demand=any_index,
        copies=st.sampled_from([1, 1, 2]),
        enough=seldom,
        seconds=st.sampled_from([0.0, 0.5, 2.0]),
    )
    def wait_for_children(
        self, *, at: int, like: bool, demand: int, copies: int, enough: bool, seconds: float
    ) -> None:
        """A task waits for tasks that it has just submitted, which may cause a deadlock."""
        parent = self._run(at).task
        wanted = self.world.specs[parent].demand
        if not like or isinstance(wanted, Gang):
            wanted = self._demand(demand)
        children = [self.world.submit(wanted, parent=parent, max_calls=1) for _ in range(copies)]
        if parent in self.world.runs:
            self.world.block(parent, *children, count=1 if enough else None)
        self.world.advance(seconds)

    # ----------------------------------------------------------------------------- interference

    @precondition(lambda self: self.world.specs)
    @rule(at=any_index, force=st.booleans(), recursive=st.booleans(), known=seldom)
    def cancel(self, at: int, force: bool, recursive: bool, known: bool) -> None:
        tasks = self._task(at)
        if known or not tasks:
            everybody = sorted(self.world.specs)
            tasks = (everybody[at % len(everybody)],)
        self.world.cancel(tasks[0], force=force, recursive=recursive)

    @precondition(lambda self: self.world.specs)
    @rule(at=any_index)
    def interrupt(self, at: int) -> None:
        everybody = sorted(self.world.specs)
        self.world.interrupt((self._task(at) or everybody)[0])

    @precondition(lambda self: self.actors or self.groups)
    @rule(at=any_index, restart=st.booleans())
    def kill(self, at: int, restart: bool) -> None:
        everybody = [*self.actors, *self.groups]
        self.world.kill(everybody[at % len(everybody)], restart=restart)

    @precondition(lambda self: self.actors or self.groups)
    @rule(at=any_index)
    def release(self, at: int) -> None:
        everybody = [*self.actors, *self.groups]
        self.world.release(everybody[at % len(everybody)])

    @precondition(lambda self: self.actors)
    @rule(at=any_index, replies=st.booleans(), problem=st.sampled_from(["", "", "", "IPC"]))
    def park(self, at: int, replies: bool, problem: str) -> None:
        """An actor is to be parked; its worker may reply at once, later or twice."""
        if self.world.parking and not replies:
            worker = sorted(self.world.parking)[at % len(self.world.parking)]
            self.world.send(ev.Parked(worker, problem))
        else:
            actor = self.actors[at % len(self.actors)]
            self.world.park(actor, problem if replies else None)

    @precondition(lambda self: self.world.machine.devices)
    @rule(at=st.integers(0, 2), really=st.sampled_from([False] * 15 + [True]))
    def lose(self, at: int, really: bool) -> None:
        """A device is lost, or one that this machine does not have."""
        self.world.lose(at if really else 900)

    @precondition(lambda self: self.world.machine.devices)
    @rule(
        at=any_index,
        gpus=st.sampled_from([0, 0, 0.3, 0.5, 1]),
        lasting=st.sampled_from([0, 0, 0.3, 1]),
        report=st.booleans(),
        wanted=st.lists(any_index, max_size=2),
        used=st.lists(any_index, max_size=2),
    )
    def others_hold(
        self,
        *,
        at: int,
        gpus: float,
        lasting: float,
        report: bool,
        wanted: list[int],
        used: list[int],
    ) -> None:
        """Another kernel takes or gives back a share, with a report or without one."""
        devices = self.world.machine.devices
        self.world.peers_hold(at % len(devices), gpus, lasting, report=False)
        if report:
            self.world.report_peers(
                {devices[each % len(devices)].key for each in wanted},
                {devices[each % len(devices)].key for each in used},
            )

    @precondition(lambda self: self.world.live)
    @rule(at=any_index, late=seldom)
    def exceed(self, at: int, late: bool) -> None:
        """A worker, which may be gone by then, took more than its share."""
        live = sorted(each for each, held in self.world.live.items() if not held.bundles)
        if not live:
            return
        event = ev.ShareExceeded(live[at % len(live)], "it took too much")
        if late:
            self.mail.append(event)
        else:
            self.world.send(event)

    @precondition(lambda self: self.world.log)
    @rule(at=st.integers(min_value=0, max_value=10_000))
    def repeat_event(self, at: int) -> None:
        """An earlier event comes again, but no submission of a task that is over."""
        event, _ = self.world.log[-1 - at % len(self.world.log)]
        over = set(self.world.settled) - set(self.world.scheduler.state.actors)
        match event:
            case ev.Submitted(task=task) | ev.CallSubmitted(task=task) if task in over:
                return
            case ev.ActorCreated(actor=actor) if actor in over:
                return
        self.world.send(event)

    # ------------------------------------------------------------------------------------- time

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 10.0, 60.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(seconds=st.sampled_from([0.5, 3.0, 60.0]))
    def oversleep(self, seconds: float) -> None:
        """Time passes and the timer is late."""
        self.world.now += seconds

    @rule()
    def wake_early(self) -> None:
        self.world.send(ev.TimeReached())

    # ---------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None or world.broken:
            return
        world.drain()
        world.replay()


settings.register_profile(
    "core",
    max_examples=EXAMPLES,
    stateful_step_count=80,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(LIMIT)
class TestScheduling(Scheduling.TestCase):
    settings = settings.get_profile("core")
