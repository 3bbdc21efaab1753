"""Actors: names, the context of a call, and actors that outlive their handles."""

from __future__ import annotations

import pytest

import gpunb
from gpunb.exceptions import ActorDiedError
from tests.api.actors.counter import Counter, get, gone
from tests.sessions import alive


def test_actors_are_found_by_name_and_namespace(four):
    counter = Counter.options(name="the one").remote(1)
    found = gpunb.get_actor("the one")
    assert found == counter
    assert get(found.add.remote()) == 2
    with pytest.raises(ValueError, match=r"'the one' is taken by the actor Counter"):
        Counter.options(name="the one").remote()
    other = Counter.options(name="the one", namespace="mine").remote(10)
    assert gpunb.get_actor("the one", namespace="mine") == other
    with pytest.raises(ValueError, match="no actor has the name 'nobody': there are 'the one'"):
        gpunb.get_actor("nobody")
    with pytest.raises(ValueError, match="empty"):
        gpunb.get_actor("")
    with pytest.raises(TypeError, match="text"):
        gpunb.get_actor(3)
    with pytest.raises(TypeError, match="namespace must be a text"):
        gpunb.get_actor("the one", namespace=3)
    for use in (Counter.options, lambda **given: gpunb.get_actor("the one", **given)):
        with pytest.raises(ValueError, match="namespace='' is no name"):
            use(namespace="")

    @gpunb.remote
    def by_name(name):
        return gpunb.get(gpunb.get_actor(name).add.remote(5))

    @gpunb.remote
    class Finder:
        def find(self, name):
            return gpunb.get_actor(name)

    assert get(by_name.remote("the one")) == 7
    assert get(Finder.remote().find.remote("the one")) == counter
    with pytest.raises(ValueError, match="no actor has the name"):
        get(by_name.remote("nobody"))


def test_a_name_is_free_after_the_end_of_its_actor(four):
    for end in ("del", "kill"):
        counter = Counter.options(name="again").remote()
        get(counter.read.remote())
        if end == "kill":
            gpunb.kill(counter)
        del counter
        with pytest.raises(ValueError, match="again"):
            gpunb.get_actor("again")
    counter = Counter.options(name="again").remote()
    with pytest.raises(ActorDiedError):
        get(counter.crash.remote())
    Counter.options(name="again").remote()


def test_get_if_exists(four):
    @gpunb.remote
    class Other:
        def hello(self):
            return "hello"

    first = Counter.options(name="x", get_if_exists=True).remote(1)
    second = Counter.options(name="x", get_if_exists=True).remote(2)
    assert first == second
    assert get(second.read.remote()) == 1
    third = Other.options(name="x", get_if_exists=True).remote()
    assert third == first
    assert get(third.add.remote()) == 2
    with pytest.raises(AttributeError, match="hello"):
        third.hello  # noqa: B018

    @gpunb.remote
    def inside():
        return Counter.options(name="x", get_if_exists=True).remote()

    assert get(inside.remote()) == first
    with pytest.raises(ValueError, match="needs the name"):
        Counter.options(get_if_exists=True)


def test_the_runtime_context_names_the_actor(four):
    @gpunb.remote
    class Self:
        def facts(self):
            context = gpunb.get_runtime_context()
            return context.get_actor_id(), context.get_actor_name(), context.current_actor

        def value(self):
            return 5

    actor = Self.options(name="self").remote()
    ident, name, handle = get(actor.facts.remote())
    assert (ident, name, handle) == (actor._actor_id, "self", actor)
    assert get(handle.value.remote()) == 5
    with pytest.raises(RuntimeError, match="no current actor"):
        gpunb.get_runtime_context().current_actor  # noqa: B018
    assert gpunb.get_runtime_context().get_actor_id() is None


def test_a_detached_actor_lives_without_handles(four):
    def make():
        counter = Counter.options(name="daemon", lifetime="detached").remote(1)
        return get(counter.pid.remote())

    pid = make()
    other = Counter.remote()
    later = get(other.pid.remote())
    del other
    gone(later)  # its handle went the same way behind that of the detached one
    assert alive(pid)
    counter = gpunb.get_actor("daemon")
    assert get(counter.add.remote()) == 2
    gpunb.kill(counter)
    gone(pid)
