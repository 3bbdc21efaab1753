"""Pickled functions, and whether a pickle is up to date."""

from __future__ import annotations

import builtins
import json
import threading

import pytest

from gpunb.data.serialize import (
    Payload,
    captured,
    dumps_function,
    loads,
    loads_function,
    still_current,
)


def notebook(code, **names):
    space = {"__name__": "__main__", "__builtins__": builtins, **names}
    run(code, space)
    return space


def run(code, space):
    exec(compile(code, "<cell>", "exec", dont_inherit=True), space)


def test_notebook_function_is_pickled_by_value():
    space = notebook("a = 2\ndef f(x): return a * x")
    data = dumps_function(space["f"])
    assert isinstance(data, bytes)
    assert loads_function(data)(4) == 8
    home = {"a": 10}
    assert loads(Payload(data), namespace=home)(4) == 40


def test_importable_function_is_pickled_by_name():
    data = dumps_function(json.dumps)
    assert len(data) < 60
    assert loads_function(data) is json.dumps


def test_code_keeps_its_file_and_lines():
    space = notebook("def f(x):\n    def inner():\n        return x.missing\n    return inner()")
    again = loads_function(dumps_function(space["f"]))
    assert again.__code__ == space["f"].__code__
    with pytest.raises(AttributeError) as caught:
        again(1)
    lines = [(each.path, each.lineno + 1) for each in caught.traceback[1:]]
    assert [(str(path), line) for path, line in lines] == [("<cell>", 4), ("<cell>", 3)]


def test_large_globals_are_part_of_the_bytes():
    space = notebook("import numpy\nbig = numpy.arange(100_000)\ndef f(): return big.sum()")
    assert loads_function(dumps_function(space["f"]))() == space["big"].sum()


@pytest.mark.parametrize("kind", ["function f", "class f"])
def test_what_cannot_be_pickled_is_named(kind):
    code = "def f(): return lock" if "func" in kind else "class f:\n    def m(self): return lock"
    space = notebook(code, lock=threading.Lock())
    with pytest.raises(TypeError, match=f"{kind} cannot be sent to a worker: .*global 'lock'"):
        dumps_function(space["f"])


SOURCE = """
import json, functools
a = 1
def helper(): return a
def deeper(): return helper()
def f(x=None): return deeper(), json, len, missing
"""

CHANGES = [
    ("def f(): return g\ng = 1", "g = 2"),
    ("def f(): return g\ng = [1]", "g = [1]"),
    ("def f(): return g", "g = 1"),
    ("def f(): return len('')", "len = 5"),
    ("def f(): return g\ng = 1", "del g"),
    (SOURCE, "a = 2"),
    (SOURCE, "def helper(): return a"),
    (SOURCE, "def deeper(): pass"),
    (SOURCE, "missing = 1"),
    ("class C:\n    def m(self): return k\nk = 1\ndef f(): return C()", "k = 2"),
    ("class C:\n    def m(self): return k\nk = 1\ndef f(): return C()", "class C: pass"),
    (
        "class C:\n    @property\n    def m(self): return k\nk = 1\nc = C()\ndef f(): return c",
        "k = 2",
    ),
    ("class C:\n    @staticmethod\n    def m(): return k\nk = 1\ndef f(): return C", "k = 2"),
    ("class B:\n    def m(self): return k\nclass C(B): pass\nk = 1\ndef f(): return C", "k = 2"),
    ("def h(): return k\nk = 1\ntable = {'a': h}\ndef f(): return table", "k = 2"),
    ("def h(): return k\nk = 1\nimport functools\np = functools.partial(h)\ndef f(): p()", "k = 2"),
    ("def h(): return k\nk = 1\ndef make(g):\n    return lambda: g()\nf = make(h)", "k = 2"),
    ("def h(): return k\nk = 1\ndef f(g=h): return g()", "k = 2"),
    ("def h(): return k\nk = 1\ndef f(*, g=h): return g()", "k = 2"),
    ("def f():\n    def inner(): return k\n    return inner()\nk = 1", "k = 2"),
    ("class C:\n    def m(self): return k\nk = 1\nb = C().m\ndef f(): return b()", "k = 2"),
    ("def d(g):\n    def w(): return g()\n    return w\n@d\ndef f(): return k\nk = 1", "k = 2"),
]


@pytest.mark.parametrize(("code", "change"), CHANGES)
def test_new_binding_of_a_global_makes_the_snapshot_stale(code, change):
    space = notebook(code)
    snapshot = captured(space["f"])
    assert still_current(snapshot)
    assert still_current(captured(space["f"]))
    run(change, space)
    assert not still_current(snapshot)
    assert still_current(captured(space["f"]))


@pytest.mark.parametrize("change", ["other = 2", "a = a", "def unrelated(): pass", "json.x = 1"])
def test_other_changes_leave_the_snapshot_current(change, monkeypatch):
    monkeypatch.setattr(json, "x", 0, raising=False)
    space = notebook(SOURCE)
    snapshot = captured(space["f"])
    run(change, space)
    assert still_current(snapshot)


def test_snapshot_leaves_out_globals_of_imported_functions():
    assert captured(json.dumps) == ()
    assert still_current(())
    space = notebook("import json\nd = json.dumps\ndef f(): return d({})")
    assert [name for _, name, _ in captured(space["f"])] == ["d"]


def test_snapshot_of_functions_in_a_cycle_ends():
    space = notebook("def f(): return g()\ndef g(): return f()\ntable = []\nf.t = table")
    space["table"].append(space["table"])
    assert {name for _, name, _ in captured(space["f"])} == {"f", "g"}


def test_snapshot_works_with_a_global_whose_methods_raise():
    class Odd:
        def __getattribute__(self, name):
            raise RuntimeError(name)

        __class__ = property(lambda self: 1 / 0)

        def __eq__(self, other):
            raise RuntimeError("compared")

        __hash__ = None

    space = notebook("def f(): return odd")
    space["odd"] = Odd()
    assert still_current(captured(space["f"]))
