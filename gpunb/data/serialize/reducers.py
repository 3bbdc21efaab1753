"""Reducers for types of Python that pickle and cloudpickle refuse, or turn into other types."""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle

from gpunb.data.serialize import identities
from gpunb.data.serialize.functions import CACHED
from gpunb.data.serialize.operators import reduce_operator
from gpunb.data.serialize.pickler import PROTOCOL, StreamPickler, by_value, keeps_identities


def _reduce_view(view: memoryview) -> Any:
    """Reduce a view to a view: of the same object, if it shows all of it."""
    whole = view.obj
    if type(whole).__name__ in ("bytes", "bytearray", "array", "ndarray"):
        full = memoryview(whole)
        if all(getattr(view, name) == getattr(full, name) for name in _LAYOUT):
            return memoryview, (whole,)
    data = pickle.PickleBuffer(view) if view.c_contiguous else bytearray(view.tobytes())
    return _view, (data, view.format, view.shape, view.readonly)


def _view(data: Any, code: str, shape: tuple[int, ...], readonly: bool) -> memoryview:
    made = memoryview(data).cast("B")
    if 0 not in shape and len(code.lstrip("@")) == 1:  # memoryview has no other formats
        made = made.cast(code, shape)  # type: ignore[call-overload]
    return made.toreadonly() if readonly else made


_LAYOUT = ("nbytes", "format", "shape", "strides", "readonly")


def _reduce_cached(function: Any) -> Any:
    """Reduce a function of `lru_cache` without its results. pickle would send only its name, even
    if the wrapped function travels by value."""
    wrapped = getattr(function, "__wrapped__", None)
    if type(wrapped) is types.FunctionType and by_value(wrapped):
        return _cached, (wrapped, function.cache_parameters())
    return function.__reduce__()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(it: Any) -> Any:
    """Reduce without the lock that the object has before Python 3.12."""
    return _cached_property, (it.func, it.attrname)


def _cached_property(function: Callable[[Any], Any], name: str | None) -> Any:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduce_weak(it: Any) -> Any:
    """Reduce with the present items. `functools.singledispatch` has such a dictionary."""
    return type(it), (dict(it),)


def _reduce_figure(figure: Any) -> Any:
    """Reduce with the canvas of pyplot's figures, which a pickle of matplotlib leaves out."""
    return (*figure.__reduce_ex__(PROTOCOL)[:3], None, None, _set_figure_state)


def _set_figure_state(figure: Any, state: Any) -> None:
    figure.__setstate__(state)
    if type(figure.canvas).__name__ == "FigureCanvasBase":
        importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)


def _reduce_array(array: Any) -> Any:
    """Reduce an array of a class of its own with its attributes, which NumPy leaves out."""
    make, arguments, state = array.__reduce_ex__(PROTOCOL)[:3]
    return make, arguments, (state, vars(array)), None, None, _set_array_state


def _set_array_state(array: Any, state: tuple[Any, dict[str, Any]]) -> None:
    array.__setstate__(state[0])
    vars(array).update(state[1])


def _is_array(kind: Any) -> bool:
    """Whether instances of a subclass of NumPy's arrays are pickled as NumPy's arrays."""
    numpy: Any = sys.modules.get("numpy")
    if kind.__module__ == "numpy" or numpy is None or numpy.ndarray not in kind.__mro__:
        return False
    names = ("__reduce__", "__reduce_ex__", "__setstate__")
    if numpy.memmap in kind.__mro__:  # which has an open file
        return False
    return all(getattr(kind, each) is getattr(numpy.ndarray, each) for each in names)


_SINGLE = {
    ("random", "Random"): ("random", "_inst"),
    ("numpy.random.mtrand", "RandomState"): ("numpy.random.mtrand", "_rand"),
    ("matplotlib", "RcParams"): ("matplotlib", "rcParams"),
    ("matplotlib.cm", "ColormapRegistry"): ("matplotlib", "colormaps"),
}
"""Types with an object that a library has once in each process, and the name of this object."""

_SINGLE_NAMES = frozenset(name for _, name in _SINGLE)


def _reduce_single(thing: Any) -> Any:
    """Reduce the object that a library has once in each process to its name: a copy of it would
    not be the one that the library's functions use."""
    module, name = _SINGLE[type(thing).__module__, type(thing).__name__]
    if thing is getattr(sys.modules.get(module), name, None):
        return _single, (module, name)
    return thing.__reduce_ex__(PROTOCOL)


def _single(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _reduce_weak_reference(it: Any) -> Any:
    """Reduce with the object that it refers to, among the names of a cell."""
    if not keeps_identities():
        return it.__reduce_ex__(PROTOCOL)  # which says that it cannot be pickled
    return _weak_reference, (it(), it.__callback__)


def _weak_reference(thing: Any, callback: Any) -> Any:
    identities.referred.append(thing)
    return weakref.ref(_Gone() if thing is None else thing, callback)


class _Gone:
    """An object that a reference no longer has."""


def _reduce_module(module: Any) -> Any:
    """Reduce a module of a class of its own, such as `torch.ops`, as other modules."""
    known: Any = sys.modules.get(module.__name__)
    if known is module:
        return cloudpickle.subimport, (module.__name__,)
    return module.__reduce_ex__(PROTOCOL)


def _shared_dicts(kind: Any) -> list[tuple[Any, str]]:
    """Return the attributes of a class that all instances may have as `__dict__`, each as its class
    and its name: what one instance knows, all know."""
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return []
    if kind.__getstate__ is not object.__getstate__ or hasattr(kind, "__setstate__"):
        return []
    return [
        (each, name)
        for each in kind.__mro__[:-1]
        for name, value in vars(each).items()
        if type(value) is dict and not name.startswith("__")
    ]


def _reduce_sharing(shared: list[tuple[Any, str]], thing: Any) -> Any:
    """Reduce an instance that may share its attributes with all others of its class."""
    own: dict[str, Any] = vars(thing)
    same = [(owner, name) for owner, name in shared if vars(owner).get(name) is own]
    if not same:
        return thing.__reduce_ex__(PROTOCOL)
    owner, name = same[0]
    more = {}
    for other in _TOGETHER.get((owner.__module__, owner.__name__), ()):
        with_it: Any = getattr(sys.modules[owner.__module__], other)
        more[with_it] = name, dict(vars(with_it)[name])
    return _sharing, (type(thing), owner, name), (dict(own), more), None, None, _set_shared


def _sharing(kind: Any, owner: type, name: str) -> Any:
    made: Any = object.__new__(kind)
    object.__setattr__(made, "__dict__", getattr(owner, name))
    return made


def _set_shared(thing: Any, state: tuple[dict[str, Any], dict[type, Any]]) -> None:
    own, (came, more) = vars(thing), state
    own.clear()
    own.update(came)
    for each, (name, values) in more.items():
        getattr(each, name).update(values)


_TOGETHER = {("accelerate.state", "AcceleratorState"): ("PartialState",)}
"""Classes whose shared attributes are nothing without those of others in the same module."""


def _needs_arguments(kind: Any) -> bool:
    """Whether pickle cannot make instances of a class again: its `__new__` is a function that needs
    arguments, and nothing says which."""
    make = kind.__new__
    if not isinstance(make, types.FunctionType) or hasattr(kind, "__getnewargs__"):
        return False
    if hasattr(kind, "__getnewargs_ex__") or object not in (kind.__base__, *kind.__base__.__mro__):
        return False
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return False
    first, *rest = inspect.signature(make).parameters.values()
    needed = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD, first.KEYWORD_ONLY)
    return any(each.kind in needed and each.default is each.empty for each in rest)


def _reduce_without_new(thing: Any) -> Any:
    """Reduce an object to one that is made without the `__new__` of its class."""
    make, (kind, *arguments), *rest = thing.__reduce_ex__(PROTOCOL)
    if make is not copyreg.__newobj__ or arguments:  # type: ignore[attr-defined]
        return make, (kind, *arguments), *rest
    return object.__new__, (kind,), *rest


_OTHERS = StreamPickler.dispatch_table.maps[1:]
"""The tables of cloudpickle and copyreg, which may grow."""

_plainly = operator.methodcaller("__reduce_ex__", PROTOCOL)


class _Reducers(dict[type, Any]):
    """A dispatch table that also has reducers for types of libraries, which need not be loaded.

    It is a dictionary, and every object has a reducer, because the pickler finds these faster than
    a missing key or a key of a ChainMap.
    """

    def __missing__(self, kind: type) -> Any:
        for table in _OTHERS:
            if kind in table:
                return table[kind]
        if kind.__name__ in _SINGLE_NAMES and (kind.__module__, kind.__name__) in _SINGLE:
            return _reduce_single
        if kind.__dictoffset__:  # which rules most types out at once
            if kind.__name__ == "Figure" and kind.__module__ == "matplotlib.figure":
                return _reduce_figure
            if hasattr(kind, "__array_finalize__") and _is_array(kind):
                return _reduce_array
            if issubclass(kind, type):
                raise KeyError(kind)  # its instances are classes
            if issubclass(kind, types.ModuleType):
                return _reduce_module
            if kind.__name__ == "CustomOpDef" and kind.__module__ == "torch._library.custom_ops":
                return reduce_operator
            if shared := _shared_dicts(kind):
                return functools.partial(_reduce_sharing, shared)
            if _needs_arguments(kind):
                return _reduce_without_new
        return _plainly


StreamPickler.dispatch_table = _Reducers(StreamPickler.dispatch_table.maps[0])
StreamPickler.dispatch_table.update(
    {
        memoryview: _reduce_view,
        CACHED: _reduce_cached,
        functools.cached_property: _reduce_cached_property,
        weakref.ref: _reduce_weak_reference,
        weakref.WeakKeyDictionary: _reduce_weak,
        weakref.WeakValueDictionary: _reduce_weak,
    }
)
