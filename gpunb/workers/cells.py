"""A notebook's cell, run in a worker: in an InteractiveShell of its own, so that it is a cell.

What it shows is sent home as it happens. What it binds, and what it changed of what it was given,
is the result of the task; so is its error, because a cell that fails has bound names as well.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from IPython.core.interactiveshell import ExecutionResult

from gpunb import backend, serialize
from gpunb.serialize import Payload
from gpunb.workers import comms, figures, stdin
from gpunb.workers.attributes import Attributes
from gpunb.workers.changes import Fingerprints
from gpunb.workers.ending import ending_of
from gpunb.workers.modules import Autoreload
from gpunb.workers.remote import Remote
from gpunb.workers.shell import Compiler, Hook, Publisher, Shell, Show, prepare, remember

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
        imports: modules within packages that its own import statements name.
        outputs: names to bring home, and no others; None for all.
        sources: of the cells whose functions come along: (number, text) by file name.
        flags: of the compiler, for what was imported from ``__future__``.
        filters: of warnings, as the notebook has set them.
        colors: how tracebacks are coloured, as the kernel's shell has it.
        xmode: how long they are.
        figures: what the notebook has set for its figures, as `figures.settings` says.
        interactivity: the kernel's ``ast_node_interactivity``.
        shell: module and name of the class of the notebook's shell.
        local: names of the function that asked for this expression, whose values are in one dict
            under `LOCALS`.
        known: names that it reads and that this worker has already, from an earlier cell.
        silent: whether its value is not shown.
        largest: bytes that a value may have to come home, if it was not asked for by name; 0 for
            no limit.
        autoreload: which modules the notebook reloads when they are edited, done while this is
            unpickled; None if it reloads none.
        lasting: whether another kernel may bring it home, which lacks what the notebook has.
        request: id of the message that asked the notebook's kernel to run it; none if it is run
            where widgets cannot be shown.
    """

    source: str
    name: str
    number: int
    modules: Mapping[str, str] = field(default_factory=dict)
    binds: frozenset[str] | None = None
    deletes: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()
    outputs: tuple[str, ...] | None = None
    sources: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    flags: int = 0
    filters: Sequence[Any] = ()
    colors: str = "neutral"
    xmode: str = "Context"
    figures: Mapping[str, Any] = field(default_factory=dict)
    interactivity: str = "last_expr"
    known: frozenset[str] = frozenset()
    local: tuple[str, ...] = ()
    shell: tuple[str, str] = ("", "")
    silent: bool = False
    largest: int = 0
    autoreload: Autoreload | None = None
    lasting: bool = False
    request: str = ""


class Host:
    """What a session's worker is an actor of: its state is that of the shell."""


LOCALS = "__gpunb_locals__"

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
    compared = {**known, **values} if cell.outputs != () else {}
    fingerprints = Fingerprints(compared, "compared")
    attributes = Attributes(compared)
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
    return ending_of(
        cell,
        result,
        label,
        before=before,
        given=values,
        fingerprints=fingerprints,
        attributes=attributes,
    )


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
    if len(visited := shell.user_ns["_dh"]) == 1:  # the shell was made before it was here
        with contextlib.suppress(OSError):
            visited[:] = [os.getcwd()]
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
    figures.apply(shell, cell.figures)
    # The kernel says which matplotlib backend a notebook's figures need; IPython's own flushes
    # them at the end of a cell.
    if os.environ.get("MPLBACKEND", "").endswith("backend_inline") and "matplotlib" in sys.modules:
        import matplotlib.pyplot  # noqa: F401 - registers the flush


def _execute(shell: Shell, cell: Cell) -> ExecutionResult:
    Hook.cell, Hook.value, Hook.shown = cell.source, None, False
    shell.traceback_lines = []
    with _within(shell, cell.local):
        result: ExecutionResult = shell.run_cell(cell.source, store_history=False)
    if result.success and shell.traceback_lines:  # of a part that a magic such as %%capture ran
        name, text = shell.error_shown
        lines = shell.traceback_lines
        Hook.show("error", {"ename": name, "evalue": text, "traceback": lines})
    return result


@contextmanager
def _within(shell: Shell, names: tuple[str, ...]) -> Iterator[None]:
    """Run an expression as if in the function whose names these are."""
    if not names:
        yield
        return
    function = _Function(names)
    shell.ast_transformers.append(function)
    try:
        yield
    finally:
        shell.ast_transformers.remove(function)


class _Function(ast.NodeTransformer):
    """Makes the body of a function of an expression: what it calls sees other names than it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def visit_Module(self, node: ast.Module) -> ast.Module:
        (statement,) = node.body
        assert isinstance(statement, ast.Expr)
        call: Any = ast.parse(f"(lambda {', '.join(self._names)}: 0)(**{LOCALS})").body[0]
        call.value.func.body = statement.value
        for part in (call, *ast.walk(call.value.func.args), call.value, call.value.func):
            ast.copy_location(part, statement)
        return ast.fix_missing_locations(ast.Module([call], []))


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
