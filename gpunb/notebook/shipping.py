"""What travels with a cell."""

from __future__ import annotations
import __future__

import ast
import contextlib
import linecache
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from IPython.core.compilerop import code_name
from IPython.core.error import UsageError

from gpunb import backend, serialize
from gpunb.notebook import switch
from gpunb.notebook.names import CellNames, analyse
from gpunb.notebook.output import request_of
from gpunb.runtime.memory import total_memory
from gpunb.serialize import Payload
from gpunb.serialize.functions import global_names
from gpunb.serialize.reuse import Reuse
from gpunb.workers import figures
from gpunb.workers.cells import LOCALS, Cell
from gpunb.workers.changes import Fingerprints
from gpunb.workers.ending import SHELL_NAMES
from gpunb.workers.modules import Autoreload
from gpunb.workers.shell import remember

if TYPE_CHECKING:
    from gpunb.notebook.sessions import Held

_sent_before = Reuse(min(4 << 30, total_memory() // 8))
"""Large data is often what many cells read and few change."""

_NOT_DATA = SHELL_NAMES - {"_", "__", "___"}


class Since:
    """The notebook's names as they are now, to tell later which of them have changed since."""

    def __init__(self, space: Mapping[str, Any], names: Iterable[str], shipped: Mapping[str, Any]):
        self._space = space
        self._bound = {name: _held_loosely(space[name]) for name in names if name in space}
        self._data = Fingerprints(shipped, "ignored")

    def now(self, name: str) -> None:
        """Go on from what it is now, as a cell before this one has bound it."""
        self._bound.pop(name, None)
        if name in self._space:
            self._bound[name] = _held_loosely(self._space[name])
        self._data.forget(name)

    def touched(self, name: str) -> bool:
        """Whether the notebook has bound the name anew, deleted it, or changed its object."""
        before = self._bound.get(name)
        if name not in self._space or before is None:
            return name in self._space or before is not None
        return before() is not self._space[name] or self._data.has_changed(name)


class Always(Since):
    """For names that are bound whatever the notebook has."""

    def __init__(self) -> None:
        super().__init__({}, (), {})

    def touched(self, name: str) -> bool:
        return False


def _held_loosely(value: Any) -> Callable[[], Any]:
    """Gives the object as long as it lives; what cannot be asked for that is kept alive, or
    another one could have its identity."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


@dataclass(frozen=True, slots=True)
class Shipment:
    """What the notebook had when a cell left.

    Attributes:
        objects: of the cell's names, by name.
        sent: those of them that travelled by value.
        binds: names that the cell may bind; None if that cannot be told.
        since: for a cell in the background.
        expression: whether it is none, but an expression for its value.
    """

    objects: Mapping[str, Any]
    sent: frozenset[str] = frozenset()
    binds: frozenset[str] | None = None
    since: Since | None = None
    expression: bool = False


def outgoing(
    shell: Any,
    source: str,
    first_line: str,
    number: int,
    *,
    inputs: tuple[str, ...] | None = None,
    outputs: tuple[str, ...] | None = None,
    held: Held | None = None,
    late: bool = False,
    expression: bool = False,
    largest: int = 0,
    local: Mapping[str, Any] | None = None,
) -> tuple[Payload, Shipment]:
    """The cell with the names that it reads, and the objects of its names as they are bound now.

    `inputs` are the names to ship, and no others; None for what the cell reads. What the
    functions among them look up goes with them. What a session has already stays here. If `late`,
    other cells run before this one comes home. Values above `largest` bytes that `outputs` does not
    name stay in the worker. `local` are the names of the function that asks for an `expression`.

    Raises:
        UsageError: a name to ship is not bound, or its object cannot be pickled.
        SyntaxError: the cell is not Python.
    """
    text = _numbered(source, first_line)
    with switch.plain():
        transformed = shell.transform_cell(text)
        name = _check_syntax(shell, transformed, number)
        names = analyse(transformed, shell.transform_cell)
    space = shell.user_ns
    local = local or {}
    within = {each: local[each] for each in sorted(names.reads & local.keys())}
    if inputs is not None:
        missing = [each for each in inputs if each not in space]
        if missing:
            raise UsageError(f"%%gpu --in: not bound in the notebook: {', '.join(missing)}")
        reads, mentioned = set(inputs), set()
    else:
        reads = names.reads - within.keys() & space.keys() - _NOT_DATA
        mentioned = names.mentioned & space.keys() - _NOT_DATA
    wanted, files = _with_globals(reads, space, *within.values())
    perhaps, more_files = _with_globals(mentioned, space)
    perhaps -= wanted
    objects = {each: space[each] for each in sorted((wanted | perhaps) & space.keys())}
    modules = {
        name: each.__name__
        for name, each in objects.items()
        if isinstance(each, types.ModuleType) and sys.modules.get(each.__name__) is each
    }
    values = {name: each for name, each in objects.items() if name not in modules}
    known = frozenset(n for n, each in values.items() if held is not None and held.has(n, each))
    values = {name: each for name, each in values.items() if name not in known}
    if within and _awaits(transformed):  # as no function may that is not async
        values.update(within)
        objects.update(within)
        within = {}
    elif within:
        values[LOCALS] = within
    binds = _binds(names, transformed)
    deletes = (names.deletes & space.keys()) - objects.keys() - _NOT_DATA
    cell = Cell(
        source=text,
        name=name,
        number=number,
        modules=modules,
        binds=binds if binds is None else binds | wanted,
        deletes=deletes,
        imports=names.imports,
        outputs=outputs,
        sources=_sources(shell, files | more_files),
        flags=shell.compile.flags,
        filters=tuple(warnings.filters),
        colors=shell.colors,
        xmode=shell.InteractiveTB.mode,
        figures=figures.settings(shell),
        interactivity=shell.ast_node_interactivity,
        known=known,
        local=tuple(within),
        shell=(type(shell).__module__, type(shell).__name__),
        silent=expression,
        largest=0 if expression else largest,
        autoreload=_autoreload(shell),
        lasting=late and isinstance(backend.existing(), backend.Keeper),
        request=(request_of(shell).get("header") or {}).get("msg_id", "")
        if hasattr(shell, "kernel")
        else "",
    )
    payload = _packed(cell, values, perhaps)
    objects.update((name, space[name]) for name in deletes)
    since = None
    if late:
        since = Since(space, space if binds is None else binds | objects.keys(), objects)
    return payload, Shipment(objects, frozenset(values), binds, since, expression)


def _numbered(source: str, first_line: str) -> str:
    """The cell with a comment for the %%gpu line, so that its lines have the notebook's numbers;
    there may be no such line.

    A cell magic that it goes on with must come first, though. An indented cell stays one.
    """
    code = source.lstrip()
    if code.startswith("%%") or not first_line:
        return source
    indent = source[: len(source) - len(code)].rpartition("\n")[2]
    return f"{indent}#{first_line}\n{source}"


def _check_syntax(shell: Any, transformed: str, number: int) -> str:
    """Raise a SyntaxError here, not after a wait for a GPU; return the file name of the code.

    It is IPython's own, as ipykernel's ends with ``.py``: of a file that does not exist, IPython
    shows the line that a function had reached in the end, not the one where it failed.
    """
    name: str = code_name(transformed, number)
    remember(shell.compile, name, number, transformed)
    tree = shell.compile.ast_parse(transformed, filename=name)
    flags = shell.compile.flags & _FUTURE | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are shown when the cell runs
        compile(tree, name, "exec", flags, dont_inherit=True)
    return name


def _autoreload(shell: Any) -> Autoreload | None:
    """What the notebook reloads of edited modules, if it does."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    reloader = getattr(magics, "_reloader", None)
    if reloader is None or not reloader.enabled:
        return None
    chosen = reloader.skip_modules if reloader.check_all else reloader.modules
    return Autoreload(bool(reloader.check_all), frozenset(chosen))


_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def _with_globals(
    names: Iterable[str], space: Mapping[str, Any], *others: Any
) -> tuple[set[str], set[str]]:
    """The names and those that functions among their objects, and others, look up; the functions'
    files."""
    found, files = set(names), set()
    for function in serialize.functions_within(*(space[name] for name in names), *others):
        files.add(function.__code__.co_filename)
        if function.__globals__ is space:
            found.update(global_names(function.__code__))
    return found - _NOT_DATA, files


def _sources(shell: Any, files: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The cells that these files are, for tracebacks in the worker."""
    numbers = shell.compile._filename_map  # noqa: SLF001 - there is no public way
    return {
        name: (numbers[name], "".join(linecache.getlines(name)))
        for name in files
        if name in numbers
    }


def _binds(names: CellNames, transformed: str) -> frozenset[str] | None:
    """The names that the cell may bind; None if something runs in it that its text hides."""
    if names.star_imports or _calls_magics(transformed):
        return None
    return names.binds


def _calls_magics(transformed: str) -> bool:
    if "get_ipython" not in transformed:
        return False
    return any(
        isinstance(node, ast.Name) and node.id == "get_ipython"
        for node in ast.walk(compile(transformed, "cell", "exec", _PARSE_ONLY))
    )


def _awaits(transformed: str) -> bool:
    tree = compile(transformed, "cell", "exec", _PARSE_ONLY)
    return any(
        isinstance(node, ast.Await) or (isinstance(node, ast.comprehension) and node.is_async)
        for node in ast.walk(tree)
    )


_PARSE_ONLY = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _packed(cell: Cell, values: dict[str, Any], perhaps: set[str]) -> Payload:
    with serialize.staying() or contextlib.nullcontext():
        return _packed_here(cell, values, perhaps)


def _packed_here(cell: Cell, values: dict[str, Any], perhaps: set[str]) -> Payload:
    try:
        return _dumps(cell, values)
    except Exception:  # one of them cannot be pickled
        pass
    for name, value in [*values.items(), *values.get(LOCALS, {}).items()]:
        try:
            if name != LOCALS:
                serialize.dumps(value, what=name, way="cell")
        except Exception as error:
            if name in perhaps and name in values:
                del values[name]
                continue
            raise UsageError(f"%%gpu: {error}") from None
    return _dumps(cell, values)


def _dumps(cell: Cell, values: dict[str, Any]) -> Payload:
    what = "names of the cell"
    return serialize.dumps((cell, values), what=what, way="cell", reuse=_sent_before)
