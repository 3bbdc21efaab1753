"""The InteractiveShell of a worker: IPython without history, terminal and questions, whose displays
and errors go home instead.
"""

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

from gpunb.workers import stdin, usage
from gpunb.workers.interrupts import Interrupts

Show = Callable[..., None]


def remember(compiler: Any, name: str, number: int, text: str) -> None:
    """Let tracebacks and `inspect` know a cell by the file name of its code."""
    compiler._filename_map[name] = number  # noqa: SLF001 - there is no public way
    lines = [f"{line}\n" for line in text.splitlines()]
    linecache.cache[name] = len(text), None, lines, name


class Publisher(DisplayPublisher):
    """Sends home what is displayed."""

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
    """Sends home what the value of an expression looks like, and keeps the last one."""

    show: Show
    cell = ""
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
        if data:
            type(self).show("execute_result", {"data": data, "metadata": metadata})


class Compiler(CachingCompiler):
    """Gives the cell the name by which the notebook knows it, once its functions are home."""

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
        """As IPython does, but of an interrupt show the line that it hit, not our handler. What a
        library has shown, as an Output widget does, is no error of the cell."""
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
        """The notebook's shell shows it."""

    def init_sys_modules(self) -> None:
        """Leave ``sys.modules["__main__"]`` for `_adopt_main`."""

    def enable_gui(self, gui: str | None = None) -> None:
        """There is no event loop to integrate with."""

    def debugger(self, force: bool = False) -> None:
        """Debug the last error, if there is somebody to give commands."""
        if force or self.call_pdb:
            stdin.check("a debugger")
            super().debugger(force)

    def ask_exit(self) -> None:
        """A cell cannot end the notebook."""


def _is_ours(code: types.CodeType) -> bool:
    ours = Interrupts.signalled.__code__, Shell.debugger.__code__
    return code in ours or code.co_filename == stdin.__file__


def _leave_us_out(error: BaseException | None) -> None:
    """Take the frames of gpunb out of an error's traceback, and of those that led to it: what a
    user sees ends at the line that called."""
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
    """Whether IPython would print the error by itself, because a group of errors led to it."""
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


def prepare() -> Shell:
    """The process's shell, which is made by the first who asks."""
    global _shell
    if _shell is None:
        config = Config()
        config.HistoryManager.enabled = False
        config.InteractiveShell.cache_size = 0
        main = types.ModuleType("__main__")
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
            # They do nothing for us, and an interrupt that comes while they run would be lost.
            shell.events.callbacks[event].clear()
        by_reference(Shell)
        _shell = shell
    return _shell


def by_reference(kind: type) -> None:
    """A shell that is pickled becomes the one that is there where it arrives: functions with magics
    or shell commands in them refer to it."""
    copyreg.pickle(kind, lambda _: (get_ipython, ()))


def rehearse() -> None:
    """Run a cell and fail in one, where no cell waits for it: what IPython imports and compiles for
    that takes longer than most cells do."""
    shell = prepare()
    for text in ("pass", "0 / 0"):
        shell.run_cell(text, store_history=False)
    shell.traceback_lines = []
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
