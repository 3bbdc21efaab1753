"""Values to payloads and back."""

from __future__ import annotations

import collections
import copyreg
import datetime
import enum
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpunb.data.serialize.explain  # noqa: F401 - not first where a test has taken its parts away
from gpunb.data.segments import Segment
from gpunb.data.serialize import (
    INLINE_LIMIT,
    Payload,
    dumps,
    loads,
    note_reference,
    pickler,
    values,
)
from gpunb.exceptions import ObjectLostError, OutOfMemoryError


@pytest.fixture(autouse=True)
def no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    yield
    if len(os.listdir("/proc/self/fd")) > before:
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def again(value, **options):
    """Dump `value`, pass the payload through its wire, and load it."""
    payload = dumps(value)
    wire = pickle.loads(pickle.dumps(payload.wire()))
    segment = payload.segment.dup() if payload.segment is not None else None
    return loads(Payload.from_wire(wire, segment), **options)


class Signal(np.ndarray):
    """An array with attributes, as NumPy's manual makes one."""

    def __array_finalize__(self, obj):
        self.labels = getattr(obj, "labels", None)


def test_an_array_of_a_class_of_its_own_keeps_its_attributes():
    signal = np.arange(4.0).reshape(2, 2).view(Signal)
    signal.labels = ["x", signal]
    arrived = again([signal, signal])
    assert arrived[0] is arrived[1]
    assert arrived[0].labels == ["x", arrived[0]]
    assert type(arrived[0]) is Signal
    assert arrived[0].tolist() == [[0, 1], [2, 3]]


def test_a_type_that_is_registered_later_is_pickled_by_its_reducer(monkeypatch):
    assert type(again(Number(1))) is Number
    monkeypatch.setitem(copyreg.dispatch_table, Number, lambda _: (str, ("reduced",)))
    assert again([Number(1), Number]) == ["reduced", Number]
    monkeypatch.undo()
    assert type(again(Number(1))) is Number


def test_a_mapped_array_arrives_as_before(tmp_path):
    mapped = np.memmap(tmp_path / "data", dtype="u1", mode="w+", shape=3)
    assert again(mapped).tolist() == [0, 0, 0]
    mapped._mmap.close()


def same(one, other):
    """Return whether two values are equal, with equal types; arrays by content and layout."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        layout = one.flags.f_contiguous and not one.flags.c_contiguous
        return (
            (native(one.dtype), one.shape) == (native(other.dtype), other.shape)
            and layout == (other.flags.f_contiguous and not other.flags.c_contiguous)
            and content(one) == content(other)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


def content(array):
    return (
        array.tolist() if array.dtype.kind == "O" else array.astype(native(array.dtype)).tobytes()
    )


def native(dtype):
    """Return the dtype in this machine's byte order, which numpy uses for arrays with gaps."""
    return dtype.newbyteorder("=")


# ------------------------------------------------------------------------------------ the fast path


class Number(int):
    pass


class Colour(enum.Enum):
    RED = 1


PLAIN = [
    None,
    True,
    3,
    10**100,
    2.5,
    "text",
    "\ud800",
    b"bytes",
    (),
    [],
    {},
    (1, 2.0, "x"),
    [None, b"x"],
    {"a": 1, 2: "b"},
    ((), {}),
    ((1, 2.0, "x"), {}),
    ((1,), {"a": 3, "b": b"x"}),
]
GENERAL = [
    (1, (2,)),
    {"a": [1]},
    {(1, 2): 3},
    ((1,), {"a": []}),
    ([1], {}),
    ((1, (2, 3)), {}),
    list(range(1000)),
    b"x" * 10_000,
    ((b"x" * 10_000,), {}),
    1 + 2j,
    {1, 2},
    Number(3),
    (Number(3),),
    datetime.date(2024, 2, 29),
    collections.OrderedDict(a=1),
    range(3),
    ...,
    (1, len),
    int,
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_take_the_fast_path(value, monkeypatch):
    monkeypatch.setattr(pickler, "StreamPickler", None)
    monkeypatch.setattr(values, "Rebuilder", None)
    assert same(again(value), value)
    assert same(again(value, namespace={}, lazy_modules=True), value)


@pytest.mark.parametrize("value", GENERAL, ids=lambda value: repr(value)[:30])
def test_other_values_take_the_general_path(value, monkeypatch):
    assert same(again(value), value)
    monkeypatch.setattr(pickler, "StreamPickler", None)
    with pytest.raises(TypeError):
        dumps(value)


def test_large_value_of_the_fast_path_goes_into_a_segment():
    payload = dumps("x" * INLINE_LIMIT)
    assert payload.segment is not None
    assert loads(payload) == "x" * INLINE_LIMIT
    assert dumps("x" * (INLINE_LIMIT - 100)).segment is None


def test_functions_never_take_the_fast_path():
    space = {"__name__": "__main__"}
    exec("def f(): return 5", space)
    for value in (space["f"], (space["f"],), {"f": space["f"]}, ((space["f"],), {})):
        assert b"cloudpickle" in dumps(value).stream


# ------------------------------------------------------------------------------ inline or a segment


@pytest.mark.parametrize("size", [0, 1, 1000, INLINE_LIMIT - 500, INLINE_LIMIT + 1, 3_000_000])
@pytest.mark.parametrize("kind", [bytes, bytearray, np.zeros])
def test_value_above_the_inline_limit_goes_into_a_segment(kind, size):
    value = kind(size) if kind is not np.zeros else np.zeros(size, "u1")
    payload = dumps([value, "end"])
    assert (payload.segment is not None) == (size > INLINE_LIMIT)
    assert payload.nbytes >= size
    assert same(loads(payload), [value, "end"])
    assert str(payload.nbytes)[:1] in repr(payload)


def test_stream_and_buffers_go_into_one_segment():
    arrays = [np.arange(n) for n in (0, 1, 10_000, 3)]
    payload = dumps(arrays)
    assert (payload.stream, payload.buffers) == (b"", ())
    assert len(payload.spans) == 5
    assert sum(length for _, length in payload.spans) == payload.nbytes
    assert len(pickle.dumps(payload.wire())) < 200


def test_inline_buffers_are_not_part_of_the_stream():
    payload = dumps(np.arange(10))
    assert payload.buffers == (np.arange(10).tobytes(),)
    assert payload.spans == ()


def test_buffers_are_written_without_a_copy(monkeypatch):
    array = np.arange(100_000)
    text = b"x" * 200_000
    room = bytearray(200_000)
    seen = []
    write = Segment.write.__func__

    def watched(cls, buffers):
        for each in buffers:
            parts = each if isinstance(each, list) else [each]
            seen.extend(np.frombuffer(part, "u1").__array_interface__["data"][0] for part in parts)
        return write(cls, buffers)

    monkeypatch.setattr(Segment, "write", classmethod(watched))
    dumps([array, text, room])
    for sent in (array, np.frombuffer(text, "u1"), np.frombuffer(room, "u1")):
        assert sent.__array_interface__["data"][0] in seen


def test_dumps_leaves_no_reference_cycle_with_the_data():
    class Big(bytearray):
        pass

    array = np.zeros(100_000).view(type("Array", (np.ndarray,), {}))
    gone = weakref.ref(array)
    gc.disable()
    try:
        payload = dumps(array)
        del array
        assert gone() is None
        payload.segment.close()
    finally:
        gc.enable()


def test_from_wire_refuses_a_missing_or_short_segment():
    payload = dumps(np.zeros(100_000))
    with pytest.raises(ValueError, match="needs a segment of 8"):
        Payload.from_wire(payload.wire())
    small, _ = Segment.write([b"abc"])
    with small, pytest.raises(ValueError, match="got one of 3"):
        Payload.from_wire(payload.wire(), small)
    assert Payload.from_wire(dumps(1).wire()).segment is None


def test_full_memory_raises_out_of_memory_error(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OutOfMemoryError, match="no room for 80"):
        dumps(np.zeros(100_000))


# ----------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["inline", "segment"])
def test_arrays_arrive_writable_and_independent(size):
    sent = np.zeros(size)
    payload = dumps({"a": sent})
    first, second = loads(payload)["a"], loads(payload)["a"]
    first += 1
    assert (first[0], second[-1], sent[0], loads(payload)["a"][0]) == (1, 0, 0, 0)
    if payload.segment is not None:
        payload.segment.close()
    assert first.sum() == size


@pytest.mark.parametrize("sizes", [(3,), (0, 1, 7, 100), (5000, 1), (3, 20_000, 5), (500_000, 3)])
def test_arrays_arrive_at_addresses_that_are_multiples_of_64(sizes):
    payload = dumps([np.full(size, 1.5) for size in sizes])
    for _ in range(10):
        for each in loads(payload):
            assert each.ctypes.data % 64 == 0
            assert each.flags.aligned
            assert each.flags.writeable


def test_read_only_array_arrives_read_only():
    array = np.arange(5)
    array.flags.writeable = False
    assert not again(array).flags.writeable


def test_object_under_two_names_stays_one_object():
    array = np.arange(100_000)
    one, other, nested = again([array, array, {"x": array}])
    assert one is other
    assert nested["x"] is one


def test_pickle_buffer_of_another_library_arrives():
    class Holder:
        def __init__(self, data):
            self.data = data

        def __reduce_ex__(self, protocol):
            return Holder, (pickle.PickleBuffer(self.data),)

    assert bytes(again(Holder(b"abc" * 100_000)).data) == b"abc" * 100_000
    gaps = memoryview(b"abcd")[::2]
    with pytest.raises(TypeError, match="non-contiguous"):
        dumps(Holder(gaps))


@pytest.mark.parametrize("rows", [3, 100_000])
def test_data_frames_arrive_writable(rows):
    frame = pd.DataFrame({"a": np.arange(rows), "b": ["x"] * rows, "c": 0.5})
    back = again(frame)
    pd.testing.assert_frame_equal(back, frame)
    back.loc[0, "a"] = 99
    assert (back.loc[0, "a"], frame.loc[0, "a"]) == (99, 0)


DTYPES = [
    "?", "i1", "u2", "<i4", ">i4", "i8", "f2", "f4", ">f8", "g", "F", "D", "S3", "U2", "V5",
    "M8[ns]", "m8[s]", [("a", "i4"), ("b", "f8", (2,))], "O",
]  # fmt: skip


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    if draw(st.integers(0, 9)) == 0 and dtype.kind != "O":
        shape.append(20_000)
    count = int(np.prod(shape, dtype=int))
    if dtype.kind == "O":
        made = np.empty(shape, object)
        made[...] = draw(st.integers())
    else:
        seed = draw(st.integers(0, 255))
        raw = bytes((seed + n) % 128 for n in range(256)) * (count * dtype.itemsize // 256 + 1)
        if dtype.kind == "U":
            raw = np.full(count, "ab", dtype).tobytes() + b"\0" * 8
        if dtype.kind in "?b":
            raw = bytes(byte % 2 for byte in raw)
        made = np.frombuffer(raw[: count * dtype.itemsize] or b"", dtype, count=count)
        made = made.reshape(shape).copy()
    change = draw(st.sampled_from(["C", "F", "T", "step", "view"]))
    if change == "F":
        return np.asfortranarray(made)
    if change == "T":
        return made.T
    if change == "step" and made.ndim:
        return made[::2]
    if change == "view" and made.ndim:
        return made[..., :1]
    return made


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from([Colour.RED, Number(4), b"cloudpickle", b"y" * 70_000, bytearray(b"z" * 9)])
    | arrays()
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(NESTED)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nested_data_makes_the_round_trip(value):
    back = again(value)
    if not has_gaps(value):  # an array with gaps is copied, and into C order
        assert same(back, value)
    assert same(again(back), back)


def has_gaps(value):
    if isinstance(value, np.ndarray):
        return not (value.flags.c_contiguous or value.flags.f_contiguous)
    if isinstance(value, dict):
        return any(map(has_gaps, value.values()))
    return isinstance(value, list | tuple) and any(map(has_gaps, value))


@given(arrays())
@settings(max_examples=60, deadline=None)
def test_every_array_arrives_equal_and_writable(array):
    back = again(array)
    assert (native(back.dtype), back.shape) == (native(array.dtype), array.shape)
    assert content(back) == content(array)
    assert back.flags.writeable == array.flags.writeable


# --------------------------------------------------------------------------------------- references


class Reference:
    def __init__(self, identity):
        self.identity = identity

    def __reduce__(self):
        note_reference(self.identity)
        return Reference, (self.identity,)


class Outer:
    """Calls `dumps` while it is pickled."""

    def __init__(self, inner):
        self.inner = inner

    def __reduce__(self):
        note_reference("before")
        inside = dumps(self.inner)
        note_reference("after")
        return loads, (Payload(*inside.wire()[:2], references=inside.references),)


def test_references_are_noted_in_order():
    payload = dumps([Reference(1), {"x": Reference("two")}, np.zeros(10)])
    assert payload.references == (1, "two")
    assert Payload.from_wire(payload.wire()).references == (1, "two")
    assert dumps([np.zeros(100_000), Reference(3)]).references == (3,)


def test_nested_dumps_has_its_own_references():
    payload = dumps([Reference(1), Outer(Reference(2)), Reference(3)])
    assert payload.references == (1, "before", "after", 3)
    assert [each.identity for each in loads(payload)] == [1, 2, 3]


def test_note_reference_without_dumps_does_nothing():
    note_reference(1)
    pickle.dumps(Reference(2))
    assert dumps([]).references == ()
    with pytest.raises(TypeError):
        dumps([Reference(3), threading.Lock()])
    note_reference(4)
    assert dumps([Reference(5)]).references == (5,)


def test_references_of_threads_are_separate():
    found = {}
    gate = threading.Barrier(4)

    class Slow(Reference):
        def __reduce__(self):
            gate.wait(10)
            return super().__reduce__()

    def run(n):
        found[n] = dumps([Slow((n, i)) for i in range(20)]).references

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: tuple((n, i) for i in range(20)) for n in range(4)}


# ------------------------------------------------------------------------------------------- errors


class Raising:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize("error", [ObjectLostError("gone"), MemoryError(), KeyboardInterrupt()])
def test_errors_of_gpunb_and_of_memory_are_not_replaced(error):
    with pytest.raises(type(error)) as info:
        dumps([Raising(error)])
    assert info.value is error


def test_pickling_error_is_a_type_error_with_its_cause():
    with pytest.raises(TypeError, match="argument 'x' of f cannot be sent") as info:
        dumps(((), {"x": threading.Lock()}), what="arguments of f")
    assert "cannot pickle" in str(info.value.__cause__)


def test_loads_raises_the_error_of_the_value():
    class Angry:
        def __reduce__(self):
            return int, ("not a number",)

    with pytest.raises(ValueError, match="not a number"):
        loads(dumps(Angry()))


def test_import_of_serialize_loads_no_large_modules():
    script = (
        "import sys, gpunb.data.serialize\n"
        "gpunb.data.serialize.loads(gpunb.data.serialize.dumps(((1,), {})))\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    loaded = set(done.stdout.split())
    assert "cloudpickle" in loaded
    assert not loaded & {"numpy", "IPython", "pandas", "ctypes", "asyncio", "multiprocessing"}
    assert loaded - set(sys.stdlib_module_names) <= {"cloudpickle", "gpunb"} | {
        name for name in loaded if name.startswith(("_", "site", "editable", "distutils"))
    }
