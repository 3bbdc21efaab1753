"""Explanations of why a value cannot be pickled, and which part is the cause."""

from __future__ import annotations

import asyncio
import builtins
import functools
import gc
import importlib
import itertools
import pickle
import socket
import sqlite3
import sys
import threading
import types
import weakref
from types import SimpleNamespace

import pytest

from gpunb.data.serialize import dumps, loads


class Box:
    def __init__(self, **parts):
        self.__dict__.update(parts)


class Slots:
    __slots__ = ("inner", "other")


class Careful:
    """Leaves its lock out of its pickle."""

    def __init__(self, **parts):
        self.lock = threading.Lock()
        self.__dict__.update(parts)

    def __getstate__(self):
        return {name: part for name, part in vars(self).items() if name != "lock"}


class Raising:
    def __reduce__(self):
        raise ValueError("not today")


class Exiting:
    def __reduce__(self):
        sys.exit("bye")


class Node:
    def __init__(self, parent=None):
        self.parent = parent
        self.children = []
        if parent is not None:
            parent.children.append(self)


def slots(part):
    made = Slots()
    made.inner = part
    return made


def generator():
    yield 1


def notebook(code, **names):
    space = {"__name__": "__main__", "__builtins__": builtins, **names}
    exec(compile(code, "<cell>", "exec", dont_inherit=True), space)
    return space


LOCK = threading.Lock()
NEEDED = "belong to one process. Make it inside the function instead."


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (LOCK, "it is a _thread.lock; locks, open files"),
        ([1, LOCK], "[1] is a _thread.lock;"),
        ((1, (2, LOCK)), "[1][1] is a _thread.lock;"),
        ({"a": {"b": LOCK}}, "['a']['b'] is a _thread.lock;"),
        ({LOCK: 1}, "it (the key <unlocked"),
        ({LOCK}, "it (an element) is a _thread.lock;"),
        (Box(head=Box(lock=LOCK)), ".head.lock is a _thread.lock;"),
        (slots(LOCK), ".inner is a _thread.lock;"),
        (Careful(other=[LOCK]), ".other[0] is a _thread.lock;"),
        (Box(a=1, b=generator()), ".b is a generator;"),
        (types.SimpleNamespace(x=LOCK), ".x is a _thread.lock;"),
        (functools.partial(print, LOCK), ".args[0] is a _thread.lock;"),
        (Box(x=LOCK).__init__, ".__self__.x is a _thread.lock;"),
        (ValueError("x", LOCK), ".args[1] is a _thread.lock;"),
        (Box(r=Raising()), ".r is a test_explain.Raising, and pickling it raised ValueError: not"),
        (Box(e=Exiting()), ".e is a test_explain.Exiting, and pickling it raised SystemExit: bye"),
        (sys._getframe(), "it is a frame;"),
        (weakref.ref(Box), "it is a weakref.ReferenceType;"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20],
)
def test_explanation_names_the_part_that_cannot_be_pickled(value, where):
    text = explain_it(value)
    assert text.startswith(f"value cannot be sent to a worker: {where}")
    if where.endswith(";"):
        assert text.endswith(NEEDED)


def explain_it(value, what="value", **options):
    with pytest.raises(TypeError) as info:
        dumps(value, what=what, **options)
    return str(info.value).replace(__name__, "test_explain")


def test_a_buffer_with_gaps():
    class Gaps:
        def __reduce_ex__(self, protocol):
            return bytes, (pickle.PickleBuffer(memoryview(b"abcd")[::2]),)

    assert "non-contiguous" in explain_it([Gaps()])


def test_explanation_names_sockets_files_and_connections():
    with socket.socket() as link, open(__file__, "a") as file, sqlite3.connect(":memory:") as base:
        assert "[0] is a socket.socket;" in explain_it([link])
        assert "['f'] is an _io.TextIOWrapper;" in explain_it({"f": file})
        assert ".c is a sqlite3.Connection;" in explain_it(Box(c=base))
    base.close()


def test_explanation_names_coroutines_and_event_loops():
    async def work():
        pass

    coroutine = work()
    assert "is a coroutine;" in explain_it([coroutine])
    coroutine.close()
    loop = asyncio.new_event_loop()
    text = explain_it(Box(loop=loop))
    loop.close()
    assert ".loop is an asyncio.unix_events._UnixSelectorEventLoop;" in text


def test_explanation_names_the_argument():
    model = Box(head=Box(lock=LOCK))
    text = explain_it(((1, 2), {"model": model}), "arguments of train")
    assert text == (
        "argument 'model' of train cannot be sent to a worker: .head.lock is a _thread.lock; "
        "locks, open files, sockets, generators and database connections belong to one process. "
        "Make it inside the function instead."
    )
    text = explain_it(((1, model), {}), "arguments of train")
    assert text.startswith("argument 2 of train cannot be sent to a worker: .head.lock is")
    text = explain_it(((1, model), {}), "arguments of train", names=["data", "model"])
    assert text.startswith("argument 'model' of train cannot")
    text = explain_it(((1, model), {}), "arguments of train", names=["data"])
    assert text.startswith("argument 2 of train cannot")


def test_explanation_of_a_result_says_sent_back():
    for what in ("result of train", "the result of train (#7)"):
        assert explain_it([LOCK], what).startswith(f"{what} cannot be sent back: [0] is a")


def test_explanation_follows_globals_of_functions():
    space = notebook(
        "def helper(): return db.x\ndef train(): return helper()\n", db=Box(x=[Box(conn=LOCK)])
    )
    text = explain_it(space["train"], "function train")
    assert text.startswith(
        "function train cannot be sent to a worker: global 'helper' of train(), "
        "global 'db' of helper().x[0].conn is a _thread.lock;"
    )


@pytest.mark.parametrize(
    ("code", "where"),
    [
        (
            "def make(v):\n    return lambda: v\nf = make(lock)",
            "variable 'v' captured by <lambda>()",
        ),
        ("def f(a=lock): pass", "a default argument of f()"),
        ("def f(*, a=lock): pass", "a default argument of f()"),
        ("def f(): pass\nf.mark = lock", "attribute 'mark' of f()"),
        ("class f:\n    held = lock", ".held"),
        ("class f:\n    def m(self): return lock", ".m, global 'lock' of m()"),
        ("class f:\n    @staticmethod\n    def m(): return lock", ".m, global 'lock' of m()"),
        ("class f:\n    @property\n    def m(self): return lock", ".m.fget, global 'lock' of m()"),
        ("class B:\n    held = lock\nclass f(B): pass", "it (base B).held"),
        ("class C:\n    held = lock\nf = C()", "it (its class).held"),
        ("import functools\nf = functools.partial(lambda: lock)", ".func, global 'lock' of <la"),
        (
            "import collections\nclass L(list): pass\nf = L([1, lock])",
            "[1]",
        ),
        ("class D(dict): pass\nf = D(a=lock)", "['a']"),
    ],
)
def test_explanation_names_the_place_within_functions_and_classes(code, where):
    text = explain_it(notebook(code, lock=LOCK)["f"])
    assert f"cannot be sent to a worker: {where}" in text
    assert "is a _thread.lock;" in text


def test_culprit_is_found_in_a_tree_with_links_to_parents():
    root = Node()
    for _ in range(3):
        Node(Node(root))
    root.zzz = LOCK
    assert ": .zzz is a _thread.lock;" in explain_it(root)
    del root.zzz
    root.children[2].children[0].bad = LOCK
    assert ".children[2].children[0].bad is a _thread.lock;" in explain_it(root)


def test_culprit_is_found_in_an_object_that_refers_to_itself():
    box = Box()
    box.itself = box
    box.list = [box, {"lock": LOCK}]
    assert ": .list[1]['lock'] is a _thread.lock;" in explain_it(box)


def test_explanation_names_data_that_is_nested_too_deeply():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    text = explain_it(((), {"tree": Box(data={"x": deep})}), "arguments of f")
    assert text == (
        "argument 'tree' of f cannot be sent to a worker: .data['x'] is nested too deeply "
        "(Python's limit is 1,000 levels)"
    )
    while deep:
        deep = deep[0]


def test_explanation_works_with_little_stack_left():
    def down(n):
        return down(n - 1) if n else explain_it([Box(lock=LOCK)])

    for n in range(700, 1000, 7):
        try:
            assert "cannot be sent to a worker" in down(n)
        except RecursionError:
            break


def test_explanation_works_for_objects_whose_methods_raise():
    class Hostile:
        def __getattribute__(self, name):
            raise RuntimeError("leave me alone")

        def __repr__(self):
            raise RuntimeError("no")

    assert "[0] is a" in explain_it([Hostile()])
    assert "RuntimeError: leave me alone" in explain_it({Hostile(): 1})


def test_explanation_works_for_an_error_whose_str_raises():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError

    class Thing:
        def __reduce__(self):
            raise Silent

    assert explain_it(Thing()).endswith("pickling it raised Silent")


def test_search_in_a_large_value_is_limited(monkeypatch):
    module = importlib.import_module("gpunb.data.serialize.explain")
    pickled = []
    failure = module._failure
    monkeypatch.setattr(module, "_failure", lambda part: pickled.append(part) or failure(part))
    large = [*[Box(x=1)] * 2_000_000, LOCK]
    given_up = ": it is a list, and pickling it raised TypeError: cannot pickle '_thread.lock'"

    # Each look at the clock takes a tenth of a second.
    seconds = itertools.count(0, 0.1)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(module, "_MOST_SECONDS", 1.0)
    assert given_up in explain_it(large)
    assert 5 < len(pickled) < 15

    # The clock stands still.
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(module, "_MOST_PROBES", 10)
    pickled.clear()
    assert given_up in explain_it(large)
    assert 5 < len(pickled) < 15


def test_search_keeps_no_reference_to_the_value():
    gc.collect()
    gc.disable()
    try:
        box = Box(lock=LOCK, data=[1])
        gone = weakref.ref(box)
        try:
            dumps([box])
        except TypeError:
            pass
        del box
        assert gone() is None
    finally:
        gc.enable()


def test_explain_finds_the_error_itself():
    from gpunb.data.serialize.explain import explain as ask

    assert ask([LOCK], "x").startswith("x cannot be sent to a worker: [0] is a _thread.lock;")
    assert ask([1], "x") == "x cannot be sent to a worker: nothing in it fails now"
    assert "ValueError: no" in ask([1], "x", error=ValueError("no"))


def test_files_that_a_cell_reads(monkeypatch):
    with open(__file__) as file:
        line = file.readline()
        message = "x cannot be sent to a worker: {} is an _io.TextIOWrapper"
        assert message.format("it") in explain_it(file, "x", way="cell")
        assert message.format("[1]['f']") in explain_it([1, {"f": file}], "x", way="cell")
        assert loads(dumps(file)).getvalue().startswith(line)
        monkeypatch.setattr(sys, "stdout", file)
        assert loads(dumps(file, way="cell")) is file
