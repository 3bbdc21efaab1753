"""Keeps tensors and functions the same objects over the trips between a notebook and its workers.

Other objects refer to a tensor: an optimizer to the parameters of a model, a state dict to their
memory. Functions share variables. A cell may bring home only one of these objects.

1. A tensor or function among the names of a cell travels with an identity. The receiver notes which
   object it has made for it.
2. When the receiver sends that object back, it has the same identity.
3. A reader that has the object of an identity fills it with what has come, instead of making
   another one.
"""

from __future__ import annotations

import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

__all__ = [
    "Identity",
    "filled",
    "functions",
    "has_identity",
    "identified",
    "identity_of",
    "object_of",
]

Identity: TypeAlias = tuple[bytes, int]
"""A random text of the process that has sent the object first, and a number."""

_numbers = itertools.count()
_origin = b""
_objects: dict[Identity, _Reference] = {}
_identities: dict[int, _Reference] = {}
"""By the ids of the objects, which need not be hashable by identity."""


def identity_of(thing: Any) -> Identity:
    """Return the identity of an object, a new one if it has none."""
    known = _identities.get(id(thing))
    if known is not None and known() is thing:
        return known.identity
    global _origin
    _origin = _origin or os.urandom(8)
    identity = _origin, next(_numbers)
    _note(identity, thing)
    return identity


def has_identity(thing: Any) -> bool:
    """Return whether an object has an identity already."""
    known = _identities.get(id(thing))
    return known is not None and known() is thing


def object_of(identity: Identity) -> Any:
    """Return this process's object of an identity; None if there is none any more."""
    known = _objects.get(identity)
    return known() if known is not None else None


def functions() -> Iterator[tuple[Identity, types.FunctionType]]:
    """Yield the functions that have an identity."""
    for identity in list(_objects):
        thing = object_of(identity)
        if type(thing) is types.FunctionType:
            yield identity, thing


def identified(
    identity: Identity, make: Callable[..., Any], arguments: tuple[Any, ...], _: tuple[str, ...]
) -> Any:
    """Return the object that a sender has reduced to `make` and its arguments."""
    made = make(*arguments)
    _note(identity, made)
    return made


def filled(
    identity: Identity,
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
    without: tuple[str, ...],
) -> Any:
    """Return this process's own object of the identity, filled with what has come; if there is
    none, or it cannot be filled, the new object. It has no attributes of the names `without`."""
    own = object_of(identity)
    if own is None:
        return identified(identity, make, arguments, without)
    made = make(*arguments)
    if not isinstance(own, getattr(sys.modules.get("torch"), "Tensor", ())):
        if type(own) is type(made):
            if isinstance(own, dict):
                own.clear()
            return own  # what follows has its data
        _note(identity, made)
        return made
    try:
        if _fill(own, made, without):
            return own
    except (RuntimeError, TypeError):  # PyTorch does not allow it, as for an expanded tensor
        pass
    _note(identity, made)
    return made


class _Reference(weakref.ref[Any]):
    """A weak reference to an object, with its identity and its id."""

    __slots__ = ("identity", "key")

    identity: Identity
    key: int


def _gone(reference: Any) -> None:
    key, identity = reference.key, reference.identity
    if _identities.get(key) is reference:
        del _identities[key]
    if _objects.get(identity) is reference:
        del _objects[identity]


def _note(identity: Identity, thing: Any) -> None:
    reference = _Reference(thing, _gone)
    reference.identity, reference.key = identity, id(thing)
    _objects[identity] = _identities[reference.key] = reference


def _fill(own: Any, came: Any, without: tuple[str, ...]) -> bool:
    """Give a tensor the data of another one; return whether that is possible."""
    torch = sys.modules["torch"]
    alike = type(own) is type(came) and own.dtype == came.dtype and own.layout == came.layout
    if not alike or own.layout is not torch.strided or own.is_quantized or own.device.type != "cpu":
        return False
    with torch.no_grad():
        if own.shape != came.shape:
            own.data = came.data
        elif _differs(torch, own, came) and not _takes_memory(torch, own, came):
            own.copy_(came)
    if vars(own) or vars(came):
        vars(own).clear()
        vars(own).update(vars(came))
    if own.is_leaf:
        own.requires_grad_(came.requires_grad)
        for name in without:
            if getattr(own, name, None) is not None:
                setattr(own, name, None)
    return True


_LARGE = 1 << 20


def _takes_memory(torch: Any, own: Any, came: Any) -> bool:
    """Let a large tensor have the memory of another one, which saves a copy; return whether that is
    possible: nobody else, such as a view or an array, has its present memory."""
    storage = own.untyped_storage()
    try:
        alone = torch._C._storage_Use_Count(storage._cdata) == 2  # noqa: SLF001 - `own`, `storage`
        if storage.nbytes() < _LARGE or not alone:
            return False
        if not (storage.resizable() or storage._cdata in mapped):  # noqa: SLF001
            return False  # it is in memory of others
        own.data = came.data
        torch.autograd.graph.increment_version([own])
    except AttributeError:  # another release of PyTorch
        return False
    return True


referred: list[Any] = []
"""The objects of weak references that came last with names: nothing else may have them, and the
cell would find them gone."""

mapped: dict[int, weakref.ref[Any]] = {}
"""The memory that has come with values, by the storage that alone has it."""


def note_mapped(storage: Any, memory: Any) -> None:
    """Note that a storage of PyTorch has memory that has come with it, and that nobody else has."""
    key = storage._cdata  # noqa: SLF001

    def gone(it: weakref.ref[Any]) -> None:
        if mapped.get(key) is it:
            del mapped[key]

    mapped[key] = weakref.ref(memory, gone)


_FEW = 64


def _differs(torch: Any, own: Any, came: Any) -> bool:
    """Whether two tensors have different data. A tensor that is equal is not written to: a graph
    that has used it can still be followed backward."""
    first = tuple(slice(_FEW) for _ in own.shape)
    return not (torch.equal(own[first], came[first]) and torch.equal(own, came))


def _forked() -> None:
    """Give new objects another origin than those of the parent, in a child."""
    global _origin
    _origin = b""


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
