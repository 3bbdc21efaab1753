"""The error tree, and TaskError, which is also of the type of its cause."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import pickle
import re
import subprocess
import sys
import traceback
import weakref

import pytest

from gpunb import exceptions
from gpunb.exceptions import GpunbError, TaskError

SIMPLE = [
    getattr(exceptions, name)
    for name in exceptions.__all__
    if name not in {"TaskError", "InternalError"}
]


def test_rays_names():
    for theirs, ours in (
        ("RayError", "GpunbError"),
        ("RayTaskError", "TaskError"),
        ("RayActorError", "ActorError"),
        ("ObjectStoreFullError", "OutOfMemoryError"),
    ):
        assert getattr(exceptions, theirs) is getattr(exceptions, ours)


class Needy(Exception):
    """Has an __init__ that pickle's default cannot call."""

    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code = code
        self.why = why


class Slotted(Exception):
    __slots__ = ("size",)

    def __init__(self, size):
        self.size = size


class Reducing(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.second = second

    def __reduce__(self):
        return Reducing, (self.args[0], self.second)


class Worded(Exception):
    def __str__(self):
        return "my own words"


class Clashing(Exception):
    """Its names are those of TaskError, and they cannot be set."""

    @property
    def task(self):
        return "the cause's task"

    traceback = property(lambda self: "the cause's traceback")
    cause = property(lambda self: "the cause's cause")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Guarded(Exception):
    def __setattr__(self, name, value):
        raise TypeError("nothing can be set here")


class Final(Exception):
    def __init_subclass__(cls):
        raise TypeError("this class cannot be derived from")


class FinalAndRude(Exception):
    def __init_subclass__(cls):
        raise SystemExit("not even politely")


class Meta(type):
    def __new__(mcs, name, bases, space, *, needed=None):
        return super().__new__(mcs, name, bases, space)


class WithMeta(Exception, metaclass=Meta):
    pass


class WithNew(Exception):
    def __new__(cls, one, two):
        return super().__new__(cls, one, two)


class Unhashable(Exception):
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("never compare me")


class Broken(Exception):
    def __str__(self):
        raise SystemExit("str")

    __repr__ = __str__


CAUSES = [
    ValueError("bad"),
    KeyError("missing"),
    FileNotFoundError(2, "No such file", "/nowhere"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ImportError("no", name="nothing", path="/x"),
    SyntaxError("bad", ("file.py", 3, 4, "x = = 1", 3, 5)),
    MemoryError("much"),
    RecursionError("deep"),
    ZeroDivisionError(),
    Needy(7, why="because"),
    Slotted(3),
    Reducing("a", "b"),
    Worded("other words"),
    Clashing("x"),
    Frozen(5),
    Guarded("x"),
    WithMeta("x"),
    WithNew(1, 2),
    Unhashable("x"),
    Broken("x"),
    ExceptionGroup("several", [ValueError(1), TypeError(2)]),
    exceptions.WorkerCrashedError("gone"),
    exceptions.GetTimeoutError("late"),
]

PLAIN_CAUSES = [
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(4),
    StopAsyncIteration(),
    BaseExceptionGroup("several", [KeyboardInterrupt()]),
    Final("x"),
    FinalAndRude("x"),
    GpunbError("x"),
    Exception("x"),
]


def named(cause):
    return type(cause).__name__


def test_the_tree_is_the_one_in_the_docstring():
    parents = {}
    above = []
    for line in exceptions.__doc__.splitlines():
        found = re.match(r"    ([| ]*)(?:\+-- )?([A-Z]\w+)", line)
        if not found or not re.search("Error|Exceeded|Removed", line):
            continue
        depth = len(found[1]) // 4 + ("+--" in line)
        above[depth:] = [found[2]]
        parents[found[2]] = above[depth - 1] if depth else None
    assert set(parents) == set(exceptions.__all__)
    for name, parent in parents.items():
        cls = getattr(exceptions, name)
        assert cls.__bases__[0] is (getattr(exceptions, parent) if parent else Exception), name


@pytest.mark.parametrize(
    ("cls", "also"),
    [
        (exceptions.GetTimeoutError, TimeoutError),
        (exceptions.InfeasibleRequestError, ValueError),
        (exceptions.OutOfMemoryError, MemoryError),
    ],
)
def test_some_errors_are_also_of_a_builtin_type(cls, also):
    assert issubclass(cls, also)
    with pytest.raises(also, match="because"):
        raise cls("because")


@pytest.mark.parametrize("cls", SIMPLE)
def test_simple_errors_survive_pickling_with_their_attributes(cls):
    error = cls("some text")
    error.detail = {"a": 1}
    error.add_note("a note")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert (str(back), back.args, vars(back)) == ("some text", error.args, vars(error))


def test_an_internal_error_asks_for_a_report():
    back = pickle.loads(pickle.dumps(exceptions.InternalError("no such state")))
    assert "no such state" in str(back)
    assert "please report" in str(back)


# ------------------------------------------------------------------------------------ TaskError


def test_the_text_is_the_remote_traceback():
    error = TaskError("train (#7)", ValueError("x"), "Traceback ...\nValueError: x\n", process=123)
    assert str(error) == "train (#7) failed in process 123:\n\nTraceback ...\nValueError: x"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TaskError("train"), "train failed"),
        (TaskError("train", ValueError("x")), "train failed: ValueError: x"),
        (TaskError("train", None, "T"), "train failed:\n\nT"),
        (TaskError("train", Broken()), "<Broken: its str() raised SystemExit>"),
    ],
)
def test_the_text_where_little_is_known(error, text):
    assert text in str(error)


@pytest.mark.parametrize("cause", CAUSES, ids=named)
def test_an_error_is_also_of_its_causes_type(cause):
    error = TaskError.of(cause, task="t", traceback="TB")
    assert isinstance(error, TaskError)
    assert isinstance(error, type(cause))
    assert type(error).__name__ == f"TaskError({type(cause).__name__})"
    assert error.__cause__ is cause
    assert error.cause is cause
    assert (error.task, error.traceback, str(error)) == ("t", "TB", "t failed:\n\nTB")
    assert error.args is cause.args
    with pytest.raises(type(cause)):
        raise error
    with pytest.raises(TaskError):
        raise error
    assert {error: 1}[error] == 1
    assert "t" in repr(error)


@pytest.mark.parametrize("cause", CAUSES + PLAIN_CAUSES, ids=named)
def test_an_error_can_be_shown_and_pickled(cause, tmp_path):
    error = TaskError.of(cause, task="t", traceback="TB")
    assert f"{type(error).__name__}: " in "".join(traceback.format_exception(error))
    if isinstance(cause, Needy | Slotted | Frozen | Guarded):
        return  # the cause itself cannot make it
    error.add_note("a note")
    error.extra = 5
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(back) is type(error)
        assert back.__cause__ is back.cause
        assert type(back.cause) is type(cause)
        assert (back.task, back.traceback, back.process) == ("t", "TB", None)
        assert (back.__notes__, back.extra) == (["a note"], 5)


@pytest.mark.parametrize("cause", PLAIN_CAUSES, ids=named)
def test_it_is_a_plain_task_error_where_no_other_class_will_do(cause):
    error = TaskError.of(cause, task="t")
    assert type(error) is TaskError
    assert error.__cause__ is cause
    assert error.args is cause.args


def test_error_as_an_instance_of_its_cause_is_the_error_itself():
    error = TaskError.of(ValueError("no"), task="t")
    assert isinstance(error.as_instanceof_cause(), ValueError)
    assert error.as_instanceof_cause() is error
    assert isinstance(TaskError.of(StopIteration(3), task="t").as_instanceof_cause(), StopIteration)


def test_attributes_are_those_of_the_cause():
    missing = TaskError.of(FileNotFoundError(2, "No such file", "/nowhere"), task="t")
    assert (missing.errno, missing.strerror, missing.filename) == (2, "No such file", "/nowhere")
    assert TaskError.of(SystemExit(3), task="t").code == 3
    assert TaskError.of(Needy(7, why="w"), task="t").why == "w"
    assert TaskError.of(Slotted(9), task="t").size == 9
    text = TaskError.of(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), task="t")
    assert (text.object, text.start, text.end, text.reason) == (b"\xff", 0, 1, "bad")
    assert TaskError.of(Reducing("a", "b"), task="t").second == "b"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = missing.nothing


def test_attributes_of_the_error_itself_come_first():
    error = TaskError.of(Clashing("x"), task="t", traceback="TB")
    assert (error.task, error.traceback) == ("t", "TB")
    assert error.cause.task == "the cause's task"
    error.mine = 1
    assert error.mine == 1
    cause = Worded()
    cause.add_note("the cause's note")
    error = TaskError.of(cause, task="t")
    assert not hasattr(error, "__notes__")
    assert not hasattr(error.cause, "mine")


def test_a_renderer_of_the_cause_does_not_hide_the_remote_traceback():
    cause = type("Rendered", (Exception,), {"_render_traceback_": lambda self: ["mine"]})()
    error = TaskError.of(cause, task="t")
    assert not hasattr(error, "_render_traceback_")


def test_except_star_splits_a_group():
    caught = []
    error = TaskError.of(ExceptionGroup("several", [ValueError(1), TypeError(2)]), task="t")
    try:
        raise error
    except* ValueError as group:
        caught += group.exceptions
    except* TypeError as group:
        caught += group.exceptions
    assert list(map(str, caught)) == ["1", "2"]


def test_the_error_of_a_task_within_a_task_keeps_the_root_type():
    inner = TaskError.of(KeyError("k"), task="inner (#1)", traceback="INNER", process=1)
    middle = TaskError.of(inner, task="middle (#2)", traceback="MIDDLE\n", process=2)
    outer = TaskError.of(middle, task="outer (#3)", traceback="OUTER\n", process=3)
    assert type(outer) is type(inner)
    assert isinstance(outer, KeyError)
    assert outer.cause is inner.cause
    assert str(outer) == (
        "outer (#3) failed in process 3:\n\nOUTER\n\n"
        "because middle (#2) failed in process 2:\n\nMIDDLE\n\n"
        "because inner (#1) failed in process 1:\n\nINNER"
    )


def test_wrapping_an_error_without_a_cause():
    outer = TaskError.of(TaskError("inner", None, "INNER"), task="outer")
    assert type(outer) is TaskError
    assert outer.cause is None
    assert "INNER" in str(outer)


def test_pickling_does_not_turn_a_plain_error_into_another():
    back = pickle.loads(pickle.dumps(TaskError("t", ValueError("x"), "TB", process=4)))
    assert type(back) is TaskError
    assert (back.task, back.args, back.traceback, back.process) == ("t", ("x",), "TB", 4)


def test_one_class_for_each_type_and_none_kept():
    class EngineBackend(Exception):
        pass

    error = TaskError.of(EngineBackend(), task="t")
    assert type(TaskError.of(EngineBackend(), task="u")) is type(error)
    kept = weakref.ref(EngineBackend)
    del EngineBackend, error
    gc.collect()
    assert kept() is None


def test_the_traceback_shows_the_cause_first():
    error = TaskError.of(ValueError("bad value"), task="train (#7)", traceback="REMOTE")
    text = "".join(traceback.format_exception(error))
    assert text.index("ValueError: bad value") < text.index("direct cause") < text.index("REMOTE")


def test_errors_load_in_another_process():
    errors = [TaskError.of(cause, task="t") for cause in (ValueError(1), KeyError(2), OSError(3))]
    script = (
        "import pickle, sys\n"
        "errors = pickle.load(sys.stdin.buffer)\n"
        "print([isinstance(e, (ValueError, KeyError, OSError)) for e in errors])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(errors), capture_output=True, check=True
    )
    assert done.stdout.strip() == b"[True, True, True]"
