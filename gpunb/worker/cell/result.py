"""Packs the result of a cell: the values that it bound and changed, and its error."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from IPython.core.interactiveshell import ExecutionResult

from gpunb.data import serialize
from gpunb.data.serialize import Moved, Payload
from gpunb.protocol.ranks import RankOfCell
from gpunb.scheduler.resources import size_text
from gpunb.worker.cell import widgets
from gpunb.worker.cell.attribute_diff import Attribute, Attributes
from gpunb.worker.cell.cell_types import (
    LAST,
    LOCALS,
    SHELL_NAMES,
    Cell,
    CellResult,
    module_names,
)
from gpunb.worker.cell.change_detection import Fingerprints
from gpunb.worker.cell.shell import Hook, prepare
from gpunb.worker.cell.sizes import larger
from gpunb.worker.limits import usage
from gpunb.worker.streams import warn


@dataclass(frozen=True, slots=True)
class Before:
    """The namespace just before a cell runs, to find later the names that it binds and changes."""

    names: dict[str, Any]  # all of them
    given: Mapping[str, Any]  # those whose values came with this cell
    data: Fingerprints  # of the values that the notebook has as well
    attributes: Attributes  # of the functions and classes among these values

    @classmethod
    def take(cls, cell: Cell, names: Mapping[str, Any], values: Mapping[str, Any]) -> Before:
        """Look at the namespace of a cell that has come with these values."""
        known = {name: names[name] for name in cell.known if name in names}
        compared = {**known, **values} if cell.outputs != () else {}
        given = {name: each for name, each in values.items() if name != LOCALS}
        return cls(dict(names), given, Fingerprints(compared, "compared"), Attributes(compared))


class _Failure(NamedTuple):
    """The error of a cell, and the lines that IPython shows for it."""

    error: BaseException
    lines: tuple[str, ...]

    def shown(self) -> dict[str, Any]:
        """The content of the message that shows the error."""
        content = {"ename": type(self.error).__name__, "evalue": str(self.error)}
        return {**content, "traceback": list(self.lines)}


def pack_result(
    cell: Cell,
    executed: ExecutionResult,
    label: str,
    before: Before,
    libraries: Mapping[str, bytes],
) -> Payload:
    """The `CellResult` of a cell that has run, with the values that come home.

    Args:
        executed: what IPython returned for the cell.
        label: name of the task, for the text of an error.
        libraries: changes of library settings.
    """
    payload, failure = _result(cell, executed, label, before, libraries)
    if failure is not None:
        # The kernel opens a background cell's result only between other cells, but shows this now.
        Hook.show("failed", failure.shown())
    return payload


def pack_rank(
    rank: RankOfCell,
    cell: Cell,
    executed: ExecutionResult,
    *,
    label: str,
    before: Before,
    libraries: Mapping[str, bytes],
) -> list[Payload]:
    """The results of one rank of a cell, with the arguments of `pack_result`.

    Returns:
        The `CellResult` with its values, if this rank leads; the error of the cell with the content
        that shows it, or None; and a dict of the values of the names to gather.
    """
    home, gathered = serialize.dumps(None), {}
    if rank.leads:
        home, failure = _result(cell, executed, label, before, libraries)
    else:
        failure = _failure_of(replace(cell, outputs=None), executed)
        Hook.value = executed.result = None
    if failure is None:
        names = prepare().user_ns
        gathered = {name: names[name] for name in cell.gather if name in names}
        failure = _missing(cell.gather, gathered, "--gather")
    sent_error = None
    try:
        with serialize.moving() or nullcontext():
            packed = serialize.dumps(gathered, what="names to gather", way="home")
    except Exception as error:
        packed, text = serialize.dumps({}), f"--gather: {error}"
        failure = _Failure(TypeError(text), (f"TypeError: {text}",))
    if failure is not None:
        with serialize.moving() or nullcontext():
            payload = serialize.dump_failure(failure.error, task=label)
        sent_error = serialize.inlined(payload), failure.shown()
        Hook.show("failed", {"ename": type(failure.error).__name__})  # the state of this rank
    return [home, serialize.dumps(sent_error), packed]


def _result(
    cell: Cell,
    executed: ExecutionResult,
    label: str,
    before: Before,
    libraries: Mapping[str, bytes],
) -> tuple[Payload, _Failure | None]:
    """The packed result of a cell, and its failure."""
    shell = prepare()
    names = shell.user_ns
    failure = _failure_of(cell, executed)
    if failure is not None:
        usage.ended_with(failure.error)
    result, values, shared = _select(cell, before, libraries, shown=Hook.shown and failure is None)
    payload: Payload | None = None
    moved: Moved | None = None
    try:
        payload, moved = _pack(result, values, shared, failure, label)
    except Exception:  # a value cannot be pickled; the others still go home
        unchanged = {n for n in cell.known if names.get(n) is before.names.get(n)}
        left_behind = result.left_behind + _leave_behind(values, unchanged | result.same.keys())
        failure = failure or _unmet_outputs(cell, left_behind)
        result = replace(result, left_behind=left_behind)
    if payload is None:
        payload, moved = _pack(result, values, shared, failure, label)
    if LAST in values and names.get("_") is Hook.value:  # the notebook has it now
        del names["_"]
    Hook.value = executed.result = None
    if moved is not None and (note := str(moved)):
        warn(f"gpunb: {note}\n")
    return payload, failure


def _failure_of(cell: Cell, executed: ExecutionResult) -> _Failure | None:
    """The error that the cell raised, or the one for an output that it did not bind."""
    shell = prepare()
    error = executed.error_before_exec or executed.error_in_exec
    if error is not None:
        return _Failure(error, tuple(shell.traceback_lines))
    return _missing(cell.outputs or (), shell.user_ns, "--out")


def _missing(asked: Sequence[str], names: Mapping[str, Any], option: str) -> _Failure | None:
    """The error for the names that an option asks for and that are missing."""
    missing = [name for name in asked if name not in names]
    if not missing:
        return None
    error = NameError(f"{option} asks for {', '.join(missing)}, which the cell did not bind")
    return _Failure(error, (f"NameError: {error}",))


def _unmet_outputs(cell: Cell, left_behind: tuple[tuple[str, str], ...]) -> _Failure | None:
    """The error for outputs that cannot be pickled."""
    asked = [
        f"--out {name}: {reason}" for name, reason in left_behind if cell.outputs and name != LAST
    ]
    error = TypeError("; ".join(asked))
    return _Failure(error, (f"TypeError: {error}",)) if asked else None


def _select(
    cell: Cell, before: Before, libraries: Mapping[str, bytes], *, shown: bool
) -> tuple[CellResult, dict[str, Any], list[serialize.Part]]:
    """The result without its error, the values to pickle, and the parts of these that the notebook
    has already; `shown` if the last value is one of the values."""
    shell, old = prepare(), before.names
    names = shell.user_ns
    touched = list(before.data.changed())
    given = {name: each for name, each in before.given.items() if name not in touched}
    changed = [n for n in touched if names.get(n) is old[n] and _comes_home(n, cell)]
    bound = _bound(names, cell, old)
    if cell.outputs is None:
        wanted = bound | {name: names[name] for name in changed}
    else:
        wanted = {name: names[name] for name in cell.outputs if name in names}
    if shown:
        wanted[LAST] = Hook.value
    modules = module_names(wanted)
    same = _same(wanted, given)
    values = {name: wanted[name] for name in wanted.keys() - modules.keys() - same.keys()}
    if cell.lasting:
        values.update((name, wanted[name]) for name in same)
    values.update(before.attributes.changed(cell.outputs))
    result = CellResult(
        modules=modules,
        imported=_imported(cell),
        same=same,
        deleted=tuple(n for n in old if n not in names and _comes_home(n, cell)),
        changed=tuple(changed),
        left_behind=tuple(each for each in _take_out_large(values, cell) if each[0] not in same),
        own=tuple(bound.keys() - wanted.keys()),
        detached=serialize.with_graph(values),
        losses=_losses(values) if cell.check else None,
        shown=shown,
        flags=shell.compile.flags,
        libraries=libraries,
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    shared = [] if cell.lasting or cell.outputs == () else _shared(values, given)
    return result, values, shared


def _losses(values: dict[str, Any]) -> list[serialize.Loss]:
    named = {
        "the last value" if name == LAST else name: each
        for name, each in values.items()
        if not isinstance(each, Attribute)
    }
    with serialize.moving() or nullcontext():
        return serialize.losses(named, "home")


def _pack(
    result: CellResult,
    values: dict[str, Any],
    shared: list[serialize.Part],
    failure: _Failure | None,
    label: str,
) -> tuple[Payload, Moved | None]:
    """Pickle the result; the second part counts the tensors that were moved to host memory."""
    shown = result.shown and failure is None and LAST not in dict(result.left_behind)
    result = replace(result, shown=shown)
    if failure is not None:
        with serialize.moving() or nullcontext():
            packed = serialize.dump_failure(failure.error, task=label)
        result = replace(result, failure=packed, traceback=failure.lines)
    moved = serialize.moving()
    with moved or nullcontext():
        what = "names of the cell"
        return serialize.dumps((result, values), what=what, way="home", shared=shared), moved


def _comes_home(name: str, cell: Cell) -> bool:
    return cell.outputs is None or name in cell.outputs


def _imported(cell: Cell) -> tuple[str, ...]:
    """Modules within packages that the notebook has to load as well."""
    outputs = cell.outputs
    return tuple(
        module
        for module in sorted(cell.imports & sys.modules.keys())
        if outputs is None or module.partition(".")[0] in outputs
    )


def _same(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Names whose objects the notebook has already, with the name there."""
    there = {id(value): name for name, value in given.items()}
    return {name: there[id(value)] for name, value in wanted.items() if id(value) in there}


def _shared(values: Mapping[str, Any], given: Mapping[str, Any]) -> list[serialize.Part]:
    """Parts of the values that the notebook has sent and that are unchanged."""
    if all(isinstance(each, (int, float, str, bytes, type(None))) for each in values.values()):
        return []
    return list(serialize.parts(given, exact=True))


def _take_out_large(values: dict[str, Any], cell: Cell) -> tuple[tuple[str, str], ...]:
    """Remove values too large to come home unasked; return their names, each with the reason."""
    if not cell.largest or cell.outputs is not None:
        return ()
    large = larger(values, cell.largest)
    for name in large:
        del values[name]
    return tuple((name, _why_large(name, size, cell.largest)) for name, size in large.items())


def _why_large(name: str, size: int, largest: int) -> str:
    return (
        f"it has {size_text(size)}, more than the {size_text(largest)} of GpuMagics.largest; "
        f"--session NAME keeps it for further cells, --out {name} brings it home"
    )


def _leave_behind(values: dict[str, Any], there: set[str]) -> tuple[tuple[str, str], ...]:
    """Remove values that cannot be pickled; return their names, each with the reason, without those
    in `there`, which the notebook has."""
    left_behind = []
    for name in list(values):
        try:
            with serialize.moving() or nullcontext():
                value = values[name]
                part = value.value if isinstance(value, Attribute) else value
                serialize.dumps(part, what=name, way="home")
        except Exception as error:
            if name not in there:
                reason = str(error).removeprefix(f"{name} cannot come home: ")
                left_behind.append((name, widgets.why_here(value, reason)))
            del values[name]
    return tuple(left_behind)


def _bound(names: Mapping[str, Any], cell: Cell, before: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in names.items():
        if name in SHELL_NAMES or (name.startswith("_i") and name[2:].isdigit()):
            continue
        bound = name not in before or before[name] is not value
        if bound and (cell.binds is None or name in cell.binds):
            found[name] = value
    return found
