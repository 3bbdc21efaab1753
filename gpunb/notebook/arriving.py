"""What comes home with a cell, and what becomes of it in the notebook."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from IPython.core.displayhook import CapturingDisplayHook

from gpunb import serialize
from gpunb.exceptions import GpunbError
from gpunb.notebook.shipping import Shipment
from gpunb.serialize import Payload
from gpunb.signals import UNDIVIDED
from gpunb.workers.attributes import Attribute, bring_home
from gpunb.workers.ending import LAST, Ending

_UNCHANGING = (int, float, complex, str, bytes, bool, type(None), type, types.FunctionType)


@dataclass(frozen=True, slots=True)
class Home:
    """What came home: how the cell ended, its last value, and the values of its names. Those of
    the names in `unbound` were bound anew or changed meanwhile, and stay as they are. What could
    not come home is in `kept`, with the reason."""

    ending: Ending
    last: Any
    values: Mapping[str, Any]
    unbound: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()


def incoming(
    shell: Any,
    payload: Payload,
    shipment: Shipment,
    note: Callable[[str], object],
) -> Home:
    """Bind what came home, as far as it may be bound, and say how the cell ended; what there is
    to say to the user is handed to `note`."""
    space, shipped, since = shell.user_ns, shipment.objects, shipment.since
    try:
        ending, values = serialize.loads(payload, namespace=space, lazy_modules=True)
    except Exception as error:
        raise GpunbError(
            "the cell ran, but what it bound cannot be made again in the notebook: "
            f"{type(error).__name__}: {error}"
        ) from error
    assert isinstance(ending, Ending)
    kept = [each for each in ending.kept if each[0] != LAST]  # that was shown all the same
    attributes = {n: values.pop(n) for n, v in list(values.items()) if isinstance(v, Attribute)}
    for name, given in ending.same.items():
        if given in shipped:
            values[name] = shipped[given]
        elif name not in values and name != LAST:
            kept.append((name, "it is an object of the notebook that the cell was run in"))
    for name, module in (ending.modules | {each: each for each in ending.imported}).items():
        try:
            found = _module(module)
        except Exception as error:  # whatever importing it raises
            kept.append((name, str(error) or type(error).__name__))
        else:
            if name in ending.modules:  # else it is in its package now
                values[name] = found
    last = values.pop(LAST, None)
    unbound = tuple(
        name
        for name in sorted(values)
        if since is not None and since.touched(name) and space.get(name) is not values[name]
    )
    _fill_own(shipped, [name for name in ending.changed if name not in unbound], values)
    bound = {name: each for name, each in values.items() if name not in unbound}
    aliases = _aliases(space, shipped, ending.changed, values)
    shell.push({**aliases, **bound})
    if since is None:  # else the notebook may have changed them itself meanwhile
        kept.extend(bring_home(attributes, shipped))
    for name in ending.deleted:
        if name in shipped and name in space and space[name] is shipped[name]:
            del space[name]
    if since is None and not shipment.expression:
        shell.compile.flags = ending.flags
        # With %%capture it was collected, and is no output of the notebook.
        if ending.shown and not isinstance(sys.displayhook, CapturingDisplayHook):
            shell.displayhook.update_user_ns(last)
            shell.displayhook.fill_exec_result(last)
    for reason in dict.fromkeys(reason for _, reason in kept):
        names = [repr(name) for name, why in kept if why == reason]
        verb = "stays" if len(names) == 1 else "stay"
        note(f"gpunb: {', '.join(names)} {verb} in the worker: {reason}\n")
    return Home(ending, last, values, unbound, tuple(kept))


def _module(name: str) -> types.ModuleType:
    """The module, which is loaded when it is used if that can be."""
    found = sys.modules.get(name)
    if found is not None:
        return found
    try:
        return serialize.lazy_module(name)
    except ModuleNotFoundError:
        if "." not in name:
            raise
        return importlib.import_module(name)  # its package makes it, perhaps


def _fill_own(shipped: Mapping[str, Any], changed: Iterable[str], values: dict[str, Any]) -> None:
    """Put what an object was changed to into the notebook's own, which others may hold: views of an
    array, a list with a model in it; unless something else that came home holds the new one as
    well, or it is of a kind that cannot be filled."""
    for name in changed:
        own: Any = shipped.get(name)
        came: Any = values.get(name)
        fill = _filling(own, came)
        if fill is None:
            continue
        names = [other for other, each in values.items() if each is came]
        if sys.getrefcount(came) <= len(names) + 2:  # and `came`, and the argument
            with UNDIVIDED:
                fill(own, came)
            values.update(dict.fromkeys(names, own))


def _filling(own: Any, came: Any) -> Callable[[Any, Any], object] | None:
    """How an object becomes what another one is; None if it cannot be."""
    kind = type(own)
    if own is came or kind is not type(came):
        return None
    if kind in _FILLED:
        return _FILLED[kind]
    if kind.__module__ == "numpy":
        numpy = sys.modules["numpy"]
        if kind is not numpy.ndarray or own.dtype.hasobject or not own.flags.writeable:
            return None
        alike = (own.shape, own.dtype, own.strides) == (came.shape, came.dtype, came.strides)
        return cast("Callable[[Any, Any], object]", numpy.copyto) if alike else None
    return _fill_attributes if _is_plain(kind) else None


def _is_plain(kind: type) -> bool:
    """Whether all that an instance has is in its ``__dict__``."""
    slots = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    named = {name for each in slots for name in ((each,) if isinstance(each, str) else each)}
    return (
        kind.__dictoffset__ != 0
        and kind.__basicsize__ <= _Plain.__basicsize__
        and not issubclass(kind, type)
        and named <= {"__dict__", "__weakref__"}
    )


class _Plain:
    """Has attributes, can be referred to weakly, and nothing else."""


def _fill_dict(own: dict[Any, Any], came: dict[Any, Any]) -> None:
    own.clear()
    own.update(came)


def _fill_set(own: set[Any], came: set[Any]) -> None:
    own.clear()
    own.update(came)


def _fill_sequence(own: Any, came: Any) -> None:
    own[:] = came


def _fill_attributes(own: Any, came: Any) -> None:
    _fill_dict(vars(own), vars(came))


_FILLED: dict[type, Callable[[Any, Any], object]] = {
    list: _fill_sequence,
    bytearray: _fill_sequence,
    dict: _fill_dict,
    set: _fill_set,
}


def _aliases(
    space: Mapping[str, Any],
    shipped: Mapping[str, Any],
    changed: tuple[str, ...],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """Other names of the notebook for objects that the cell changed: they stay one object."""
    new = {
        id(shipped[name]): values[name] for name in changed if name in shipped and name in values
    }
    if not new:
        return {}
    return {
        name: new[id(each)]
        for name, each in space.items()
        if id(each) in new and name not in values and not isinstance(each, _UNCHANGING)
    }
