"""Binds the values of a finished cell to the notebook's names."""

from __future__ import annotations

import importlib
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

from IPython.core.displayhook import CapturingDisplayHook

from gpunb.data import serialize
from gpunb.data.serialize import Loss, Payload
from gpunb.exceptions import GpunbError
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.shipment import Shipment
from gpunb.system.signals import UNDIVIDED
from gpunb.worker import library_state
from gpunb.worker.cell import figures
from gpunb.worker.cell.attribute_diff import FILLED, Attribute, bring_home
from gpunb.worker.cell.cell_types import LAST, CellResult
from gpunb.worker.cell.widgets import WHY_HERE

Names: TypeAlias = Mapping[str, Any]
"""Objects by name."""

_UNCHANGING = (int, float, complex, str, bytes, bool, type(None), type, types.FunctionType)


@dataclass(frozen=True, slots=True)
class Home:
    """The values that a cell has brought home.

    Attributes:
        result: how the cell ended.
        last: value of the last expression.
        values: values of its names.
        unbound: names that the notebook bound anew or changed meanwhile, and that stay as they are.
        kept: names whose values could not come home, each with the reason.
    """

    result: CellResult
    last: Any
    values: dict[str, Any]
    unbound: tuple[str, ...] = ()
    left_behind: tuple[tuple[str, str], ...] = ()

    @property
    def in_worker(self) -> set[str]:
        """Names that the worker has as the cell left them."""
        return {*self.values, *self.result.own, *(name for name, _ in self.left_behind)}


def bind_result(
    shell: NotebookShell,
    payload: Payload,
    shipment: Shipment,
    warn: Callable[[str], object],
    session: str | None = None,
) -> Home:
    """Bind the names that a cell has brought home, as far as they may be bound.

    Args:
        warn: called with each text for the user.
        session: name of the session that ran the cell.

    Raises:
        GpunbError: the payload cannot be unpickled.
    """
    # Later the notebook may have changed its tensors itself.
    result, values, lost = _load(shell.user_ns, payload, shipment, fill=shipment.since is None)
    left_behind = [
        each for each in result.left_behind if each[0] != LAST
    ]  # the value was shown all the same
    left_behind += [(name, _why_lost(why)) for name, why in sorted(lost.items()) if name != LAST]
    attributes = {n: values.pop(n) for n, v in list(values.items()) if isinstance(v, Attribute)}
    left_behind += _add_known(values, result, shipment.objects)
    last = values.pop(LAST, None)
    unbound = _bind(shell, values, result, shipment)
    if shell.shows and figures.inline():
        figures.expect(shell.ip)
    if shipment.since is None:  # else the notebook may have changed them itself meanwhile
        left_behind.extend(bring_home(attributes))
        libraries = dict(result.libraries)
        if (chosen := libraries.pop(figures.CHOSEN, None)) is not None:
            figures.bring_home(shell.ip, pickle.loads(chosen))
        library_state.bring_home(libraries, shell.user_ns)
        if not shipment.expression:
            shell.ip.compile.flags = result.flags
            # %%capture has collected the value, which is no output of the notebook then.
            captured = isinstance(sys.displayhook, CapturingDisplayHook)
            if result.shown and LAST not in lost and not captured:
                shell.set_output(last)
    if shipment.losses is not None and result.losses is not None:
        warn(_table({"to the cell": shipment.losses, "home": result.losses}))
    shell.part(_Detached).note(shipment.detached, "went to the cell", warn)
    if session is None:  # its next cells have the graph
        shell.part(_Detached).note(result.detached, "came home", warn)
    for reason in dict.fromkeys(reason for _, reason in left_behind):
        warn(_left_behind([name for name, why in left_behind if why == reason], reason, session))
    return Home(result, last, values, unbound, tuple(left_behind))


def _table(losses: Mapping[str, list[Loss]]) -> str:
    """What differs after the trip, by the way on which it is lost."""
    rows = [(each.where, way, each.what) for way, some in losses.items() for each in some]
    if not rows:
        return (
            "gpunb: --check: nothing is lost on the way to the cell, and nothing on the way home\n"
        )
    rows = [("--check", "lost on the way", "what"), *rows]
    wide = [max(len(row[at]) for row in rows) for at in (0, 1)]
    lines = [f"gpunb: {a:{wide[0]}}  {b:{wide[1]}}  {c}" for a, b, c in rows]
    return "".join(f"{line}\n" for line in lines)


class _Detached:
    """Says once for each name and way that tensors came without their graphs."""

    def __init__(self, _: NotebookShell) -> None:
        self._said: set[tuple[str, str]] = set()

    def note(self, names: Iterable[str], way: str, warn: Callable[[str], object]) -> None:
        """Say it of the names of which it was not said."""
        new = [name for name in names if (name, way) not in self._said and name != LAST]
        self._said.update((name, way) for name in new)
        if new:
            its = "its graph" if len(new) == 1 else "their graphs"
            warn(
                f"gpunb: {', '.join(map(repr, new))} {way} without {its}, so backward() cannot go "
                "on from there; cells of a session (--session NAME) keep graphs, and .detach() "
                "says that none is needed\n"
            )


def load_result(
    space: dict[str, Any], payload: Payload, shipment: Shipment
) -> tuple[CellResult, dict[str, Any]]:
    """The result of a cell and its values, which are not bound.

    Raises:
        GpunbError: the payload cannot be unpickled, or one of its values cannot.
    """
    result, values, lost = _load(space, payload, shipment)
    for name, error in lost.items():
        raise GpunbError(f"{name!r}: {_why_lost(error)}")
    for name, reason in _add_known(values, result, shipment.objects):
        raise GpunbError(f"{name!r}: {reason}")
    return result, values


def _load(
    space: dict[str, Any], payload: Payload, shipment: Shipment, *, fill: bool = False
) -> tuple[CellResult, dict[str, Any], dict[str, Exception]]:
    """The result of a cell, its values, and the errors of values that cannot be unpickled; with
    `fill` tensors of the notebook that come back stay the same objects."""
    shared = partial(serialize.part_at, shipment.objects)
    load = partial(
        serialize.loads_names, namespace=space, lazy_modules=True, shared=shared, fill=fill
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # of libraries, which unpacking alone causes
            result, values, lost = load(payload)
            if result.home is not None:
                return _of_ranks(result, space, *load(result.home))
    except Exception as error:
        raise GpunbError(
            "the cell ran, but what it bound cannot be made again in the notebook: "
            f"{type(error).__name__}: {error}"
        ) from error
    assert isinstance(result, CellResult)
    return result, values, lost


def _of_ranks(
    ranks: CellResult,
    space: dict[str, Any],
    result: CellResult,
    values: dict[str, Any],
    lost: dict[str, Exception],
) -> tuple[CellResult, dict[str, Any], dict[str, Exception]]:
    """The result of a cell in several ranks, with the arguments and the value of `_load`."""
    gathered = [serialize.loads(e, namespace=space, lazy_modules=True) for e in ranks.gathered]
    lists = {name: [each[name] for each in gathered] for name in (gathered or [{}])[0]}
    same = {name: given for name, given in result.same.items() if name not in lists}
    result = replace(result, same=same, failure=ranks.failure, traceback=ranks.traceback)
    return result, {**values, **lists}, lost


def _add_known(
    values: dict[str, Any], result: CellResult, shipped: Names
) -> Iterator[tuple[str, str]]:
    """Add the notebook's own objects and modules to the values; yield each name that cannot be
    added, with the reason."""
    for name, given in result.same.items():
        if given in shipped:
            values[name] = shipped[given]
        elif name not in values and name != LAST:
            yield name, "it is an object of the notebook that the cell was run in"
    for name, module in (result.modules | {each: each for each in result.imported}).items():
        try:
            loaded = _module(module)
        except Exception as error:  # whatever importing it raises
            yield name, str(error) or type(error).__name__
        else:
            if name in result.modules:  # else it is in its package now
                values[name] = loaded


def _bind(
    shell: NotebookShell, values: dict[str, Any], result: CellResult, shipment: Shipment
) -> tuple[str, ...]:
    """Bind the values; return the names that stay as the notebook has them."""
    space, shipped, since = shell.user_ns, shipment.objects, shipment.since
    unbound = tuple(
        name
        for name in sorted(values)
        if since is not None and since.touched(name) and space.get(name) is not values[name]
    )
    _fill_own(shipped, [name for name in result.changed if name not in unbound], values)
    bound = {name: each for name, each in values.items() if name not in unbound}
    new = {id(shipped[n]): values[n] for n in result.changed if n in shipped and n in values}
    aliases = {name: each for name, each in _renewed(space, new).items() if name not in values}
    outputs = space.get("_oh", {})
    outputs.update(_renewed(outputs, new))
    shell.ip.push({**aliases, **bound})
    for name in result.deleted:
        if name in shipped and name in space and space[name] is shipped[name]:
            del space[name]
    return unbound


def _left_behind(names: list[str], reason: str, session: str | None) -> str:
    """A line that names values that stay in the worker, for the user."""
    which, one = ", ".join(map(repr, names)), len(names) == 1
    if reason != WHY_HERE:
        return f"gpunb: {which} {'stays' if one else 'stay'} in the worker: {reason}\n"
    if session is None:
        ends = "which ends with the cell; in a session (--session NAME) they live on"
        return f"gpunb: {which} {'stays' if one else 'stay'} in the worker: {reason}, {ends}\n"
    return (
        f"gpunb: {which} {'lives' if one else 'live'} on in the session {session!r}: {reason}; "
        f"cells with --session {session} have {'it' if one else 'them'}\n"
    )


def _why_lost(error: Exception) -> str:
    return f"it cannot be made again in the notebook: {serialize.why_lost(error)}"


def _module(name: str) -> types.ModuleType:
    """The module; a lazy one, which loads at the first use, where possible."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    try:
        return serialize.lazy_module(name)
    except ModuleNotFoundError:
        if "." not in name:
            raise
        return importlib.import_module(name)  # its package makes it, perhaps


def _fill_own(shipped: Names, changed: Iterable[str], values: dict[str, Any]) -> None:
    """Copy the data of changed objects into the notebook's own objects, to which others may refer:
    views of an array, a list with a model in it. An object stays as it is if another value refers
    to the new one as well, or if its type cannot be filled."""
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
    """The function that copies the data of `came` into `own`; None if there is none."""
    kind = type(own)
    if own is came or kind is not type(came):
        return None
    if kind in FILLED:
        return FILLED[kind]
    if (kind.__module__, kind.__name__) in _GENERATORS:
        return _GENERATORS[kind.__module__, kind.__name__]
    if kind.__module__ == "numpy":
        numpy = sys.modules["numpy"]
        if kind is not numpy.ndarray or own.dtype.hasobject or not own.flags.writeable:
            return None
        alike = (own.shape, own.dtype, own.strides) == (came.shape, came.dtype, came.strides)
        return cast("Callable[[Any, Any], object]", numpy.copyto) if alike else None
    return _fill_attributes if _is_plain(kind) else None


def _fill_random_state(own: Any, came: Any) -> None:
    own.set_state(came.get_state())


def _fill_bit_generator(own: Any, came: Any) -> None:
    own.bit_generator.state = came.bit_generator.state


_GENERATORS: dict[tuple[str, str], Callable[[Any, Any], object]] = {
    ("random", "Random"): lambda own, came: own.setstate(came.getstate()),
    ("numpy.random.mtrand", "RandomState"): _fill_random_state,
    ("numpy.random._generator", "Generator"): _fill_bit_generator,
    ("torch._C", "Generator"): _fill_random_state,
}
"""Functions that copy the state of a random generator, by module and name of its class."""


def _fill_attributes(own: Any, came: Any) -> None:
    FILLED[dict](vars(own), vars(came))


def _is_plain(kind: type) -> bool:
    """Whether the instances of a class keep all their data in ``__dict__``."""
    slots = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    named = {name for each in slots for name in ((each,) if isinstance(each, str) else each)}
    return (
        kind.__dictoffset__ != 0
        and kind.__basicsize__ <= _Plain.__basicsize__
        and not issubclass(kind, type)
        and named <= {"__dict__", "__weakref__"}
    )


class _Plain:
    """A class of the smallest size: with ``__dict__`` and weak references."""


def _renewed(held: Mapping[Any, Any], new: Mapping[int, Any]) -> dict[Any, Any]:
    """The entries of a mapping that hold objects which the cell has changed, with the new objects.

    Args:
        new: the new objects by the ids of the notebook's own.
    """
    return {
        key: new[id(each)]
        for key, each in held.items()
        if id(each) in new and not isinstance(each, _UNCHANGING)
    }
