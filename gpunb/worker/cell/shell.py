"""The InteractiveShell of a worker: without history and terminal, with displays for the kernel."""

from __future__ import annotations

import copyreg
import linecache
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from gpunb.worker.cell import stdin
from gpunb.worker.interrupts import Interrupts
from gpunb.worker.limits import usage

Show = Callable[..., None]


def remember(compiler: Any, name: str, number: int, text: str) -> None:
    """Let tracebacks and `inspect` know a cell by the file name of its code."""
    compiler._filename_map[name] = number  # noqa: SLF001 - there is no public way
    lines = [f"{line}\n" for line in text.splitlines()]
    linecache.cache[name] = len(text), None, lines, name


class Publisher(DisplayPublisher):
    """Sends displays to the kernel."""

    show: Show

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        kind = "update_display_data" if update else "display_data"
        content = {"data": data, "metadata": metadata or {}, "transient": transient or {}}
        type(self).show(kind, content)

    def clear_output(self, wait: bool = False) -> None:
        type(self).show("clear_output", {"wait": wait})


class Hook(DisplayHook):
    """Sends the display of an expression's value to the kernel, and keeps the last value."""

    show: Show
    cell = ""
    silent = False
    value: Any = None
    shown = False

    def quiet(self) -> bool:
        return bool(self.semicolon_at_end_of_expression(type(self).cell))

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        if result is None or self.quiet():
            return
        data, metadata = self.compute_format_data(result)
        self.fill_exec_result(result)
        type(self).value, type(self).shown = result, True
        prepare().user_ns["_"] = result
        if data and not self.silent:
            type(self).show("execute_result", {"data": data, "metadata": metadata})


class Compiler(CachingCompiler):
    """Gives the code of the cell the file name that the notebook's shell knows."""

    text = ""
    name = ""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        if raw_code == self.text:
            return self.name
        name: str = super().get_code_name(raw_code, transformed_code, number)
        return name


class Shell(InteractiveShell):
    """The shell of a worker: no history, no terminal, no questions."""

    traceback_lines: list[str]
    error_shown: tuple[str, str]
    _shown_now = False

    def _showtraceback(self, etype: Any, evalue: Any, stb: list[str]) -> None:
        if self._shown_now:
            self._shown_now = False
            content = {"ename": etype.__name__, "evalue": str(evalue), "traceback": list(stb)}
            Hook.show("error", content)
            return
        self.traceback_lines = list(stb)
        self.error_shown = etype.__name__, str(evalue)

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """Show an error as IPython does, but of an interrupt the line that it hit, not gpunb's
        handler. An error that a library shows, as an Output widget does, is not the cell's."""
        self._shown_now = not _is_shells(sys._getframe(1))  # noqa: SLF001
        frames = sys.exc_info()[2]
        while frames is not None and frames.tb_next is not None:
            if _is_ours(frames.tb_next.tb_frame.f_code):
                frames.tb_next = None
                break
            frames = frames.tb_next
        error = sys.exc_info()[1]
        _leave_us_out(error)
        usage.explain(error)
        if error is not None and holds_group(error):
            self._showtraceback(type(error), error, _plain_lines(error))
        else:
            super().showtraceback(*args, **kwargs)

    def show_usage_error(self, exc: BaseException) -> None:
        """Show nothing: the notebook's shell shows the error."""

    def init_sys_modules(self) -> None:
        """Leave ``sys.modules["__main__"]`` to `prepare`."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing, as there is no event loop."""

    def debugger(self, force: bool = False) -> None:
        """Debug the last error, if a user can give commands."""
        if force or self.call_pdb:
            stdin.check("a debugger")
            super().debugger(force)

    def ask_exit(self) -> None:
        """Do nothing, as a cell cannot end the notebook."""


def _is_ours(code: types.CodeType) -> bool:
    ours = Interrupts.signalled.__code__, Shell.debugger.__code__
    return code in ours or code.co_filename == stdin.__file__


def _leave_us_out(error: BaseException | None) -> None:
    """Remove the frames of gpunb from the tracebacks of an error and of the errors that led to it,
    so that they end at the user's call."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frame = error.__traceback__
        while frame is not None and (inner := frame.tb_next) is not None:
            if str(inner.tb_frame.f_globals.get("__name__")).startswith("gpunb."):
                frame.tb_next = inner.tb_next
            else:
                frame = inner
        error = error.__cause__ or error.__context__


def holds_group(error: BaseException | None) -> bool:
    """Whether a group of errors led to the error: IPython then prints the error by itself."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, BaseExceptionGroup):
            return True
        seen.add(id(error))
        error = error.__context__
    return False


def _plain_lines(error: BaseException) -> list[str]:
    frames = error.__traceback__
    while frames is not None and _is_shells(frames.tb_frame):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).splitlines()


def _is_shells(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "IPython"


_shell: Shell | None = None
_DOC = "Automatically created module for IPython interactive environment"
"""IPython's own text, which scripts of galleries print."""


def prepare() -> Shell:
    """The shell of the process; the first call makes it."""
    global _shell
    if _shell is None:
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.cache_size = 0
        main = types.ModuleType("__main__", _DOC)
        # Not as the singleton yet: a plain task should not look like a notebook to libraries.
        shell = Shell(
            config=config,
            user_module=main,
            display_pub_class=Publisher,
            displayhook_class=Hook,
            compiler_class=Compiler,
        )
        shell.traceback_lines = []
        sys.modules["__main__"] = main
        for event in ("pre_execute", "pre_run_cell"):
            # gpunb needs none of them, and an interrupt that comes while they run would be lost.
            shell.events.callbacks[event].clear()
        by_reference(Shell)
        _shell = shell
    return _shell


def by_reference(kind: type) -> None:
    """Unpickle a shell of this class as the shell of the process: functions with magics or shell
    commands refer to the shell."""
    copyreg.pickle(kind, lambda _: (get_ipython, ()))


def rehearse() -> None:
    """Run a cell, and one that fails, while no cell waits: IPython's imports for the first cell
    take longer than most cells. So does making the objects that format values."""
    shell = prepare()
    formatter: Any = shell.display_formatter
    assert formatter.formatters
    assert formatter.mimebundle_formatter
    for text in ("pass", "0 / 0"):
        shell.run_cell(text, store_history=False)
    shell.traceback_lines = []
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
