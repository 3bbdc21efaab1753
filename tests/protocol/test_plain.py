"""Plain values on the wire: nothing else goes in, and nothing else comes out."""

from __future__ import annotations

import collections
import copyreg
import datetime
import enum
import io
import os
import pickle
import pickletools
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.protocol import plain
from gpunb.protocol.plain import Malformed, framed

atoms = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
    ),
)


@given(values)
def test_plain_values_come_back_as_they_were(value):
    assert plain.loads(plain.dumps(value)) == value


@given(st.binary())
def test_any_bytes_are_a_value_or_malformed(data):
    try:
        plain.loads(data)
    except Malformed:
        pass


@given(values, st.data())
def test_a_message_that_is_cut_or_changed_is_a_value_or_malformed(value, data):
    whole = bytearray(plain.dumps(value))
    end = data.draw(st.integers(0, len(whole)))
    cut = whole[:end]
    if cut:
        cut[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    try:
        plain.loads(bytes(cut))
    except Malformed:
        pass


class Runs:
    """Does something where it is unpickled."""

    def __reduce__(self):
        return os._exit, (7,)


@pytest.mark.parametrize(
    "data",
    [
        framed(pickle.dumps(Runs(), 5)),
        framed(b"\x80\x05cos\n_exit\n(K\x07tR."),
        framed(b"\x80\x05(K\x07ios\n_exit\n."),
        framed(pickle.dumps(os.path.join, 5)),
        framed(pickle.dumps(np.float64(1), 5)),
    ],
)
def test_what_would_run_code_is_malformed(data):
    with pytest.raises(Malformed, match="plain values only"):
        plain.loads(data)


@pytest.mark.parametrize("code", [0x70, 0x7000, 0x700000])
def test_a_function_known_by_a_number_is_malformed(code):
    copyreg.add_extension("posix", "_exit", code)
    try:
        data = framed(pickle.dumps(os._exit, 5))
        assert b"posix" not in data
        with pytest.raises(Malformed, match="plain values only"):
            plain.loads(data)
    finally:
        copyreg.remove_extension("posix", "_exit", code)


def test_every_opcode_that_refers_to_something_is_looked_for():
    names = {"GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}
    found = {each.name for each in pickletools.opcodes if plain._refers(each.code.encode("latin1"))}
    assert found == names


def test_an_object_is_not_sent():
    with pytest.raises(TypeError, match=r"Runs cannot be sent"):
        plain.dumps((1, Runs()))


class Text(str):
    def __str__(self):
        return "something else"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        (Text("text"), "text"),
        (Number.ONE, 1),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (collections.OrderedDict(a=[Text("b")]), {"a": ["b"]}),
        (collections.namedtuple("Pair", "a b")(1, 2), (1, 2)),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (memoryview(b"abc"), b"abc"),
        (datetime.date(2020, 1, 2), "2020-01-02"),
        (np.arange(3), [0, 1, 2]),
        (range(3), [0, 1, 2]),
    ],
)
def test_kinds_of_plain_types_are_sent_as_these(value, becomes):
    back = plain.loads(plain.dumps(value))
    assert back == becomes
    assert type(back) is type(becomes)


def test_what_refers_to_itself_cannot_be_made_plain():
    endless = {}
    endless["self"] = [endless]
    with pytest.raises(TypeError, match="containers inside each other"):
        plain.made(endless)


def test_depth_is_limited_where_values_are_decoded():
    deep = 1
    for _ in range(plain.DEPTH + 1):
        deep = [deep]
    with pytest.raises(Malformed, match="containers inside each other"):
        plain.check_depth(deep)
    plain.check_depth(deep[0])


def test_values_of_a_file_come_one_after_the_other():
    file = io.BytesIO(plain.dumps("one") + plain.dumps({"two": 2}))
    assert plain.load(file) == "one"
    assert plain.load(file) == {"two": 2}
    with pytest.raises(EOFError):
        plain.load(file)
