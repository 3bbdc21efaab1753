"""Concurrency groups of actors."""

from __future__ import annotations

import pytest

from tests.conformance.api.backends import get, ray


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
    refs = [actor.hold.remote(gate, f"io {number}") for number in range(3)]
    gate.await_("io 0")
    gate.await_("io 1")
    refs += [actor.block.remote(gate, f"one {number}") for number in range(2)]
    gate.await_("one 0")
    assert get(actor.default.remote()) == "default"
    assert not gate.came("io 2")
    assert not gate.came("one 1")
    gate.open()
    assert get(refs) == ["io 0", "io 1", "io 2", "one 0", "one 1"]


def test_a_call_chooses_its_group(gate, actor):
    refs = [actor.hold.remote(gate, f"call {number}") for number in range(2)]
    gate.await_("call 0")
    gate.await_("call 1")
    refs.append(actor.hold.options(concurrency_group="one").remote(gate, "other"))
    gate.await_("other")
    gate.open()
    assert get(refs) == ["call 0", "call 1", "other"]
