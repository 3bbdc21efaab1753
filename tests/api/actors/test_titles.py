"""An actor's own `__repr__` in the prefix of its output and in its errors."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

import gpunb
from gpunb.exceptions import ActorDiedError
from tests.api.actors.counter import back, echo, get
from tests.waiting import eventually


class Indexed:
    def __init__(self, index):
        self.index = index

    def __repr__(self):
        return f"Indexed(index={self.index})"

    def say(self, text):
        echo(text)
        return os.getpid()

    def set(self, index):
        self.index = index

    def fail(self):
        raise LookupError("nothing there")

    def crash(self):
        os._exit(3)


class IndexedAsync(Indexed):
    async def waits(self):
        return self.index


KINDS = {
    "sync": lambda: gpunb.remote(Indexed),
    "threads": lambda: gpunb.remote(max_concurrency=2)(Indexed),
    "async": lambda: gpunb.remote(IndexedAsync),
}


@pytest.mark.parametrize("kind", KINDS)
def test_output_begins_with_the_repr_of_the_actor(four, console, kind):
    actor = KINDS[kind]().remote(1)
    pid = get(actor.say.remote("hello"))
    eventually(lambda: "hello" in "".join(console))
    assert "".join(console) == f"(Indexed(index=1) pid={pid}) hello\n"


def test_the_repr_is_evaluated_once_after_the_constructor(four, console):
    actor = gpunb.remote(Indexed).remote(1)
    get(actor.set.remote(2))
    get(actor.say.remote("still"))
    eventually(lambda: "still" in "".join(console))
    assert "".join(console).startswith("(Indexed(index=1) pid=")


@pytest.mark.parametrize("kind", KINDS)
def test_errors_name_the_actor_by_its_repr(four, kind):
    actor = KINDS[kind]().remote(4)
    with pytest.raises(LookupError, match=r"Indexed\(index=4\)\.fail \(#\d+\)"):
        get(actor.fail.remote())
    with pytest.raises(ActorDiedError, match=r"Indexed\(index=4\)\.crash \(#\d+\): the actor"):
        get(actor.crash.remote())


def test_a_name_of_calls_stays(four):
    actor = gpunb.remote(Indexed).remote(4)
    with pytest.raises(LookupError, match=r"mine \(#\d+\)"):
        get(actor.fail.options(name="mine").remote())


def test_a_restarted_actor_has_its_repr(four, console):
    actor = gpunb.remote(Indexed).options(max_restarts=1).remote(7)
    with pytest.raises(gpunb.exceptions.ActorError):
        get(actor.crash.remote())
    back(actor.say, "again")
    eventually(lambda: "again" in "".join(console))
    assert "(Indexed(index=7) pid=" in "".join(console)


@dataclass
class Point:
    x: int

    def say(self):
        echo("here")


def test_a_dataclass_has_a_repr(four, console):
    actor = gpunb.remote(Point).remote(3)
    get(actor.say.remote())
    eventually(lambda: "here" in "".join(console))
    assert "".join(console).endswith(") here\n")
    assert "Point(x=3) pid=" in "".join(console)


class Plain:
    def say(self):
        echo("here")


class Raises(Plain):
    def __repr__(self):
        raise SystemExit(3)


class NoText(Plain):
    def __repr__(self):
        return 3


class Long(Plain):
    def __repr__(self):
        return "x" * 1000


class Lines(Plain):
    def __repr__(self):
        return "one\ntwo"


class Dict(dict, Plain):
    pass


@pytest.mark.parametrize("kind", [Plain, Raises, NoText, Long, Lines, Dict])
def test_without_a_usable_repr_the_class_names_the_actor(four, console, kind):
    actor = gpunb.remote(kind).remote()
    get(actor.say.remote())
    eventually(lambda: "here" in "".join(console))
    assert "".join(console).startswith(f"({kind.__name__} pid=")
