"""Actors: which classes they may have, and which options and devices."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import os

import pytest

import gpunb
from gpunb.exceptions import InfeasibleRequestError
from tests.api.actors.counter import Counter, get
from tests.sessions import alive
from tests.waiting import eventually


def test_derived_abstract_and_data_classes_can_be_actors(four):
    class Base(abc.ABC):
        def __init__(self, x):
            self.x = x

        @abc.abstractmethod
        def read(self):
            return self.x

        def base(self):
            return "base"

        @staticmethod
        def helper(a):
            return a

    @gpunb.remote
    class Derived(Base):
        def __init__(self, x):
            super().__init__(2 * x)

        def read(self):
            return super().read() + 1

    @gpunb.remote
    @dataclasses.dataclass
    class Data:
        a: int
        b: str = "b"

        def both(self):
            return self.a, self.b

    def logs(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return "logged", function(*args, **kwargs)

        return wrapper

    @gpunb.remote
    class Stack(list):
        __slots__ = ()
        log = math.log

        @logs
        def top(self, n=1):
            return self[-n]

        second = functools.partialmethod(top, n=2)

    derived = Derived.remote(5)
    assert get([derived.read.remote(), derived.base.remote()]) == [11, "base"]
    assert get(derived.helper.remote(3)) == 3
    assert get(Data.remote(1).both.remote()) == (1, "b")
    with pytest.raises(TypeError, match="missing"):
        Data.remote()
    stack = Stack.remote([1, 2])
    get(stack.append.remote(7))
    assert get(stack.top.remote()) == ("logged", 7)
    assert get(stack.second.remote()) == ("logged", 2)
    assert get(stack.log.remote(1)) == 0
    assert get(stack.pop.remote()) == 7


def test_a_remote_class_can_be_in_a_closure(four):
    @gpunb.remote
    class EngineBackend:
        def read(self):
            return 42

    @gpunb.remote
    def outer():
        @gpunb.remote
        def inner():
            return gpunb.get(EngineBackend.remote().read.remote())

        return gpunb.get(inner.remote())

    assert get(outer.remote()) == 42


def helper():
    return 1


def test_a_helper_that_is_redefined_is_seen(four):
    @gpunb.remote
    class Uses:
        def read(self):
            return helper()

    assert get(Uses.remote().read.remote()) == 1
    original = globals()["helper"]
    try:
        globals()["helper"] = lambda: 2
        assert get(Uses.remote().read.remote()) == 2
    finally:
        globals()["helper"] = original


def test_num_returns_of_a_method(four):
    @gpunb.remote
    class Splits:
        @gpunb.method(num_returns=2)
        def two(self):
            return 1, 2

        @gpunb.method(name="shown")
        def fail(self):
            raise ValueError

        def three(self):
            return [1, 2, 3]

    splits = Splits.remote()
    assert get(splits.two.remote()) == [1, 2]
    assert get(splits.three.options(num_returns=3).remote()) == [1, 2, 3]
    assert splits.three.options(num_returns=0).remote() is None
    assert get(splits.two.options(num_returns=1).remote()) == (1, 2)
    with pytest.raises(ValueError, match=r"shown \(#"):
        get(splits.fail.remote())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_restarts": -2}, ValueError, "max_restarts=-2"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts"),
        ({"max_task_retries": "a"}, TypeError, "max_task_retries"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency=0"),
        ({"max_pending_calls": 0}, ValueError, "max_pending_calls=0"),
        ({"lifetime": "for ever"}, ValueError, "lifetime='for ever'"),
        ({"get_if_exists": 1}, TypeError, "get_if_exists"),
        ({"name": ""}, ValueError, "name=''"),
        ({"name": 3}, TypeError, "name"),
        ({"namespace": 3}, TypeError, "namespace"),
        ({"num_gpus": 1.5}, ValueError, "1.5"),
        ({"num_gpus": "a"}, TypeError, "num_gpus"),
        ({"num_returns": 2}, ValueError, "one of functions and methods, not of classes"),
        ({"max_calls": 2}, ValueError, "one of functions, not of classes"),
        ({"max_retries": 2}, ValueError, "one of functions, not of classes"),
        ({"max_restart": 2}, ValueError, "did you mean 'max_restarts'"),
        ({"runtime_env": {"pip": []}}, ValueError, "'pip'"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_wrong_options_of_classes_are_refused(options, error, words):
    class Plain:
        pass

    with pytest.raises(error, match=words):
        gpunb.remote(**options)(Plain)
    with pytest.raises(error, match=words):
        gpunb.remote(Plain).options(**options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_returns": -1}, ValueError, "num_returns=-1"),
        ({"num_returns": "many"}, ValueError, "'many'"),
        ({"num_returns": 1.5}, TypeError, "num_returns"),
        ({"max_task_retries": -2}, ValueError, "max_task_retries"),
        ({"retry_exceptions": ValueError}, TypeError, "retry_exceptions"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "1"}, TypeError, "timeout"),
        ({"num_gpus": 1}, ValueError, "not of methods"),
        ({"max_retries": 1}, ValueError, "not of methods"),
        ({}, TypeError, "options"),
    ],
    ids=str,
)
def test_wrong_options_of_methods_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        gpunb.method(**options)


def test_wrong_options_of_calls_are_refused(four):
    counter = Counter.remote()
    with pytest.raises(ValueError, match="not of methods"):
        counter.add.options(num_gpus=1)
    with pytest.raises(ValueError, match="does not yield"):
        counter.add.options(num_returns="streaming")


def test_an_actor_that_can_never_run_is_refused(four):
    for options in ({"num_gpus": 5}, {"accelerator_type": "H100"}, {"num_cpus": 3}):
        with pytest.raises(InfeasibleRequestError, match="Counter"):
            Counter.options(name="never", **options).remote()
    with pytest.raises(ValueError, match="never"):
        gpunb.get_actor("never")


@gpunb.remote(num_gpus=0.5)
class Pinned:
    def __init__(self):
        self.at_start = gpunb.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    def look(self):
        return self.at_start, gpunb.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    def variable(self, name):
        return os.environ.get(name)


def test_two_halves_share_a_device(four):
    actors = [Pinned.remote() for _ in range(3)]
    for expected, actor in zip([0, 0, 1], actors, strict=True):
        at_start, ids, variable = get(actor.look.remote())
        assert at_start == ([expected], str(expected))
        assert (ids, variable) == at_start
        assert get(actor.look.remote())[1] == [expected]
    typed = Pinned.options(accelerator_type="V100").remote()
    assert get(typed.look.remote())[1] == [2]
    free = Pinned.options(num_gpus=0).remote()
    assert get(free.look.remote()) == (([], ""), [], "")


def test_the_environment_of_an_actor_is_its_own(four, monkeypatch):
    actor = Pinned.options(runtime_env={"env_vars": {"OF_ACTOR": "1"}}).remote()
    assert get(actor.variable.remote("OF_ACTOR")) == "1"
    monkeypatch.setenv("SINCE_THEN", "1")
    assert get(actor.variable.remote("SINCE_THEN")) is None
    assert get(Pinned.remote().variable.remote("SINCE_THEN")) == "1"


def test_an_actor_holds_no_cpus_unless_it_asks(four):
    actors = [Counter.remote() for _ in range(5)]
    get([each.read.remote() for each in actors])
    assert gpunb.available_resources()["CPU"] == 2
    actor = Counter.options(num_cpus=2).remote()
    get(actor.read.remote())
    assert "CPU" not in gpunb.available_resources()
    del actor
    eventually(lambda: gpunb.available_resources().get("CPU") == 2)


def test_the_status_lists_actors(four):
    actor = Pinned.options(name="shown").remote()
    get(actor.look.remote())
    (facts,) = gpunb.status()["actors"]
    assert facts["name"] == "shown"
    assert facts["class"] == "Pinned"
    assert alive(facts["pid"])
