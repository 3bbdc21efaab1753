"""Exceptions of tasks are sent to the caller: a readable text arrives for every exception."""

from __future__ import annotations

import builtins
import dataclasses
import gc
import linecache
import os
import pickle
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest

from gpunb.data.segments import Segment
from gpunb.data.serialize import (
    INLINE_LIMIT,
    Payload,
    dump_failure,
    failures,
    load_failure,
    sources,
)
from gpunb.data.serialize import note_reference as note
from gpunb.exceptions import GpunbError, TaskError


def sent(error, *, task="train (#7)", skip=0, **options):
    """Raise `error`, and return it as it arrives."""
    caught = None
    try:
        try:
            raise error
        except BaseException as raised:  # noqa: BLE001 - interrupts too
            caught = raised
        payload = dump_failure(caught, task=task, skip=skip)
    finally:
        caught = None
    wire = pickle.loads(pickle.dumps(payload.wire()))
    segment = payload.segment.dup() if payload.segment is not None else None
    return load_failure(Payload.from_wire(wire, segment), **options)


class Doubling(Exception):
    """pickle calls __init__ with the finished text, which makes a different text."""

    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


class Needy(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code = code
        self.why = why


class NeedyOS(OSError):
    def __init__(self, path):
        super().__init__(2, "No such thing", path)
        self.path = path


class Slotted(Exception):
    __slots__ = ("lock", "size")

    def __init__(self, size):
        super().__init__(size, size)
        self.size = size
        self.lock = threading.Lock()


class Holding(Exception):
    """An error with an object that cannot be pickled, such as a connection."""

    def __init__(self, text, status):
        super().__init__(text, threading.Lock())
        self.status = status
        self.connection = threading.Lock()


class Reduced(Exception):
    def __reduce__(self):
        raise self.args[0]


class Loaded(Exception):
    def __reduce__(self):
        return _explode, (self.args[0],)


def _explode(how):
    raise how


class NotAnError(Exception):
    def __reduce__(self):
        return dict, ()


class Speechless(Exception):
    def __str__(self):
        raise self.args[0]

    __repr__ = __str__


class Hostile(Exception):
    def __getattribute__(self, name):
        raise SystemExit(name)

    def __str__(self):
        raise SystemExit("str")

    __repr__ = __reduce__ = __reduce_ex__ = __str__


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


def local_class():
    class EngineBackend(Exception):
        pass

    return EngineBackend


# ------------------------------------------------------------------------------------- the ordinary


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        KeyError("k"),
        ZeroDivisionError(),
        FileNotFoundError(2, "No such file", "/x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SyntaxError("bad", ("file.py", 3, 4, "x = = 1", 3, 5)),
        ImportError("no", name="x", path="/y"),
        MemoryError(),
        RecursionError("deep"),
        KeyboardInterrupt(),
        SystemExit(3),
        StopIteration(4),
        ExceptionGroup("several", [ValueError(1), TypeError(2)]),
        Doubling(5),
        Needy(7, why="because"),
        NeedyOS("/z"),
        Frozen(3),
        local_class()("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exception_arrives_with_type_arguments_and_attributes(error):
    back = sent(error)
    assert isinstance(back, TaskError)
    assert type(back.cause) is type(error)
    derived = isinstance(error, Exception) and not isinstance(error, StopIteration)
    assert isinstance(back, type(error)) == derived
    assert repr(back.cause.args) == repr(error.args)
    assert {k: repr(v) for k, v in vars(back.cause).items()} == {
        k: repr(v) for k, v in vars(error).items()
    }
    assert str(back.cause) == str(error)
    for name in ("errno", "filename", "name", "start", "lineno", "code", "value", "path"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_the_text_shows_the_task_the_process_and_the_frames():
    def user_code():
        raise ValueError("bad value")

    try:
        user_code()
    except ValueError as error:
        payload = dump_failure(error, task="train (#7)")
    text = str(load_failure(payload))
    assert text.startswith(f"train (#7) failed in process {os.getpid()}:\n\nTraceback (most recent")
    assert "in user_code" in text
    assert 'raise ValueError("bad value")' in text
    assert text.endswith("ValueError: bad value")


@pytest.mark.parametrize(
    ("skip", "shown"), [(0, "abc"), (1, "bc"), (2, "c"), (3, ""), (99, "")], ids=str
)
def test_outer_frames_are_left_out(skip, shown):
    def a_frame():
        b_frame()

    def b_frame():
        c_frame()

    def c_frame():
        raise ValueError("x")

    try:
        a_frame()
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next
        payload = dump_failure(error, task="t", skip=skip)
    text = str(load_failure(payload))
    assert [name for name in "abc" if f"in {name}_frame" in text] == list(shown)
    assert text.endswith("ValueError: x")


def test_causes_contexts_and_notes_arrive():
    def fail():
        try:
            try:
                raise KeyError("first")
            except KeyError:
                raise TypeError("second")  # noqa: B904
        except TypeError as error:
            error.add_note("noted")
            raise ValueError("third") from error

    with pytest.raises(ValueError, match="third") as info:
        fail()
    info.value.add_note("and this")
    back = sent(info.value)
    third = back.cause
    second = third.__cause__
    first = second.__context__
    assert list(map(str, (third, second, first))) == ["third", "second", "'first'"]
    assert (third.__notes__, second.__notes__) == (["and this"], ["noted"])
    assert (third.__suppress_context__, second.__suppress_context__) == (True, False)
    assert third.__context__ is second
    assert back.__cause__ is third
    for text in ("KeyError: 'first'", "noted", "direct cause", "During handling", "and this"):
        assert text in str(back)


def test_suppressed_context_stays_suppressed():
    try:
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer") from None
    except ValueError as error:
        back = load_failure(dump_failure(error, task="t"))
    assert back.cause.__suppress_context__
    assert "KeyError" not in str(back)


def test_cycle_of_causes_and_long_chain_arrive():
    one, two = ValueError("one"), KeyError("two")
    one.__cause__, two.__cause__ = two, one
    back = sent(one)
    assert back.cause.__cause__.__cause__ is back.cause
    error = ValueError("last")
    for n in range(5000):
        error.__context__, error = (before := error).__context__, ValueError(str(n))
        error.__context__ = before
    assert str(sent(error).cause) == "4999"
    while error is not None:
        error = error.__context__


# ----------------------------------------------------------------------------- a task within a task


def test_the_error_of_an_inner_task_keeps_the_root_type():
    inner = sent(FileNotFoundError(2, "No such file", "/x"), task="inner (#1)")
    outer = sent(inner, task="outer (#2)")
    assert type(outer) is type(inner)
    assert isinstance(outer, FileNotFoundError)
    assert outer.filename == "/x"
    assert outer.task == "outer (#2)"
    text = str(outer)
    assert text.startswith("outer (#2) failed in process")
    assert "\n\nbecause inner (#1) failed in process" in text
    assert text.count("No such file") == 1
    assert text.count("raise error") == 2


def test_chain_of_an_inner_error_arrives():
    def fail():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as info:
        fail()
    outer = sent(sent(info.value), task="outer")
    assert isinstance(outer.cause.__cause__, KeyError)


def test_an_inner_error_as_a_cause():
    inner = sent(KeyError("k"), task="inner (#1)")

    def fail():
        raise ValueError("wrapped") from inner

    with pytest.raises(ValueError, match="wrapped") as info:
        fail()
    back = sent(info.value)
    assert isinstance(back, ValueError)
    again = back.cause.__cause__
    assert isinstance(again, TaskError)
    assert isinstance(again, KeyError)
    assert again.task == "inner (#1)"
    assert isinstance(again.cause, KeyError)
    assert again.__cause__ is again.cause


def test_an_inner_error_without_a_cause():
    back = sent(TaskError("inner", None, "INNER"), task="outer")
    assert (type(back), back.cause) == (TaskError, None)
    assert "because inner failed:\n\nINNER" in str(back)


# ------------------------------------------------------------------------------ what cannot be sent


def test_valid_parts_of_an_error_arrive():
    back = sent(Holding("no luck", 404))
    assert isinstance(back, Holding)
    assert back.status == 404
    assert back.args[0] == "no luck"
    assert "lock" in back.args[1]
    assert not hasattr(back.cause, "connection")
    slotted = sent(Slotted(3))
    assert isinstance(slotted, Slotted)
    assert slotted.size == 3
    assert not hasattr(slotted.cause, "lock")


def test_a_group_with_a_member_that_cannot_be_sent():
    back = sent(ExceptionGroup("several", [Holding("x", 1), KeyError("k")]))
    assert isinstance(back, ExceptionGroup)
    holding, key = back.exceptions
    assert (type(holding), holding.status) == (Holding, 1)
    assert isinstance(key, KeyError)


def unpicklable(error):
    """Return the error as an instance of a class that cannot be pickled."""
    parts = {"lock": threading.Lock(), "__module__": "away"}
    return type("Nowhere", (type(error),), parts)(*error.args)


@pytest.mark.parametrize(
    ("make", "texts"),
    [  # functions, as pytest shows the values of a test that fails
        (lambda: unpicklable(ValueError("text", 5)), ["Nowhere: ('text', 5)", "lock"]),
        (lambda: NotAnError("x"), ["NotAnError: x"]),
        (lambda: Reduced(ValueError("no")), ["Reduced: no"]),
        (lambda: Reduced(SystemExit("no")), ["Reduced: no"]),
        (lambda: Reduced(RecursionError("no")), ["Reduced: no"]),
        (lambda: Loaded(SystemExit("no")), ["Loaded: no"]),
        (lambda: Loaded(KeyboardInterrupt("no")), ["Loaded: no"]),
        (lambda: Speechless(ValueError("no")), ["Speechless"]),
        (lambda: Speechless(SystemExit("no")), ["Speechless"]),
        (lambda: Hostile("x"), ["Hostile", "in sent"]),
    ],
)
def test_something_readable_arrives(make, texts):
    back = sent(make())
    assert type(back).__mro__[1:].count(TaskError) + (type(back) is TaskError) == 1
    shown = f"{back}\n{failures._described(back.cause)}"
    assert "train (#7) failed" in shown
    for text in texts:
        assert text in shown


def test_a_description_tells_type_text_arguments_and_reason():
    back = sent(unpicklable(ValueError("bad", 5)))
    assert type(back.cause) is GpunbError
    assert str(back.cause) == (
        "away.Nowhere: ('bad', 5) (args: ('bad', 5); it could not be pickled: "
        "TypeError: cannot pickle '_thread.lock' object)"
    )


def test_exception_that_cannot_be_sent_affects_no_other_of_the_chain():
    def fail():
        raise ValueError("outer") from unpicklable(KeyError("inner"))

    with pytest.raises(ValueError, match="outer") as info:
        fail()
    back = sent(info.value)
    assert type(back.cause) is ValueError
    assert "Nowhere: 'inner'" in str(back.cause.__cause__)


def test_error_of_a_missing_module_arrives_as_text(monkeypatch):
    module = types.ModuleType("only_there")
    exec("class Theirs(Exception): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_there", module)
    payload = dump_failure(module.Theirs("bad"), task="t")
    monkeypatch.delitem(sys.modules, "only_there")
    back = load_failure(payload)
    assert type(back) is TaskError
    text = "only_there.Theirs: bad (it could not be rebuilt: ModuleNotFoundError: No module named"
    assert text in str(back.cause)


def test_interrupt_while_loading_is_raised(monkeypatch):
    payload = dump_failure(ValueError("x"), task="t")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    rows = failures.loads(payload)
    monkeypatch.setattr(failures, "loads", lambda p, **_: rows if p is payload else interrupted())
    with pytest.raises(KeyboardInterrupt):
        load_failure(payload)


def test_a_class_of_the_notebook_keeps_its_namespace():
    space = {"__name__": "__main__", "__builtins__": builtins}
    exec("k = 2\nclass E(Exception):\n    def m(self): return k", space)
    error = space["E"]("x")
    assert type(sent(error).cause) is space["E"]
    home = {"k": 7}
    payload = dump_failure(error, task="t")
    from cloudpickle import cloudpickle

    cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()
    assert load_failure(payload, namespace=home).m() == 7


# ---------------------------------------------------------------------------------- size and memory


def test_an_endless_recursion_is_cut_in_the_middle():
    def down(n):
        return up(n)

    def up(n):
        return down(n)

    try:
        down(0)
    except RecursionError as error:
        back = load_failure(dump_failure(error, task="t"))
    assert isinstance(back, RecursionError)
    text = str(back)
    assert "lines left out" in text
    assert len(text) < INLINE_LIMIT
    assert text.rstrip().splitlines()[-1].startswith("RecursionError: maximum")


def test_an_endless_message_is_cut_in_the_middle():
    back = sent(ValueError("start" + "x" * 1_000_000 + "end"))
    assert len(str(back)) < INLINE_LIMIT
    assert "ValueError: start" in str(back)
    assert str(back).endswith("end")
    assert len(back.args[0]) == 1_000_008


def test_arrays_in_an_error_arrive():
    back = sent(ValueError("bad", np.arange(100_000)))
    assert back.args[1].sum() == sum(range(100_000))
    back.args[1][0] = 5


def test_error_arrives_without_memory_to_pickle_it(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    back = sent(ValueError("bad", "x" * 1_000_000))
    assert back.cause is None
    assert "ValueError: ('bad', 'xxx" in str(back)


def test_error_arrives_without_memory_for_its_text(monkeypatch):
    def fails(*_, **__):
        raise MemoryError

    monkeypatch.setattr(failures.traceback, "format_exception", fails)
    back = sent(ValueError("bad"))
    assert isinstance(back, ValueError)
    assert "in sent" in str(back)
    assert str(back).endswith("ValueError: bad")
    monkeypatch.setattr(failures.traceback, "format_tb", fails)
    monkeypatch.setattr(failures, "_links", fails)
    back = sent(ValueError("bad"))
    assert str(back).endswith("ValueError")


def test_references_in_an_error_are_noted():
    class Reference:
        def __reduce__(self):
            note("r")
            return int, ()

    assert dump_failure(ValueError(Reference()), task="t").references == ("r",)


def test_failure_keeps_no_frame_alive():
    class Big:
        pass

    def fail():
        big = Big()
        alive.append(weakref.ref(big))
        raise Holding("x", 1)

    alive = []
    gc.collect()
    gc.disable()
    try:
        try:
            fail()
        except Holding as error:
            dump_failure(error, task="t")
        assert alive[0]() is None
    finally:
        gc.enable()


def test_failure_leaves_no_descriptor_open():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for make in (ValueError, Hostile):
        sent(make("y" * 200_000))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_between_two_processes():
    script = (
        "import pickle, sys\n"
        "from gpunb.data.serialize import dump_failure, loads_function\n"
        "f = loads_function(sys.stdin.buffer.read())\n"
        "try: f()\n"
        "except BaseException as error: payload = dump_failure(error, task='f (#1)', skip=1)\n"
        "sys.stdout.buffer.write(pickle.dumps(payload.wire()))"
    )
    from gpunb.data.serialize import dumps_function

    space = {"__name__": "__main__", "__builtins__": builtins}
    code = "class E(Exception):\n  def __init__(self, a, b): self.b = b\ndef f(): raise E(1, b=2)"
    exec(compile(code, "<cell 3>", "exec"), space)
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=dumps_function(space["f"]),
        capture_output=True,
        check=True,
    )
    back = load_failure(Payload.from_wire(pickle.loads(done.stdout)))
    assert isinstance(back, space["E"])
    assert (back.b, back.process != os.getpid()) == (2, True)
    assert 'File "<string>"' not in str(back)
    assert 'File "<cell 3>", line 3, in f' in str(back)


def test_a_segment_is_used_for_large_ones():
    payload = dump_failure(ValueError("x" * 500_000), task="t")
    assert isinstance(payload.segment, Segment)
    assert load_failure(payload).args == ("x" * 500_000,)


def test_the_lines_of_cells_are_put_into_tracebacks(monkeypatch):
    cell, code = "/tmp/kernel/1.py", "def f():\n    return 1 / 0\n"
    text = f"""Traceback (most recent call last):
  File "{cell}", line 2, in f
  File "{cell}", line 99, in g
  File "{__file__}", line 1, in h
  File "<string>", line 1, in <module>
ZeroDivisionError: division by zero
"""
    assert sources.with_sources(text) == text
    monkeypatch.setattr(sources, "CELLS", [{cell: "Cell In[3]"}.get])
    monkeypatch.setitem(linecache.cache, cell, (len(code), None, code.splitlines(True), cell))
    lines = sources.with_sources(text).splitlines()
    assert lines[1:4] == [
        "  Cell In[3], line 2, in f",
        "    return 1 / 0",
        "  Cell In[3], line 99, in g",
    ]
    assert lines[4:] == text.splitlines()[3:]
    assert sources.with_sources("\n".join(lines)) == "\n".join(lines), "once is enough"
