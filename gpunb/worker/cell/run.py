"""Runs a notebook's cell in a worker, in an InteractiveShell of its own.

The worker sends output as it happens. The result of the task has the names that the cell bound, the
given values that it changed, and its error, because a cell that fails has bound names as well.
"""

from __future__ import annotations

import _thread
import ast
import contextlib
import functools
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from IPython.core.interactiveshell import ExecutionResult
from traitlets.config import Config

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.exceptions import GpunbError
from gpunb.protocol import backend
from gpunb.protocol.ranks import RESULTS, rank_of
from gpunb.worker import library_state as libraries
from gpunb.worker.cell import figures, stdin, widgets
from gpunb.worker.cell.cell_types import LOCALS, Cell
from gpunb.worker.cell.result import Before, pack_rank, pack_result
from gpunb.worker.cell.shell import Compiler, Hook, Publisher, Shell, Show, prepare, remember
from gpunb.worker.import_hooks import when_loaded
from gpunb.worker.known_libraries import wide_tables
from gpunb.worker.streams import InTurn
from gpunb.worker.task_kernel import TaskKernel

FLUSH = 0.05
"""Seconds after which text without a line end is shown."""


class Host:
    """The class of a session's actor. Its state is that of the shell."""


_ELSEWHERE = object()
"""Stands for the value of a name that the cell may delete and does not read."""


def run(
    arguments: Payload, remote: TaskKernel, label: str, code: bytes = b""
) -> Payload | list[Payload]:
    """Run a cell and return its `CellResult`, with the values that come home.

    With the `code` of one of several ranks, return what `pack_rank` does.
    """
    shell = prepare()
    _make_known(shell)
    show = _in_order(remote.show)
    Publisher.show = Hook.show = staticmethod(show)
    names = shell.user_ns
    with _quiet():
        cell, values, lost = serialize.loads_names(arguments, namespace=names)
    for name, error in lost.items():
        reason = serialize.why_lost(error)
        raise GpunbError(f"{name!r} cannot be made again in the worker: {reason}")
    _bind(names, cell, values)
    rank = rank_of(code) if code else None
    if rank is not None and not rank.runs:
        return [serialize.dumps(None)] * RESULTS
    with _quiet():
        before = Before.take(cell, names, values)
    _dress(shell, cell)
    widgets.begin(remote, show, cell.request)
    watch = libraries.LibraryWatch(cell.libraries, names)
    try:
        with _flushing(), _taking_turns(remote), stdin.asked(remote), _interruptible():
            executed = _execute(shell, cell)
    finally:
        widgets.end()
    changed = watch.changed(random=cell.brings == "all") if cell.brings else {}
    if cell.brings and (chosen := figures.settings(shell)) != cell.figures:
        changed[figures.CHOSEN] = pickle.dumps(chosen)
    _flush()
    for name in cell.deletes:
        if names.get(name) is _ELSEWHERE:
            del names[name], before.names[name]
    with _quiet():
        if rank is not None:
            return pack_rank(rank, cell, executed, label=label, before=before, libraries=changed)
        return pack_result(cell, executed, label, before, changed)


def rehearse(*, forks: bool = False) -> None:
    """Go through the steps of a cell with one that does nothing, before there is any. Most of the
    time of a short cell is the first use of code, and of pages that a fork shares. A process that
    `forks` has no second thread meanwhile."""
    with as_notebook() as shell:
        arguments = serialize.dumps((Cell("pass", "rehearsal", 0), {"x": [0]}), way="cell")
        cell, values, _ = serialize.loads_names(arguments, namespace={})
        before = Before.take(cell, shell.user_ns, values)
        settings = libraries.taken(random=True)
        for packed in settings.values():
            serialize.loads(Payload(packed))
        _dress(shell, cell)
        with _flushing(thread=not forks), _interruptible():
            executed = _execute(shell, cell)
        pack_result(cell, executed, "rehearsal", before, settings)


@contextmanager
def as_notebook(kind: tuple[str, str] = ("", "")) -> Iterator[Shell]:
    """Let IPython and libraries find the shell of the process, as in a cell. `kind` is the class of
    the notebook's shell, as in `Cell`."""
    shell = prepare()
    _make_known(shell)
    try:
        _look_like(shell, kind)
        yield shell
    finally:
        _make_known(None)  # a plain task should not look like a notebook to libraries


def _make_known(shell: Shell | None) -> None:
    kinds: list[Any] = list(Shell._walk_mro())  # noqa: SLF001
    for kind in kinds:  # as `instance()` does
        kind._instance = shell  # noqa: SLF001


def _look_like(shell: Shell, kind: tuple[str, str]) -> None:
    """Let libraries see which kind of notebook shows their output."""
    if kind[1]:
        # They tell a notebook from a terminal by this name.
        Shell.__module__, Shell.__name__ = kind
        Shell.__qualname__ = Shell.__name__
        if "zmq" in kind[0]:
            # And by this section of its configuration.
            shell.config.setdefault("IPKernelApp", Config())


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """Show no warnings of libraries that only the packing of their objects causes."""
    return warnings.catch_warnings(action="ignore")


def _bind(names: dict[str, Any], cell: Cell, values: Mapping[str, Any]) -> None:
    """Bind the names that have come with a cell."""
    for name, module in cell.modules.items():
        names[name] = _imported(module)
    for module in cell.submodules:
        with contextlib.suppress(Exception):  # the cell may do without
            _imported(module)
    names.update(values)
    names.update(cell.history)
    if cell.past:
        names["Out"] = names["_oh"] = {int(name[1:]): names[name] for name in cell.past}
    for name in cell.deletes:
        names.setdefault(name, _ELSEWHERE)


def _in_order(show: Show) -> Show:
    """Wrap `show`, so that displays keep their place among the text.

    Text reaches the kernel by pipes, displays by the worker's channel. When the kernel replies to a
    request, it has read the text written before the request, and no other.
    """
    process = os.getpid()

    def send(kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        _flush()
        show(kind, content, payloads)
        if os.getpid() == process:  # a fork must not use the channel
            backend.current().ask("total")

    return send


@contextmanager
def _taking_turns(remote: TaskKernel) -> Iterator[None]:
    """Wait until the kernel has read one stream before anything is written to the other."""
    InTurn.turn = remote.catch_up
    try:
        yield
    finally:
        InTurn.turn = None


def _imported(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def _dress(shell: Shell, cell: Cell) -> None:
    """Set the shell up as the notebook's: number, compiler, tracebacks and figures."""
    shell.execution_count = cell.number
    if len(visited := shell.user_ns["_dh"]) == 1:  # the shell was made in another folder
        with contextlib.suppress(OSError):
            visited[:] = [os.getcwd()]
    _look_like(shell, cell.shell)
    if "zmq" in cell.shell[0]:
        when_loaded("pandas", wide_tables, key=wide_tables)
    shell.ast_node_interactivity = cell.interactivity
    assert isinstance(shell.compile, Compiler)
    shell.compile.flags = cell.flags
    shell.compile.text, shell.compile.name = cell.source, cell.name
    for name, (number, text) in cell.sources.items():
        remember(shell.compile, name, number, text)
    try:
        shell.colors = cell.colors
        shell.InteractiveTB.set_mode(mode=cell.xmode)
    except Exception:  # only the kernel has this theme
        pass
    figures.apply(shell, cell.figures)
    # The kernel sets the matplotlib backend for its notebook; IPython's inline backend shows
    # figures at the end of a cell.
    if figures.inline():
        figures.expect(shell)
        if "matplotlib" in sys.modules:
            import matplotlib.pyplot  # noqa: F401 - registers the flush


def _execute(shell: Shell, cell: Cell) -> ExecutionResult:
    Hook.cell, Hook.silent, Hook.value, Hook.shown = cell.source, cell.silent, None, False
    shell.traceback_lines = []
    with _within(shell, cell.local):
        result: ExecutionResult = shell.run_cell(cell.source, store_history=False)
    if result.success and shell.traceback_lines:  # a magic such as %%capture ran code that failed
        name, text = shell.error_shown
        lines = shell.traceback_lines
        Hook.show("error", {"ename": name, "evalue": text, "traceback": lines})
    return result


@contextmanager
def _within(shell: Shell, names: tuple[str, ...]) -> Iterator[None]:
    """Run an expression as if in a function with these names."""
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
    """Makes an expression the body of a function, so that no function it calls sees the names."""

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


_NOT_BEGUN: Any = ("ignore", re.compile("coroutine 'InteractiveShell"), RuntimeWarning, None, 0)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ignore the warning that an interrupt causes just before the cell begins to run."""
    warnings.filters.insert(0, _NOT_BEGUN)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the cell has removed it
            warnings.filters.remove(_NOT_BEGUN)  # type: ignore[attr-defined]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


@contextmanager
def _flushing(*, thread: bool = True) -> Iterator[None]:
    """Show text that does not end its line, as a notebook does, while a cell runs.

    No fork may happen while the thread writes, or the child would wait for it for ever.
    """
    _guard_forks()
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(FLUSH):
            with _writing:
                if not stop.is_set():
                    _flush()

    if thread:
        # As a `Thread` it would first be waited for, and the cell would see it among its own.
        _thread.start_new_thread(run, ())
    try:
        yield
    finally:
        stop.set()
        with _writing:  # what the thread writes now may use the channel
            pass


_writing = threading.Lock()


@functools.cache
def _guard_forks() -> None:
    os.register_at_fork(
        before=_writing.acquire,
        after_in_parent=_writing.release,
        after_in_child=_writing.release,
    )
