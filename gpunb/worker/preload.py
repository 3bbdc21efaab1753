"""What a second zygote does before it serves: it imports, and checks that forking is still safe."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

from gpunb.data import files
from gpunb.protocol.zygote import Imports, Preload
from gpunb.system import huge_pages, linux, process_control
from gpunb.worker import main as worker_main
from gpunb.worker.imported import package_of
from gpunb.worker.limits import threads
from gpunb.worker.user_modules import loaded

_TRIAL = 10.0

_LATER = {"torch": "torch._dynamo"}
"""What a library imports only when it is used: PyTorch this for the first optimizer, in seconds."""

_FORK_SAFE = frozenset({"jemalloc_bg_thd"})
"""Names of threads that may go on after a fork: jemalloc, which pandas loads with pyarrow, prepares
its thread for a fork and does without it in the child."""

_HUGE_PAGES, _CELL_WAITS = 1.0, 0.2
"""How long huge pages may take, as a share of the time of the imports; and when a cell may wait for
them."""

_LONGEST = 1000
_MODULES_AT_ONCE = 1000
_MOST_TEXT = 30_000
"""Characters of the error of a preloaded module, names of modules in one answer, and characters of
text that imports write: an answer has to fit into one packet."""


def carry_out(preload: Preload) -> Iterator[tuple[Any, ...]]:
    """Import what is named, and yield the answers to the kernel."""
    began = time.monotonic()
    imports = Imports(*preload.imports) if preload.imports is not None else None
    if imports is not None and not preload.onto:
        os.environ.clear()
        os.environ.update(imports.environment)
        sys.path[:] = imports.path
    variables, known = dict(os.environ), set(sys.modules) if imports is not None else set()
    problems: dict[str, str | None] = {}
    refused: tuple[str, str] | None = None
    with _written() as texts, threads.single():
        for name in preload.modules:
            try:
                importlib.import_module(name)
                problems[name] = None
            except BaseException as error:
                problems[name] = f"{type(error).__name__}: {error}"[:_LONGEST]
        if imports is not None:
            with _as_notebook(imports.shell):
                refused = _follow(imports, preload.most)
        else:
            for name in [later for first, later in _LATER.items() if first in sys.modules]:
                with contextlib.suppress(Exception):  # other releases need not have it
                    importlib.import_module(name)
    new = [name for name in sys.modules if name not in known]
    package, unsafe = refused or ("", None)
    if new and not unsafe:
        _get_ready(again=preload.onto)
        unsafe = _unsafe()
        if not unsafe:
            share = _HUGE_PAGES if imports is None else _CELL_WAITS
            huge_pages.collapse(share * (time.monotonic() - began))
    changed: dict[str, str | None] = {
        name: value for name, value in os.environ.items() if variables.get(name) != value
    }
    changed.update(dict.fromkeys(variables.keys() - os.environ.keys()))
    yield "loaded", [], changed, *texts
    modules = [name for name in new if package_of(name)]
    for start in range(0, len(modules), _MODULES_AT_ONCE):
        yield "loaded", modules[start : start + _MODULES_AT_ONCE], {}, "", ""
    yield "preloaded", problems, unsafe, package


def _get_ready(*, again: bool) -> None:
    """Do what every worker would have to do after these imports; `again` if the process that forked
    this one has done it for its own imports."""
    loaded.edited()  # note the files as the preload has loaded them
    importlib.import_module("gpunb.worker.concurrent_actor")  # it loads asyncio for all actors
    if "IPython" in sys.modules:
        importlib.import_module("gpunb.worker.cell.run")
        if not again:
            importlib.import_module("gpunb.worker.cell.shell").rehearse()
        with contextlib.suppress(Exception):  # whatever it is, a cell will say it
            worker_main.rehearse_cell(forks=True)
    threads.find()
    worker_main.warm_up(worker_main.ADAPTED)  # the last: what is loaded later makes it adapt anew


@contextlib.contextmanager
def _written() -> Iterator[list[str]]:
    """Collect the text that is written to standard output and to standard error. The streams of a
    zygote lead nowhere."""
    texts: list[str] = []
    with contextlib.ExitStack() as undo:
        collected = [undo.enter_context(open(files.memory_file(), "rb")) for _ in (1, 2)]
        for number, file in enumerate(collected, 1):
            kept = os.dup(number)
            undo.callback(os.close, kept)
            undo.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        yield texts
        for stream, file in zip((sys.stdout, sys.stderr), collected, strict=True):
            with contextlib.suppress(OSError, ValueError):  # an import may have closed it
                stream.flush()
            file.seek(0)
            texts.append(file.read(4 * _MOST_TEXT).decode(errors="replace")[:_MOST_TEXT])


def _as_notebook(shell: tuple[str, str]) -> contextlib.AbstractContextManager[Any]:
    """Let libraries look for a notebook and find it, if cells use them."""
    cells = sys.modules.get("gpunb.worker.cell.run")
    return cells.as_notebook(shell) if cells and shell[1] else contextlib.nullcontext()


def _follow(imports: Imports, most: int) -> tuple[str, str] | None:
    """Import what tasks have imported. If a package must not be preloaded, return it and the
    reason; the package is empty if the reason is another."""
    threads_before, sockets_before = len(process_control.other_threads()), _sockets()
    for name in imports.modules:
        count = len(sys.modules)
        with contextlib.suppress(BaseException):  # the task says so that imports it
            importlib.import_module(name)
        if len(sys.modules) == count:
            continue
        why = None
        if len(process_control.other_threads()) > threads_before:
            why = _unsafe()
        elif _sockets() > sockets_before:
            why = "its import opened a connection or a pipe, which children would share"
        elif _resident() > most:
            why = f"with it the process would have more than {most >> 20} MiB"
        if why is not None:
            return name.partition(".")[0], why
    for variable, value in imports.changed.items():
        if os.environ.get(variable) != value:
            who = "a task, or a package that is not preloaded,"
            return "", f"{who} has changed the variable {variable}, which packages may read"
    return None


def _sockets() -> int:
    """Return how many descriptors of this process are of sockets or pipes."""
    kinds = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            kinds.append(os.fstat(int(each)).st_mode)
    return sum(stat.S_ISSOCK(each) or stat.S_ISFIFO(each) for each in kinds)


def _resident() -> int:
    """Return the memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _unsafe() -> str | None:
    """Return why children of this process might hang or see a wrong GPU; None if all is well."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import initialised CUDA, which does not survive a fork"
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None and getattr(bridge, "_backends", None):
        return "an import started a JAX backend, which does not survive a fork"
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    descriptor = linux.pidfd_open(pid)
    ended, _, _ = select.select([descriptor], [], [], _TRIAL)
    os.close(descriptor)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not ended:
        return f"a trial child did not end within {_TRIAL:g} s"
    # A BLAS stops its threads when the process forks. Other threads would be missing in the
    # children, which would wait for them.
    left = len([each for each in process_control.other_threads() if each not in _FORK_SAFE])
    if left:
        return f"{left} thread{'s' if left > 1 else ''} started by an import went on after a fork"
    return None
