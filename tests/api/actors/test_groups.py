"""Concurrency groups of actors: groups of methods, each with a number of calls at once."""

from __future__ import annotations

import threading

import pytest

import gpunb
from gpunb.exceptions import DeadlockError, TaskCancelledError
from tests.api.actors.counter import get
from tests.waiting import PATIENCE


class Threads:
    @gpunb.method(concurrency_group="compute")
    def thread(self):
        return threading.get_ident()

    @gpunb.method(concurrency_group="io")
    def hold(self, gate, name):
        gate.enter(name)
        return name

    def default(self):
        return threading.get_ident()


class Coroutines(Threads):
    @gpunb.method(concurrency_group="io")
    async def hold(self, gate, name):
        await gate.enter_async(name)
        return name

    async def endless(self):
        import asyncio

        await asyncio.sleep(PATIENCE)


GROUPS = {"io": 2, "compute": 1}
KINDS = [Threads, Coroutines]


def made(kind):
    return gpunb.remote(concurrency_groups=GROUPS)(kind).remote()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_call_has_one_thread(four, kind):
    actor = made(kind)
    assert len(set(get([actor.thread.remote() for _ in range(5)]))) == 1
    assert get(actor.thread.remote()) != get(actor.default.remote())


@pytest.mark.parametrize("kind", KINDS)
def test_the_calls_of_a_group_begin_in_their_order(four, gate, kind):
    actor = made(kind)
    refs = [actor.hold.remote(gate, f"call {number}") for number in range(3)]
    gate.await_("call 0")
    gate.await_("call 1")
    assert not gate.came("call 2")
    gate.open()
    assert get(refs) == ["call 0", "call 1", "call 2"]


def test_a_handle_in_a_task_knows_the_groups(four):
    @gpunb.remote
    def use(actor):
        with pytest.raises(ValueError, match="its class has 'io', 'compute'"):
            actor.default.options(concurrency_group="none")
        return gpunb.get(actor.default.options(concurrency_group="io").remote())

    assert get(use.remote(made(Threads)))


def test_a_call_of_a_group_can_be_cancelled(four, gate):
    actor = made(Coroutines)
    ref = actor.hold.remote(gate, "begun")
    gate.await_("begun")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)


def test_an_actor_with_groups_ends_while_a_call_runs(four):
    actor = made(Coroutines)
    ref = actor.endless.remote()
    get(actor.default.remote())
    gpunb.kill(actor)
    with pytest.raises(gpunb.exceptions.ActorDiedError):
        get(ref)


def test_a_deadlock_within_a_group_is_found(four):
    class Calls:
        @gpunb.method(concurrency_group="one")
        def outer(self):
            me = gpunb.get_runtime_context().current_actor
            return gpunb.get(me.inner.remote())

        @gpunb.method(concurrency_group="one")
        def inner(self):
            return 1

        def default(self):
            return 2

    actor = gpunb.remote(concurrency_groups={"one": 1})(Calls).remote()
    with pytest.raises(DeadlockError, match="the group 'one' of actor"):
        get(actor.outer.remote())
    assert get(actor.default.remote()) == 2


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (["io"], TypeError, "must be a dict"),
        ({"io": 0}, ValueError, r"concurrency_groups\['io'\]=0 must be 1 or more"),
        ({"io": "2"}, TypeError, r"concurrency_groups\['io'\] must be a whole number"),
        ({"": 2}, ValueError, "a name of its own"),
        ({3: 2}, TypeError, "must be a text"),
    ],
)
def test_bad_groups_are_refused(value, error, text):
    with pytest.raises(error, match=text):
        gpunb.remote(concurrency_groups=value)(Threads)


def test_a_group_that_the_class_lacks_is_refused():
    with pytest.raises(ValueError, match=r"Threads\.thread.*'compute', and its class has 'io'"):
        gpunb.remote(concurrency_groups={"io": 1})(Threads)
    with pytest.raises(ValueError, match="its class has none"):
        gpunb.remote(Threads)
    with pytest.raises(ValueError, match="belongs to the class"):
        gpunb.remote(concurrency_groups=GROUPS)(Threads).options(concurrency_groups={"io": 3})
