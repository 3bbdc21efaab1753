"""Concurrency groups of actors."""

from __future__ import annotations

import pytest

from tests.conformance.api.backends import get, ray
from tests.waiting import eventually


class Threads:
    @ray.method(concurrency_group="io")
    def hold(self, gate, name):
        gate.enter(name)
        return name

    @ray.method(concurrency_group="one")
    def block(self, gate, name):
        gate.enter(name)
        return name

    def default(self):
        return "default"


class Coroutines:
    @ray.method(concurrency_group="io")
    async def hold(self, gate, name):
        await gate.enter_async(name)
        return name

    @ray.method(concurrency_group="one")
    async def block(self, gate, name):
        gate.enter(name)
        return name

    async def default(self):
        return "default"


@pytest.fixture(params=[Threads, Coroutines])
def actor(request):
    return ray.remote(concurrency_groups={"io": 2, "one": 1})(request.param).remote()


def test_each_group_runs_its_own_number_of_calls(gate, actor):
    # Ray does not say in which order the calls of such an actor begin.
    names = [f"io {number}" for number in range(3)] + [f"one {number}" for number in range(2)]
    refs = [actor.hold.remote(gate, name) for name in names[:3]]
    eventually(lambda: gate.count() == 2, "two calls of the group for two came to the gate")
    refs += [actor.block.remote(gate, name) for name in names[3:]]
    eventually(lambda: gate.count() == 3, "one call of the group for one came to the gate")
    assert get(actor.default.remote()) == "default"
    assert sum(gate.came(name) for name in names[:3]) == 2
    assert sum(gate.came(name) for name in names[3:]) == 1
    gate.open()
    assert get(refs) == names


def test_a_call_chooses_its_group(gate, actor):
    refs = [actor.hold.remote(gate, f"call {number}") for number in range(2)]
    gate.await_("call 0")
    gate.await_("call 1")
    refs.append(actor.hold.options(concurrency_group="one").remote(gate, "other"))
    gate.await_("other")
    gate.open()
    assert get(refs) == ["call 0", "call 1", "other"]
