"""A notebook's cell, run in a worker: in an InteractiveShell of its own, so that it is a cell.

What it shows is sent home as it happens. What it binds, and what it changed of what it was given,
is the result of the task; so is its error, because a cell that fails has bound names as well.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from IPython.core.interactiveshell import ExecutionResult

from gpunb import backend, serialize
from gpunb.core.resources import size_text
from gpunb.serialize import Moved, Payload
from gpunb.workers import comms, stdin
from gpunb.workers.changes import Fingerprints
from gpunb.workers.modules import Autoreload
from gpunb.workers.remote import Remote
from gpunb.workers.running import say
from gpunb.workers.shell import Compiler, Hook, Publisher, Shell, Show, prepare, remember
from gpunb.workers.sizes import size_of

FLUSH = 0.05
"""Seconds after which text without a line end is shown."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell on its way to a worker.

    Attributes:
        source: its text, magics and all, with the lines numbered as in the notebook.
        name: the file name that its code gets, which the notebook's shell knows too.
        number: the notebook's execution count for it.
        modules: names to bind to modules, by module name.
        binds: names that it may bind; None if that cannot be told from its text.
        deletes: names of the notebook that it may delete, but does not read.
        outputs: names to bring home, and no others; None for all.
        sources: of the cells whose functions come along: (number, text) by file name.
        flags: of the compiler, for what was imported from ``__future__``.
        filters: of warnings, as the notebook has set them.
        colors: how tracebacks are coloured, as the kernel's shell has it.
        xmode: how long they are.
        interactivity: the kernel's ``ast_node_interactivity``.
        shell: module and name of the class of the notebook's shell.
        known: names that it reads and that this worker has already, from an earlier cell.
        silent: whether its value is not shown.
        largest: bytes that a value may have to come home, if it was not asked for by name; 0 for
            no limit.
        autoreload: which modules the notebook reloads when they are edited, done while this is
            unpickled; None if it reloads none.
        request: id of the message that asked the notebook's kernel to run it; none if it is run
            where widgets cannot be shown.
    """

    source: str
    name: str
    number: int
    modules: Mapping[str, str] = field(default_factory=dict)
    binds: frozenset[str] | None = None
    deletes: frozenset[str] = frozenset()
    outputs: tuple[str, ...] | None = None
    sources: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    flags: int = 0
    filters: Sequence[Any] = ()
    colors: str = "neutral"
    xmode: str = "Context"
    interactivity: str = "last_expr"
    known: frozenset[str] = frozenset()
    shell: tuple[str, str] = ("", "")
    silent: bool = False
    largest: int = 0
    autoreload: Autoreload | None = None
    request: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a cell ended; beside it travel the values that come home.

    Attributes:
        modules: names bound to modules, by module name.
        same: names bound to objects that it was given and left as they were, by those names.
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


class Host:
    """What a session's worker is an actor of: its state is that of the shell."""


SHELL_NAMES = frozenset(
    """In Out exit quit get_ipython open _ __ ___ _i _ii _iii _dh _ih _oh
    __builtin__ __builtins__ __name__ __doc__ __loader__ __package__ __spec__
    __annotations__ __warningregistry__""".split()
)
"""Names in a shell's namespace that are the shell's own, not the user's."""

LAST = "\x00last"
"""The key, no possible name, of the last expression's value."""

_ELSEWHERE = object()
"""What a name is bound to that the cell may delete and does not read."""


def run(arguments: Payload, remote: Remote, label: str) -> Payload:
    """Run a cell and return its `Ending`, with the values that come home."""
    shell = prepare()
    kinds: list[Any] = list(Shell._walk_mro())  # noqa: SLF001
    for kind in kinds:  # as `instance()` does
        kind._instance = shell  # noqa: SLF001
    show = _in_order(remote.show)
    Publisher.show = Hook.show = staticmethod(show)
    names = shell.user_ns
    cell, values = serialize.loads(arguments, namespace=names)
    for name, module in cell.modules.items():
        names[name] = _imported(module)
    names.update(values)
    for name in cell.deletes:
        names.setdefault(name, _ELSEWHERE)
    before = dict(names)
    known = {name: names[name] for name in cell.known if name in names}
    fingerprints = Fingerprints({**known, **values}, "hashed")
    _dress(shell, cell)
    if cell.silent:
        Hook.show = staticmethod(_without_value(show))
    comms.begin(remote, show, cell.request)
    try:
        with _flusher(), stdin.asked(remote):
            result = _execute(shell, cell)
    finally:
        comms.end()
    _flush()
    for name in cell.deletes:
        if names.get(name) is _ELSEWHERE:
            del names[name], before[name]
    return _ending(cell, result, label, before=before, given=values, fingerprints=fingerprints)


def _in_order(show: Show) -> Show:
    """Show things after the text before them, and before the text after them.

    Text comes to the kernel by pipes. When it answers a question, it has read what was written
    before, and nothing more.
    """
    process = os.getpid()

    def send(kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        _flush()
        show(kind, content, payloads)
        if os.getpid() == process:  # a fork of it must not speak to the kernel
            backend.current().ask("total")

    return send


def _without_value(show: Show) -> Show:
    def send(kind: str, content: dict[str, Any]) -> None:
        if kind != "execute_result":
            show(kind, content)

    return send


def _imported(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def _dress(shell: Shell, cell: Cell) -> None:
    """Take over how the notebook shows things."""
    shell.execution_count = cell.number
    if cell.shell[1]:
        # Libraries tell a notebook from a terminal by it, and show things accordingly.
        Shell.__module__, Shell.__name__ = cell.shell
        Shell.__qualname__ = Shell.__name__
    shell.ast_node_interactivity = cell.interactivity
    assert isinstance(shell.compile, Compiler)
    shell.compile.flags = cell.flags
    shell.compile.text, shell.compile.name = cell.source, cell.name
    for name, (number, text) in cell.sources.items():
        remember(shell.compile, name, number, text)
    warnings.resetwarnings()
    warnings.filters.extend(cell.filters)  # type: ignore[attr-defined]
    # An interrupt may come just before the cell begins to run.
    warnings.filterwarnings("ignore", "coroutine 'InteractiveShell", RuntimeWarning)
    try:
        shell.colors = cell.colors
        shell.InteractiveTB.set_mode(mode=cell.xmode)
    except Exception:  # a theme that only the kernel knows
        pass
    # The kernel says which matplotlib backend a notebook's figures need; IPython's own flushes
    # them at the end of a cell.
    if os.environ.get("MPLBACKEND", "").endswith("backend_inline") and "matplotlib" in sys.modules:
        import matplotlib.pyplot  # noqa: F401 - registers the flush


def _execute(shell: Shell, cell: Cell) -> ExecutionResult:
    Hook.cell, Hook.value, Hook.shown = cell.source, None, False
    shell.traceback_lines = []
    result: ExecutionResult = shell.run_cell(cell.source, store_history=False)
    if result.success and shell.traceback_lines:  # of a part that a magic such as %%capture ran
        name, text = shell.error_shown
        lines = shell.traceback_lines
        Hook.show("error", {"ename": name, "evalue": text, "traceback": lines})
    return result


# ------------------------------------------------------------------------------------ the way home


def _ending(
    cell: Cell,
    result: ExecutionResult,
    label: str,
    *,
    before: Mapping[str, Any],
    given: Mapping[str, Any],
    fingerprints: Fingerprints,
) -> Payload:
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
    deleted = tuple(
        name
        for name in before
        if name not in names and (cell.outputs is None or name in cell.outputs)
    )

    own = tuple(_bound(names, cell, before).keys() - wanted.keys())
    large = _take_out_large(values, cell)
    moved: Moved | None = None

    def packed(
        error: BaseException | None,
        lines: tuple[str, ...],
        kept: tuple[tuple[str, str], ...],
    ) -> Payload:
        ending = Ending(
            modules=modules,
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
            return serialize.dumps((ending, values), what="names of the cell")

    def told(payload: Payload) -> Payload:
        if moved is not None and moved.count:
            say(f"gpunb: {moved}\n")
        return payload

    try:
        payload = packed(error, lines, large)
        _tell(error, lines)
        return told(payload)
    except Exception:  # something among them cannot be pickled; the rest still goes home
        there = {name for name in cell.known if names.get(name) is before.get(name)}
        kept = large + _leave_behind(values, there)
    asked = [f"--out {name}: {reason}" for name, reason in kept if cell.outputs and name != LAST]
    if asked and error is None:
        error = TypeError("; ".join(asked))
        lines = (f"TypeError: {error}",)
    _tell(error, lines)
    return told(packed(error, lines, kept))


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
                serialize.dumps(values[name], what=name)
        except Exception as reason:
            if name not in there:
                kept.append((name, comms.why_here(values[name], str(reason))))
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


class _flusher:  # noqa: N801 - used as a verb
    """While a cell runs, shows text that does not end its line, as a notebook does.

    No fork may happen while it writes, or the child would wait for it for ever.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpunb-flush", daemon=True)

    def __enter__(self) -> None:
        _register()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(FLUSH):
            with _writing:
                _flush()


_writing = threading.Lock()
_registered = False


def _register() -> None:
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(
            before=_writing.acquire,
            after_in_parent=_writing.release,
            after_in_child=_writing.release,
        )
