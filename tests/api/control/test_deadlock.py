"""Tasks and actors that wait for each other for ever, and those that only seem to."""

from __future__ import annotations

import asyncio

import pytest

import gpunb
from gpunb.exceptions import ActorDiedError, DeadlockError, GetTimeoutError
from tests.api.control.tasks import get, hold, on_gpu
from tests.sessions import both


def _gets(ref):
    return gpunb.get(ref)


def _waits(ref):
    gpunb.wait([ref])
    return gpunb.get(ref)


def _takes_as_completed(ref):
    return [gpunb.get(each) for each in gpunb.as_completed([gpunb.put(0), ref])]


def _has_a_future(ref):
    return ref.future().result()


def _has_an_error(ref):
    raise ref.future().exception()


async def _wait_for(ref):
    return await ref


_WAITS = {
    "as_completed": _takes_as_completed,
    "future": _has_a_future,
    "exception of a future": _has_an_error,
}


@both
@pytest.mark.parametrize("wait", [_gets, _waits])
def test_a_child_that_needs_its_parents_devices_gets_a_deadlock_error(two, wait):
    @gpunb.remote(num_gpus=2)
    def outer():
        return wait(on_gpu.remote())

    with pytest.raises(DeadlockError, match=r"on_gpu \(#\d+\) can never run") as caught:
        get(outer.remote())
    assert "outer" in str(caught.value)


@pytest.mark.parametrize("wait", _WAITS.values(), ids=_WAITS)
def test_every_form_of_endless_wait_gets_a_deadlock_error(two, wait):
    @gpunb.remote(num_gpus=2)
    def outer():
        return wait(on_gpu.remote())

    with pytest.raises(DeadlockError, match=r"on_gpu \(#\d+\) can never run"):
        get(outer.remote())


@gpunb.remote(num_gpus=1)
class Several:
    """An async actor: what one of its calls waits for says nothing of the others."""

    def __init__(self, gate=None):
        self.gate, self.helper = gate, None

    async def ask(self, share):
        return await on_gpu.options(num_gpus=share).remote()

    async def hold(self):
        self.helper = Pinned.remote()
        return await self.helper.here.remote()

    async def release(self):
        await self.gate.enter_async("release")
        self.helper = None


@gpunb.remote
class Self:
    def outer(self):
        me = gpunb.get_runtime_context().current_actor
        return gpunb.get(me.inner.remote())

    def inner(self):
        return 1


def look_for_deadlocks():
    """One that began later is found: whoever else waits for ever would have been found with it."""
    with pytest.raises(DeadlockError):
        get(Self.remote().outer.remote())


@gpunb.remote(num_gpus=1)
class Pinned:
    def here(self):
        return gpunb.get_gpu_ids()


def test_no_false_alarm_while_another_coroutine_can_release(two, gate):
    several = Several.remote(gate)
    get(several.hold.remote())
    release = several.release.remote()
    gate.await_("release")
    call = several.ask.remote(1)
    look_for_deadlocks()
    assert gpunb.wait([call], timeout=0) == ([], [call])
    gate.open()
    get(release)
    assert len(get(call)) == 1


def test_no_false_alarm_when_a_coroutine_may_do_something_else(two, gate):
    """It is waited for the first of two, one of which needs what the task holds."""

    async def beside():
        await gate.enter_async("beside")
        return "opened"

    async def first(child):
        waits = asyncio.ensure_future(_wait_for(child))
        opened = asyncio.create_task(beside())
        done, _ = await asyncio.wait([waits, opened], return_when="FIRST_COMPLETED")
        return [each.result() for each in done]

    @gpunb.remote(num_gpus=2)
    def outer():
        child = on_gpu.remote()
        return asyncio.run(first(child)), [child]

    ref = outer.remote()
    gate.await_("beside")
    look_for_deadlocks()
    gate.open()
    result, (child,) = get(ref)
    assert result == ["opened"]
    assert get(child) == [0]


def test_a_deadlock_can_be_caught(two):
    @gpunb.remote(num_gpus=2)
    def outer():
        try:
            gpunb.get(on_gpu.remote())
        except DeadlockError:
            return "without"

    assert get(outer.remote()) == "without"


def test_a_deadlock_through_actors_is_found(two):
    @gpunb.remote(num_gpus=1)
    class Holds:
        def ask(self):
            return gpunb.get(on_gpu.options(num_gpus=2).remote())

        def make(self):
            inner = Holds.options(num_gpus=2).remote()
            return gpunb.get(inner.ask.remote())

    holds = Holds.remote()
    for ref in (holds.ask.remote(), holds.make.remote()):
        with pytest.raises((DeadlockError, ActorDiedError), match=r"can never run|not be made: it"):
            get(ref)


def test_an_actor_that_waits_for_itself_gets_a_deadlock_error(two):
    with pytest.raises(DeadlockError):
        get(Self.remote().outer.remote())
    assert get(Self.options(max_concurrency=2).remote().outer.remote()) == 1


def test_no_false_alarm_when_somebody_else_will_free_it(two, gate):
    @gpunb.remote(num_gpus=1)
    def outer(gate):
        gate.note("outer")
        return gpunb.get(on_gpu.remote())

    holder = hold.options(num_gpus=1, num_cpus=0).remote(gate, "holder")
    gate.await_("holder")
    ref = outer.remote(gate)
    gate.await_("outer")
    look_for_deadlocks()
    assert gpunb.wait([ref], timeout=0) == ([], [ref])
    gate.open()
    assert get(holder) == "holder"
    assert len(get(ref)) == 1


def test_no_false_alarm_when_the_wait_has_a_timeout(two):
    @gpunb.remote(num_gpus=2)
    def outer():
        child = on_gpu.remote()
        try:
            return gpunb.get(child, timeout=0.8)
        except DeadlockError:
            return "alarm"
        except GetTimeoutError:
            return [child]

    (child,) = get(outer.remote())
    assert get(child) == [0]
