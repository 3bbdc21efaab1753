"""Finds what values lose on the way to a cell or home: they are pickled, loaded and compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpunb.data.serialize.left_out import LEFT_OUT, with_graph
from gpunb.data.serialize.parts import Path, at, parts
from gpunb.data.serialize.pickler import Way
from gpunb.data.serialize.rebuild import Rebuilder, Rebuilding
from gpunb.data.serialize.values import dumps, opened

__all__ = ["Loss", "losses"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that differs after the trip.

    Attributes:
        where: the value or a part of it, such as ``model.weight``.
        what: what is lost, in words.
    """

    where: str
    what: str


def losses(values: Mapping[str, Any], way: Way) -> list[Loss]:
    """Return what a copy of these values lacks. Parts a few steps inside of a value are compared,
    as far as `parts` follows them."""
    found, taken = [], {}
    for name, value in sorted(values.items()):
        try:
            dumps(value, what=name, way=way)
            taken[name] = value
        except Exception as error:  # noqa: BLE001 - whatever the value's own functions raise
            found.append(Loss(name, str(error).partition(";")[0]))
    try:
        return [*found, *_compared(taken, _copied(taken, way))]
    except Exception as error:  # noqa: BLE001
        return [*found, Loss(", ".join(taken), f"cannot be made again: {error}")]


def _copied(values: dict[str, Any], way: Way) -> dict[str, Any]:
    stream, buffers = opened(dumps(values, way=way))
    rebuilding = Rebuilding()
    rebuilding.replacements["identified"] = _unidentified
    copied: dict[str, Any] = Rebuilder(stream, buffers, rebuilding).load()
    return copied


def _unidentified(
    _: Any, make: Callable[..., Any], arguments: tuple[Any, ...], __: tuple[str, ...]
) -> Any:
    """Make the object alone: a copy must not take the place of the one that has the identity."""
    return make(*arguments)


def _compared(values: dict[str, Any], copies: dict[str, Any]) -> Iterator[Loss]:
    first: dict[int, Path] = {}
    memory: list[tuple[str, range, range]] = []
    graphs = with_graph(values)
    for part, path in parts(values, exact=False, repeated=True):
        where = _text(path)
        try:
            copy = at(copies, path)
        except (LookupError, AttributeError, TypeError):
            yield Loss(where, "it is not there")
            continue
        if (known := first.setdefault(id(part), path)) != path:
            if at(copies, known) is not copy:
                yield Loss(where, f"it is another object than {_text(known)}")
            continue
        if type(part) is not type(copy):
            yield Loss(where, f"it is of the type {type(copy).__name__}")
        for what in _lost(part, copy, path[0] in graphs):
            yield Loss(where, what)
        if (own := _memory(part)) and (other := _memory(copy)):
            for before, one, of_copy in memory:
                if _overlap(one, own) and not _overlap(of_copy, other):
                    yield Loss(where, f"it no longer shares memory with {before}")
            memory.append((where, own, other))


def _lost(part: Any, copy: Any, has_graph: bool) -> Iterator[str]:
    tensors = getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(part, tensors) and isinstance(copy, tensors):
        if part.grad_fn is not None and has_graph:
            yield "its graph: backward() cannot go on from there"
        if part.device != copy.device:
            yield f"its place on {part.device}: it is on {copy.device}"
        for name in LEFT_OUT if part.is_leaf else ():
            if getattr(part, name, None) is not None and getattr(copy, name, None) is None:
                yield f"its {name}"
    if hasattr(part, "__dict__") and hasattr(copy, "__dict__"):
        missing = vars(part).keys() - vars(copy).keys()
        if missing:
            yield f"its attributes {', '.join(sorted(map(str, missing)))}"


def _memory(thing: Any) -> range:
    """The addresses of an array or tensor in main memory; empty for others."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(thing, numpy.ndarray):
        start, step, strides = thing.ctypes.data, 1, thing.strides
        size = thing.itemsize
    elif torch is not None and isinstance(thing, torch.Tensor) and _is_plain(torch, thing):
        start, step, strides = thing.data_ptr(), thing.element_size(), thing.stride()
        size = step
    else:
        return range(0)
    if 0 in thing.shape:
        return range(0)
    reach = [
        (length - 1) * stride * step for length, stride in zip(thing.shape, strides, strict=True)
    ]
    return range(
        start + sum(each for each in reach if each < 0),
        start + sum(each for each in reach if each > 0) + size,
    )


def _is_plain(torch: Any, tensor: Any) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.numel() > 0


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _text(path: Path) -> str:
    name, *steps = path
    return str(name) + "".join(f"[{key!r}]" if item else f".{key}" for item, key in steps)
