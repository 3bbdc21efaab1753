"""Actors that are found by name."""

from __future__ import annotations

import os

import pytest

from tests.conformance.api.backends import alive, errors, get, here, ray
from tests.conformance.api.differences import differs
from tests.waiting import eventually


@ray.remote
class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self):
        self.count += 1
        return self.count

    def pid(self):
        return os.getpid()


@pytest.fixture
def name(request):
    return f"the counter of {request.node.name}"


def exists(name):
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


def test_an_actor_is_found_by_its_name(name):
    counter = Counter.options(name=name).remote()
    get(counter.add.remote())
    assert get(ray.get_actor(name).add.remote()) == 2


def test_names_are_listed(name):
    counter = Counter.options(name=name).remote()
    far = Counter.options(name=name, namespace="far").remote()
    unnamed = Counter.options(lifetime="detached").remote()
    get([counter.add.remote(), far.add.remote(), unnamed.add.remote()])
    listed = ray.util.list_named_actors()
    assert name in listed
    assert not any("far" in each or each.startswith("#") for each in listed)
    everywhere = ray.util.list_named_actors(all_namespaces=True)
    assert {"namespace": "far", "name": name} in everywhere
    assert len([each for each in everywhere if each["name"] == name]) == 2
    ray.kill(unnamed)


def test_a_name_in_the_decorator(name):
    class Named:
        def say(self):
            return "done"

    named = ray.remote(name=name, num_cpus=0)(Named).remote()
    assert get(named.say.remote()) == "done"
    assert get(ray.get_actor(name).say.remote()) == "done"


def test_a_name_that_nobody_has():
    with pytest.raises(ValueError, match="nobody"):
        ray.get_actor("nobody")


@pytest.mark.parametrize("value", [3, None], ids=repr)
def test_a_name_that_is_no_text(value):
    with pytest.raises((TypeError, ValueError)):
        ray.get_actor(value)


def test_a_name_that_is_taken(name):
    counter = Counter.options(name=name).remote()
    with pytest.raises(ValueError, match="counter") as raised:
        Counter.options(name=name).remote()
    assert isinstance(raised.value, errors.NameTaken)
    assert isinstance(raised.value, errors.Any)
    assert get(counter.add.remote()) == 1


def test_an_empty_name():
    with pytest.raises(ValueError, match="name"):
        Counter.options(name="").remote()


def test_a_name_is_found_inside_of_tasks(name):
    counter = Counter.options(name=name).remote(10)

    @ray.remote
    def use(name):
        return ray.get(ray.get_actor(name).add.remote())

    assert get(use.remote(name)) == 11
    del counter


def test_a_name_given_inside_of_a_task_is_found_outside(name):
    @ray.remote
    def make(name):
        counter = Counter.options(name=name).remote(5)
        ray.get(counter.add.remote())
        return counter

    counter = get(make.remote(name))
    assert get(ray.get_actor(name).add.remote()) == 7
    del counter


def test_a_name_is_free_after_kill(name):
    counter = Counter.options(name=name).remote()
    get(counter.add.remote())
    ray.kill(counter)
    eventually(lambda: not exists(name))
    again = Counter.options(name=name).remote()
    assert get(again.add.remote()) == 1


def test_a_name_is_free_after_the_last_handle_is_gone(name):
    counter = Counter.options(name=name).remote()
    get(counter.add.remote())
    del counter
    eventually(lambda: not exists(name))


@differs("handles-from-names")
def test_a_handle_from_a_name_when_the_first_is_gone(name):
    counter = Counter.options(name=name).remote()
    get(counter.add.remote())
    found = ray.get_actor(name)
    del counter
    if here(ray="dies", gpunb="lives") == "dies":
        eventually(lambda: _is_dead(found))
    else:
        other = Counter.remote()
        process = get(other.pid.remote())
        del other
        eventually(lambda: not alive(process))  # it ends, whose handle was let go of later
        assert get(found.add.remote()) == 2


def _is_dead(actor):
    try:
        get(actor.add.remote())
    except errors.Actor:
        return True
    return False


def test_a_detached_actor_lives_without_handles(name):
    counter = Counter.options(name=name, lifetime="detached").remote()
    get(counter.add.remote())
    del counter
    found = ray.get_actor(name)
    assert get(found.add.remote()) == 2
    ray.kill(found)
    eventually(lambda: not exists(name))


def test_a_detached_actor_of_a_task_outlives_it(name):
    @ray.remote(max_calls=1)
    def make(name):
        counter = Counter.options(name=name, lifetime="detached").remote()
        return ray.get(counter.add.remote())

    assert get(make.remote(name)) == 1
    found = ray.get_actor(name)
    assert get(found.add.remote()) == 2
    ray.kill(found)


def test_a_lifetime_that_is_not_detached(name):
    counter = Counter.options(name=name, lifetime="non_detached").remote()
    get(counter.add.remote())
    del counter
    eventually(lambda: not exists(name))


def test_get_if_exists_finds_the_one_that_is_there(name):
    one = Counter.options(name=name, get_if_exists=True).remote()
    get(one.add.remote())
    other = Counter.options(name=name, get_if_exists=True).remote()
    assert get(other.add.remote()) == 2
    assert get(one.pid.remote()) == get(other.pid.remote())


def test_get_if_exists_makes_one_where_there_is_none(name):
    counter = Counter.options(name=name, get_if_exists=True).remote(5)
    assert get(counter.add.remote()) == 6


def test_get_if_exists_needs_a_name():
    with pytest.raises(ValueError, match="name"):
        Counter.options(get_if_exists=True).remote()


def test_the_name_stays_over_a_restart(name):
    class Fragile:
        def say(self):
            return "done"

        def crash(self):
            os._exit(1)

    fragile = ray.remote(max_restarts=1, max_task_retries=1)(Fragile).options(name=name).remote()
    get(fragile.say.remote())
    crash = fragile.crash.options(max_task_retries=0)
    with pytest.raises(errors.Actor):
        get(crash.remote())
    assert get(ray.get_actor(name).say.remote()) == "done"
