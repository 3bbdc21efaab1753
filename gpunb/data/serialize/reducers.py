"""Reducers for types of Python that pickle and cloudpickle refuse, or turn into other types."""

from __future__ import annotations

import functools
import importlib
import operator
import pickle
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from gpunb.data.serialize.functions import CACHED
from gpunb.data.serialize.pickler import PROTOCOL, StreamPickler, by_value


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
        if kind.__dictoffset__:  # which rules most types out at once
            if kind.__name__ == "Figure" and kind.__module__ == "matplotlib.figure":
                return _reduce_figure
            if hasattr(kind, "__array_finalize__") and _is_array(kind):
                return _reduce_array
            if issubclass(kind, type):
                raise KeyError(kind)  # its instances are classes
        if kind.__name__ in _SINGLE_NAMES and (kind.__module__, kind.__name__) in _SINGLE:
            return _reduce_single
        return _plainly


StreamPickler.dispatch_table = _Reducers(StreamPickler.dispatch_table.maps[0])
StreamPickler.dispatch_table.update(
    {
        memoryview: _reduce_view,
        CACHED: _reduce_cached,
        functools.cached_property: _reduce_cached_property,
        weakref.WeakKeyDictionary: _reduce_weak,
        weakref.WeakValueDictionary: _reduce_weak,
    }
)
