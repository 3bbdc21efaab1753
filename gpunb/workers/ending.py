"""How a cell ended: what it bound and changed, on its way home."""

from __future__ import annotations

import resource
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import ExecutionResult

from gpunb import serialize
from gpunb.core.resources import size_text
from gpunb.serialize import Moved, Payload
from gpunb.workers import comms
from gpunb.workers.attributes import Attribute, Attributes
from gpunb.workers.changes import Fingerprints
from gpunb.workers.running import say
from gpunb.workers.shell import Hook, prepare
from gpunb.workers.sizes import size_of

if TYPE_CHECKING:
    from gpunb.workers.cells import Cell


@dataclass(frozen=True, slots=True)
class Ending:
    """How a cell ended; beside it travel the values that come home.

    Attributes:
        modules: names bound to modules, by module name.
        imported: modules within packages that its import statements have loaded.
        same: names bound to objects that it was given and left as they were, by those names. Their
            values travel as well, as far as they can, if another kernel may bring the cell home.
        deleted: names that it was given and that are gone.
        kept: names that stay behind, each with the reason.
        own: names that it bound and that were not to come home.
        changed: names whose objects, given to the cell, were changed in place.
        shown: whether the value under `LAST` in the values is that of the last expression.
        failure: what it raised, as `serialize.dump_failure` made it.
        traceback: the lines that IPython shows for that.
        flags: of the compiler.
        peak: bytes of memory that the worker had at most.
    """

    modules: dict[str, str] = field(default_factory=dict)
    imported: tuple[str, ...] = ()
    same: dict[str, str] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    own: tuple[str, ...] = ()
    shown: bool = False
    failure: Payload | None = None
    traceback: tuple[str, ...] = ()
    flags: int = 0
    peak: int = 0


SHELL_NAMES = frozenset(
    """In Out exit quit get_ipython open _ __ ___ _i _ii _iii _dh _ih _oh
    __builtin__ __builtins__ __name__ __doc__ __loader__ __package__ __spec__
    __annotations__ __warningregistry__""".split()
)
"""Names in a shell's namespace that are the shell's own, not the user's."""

LAST = "\x00last"
"""The key, no possible name, of the last expression's value."""


def ending_of(
    cell: Cell,
    result: ExecutionResult,
    label: str,
    *,
    before: Mapping[str, Any],
    given: Mapping[str, Any],
    fingerprints: Fingerprints,
    attributes: Attributes,
) -> Payload:
    """The `Ending` of a cell that was run, with the values that come home."""
    shell = prepare()
    error = result.error_before_exec or result.error_in_exec
    lines = tuple(shell.traceback_lines)
    names = shell.user_ns
    changed = [
        name
        for name in fingerprints.changed()
        if names.get(name) is before[name] and (cell.outputs is None or name in cell.outputs)
    ]
    wanted = _wanted(names, cell, before, changed)
    missing = [name for name in cell.outputs or () if name not in names]
    if missing and error is None:
        error = NameError(f"--out asks for {', '.join(missing)}, which the cell did not bind")
        lines = (f"NameError: {error}",)
    if Hook.shown and error is None:
        wanted[LAST] = Hook.value
    modules = {
        name: each.__name__
        for name, each in wanted.items()
        if isinstance(each, types.ModuleType) and sys.modules.get(each.__name__) is each
    }
    same = _same(wanted, given, changed)
    values = {name: wanted[name] for name in wanted.keys() - modules.keys() - same.keys()}
    if cell.lasting:
        values.update((name, wanted[name]) for name in same)
    values.update(attributes.changed(cell.outputs))
    deleted = tuple(
        name
        for name in before
        if name not in names and (cell.outputs is None or name in cell.outputs)
    )

    own = tuple(_bound(names, cell, before).keys() - wanted.keys())
    large = tuple(each for each in _take_out_large(values, cell) if each[0] not in same)
    moved: Moved | None = None

    def packed(
        error: BaseException | None,
        lines: tuple[str, ...],
        kept: tuple[tuple[str, str], ...],
    ) -> Payload:
        ending = Ending(
            modules=modules,
            imported=_imported(cell),
            same=same,
            deleted=deleted,
            changed=tuple(changed),
            kept=kept,
            own=own,
            shown=Hook.shown and error is None and LAST not in dict(kept),
            failure=_failure(error, label) if error is not None else None,
            traceback=lines,
            flags=shell.compile.flags,
            peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        nonlocal moved
        moved = serialize.moving()
        with moved or nullcontext():
            return serialize.dumps((ending, values), what="names of the cell", way="home")

    def told(payload: Payload) -> Payload:
        if LAST in values and names.get("_") is Hook.value:  # home has it
            del names["_"]
        Hook.value = result.result = None
        if moved is not None and moved.count:
            say(f"gpunb: {moved}\n")
        return payload

    try:
        payload = packed(error, lines, large)
        _tell(error, lines)
        return told(payload)
    except Exception:  # something among them cannot be pickled; the rest still goes home
        there = {name for name in cell.known if names.get(name) is before.get(name)} | same.keys()
        kept = large + _leave_behind(values, there)
    asked = [f"--out {name}: {reason}" for name, reason in kept if cell.outputs and name != LAST]
    if asked and error is None:
        error = TypeError("; ".join(asked))
        lines = (f"TypeError: {error}",)
    _tell(error, lines)
    return told(packed(error, lines, kept))


def _imported(cell: Cell) -> tuple[str, ...]:
    """What of its modules has to be in the packages that it binds at home."""
    outputs = cell.outputs
    return tuple(
        module
        for module in sorted(cell.imports & sys.modules.keys())
        if outputs is None or module.partition(".")[0] in outputs
    )


def _failure(error: BaseException, label: str) -> Payload:
    with serialize.moving() or nullcontext():
        return serialize.dump_failure(error, task=label)


def _tell(error: BaseException | None, lines: Sequence[str]) -> None:
    """Say that the cell has failed, as the kernel opens its ending only between other cells."""
    if error is not None:
        content = {"ename": type(error).__name__, "evalue": str(error), "traceback": list(lines)}
        Hook.show("failed", content)


def _same(
    wanted: Mapping[str, Any], given: Mapping[str, Any], changed: list[str]
) -> dict[str, str]:
    """Names for what the notebook has already, with its name there."""
    there = {id(value): name for name, value in given.items() if name not in changed}
    return {name: there[id(value)] for name, value in wanted.items() if id(value) in there}


def _take_out_large(values: dict[str, Any], cell: Cell) -> tuple[tuple[str, str], ...]:
    """Take out of the values what is too large to come home if nobody has asked for it."""
    if not cell.largest or cell.outputs is not None:
        return ()
    sizes = {name: size_of(value) for name, value in values.items()}
    large = {name: size for name, size in sizes.items() if size > cell.largest}
    for name in large:
        del values[name]
    return tuple((name, _why_large(name, size, cell.largest)) for name, size in large.items())


def _why_large(name: str, size: int, largest: int) -> str:
    return (
        f"it has {size_text(size)}, more than the {size_text(largest)} of GpuMagics.largest; "
        f"--session NAME keeps it for further cells, --out {name} brings it home"
    )


def _leave_behind(values: dict[str, Any], there: set[str]) -> tuple[tuple[str, str], ...]:
    """Take out of the values what cannot be pickled, and say why, unless it was there before."""
    kept = []
    for name in list(values):
        try:
            with serialize.moving() or nullcontext():
                value = values[name]
                part = value.value if isinstance(value, Attribute) else value
                serialize.dumps(part, what=name, way="home")
        except Exception as error:
            if name not in there:
                reason = str(error).removeprefix(f"{name} cannot come home: ")
                kept.append((name, comms.why_here(value, reason)))
            del values[name]
    return tuple(kept)


def _wanted(
    names: Mapping[str, Any], cell: Cell, before: Mapping[str, Any], changed: list[str]
) -> dict[str, Any]:
    """What the cell bound, and what it changed in place."""
    if cell.outputs is not None:
        return {name: names[name] for name in cell.outputs if name in names}
    return {**_bound(names, cell, before), **{name: names[name] for name in changed}}


def _bound(names: Mapping[str, Any], cell: Cell, before: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in names.items():
        if name in SHELL_NAMES or (name.startswith("_i") and name[2:].isdigit()):
            continue
        bound = name not in before or before[name] is not value
        if bound and (cell.binds is None or name in cell.binds):
            found[name] = value
    return found
