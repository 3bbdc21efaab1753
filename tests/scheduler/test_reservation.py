"""Room that is kept for a large request: nobody starves, and the price has a limit."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunb.scheduler import events as ev
from gpunb.scheduler.policy import Policy
from gpunb.scheduler.resources import UNIT, Demand
from gpunb.scheduler.scheduler import Scheduler
from gpunb.scheduler.snapshot import snapshot
from gpunb.scheduler.tasks import Succeeded, TaskSpec
from tests.scheduler.conftest import MakeWorld
from tests.scheduler.world import World, ask, machine

PART, FREE = Policy().idle_part, Policy().idle_free


def oldest(world: World) -> int:
    return min(world.running(), key=lambda task: (world.scheduler.tasks[task].since, task))


@pytest.mark.parametrize(("seconds", "runs"), [(5, 3), (30, 2), (1800, 2), (86_400, 30)])
def test_large_request_has_its_turn_in_an_endless_stream(
    core: MakeWorld, seconds: int, runs: int
) -> None:
    """Each device has an endless stream of tasks, and they never end at the same time. So room for
    the large one costs half a run; the allowed idle time grows by that in 12.5 runs."""
    world = core(gpus=2, age=10)
    world.fresh(ask(gpus=1))
    world.advance(seconds / 2)
    world.fresh(ask(gpus=1))
    large = world.fresh(ask(gpus=2))
    came = world.now
    while large not in world.runs:
        assert world.now - came < runs * seconds, "it waits for ever"
        world.fresh(ask(gpus=1))
        first = oldest(world)
        world.advance(max(0, world.scheduler.tasks[first].since + seconds - world.now))
        if first in world.runs:
            world.done(first)


def test_whole_device_starts_within_30_s_before_an_endless_stream_of_quarters(
    core: MakeWorld,
) -> None:
    """The quarters take 5 s each, and a new one comes each second."""
    world = core(gpus=1)
    whole = None
    for second in range(60):
        world.fresh(ask(gpus=0.25))
        for task in world.running():
            if task != whole and world.now - world.scheduler.tasks[task].since >= 5:
                world.done(task)
        if second == 20:
            whole = world.fresh(ask(gpus=1))
        if whole in world.runs:
            assert second <= 50
            return
        world.advance(1)
    raise AssertionError("it waits for ever")


def test_line_that_grows_for_ever_does_not_starve_a_large_request(core: MakeWorld) -> None:
    """Of two requests that come in the line one is served, so those that start have waited for
    longer and longer. Room for the large one costs a run of one device."""
    world, run = core(gpus=2, age=10), 8 * 3600
    for _ in range(2):
        world.fresh(ask(gpus=1))
    large = world.fresh(ask(gpus=2))
    served = 0
    while large not in world.runs:
        for _ in range(2):
            world.fresh(ask(gpus=1))
        world.advance(run)
        world.done(min(world.running()))
        served += 1
        assert served < 4 / (2 * PART), "it waits for ever"
    assert served > 15, "the line was short, so this shows nothing"


def test_who_came_before_goes_before_a_reservation(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    busy = [world.fresh(ask(gpus=0.5)), world.fresh(ask(gpus=0.5)), world.fresh(ask(gpus=1))]
    old = world.fresh(ask(gpus=0.6))
    world.advance(1)
    large = world.fresh(ask(gpus=1))
    world.advance(1)
    young = world.fresh(ask(gpus=0.5))
    world.advance(20)
    world.done(busy[0])
    assert world.waits(old, large, young)
    world.done(busy[2])
    assert world.running() == [busy[1], old]
    assert world.waits(large, young)
    world.done(busy[1])
    assert world.running() == [old, large]


def test_room_is_given_up_at_the_limit(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    long, busy = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    large = world.fresh(ask(gpus=2))
    world.advance(450)
    world.done(busy)
    small = world.fresh(ask(gpus=1))
    # Before, two devices were used for 450 s, and then one is; the other one is kept.
    lasts = (2 * FREE + PART * 900) / (1 - PART)
    world.advance(lasts - 1)
    assert world.waits(large, small)
    world.advance(2)
    assert world.running() == [long, small]
    world.done(long)
    third = world.fresh(ask(gpus=1))
    assert world.running() == [small, third], "less than half of the limit is left"


def test_room_is_kept_again_when_half_of_the_limit_is_left(core: MakeWorld) -> None:
    world = core(gpus=2, age=10, idle_free=10)
    busy = [world.fresh(ask(gpus=1)) for _ in range(2)]
    large = world.fresh(ask(gpus=2))
    world.advance(11)
    world.done(busy[0])
    busy.append(world.fresh(ask(gpus=1)))
    assert world.waits(busy[2])
    world.advance(25)
    assert busy[2] in world.runs, "the limit of 20 s was reached"
    world.scheduler.queue.costs.elapse(world.now)
    kept = world.scheduler.queue.costs.devices.kept / UNIT
    assert kept == pytest.approx((20 + PART * 22) / (1 - PART))
    half = (2 * kept - 20) / PART - world.scheduler.queue.costs.devices.used / UNIT
    world.advance(half / 2 - 1)
    world.done(busy[1])
    busy.append(world.fresh(ask(gpus=1)))
    assert busy[3] in world.runs
    world.advance(2)
    world.done(busy[2])
    busy.append(world.fresh(ask(gpus=1)))
    assert world.waits(large, busy[4])
    world.done(busy[3])
    assert world.running() == [large]


def test_room_that_nobody_else_waits_for_costs_nothing(core: MakeWorld) -> None:
    world = core(gpus=2, age=10)
    long, busy = world.fresh(ask(gpus=1)), world.fresh(ask(gpus=1))
    large = world.fresh(ask(gpus=2))
    world.advance(20)
    world.done(busy)
    world.advance(100 * FREE)
    assert world.scheduler.queue.costs.devices.kept == 0
    small = world.fresh(ask(gpus=1))
    world.advance(FREE)
    assert world.waits(large, small)
    world.cancel(small)
    assert world.scheduler.queue.costs.devices.kept == FREE * UNIT
    world.advance(100 * FREE)
    world.done(long)
    assert world.running() == [large]


def test_request_of_two_devices_pays_for_both(core: MakeWorld) -> None:
    world = core(gpus=3, age=10, idle_free=10)
    busy = [world.fresh(ask(gpus=1)) for _ in range(3)]
    large = world.fresh(ask(gpus=3))
    world.advance(11)
    for task in busy[:2]:
        world.done(task)
    small = world.fresh(ask(gpus=1))
    assert world.waits(large, small)
    world.advance(10)
    assert world.why(small) == (
        "GPU 0, GPU 1 and GPU 2 are kept for #4 (3 GPU), which has waited longest; "
        "20 s of GPU time so far"
    )
    devices = snapshot(world.scheduler, world.now).devices
    assert {each.kept for each in devices} == {"kept for #4 for 10 s; 20 s of GPU time so far"}
    world.scheduler.queue.costs.elapse(world.now)
    assert world.scheduler.queue.costs.devices.kept == 2 * 10 * UNIT


def test_kept_cpus_have_a_limit_of_their_own(core: MakeWorld) -> None:
    world = core(cpus=2, age=10)
    long, busy = world.fresh(ask(cpus=1)), world.fresh(ask(cpus=1))
    large = world.fresh(ask(cpus=2))
    world.advance(11)
    world.done(busy)
    small = world.fresh(ask(cpus=1))
    world.advance(FREE / 2)
    assert world.waits(large, small)
    world.advance(FREE)
    assert world.running() == [long, small]
    assert world.scheduler.queue.costs.devices.kept == 0


class Machine:
    """A machine on which tasks run for a time that is known when they start."""

    def __init__(self, gpus: int, policy: Policy) -> None:
        self.scheduler, self.now = Scheduler(machine(gpus), policy), 0.0
        self.started: dict[int, float] = {}
        self._due: list[tuple[float, int, ev.Event]] = []
        self._seconds: dict[int, float] = {}
        self._order = itertools.count()

    def submit(self, demand: Demand, seconds: float) -> int:
        task = len(self._seconds)
        self._seconds[task] = seconds
        self._feed(ev.Submitted(task, TaskSpec("t", demand, max_calls=1)))
        return task

    @property
    def waiting(self) -> int:
        return len(self._seconds) - len(self.started)

    def go_on(self) -> None:
        """Carry out the next event."""
        self.now, _, event = heapq.heappop(self._due)
        self._feed(event)

    def _feed(self, event: ev.Event) -> None:
        for decision in self.scheduler.handle(event, self.now):
            match decision:
                case ev.Run():
                    self.started[decision.task] = self.now
                    end = self.now + self._seconds[decision.task]
                    done = ev.Finished(
                        decision.task, decision.attempt, decision.worker, Succeeded()
                    )
                    self._push(end, done)
                    self._push(end, ev.WorkerExited(decision.worker, "exit code 0"))
                case ev.WakeAt():
                    self._push(decision.time, ev.TimeReached())

    def _push(self, time: float, event: ev.Event) -> None:
        heapq.heappush(self._due, (time, next(self._order), event))


streams = st.lists(
    st.tuples(st.sampled_from([0.25, 0.3, 0.5, 0.75, 1.0]), st.integers(10, 100)),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(gpus=st.integers(1, 3), stream=streams, seed=st.integers(0, 1000))
def test_nobody_starves_behind_any_endless_stream(
    gpus: int, stream: list[tuple[float, int]], seed: int
) -> None:
    """Tasks come for ever, more than the machine can serve, and a request needs all devices. The
    idle time of kept devices stays within its limit at each moment."""
    chance, part = random.Random(seed), 0.1
    world = Machine(gpus, Policy(idle_part=part, idle_free=5))

    def go_on() -> None:
        while world.waiting < 4 * gpus + 4:
            share, seconds = chance.choice(stream)
            world.submit(ask(gpus=share), seconds)
        world.go_on()
        account = world.scheduler.queue.costs.devices
        assert account.left > -UNIT

    while world.now < 50:
        go_on()
    large = world.submit(ask(gpus=gpus), 10)
    # To empty all devices costs less than the longest run on each. The limit that allows this is at
    # most four times as high, and a stream of these shares uses at least half of each device.
    longest = max(seconds for _, seconds in stream)
    bound = world.now + 4 * longest / (part / 2) + 2 * longest + 20
    while large not in world.started:
        assert world.now < bound, "it waits for ever"
        go_on()
