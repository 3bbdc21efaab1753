"""What comes home with a cell, and what becomes of it in the notebook."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpunb import serialize
from gpunb.exceptions import GpunbError
from gpunb.notebook.shipping import Shipment
from gpunb.serialize import Payload
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
    for name, module in ending.modules.items():
        try:
            values[name] = sys.modules.get(module) or serialize.lazy_module(module)
        except ImportError as error:
            kept.append((name, str(error)))
    last = values.pop(LAST, None)
    unbound = tuple(
        name
        for name in sorted(values)
        if since is not None and since.touched(name) and space.get(name) is not values[name]
    )
    _fill_arrays(shipped, [name for name in ending.changed if name not in unbound], values)
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
        if ending.shown:
            shell.displayhook.update_user_ns(last)
            shell.displayhook.fill_exec_result(last)
    for reason in dict.fromkeys(reason for _, reason in kept):
        names = [repr(name) for name, why in kept if why == reason]
        verb = "stays" if len(names) == 1 else "stay"
        note(f"gpunb: {', '.join(names)} {verb} in the worker: {reason}\n")
    return Home(ending, last, values, unbound, tuple(kept))


def _fill_arrays(
    shipped: Mapping[str, Any], changed: Iterable[str], values: dict[str, Any]
) -> None:
    """Put what an array was changed to into the notebook's own, which may have views elsewhere;
    unless something else that came home holds the new one as well."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return
    for name in changed:
        own: Any = shipped.get(name)
        came: Any = values.get(name)
        if not (type(own) is numpy.ndarray is type(came)):
            continue
        alike = (own.shape, own.dtype, own.strides) == (came.shape, came.dtype, came.strides)
        if alike and own.flags.writeable and not own.dtype.hasobject:
            names = [other for other, each in values.items() if each is came]
            if sys.getrefcount(came) <= len(names) + 2:  # and `came`, and the argument
                numpy.copyto(own, came)
                values.update(dict.fromkeys(names, own))


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
