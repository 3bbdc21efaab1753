"""Fingerprints: equal for equal functions and values, in each process and after each restart.

A pickle is no fingerprint: it has the file names and line numbers of code, sets in the order of
this process, and back-references wherever two equal texts happen to be one object.
"""

from __future__ import annotations

import hashlib
import pickle
import types
from collections.abc import Iterable, Mapping
from typing import Any

from gpunb.api.refs import ObjectRef
from gpunb.api.reports import as_plain
from gpunb.data.serialize.functions import CACHED
from gpunb.data.serialize.pickler import StreamPickler, by_value, closure_of, global_names
from gpunb.system.module_files import users_file

_NOT_CLASS_DATA = frozenset(
    """__abstractmethods__ __dict__ __doc__ __firstlineno__ __module__ __static_attributes__
    __weakref__ _abc_impl""".split()
)

_FLAGS = 0x3FF
"""The flags of code that say what kind of function it is; the others are of `__future__`."""


def fingerprint(value: object, what: str) -> str:
    """A fingerprint of a value; of functions, with all that they refer to.

    Functions and classes of the notebook count by their code, wherever it stands; so do those of a
    module that is registered to be pickled by value. Those of the user's other modules count by the
    text of the module, and those of installed packages by name. A ref counts by its value, which is
    waited for.

    Raises:
        TypeError: `what` refers to an object that cannot be pickled.
    """
    digest = _Digest()
    try:
        _Pickler(digest).dump(value)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be compared with an earlier run, which name= needs: "
            f"{type(error).__name__}: {error}"
        ) from error
    return digest.text()


class _Digest:
    """A file that keeps only the hash of what is written to it."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self.write = self._hash.update

    def text(self) -> str:
        return self._hash.hexdigest()


def _made(*parts: object) -> object:
    """Stands in a fingerprint for the function that would make an object again."""
    raise NotImplementedError("a fingerprint is not read")


class _Pickler(pickle._Pickler):  # noqa: SLF001 - the one in C asks nobody about sets
    dispatch_table = StreamPickler.dispatch_table

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)

    def memoize(self, obj: object) -> None:
        """Remember an object for back-references; not a text, as equal texts may be one object."""
        if type(obj) not in (str, bytes):
            super().memoize(obj)  # type: ignore[misc] # the stubs lack it

    def reducer_override(self, obj: Any) -> Any:  # noqa: C901 - one case for each kind of object
        """The parts that make an object what it is; NotImplemented for the parts of its pickle."""
        kind = type(obj)
        if obj is _made:
            return NotImplemented
        if kind in (set, frozenset):
            return _made, ("set", sorted(fingerprint(each, "a set") for each in obj))
        if kind is types.FunctionType:
            return _function(obj) if by_value(obj) else _named(obj)
        if kind is types.CodeType:
            return _made, _code(obj)
        if kind is types.ModuleType:
            return _made, ("module", obj.__name__, _text_of(obj.__name__))
        if issubclass(kind, type):
            return _class(obj) if by_value(obj) else _named(obj)
        if kind in (staticmethod, classmethod):
            return _made, (kind.__name__, obj.__func__)
        if kind is property:
            return _made, ("property", obj.fget, obj.fset, obj.fdel)
        if kind is CACHED:
            return _made, ("cached", obj.__wrapped__)
        if kind in (types.MemberDescriptorType, types.GetSetDescriptorType):
            return _made, ("descriptor", obj.__name__)
        if kind is ObjectRef:
            return _made, ("value", obj.result())
        if kind.__module__.partition(".")[0] in ("numpy", "torch"):
            return _array(obj)
        return NotImplemented


def _function(function: types.FunctionType) -> Any:
    space = function.__globals__
    names = sorted(set(global_names(function.__code__)) & space.keys())
    parts = (
        function.__defaults__,
        sorted((function.__kwdefaults__ or {}).items()),
        sorted(closure_of(function), key=lambda pair: pair[0]),
        [(name, space[name]) for name in names],
        sorted(vars(function).items()),
    )
    # As the state, it is written after the function is known: it may refer to itself.
    return _made, ("function", function.__name__, function.__code__), parts


def _code(code: types.CodeType) -> tuple[Any, ...]:
    return (
        *("code", code.co_code, code.co_consts, code.co_names, code.co_varnames),
        *(code.co_freevars, code.co_cellvars, code.co_flags & _FLAGS, code.co_exceptiontable),
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
    )


def _class(cls: type) -> Any:
    data = {name: each for name, each in vars(cls).items() if name not in _NOT_CLASS_DATA}
    return _made, ("class", cls.__name__, cls.__bases__), sorted(data.items())


def _named(thing: Any) -> Any:
    if not isinstance(thing, types.FunctionType) and thing.__module__ == "builtins":
        return NotImplemented
    module = thing.__module__ or ""
    return _made, ("name", module, thing.__qualname__, _text_of(module))


def _array(obj: Any) -> Any:
    """A scalar counts as its number. A tensor's own pickle has addresses of memory in it."""
    plain = as_plain(obj)
    if plain is not obj and getattr(obj, "shape", None) == ():
        return _made, ("number", plain)
    if not hasattr(obj, "untyped_storage"):
        return NotImplemented
    array = obj.detach().cpu().contiguous().flatten().view(obj.new_empty(0).byte().dtype)
    return _made, ("tensor", str(obj.dtype), tuple(obj.shape), array.numpy())


def _text_of(module: str) -> str:
    """A digest of the text of a user's module; empty for an installed one."""
    path = users_file(module)
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError:
        return ""


def keys(function: str, params: Iterable[Mapping[str, Any]]) -> list[str]:
    """The key of each trial in a file of results. The same parameters twice have two keys."""
    counts: dict[str, int] = {}
    made = []
    for each in params:
        names = sorted((name, as_plain(value)) for name, value in each.items())
        key = fingerprint([function, names], f"the parameter {', '.join(each)}")
        counts[key] = count = counts.get(key, 0) + 1
        made.append(f"{key}.{count}")
    return made
