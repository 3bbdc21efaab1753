"""Functions and classes that travel by value."""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import importlib
import io
import pickle
import signal
import sys
import types
import weakref

import cloudpickle
import pytest
from cloudpickle import cloudpickle as internals

from gpunb.data.serialize import dumps, loads, rebuild
from gpunb.data.serialize.rebuild import StreamReader
from tests.stepping import every_step


def notebook(code, **names):
    """Run `code` as a cell would and return its namespace."""
    space = {"__name__": "__main__", "__builtins__": builtins, **names}
    exec(compile(code, "<cell>", "exec", dont_inherit=True), space)
    return space


def names_in(stream):
    """Return the names that a stream looks up."""
    found = []

    class Watching(pickle.Unpickler):
        def find_class(self, module, name):
            found.append((module, name))
            return super().find_class(module, name)

    Watching(io.BytesIO(stream)).load()
    return found


@pytest.fixture
def elsewhere(monkeypatch):
    """Forget the classes of this process, as a process that never had them."""

    def forget():
        for name in ("_DYNAMIC_CLASS_TRACKER_BY_ID", "_DYNAMIC_CLASS_TRACKER_BY_CLASS"):
            monkeypatch.setattr(internals, name, type(getattr(internals, name))())
        monkeypatch.setattr(rebuild, "_arrived", type(rebuild._arrived)())

    return forget


def test_unpickler_keeps_no_reference_to_the_value():
    made = notebook("class Model: pass\nmodel = Model()")["model"]
    payload = dumps(made)
    gc.disable()
    try:
        gone = weakref.ref(loads(payload))
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["_make_function", "_function_setstate", "subimport"])
def test_streams_of_functions_name_the_replaced_private_functions(name):
    code = "import json\ndef f(): return json, g\ng = 1"
    stream = cloudpickle.dumps(notebook(code)["f"])
    assert ("cloudpickle.cloudpickle", name) in names_in(stream)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("class C: pass", "_make_skeleton_class"),
        ("import enum\nclass C(enum.Enum): A = 1", "_make_skeleton_enum"),
        ("class C: pass", "_class_setstate"),
    ],
)
def test_streams_of_classes_name_the_replaced_private_functions(code, name):
    cls = notebook(code)["C"]
    assert ("cloudpickle.cloudpickle", name) in names_in(cloudpickle.dumps(cls))
    *_, identity, extra = internals._class_reduce(cls)[1]
    assert internals._DYNAMIC_CLASS_TRACKER_BY_ID[identity] is cls
    assert extra is None


# ---------------------------------------------------------------------------------------- functions


def test_returned_function_uses_the_namespace_itself():
    away = notebook("a = 1\ndef f(): return a + b\nb = 10\n")
    home = notebook("")
    f = loads(dumps(away["f"]), namespace=home)
    assert f.__globals__ is home
    assert f() == 11
    home["a"] = 5
    assert f() == 15
    assert away["a"] == 1
    assert (f.__module__, f.__name__, f.__qualname__) == ("__main__", "f", "f")


def test_loading_a_function_changes_no_name_of_the_namespace():
    away = notebook("a = 1\nc = 3\ndef f(): return a, c, len([])\n")
    home = notebook("a = 'mine'")
    before = dict(home)
    f = loads(dumps(away["f"]), namespace=home)
    assert f() == ("mine", 3, 0)
    assert home == before | {"c": 3}
    assert home["__builtins__"] is builtins


def test_empty_namespace_gets_name_and_builtins():
    home = {}
    f = loads(dumps(notebook("def f(): return __name__, len([1])")["f"]), namespace=home)
    assert f() == ("__main__", 1)
    assert set(home) == {"__name__", "__builtins__"}


def test_functions_that_call_each_other_share_the_namespace():
    away = notebook(
        "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n > 0 and even(n - 1)\n"
    )
    home = notebook("")
    even = loads(dumps(away["even"]), namespace=home)
    assert even(10)
    assert home["odd"].__globals__ is home
    assert home["even"] is even


def test_closure_defaults_and_attributes_of_a_function_arrive():
    away = notebook(
        "def make():\n"
        "    n = [0]\n"
        "    def f(a, b=2, *, c: int = 3):\n"
        "        'doc'\n"
        "        n[0] += a\n"
        "        return n[0], b, c, top\n"
        "    f.mark = 'x'\n"
        "    return f\n"
        "f = make()\ntop = 'top'\n"
    )
    home = notebook("")
    f = loads(dumps(away["f"]), namespace=home)
    assert f(1) == (1, 2, 3, "top")
    assert f(1) == (2, 2, 3, "top")
    assert (f.mark, f.__doc__, f.__kwdefaults__) == ("x", "doc", {"c": 3})
    assert f.__annotations__ == {"c": int}
    assert away["f"](1)[0] == 1


def test_methods_use_the_namespace(elsewhere):
    away = notebook("k = 2\nclass C:\n    def m(self): return k\n    s = staticmethod(lambda: k)")
    payload = dumps(away["C"]())
    elsewhere()
    home = notebook("k = 5")
    back = loads(payload, namespace=home)
    assert type(back) is not away["C"]
    assert (back.m(), back.s()) == (5, 5)


def test_functions_of_other_modules_keep_their_own_globals(monkeypatch):
    module = types.ModuleType("somewhere")
    module.__dict__["functools"] = functools
    exec(
        "x = 'theirs'\n"
        "def decorate(f):\n"
        "    @functools.wraps(f)\n"
        "    def wrapper(): return x, f()\n"
        "    return wrapper\n",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "somewhere", module)
    away = notebook("x = 'mine'\n@decorate\ndef f(): return x\n", decorate=module.decorate)
    assert away["f"].__module__ == "__main__"
    home = notebook("")
    f = loads(dumps(away["f"]), namespace=home)
    assert f() == ("theirs", "mine")
    assert home["x"] == "mine"
    assert f.__globals__ is not home


@pytest.mark.parametrize(
    ("name", "folder", "seen"),
    [("users", "", "set later"), ("librarys", "lib/site-packages", "as imported")],
)
def test_inner_function_has_the_present_globals_only_of_a_module_of_the_user(
    monkeypatch, tmp_path, name, folder, seen
):
    folder = tmp_path / folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(
        "x = 'as imported'\ndef make():\n    def inner(): return x\n    return inner\n"
    )
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(name)
    module.x = "set later"
    packed = dumps(module.make())
    del sys.modules[name]  # as in another process
    assert loads(packed)() == seen
    sys.modules.pop(name, None)


def test_functions_of_one_payload_share_their_globals_without_a_namespace():
    away = notebook("a = 1\ndef f(): return a\ndef g(): global a; a += 1\n")
    f, g = loads(dumps([away["f"], away["g"]]))
    g()
    assert (f(), away["f"]()) == (2, 1)
    assert f.__globals__ is g.__globals__


def test_function_under_two_names_stays_one_object():
    away = notebook("def f(): pass\ng = f\nclass C: pass\nD = C")
    f, g, (c, d) = loads(dumps([away["f"], away["g"], [away["C"], away["D"]]]), namespace={})
    assert f is g
    assert c is d


def test_function_from_a_large_payload_uses_the_namespace():
    away = notebook("data = b'x' * 100_000\nmore = list(range(50_000))\ndef f(): return data, more")
    payload = dumps(away["f"])
    assert payload.segment is not None
    home = {}
    f = loads(payload, namespace=home)
    assert f() == (away["data"], away["more"])
    assert f.__globals__ is home


# ------------------------------------------------------------------------------------------ classes


def test_returned_class_is_the_original_with_its_later_changes():
    home = notebook("class C:\n    total = 0\n    def m(self): return 'first'")
    payload = dumps([home["C"](), home["C"]])
    home["C"].total = 5
    home["C"].m = changed = lambda self: "second"
    instance, cls = loads(payload, namespace=home)
    assert cls is home["C"]
    assert type(instance) is cls
    assert (cls.total, cls.m) == (5, changed)


def test_class_of_this_process_gets_only_missing_attributes():
    home = notebook("class C:\n    kept = 1")
    home["C"].gone = 2
    payload = dumps(home["C"])
    home["C"].kept = 3
    del home["C"].gone
    loads(payload)
    assert (home["C"].kept, home["C"].gone) == (3, 2)
    loads(payload, update_classes=True)
    assert home["C"].kept == 1


def test_class_from_another_process_gets_later_changes(elsewhere):
    home = notebook("class C:\n    v = 1")
    first = dumps(home["C"])
    home["C"].v = 2
    second = dumps(home["C"])
    elsewhere()
    arrived = loads(first)
    assert arrived is not home["C"]
    assert arrived.v == 1
    assert loads(second) is arrived
    assert arrived.v == 2


def test_returned_enum_members_are_identical():
    home = notebook("import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\n    def m(self): pass")
    a, cls, (b,) = loads(dumps([home["E"].A, home["E"], {home["E"].B}]))
    assert (a, cls, b) == (home["E"].A, home["E"], home["E"].B)
    assert a is home["E"].A


def test_known_class_is_not_made_again():
    seen = []

    class Meta(type):
        def __init__(cls, name, bases, space, **options):
            seen.append(name)
            super().__init__(name, bases, space)

    base = Meta("Base", (), {"__module__": "__main__"})
    home = notebook("class C(Base): pass", Base=base)
    payload = dumps(home["C"]())
    del seen[:]
    assert type(loads(payload)) is home["C"]
    assert seen == []


@pytest.mark.parametrize(
    "code",
    [
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass C:\n    x: int = 1",
        "import abc\nclass C(abc.ABC):\n    m = abc.abstractmethod(lambda: 0)\nC.register(int)",
        "class C:\n    __slots__ = ('a', 'b')",
        "import typing\nT = typing.TypeVar('T')\nclass C(typing.Generic[T]): pass",
        "import collections\nC = collections.namedtuple('C', 'a b', module='__main__')",
        "class C(Exception):\n    def __init__(self, a): super().__init__(a)",
    ],
    ids=["dataclass", "abc", "slots", "generic", "namedtuple", "exception"],
)
def test_classes_of_many_kinds_keep_their_identity(code, elsewhere):
    home = notebook(code)
    payload = dumps(home["C"])
    assert loads(payload) is home["C"]
    elsewhere()
    first, second = loads(payload), loads(payload)
    assert first is second
    assert first is not home["C"]
    assert first.__name__ == "C"


# ---------------------------------------------------------------------------------- reading streams


@pytest.mark.parametrize("protocol", range(6))
def test_stream_reader_reads_every_pickle_protocol(protocol):
    value = {"a": [1, 2.5, "text", b"x" * 200_000, None], "b": ("y" * 5000,)}
    stream = memoryview(pickle.dumps(value, protocol))
    assert pickle.Unpickler(StreamReader(stream)).load() == value


def test_stream_reader_returns_the_same_bytes_as_a_file():
    data = bytes(range(256)) * 40 + b"\nlast line without an end" + b"z" * 5000
    reader, file = StreamReader(memoryview(data)), io.BytesIO(data)
    assert reader.read(3) == file.read(3)
    assert [reader.readline() for _ in range(45)] == [file.readline() for _ in range(45)]
    reader, file = StreamReader(memoryview(data)), io.BytesIO(data)
    for size in (0, 1, 5000, 10_000, 100_000):
        one, other = bytearray(size), bytearray(size)
        assert reader.readinto(one) == file.readinto(other)
        assert one == other
    assert reader.read() == b""
    assert StreamReader(memoryview(data)).read() == data


def test_an_interrupt_at_any_step_leaves_a_class_its_init_subclass(elsewhere):
    space = notebook(
        "class Base:\n    def __init_subclass__(cls): seen.append(cls)\nclass Sub(Base): pass",
        seen=[],
    )
    base, payload = space["Base"], dumps(space["Sub"])
    identity = internals._DYNAMIC_CLASS_TRACKER_BY_CLASS[base]

    def interrupt():
        signal.raise_signal(signal.SIGINT)

    seen = list(space["seen"])
    for steps in every_step(interrupt, rebuild):
        elsewhere()
        internals._lookup_class_or_track(identity, base)
        with contextlib.suppress(KeyboardInterrupt), steps.counted():
            loads(payload)
        assert "__init_subclass__" in vars(base)
    assert space["seen"] == seen
