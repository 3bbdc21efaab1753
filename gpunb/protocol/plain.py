"""Plain values: `None`, numbers, text, bytes, and lists, tuples, dicts and sets of them.

Only plain values are in what processes send to each other, so that decoding a message runs no
code of a user and imports nothing. A value of a user travels inside a message as opaque bytes, and
is opened by the call, the cell or the actor that asked for it.

This guards against accidents, not against an attacker: all processes belong to one user.
"""

from __future__ import annotations

import datetime
import io
import numbers
import pickle
import re
import reprlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, NoReturn

MOST = 1 << 30
"""Bytes of the longest message."""

DEPTH = 100
"""Levels of containers inside each other that may be shown."""

SHALLOW = 20_000
"""Tuples inside each other that Python's decoder is given: to use one as a key, it computes the
hash of them all, and 200,000 use up the stack of a thread."""

_SUM = 4
"""Bytes of the checksum."""

_WHOLE = zlib.crc32(bytes(_SUM))
"""The checksum of anything that has its own checksum behind it."""

_EXACT = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})


_refers = re.compile(rb"[ci\x82\x83\x84\x93]").search
"""Finds what may be an opcode of a pickle that refers to a class or a function: GLOBAL, INST, EXT1,
EXT2, EXT4, STACK_GLOBAL. Short messages often have none of these bytes, also not in their values,
and then Python's own decoder is as safe as ours, and faster."""


_HASHED = b"t\x85\x86\x87\x91"
"""The opcodes that make tuples and frozen sets."""


class Malformed(ValueError):
    """The bytes are no message."""


def short(value: Any) -> str:
    """Return some value in words for an error: not its whole text, which may be deep and long."""
    return reprlib.repr(value)[:200]


class _Decoder(pickle.Unpickler):
    __slots__ = ()

    def find_class(self, module: str, name: str) -> NoReturn:
        raise Malformed(f"it refers to {module}.{name}, and messages hold plain values only")


class _Encoder(pickle.Pickler):
    def reducer_override(self, value: Any) -> NoReturn:
        raise _NotPlain(value)


class _NotPlain(Exception):
    """A value that is not plain by its exact type."""


def dumps(value: Any) -> bytes:
    """Return a value as bytes. Subclasses of plain types become the plain types.

    Raises:
        TypeError: part of the value cannot be made plain.
    """
    try:
        return _encode(value)
    except _NotPlain:
        return _encode(made(value))


def _encode(value: Any) -> bytes:
    file = io.BytesIO()
    _Encoder(file, 5).dump(value)
    return framed(file.getvalue())


def framed(pickled: bytes) -> bytes:
    """Return a pickle with its checksum behind it.

    A byte that changed on the way must not reach the unpickler: it could ask for more memory than
    there is (a memo with the index 2**32 - 1) before it fails.
    """
    return pickled + zlib.crc32(pickled).to_bytes(_SUM, "little")


def loads(data: Any) -> Any:
    """Return the value of bytes that `dumps` has made.

    Raises:
        Malformed: the bytes are something else.
    """
    if len(data) > MOST:
        raise Malformed(f"it has {len(data):,} bytes, and the longest message has {MOST:,}")
    if zlib.crc32(data) != _WHOLE:
        raise Malformed(f"{len(data):,} bytes that begin with {bytes(data[:16])!r}")
    if len(data) > SHALLOW:
        _check_tuples(bytes(data[:-_SUM]))
    try:
        return pickle.loads(data) if _refers(data) is None else _Decoder(io.BytesIO(data)).load()
    except Malformed:
        raise
    except Exception as error:  # a pickle that is cut or changed may raise anything
        raise Malformed(f"{len(data):,} bytes that cannot be decoded: {error!r}") from error


def _check_tuples(pickled: bytes) -> None:
    """Raise Malformed if more than `SHALLOW` tuples are inside each other.

    Nearly all messages have fewer bytes that could be such an opcode. For the others the stack of
    the decoder is followed, with the number of tuples inside each other in place of each value.
    """
    if len(pickled) - len(pickled.translate(None, _HASHED)) <= SHALLOW:
        return
    import pickletools

    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            name = opcode.name
            if name == "MARK":
                marks.append(len(stack))
            elif name == "MEMOIZE":
                memo[len(memo)] = stack[-1]
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memo[int(argument)] = stack[-1]  # type: ignore[arg-type]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument)])  # type: ignore[arg-type]
            elif name == "DUP":
                stack.append(stack[-1])
            else:
                before = opcode.stack_before
                count = len(before)
                if pickletools.markobject in before:
                    count = len(stack) - marks.pop() + before.index(pickletools.markobject)
                taken = stack[len(stack) - count :]
                del stack[len(stack) - count :]
                depth = max(taken, default=0) + 1 if name.startswith(("TUPLE", "FROZEN")) else 0
                if depth > SHALLOW:
                    raise Malformed(f"it has more than {SHALLOW:,} containers inside each other")
                stack += [depth] * len(opcode.stack_after)
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"{len(pickled):,} bytes that cannot be read: {error!r}") from error


def load(file: BinaryIO) -> Any:
    """Return the next value of a file, and leave the file behind it.

    Raises:
        EOFError: the file is at its end.
        Malformed: there is something else.
    """
    value = _Decoder(file).load()
    file.read(_SUM)
    return value


def made(value: Any, depth: int = DEPTH) -> Any:
    """Return a value with each part as the plain type that it is a kind of.

    Raises:
        TypeError: a part is of no plain kind, or inside more than `depth` containers.
    """
    kind = type(value)
    if kind in _EXACT:
        return value
    if not depth:
        raise TypeError(f"it has more than {DEPTH} containers inside each other")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, Mapping):
        return {made(key, depth - 1): made(each, depth - 1) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(made(each, depth - 1) for each in value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # NumPy's bool, a tensor
        return made(value.item(), depth - 1)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Iterable):
        return [made(each, depth - 1) for each in value]
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent: only None, numbers, text, "
        "bytes, and lists, tuples and dicts of them can"
    )


def check_depth(value: Any, depth: int = DEPTH) -> None:
    """Look through the containers of a decoded value.

    Raises:
        Malformed: there are more than `depth` inside each other.
    """
    kind = type(value)
    if kind in _EXACT:
        return
    if not depth:
        raise Malformed(f"it has more than {DEPTH} containers inside each other")
    for each in value.values() if kind is dict else value:
        check_depth(each, depth - 1)
