"""Asks the user through the kernel, for `input`, `getpass` and the debugger in a cell."""

from __future__ import annotations

import builtins
import contextlib
import getpass
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from IPython.core.error import StdinNotImplementedError

from gpunb.worker.task_kernel import TaskKernel


class _Questions:
    """Replaces the functions that ask at a terminal."""

    def __init__(self, remote: TaskKernel) -> None:
        self._remote = remote
        self._pid = os.getpid()
        self._plain = builtins.input, getpass.getpass

    def input(self, prompt: object = "", /) -> str:
        """As `builtins.input`."""
        if os.getpid() != self._pid:
            return self._plain[0](prompt)
        return self._ask(str(prompt), False)

    def getpass(self, prompt: str = "Password: ", stream: Any = None, **_: Any) -> str:
        """As `getpass.getpass`."""
        if os.getpid() != self._pid:
            return self._plain[1](prompt, stream)
        return self._ask(prompt, True)

    def breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As `sys.breakpointhook`."""
        if os.environ.get("PYTHONBREAKPOINT") or os.getpid() != self._pid:
            return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100 - as the user wants
        self.check("breakpoint()")
        from IPython.core.debugger import Pdb

        # With a handler of its own, Stop would not reach the cell any more.
        debugger: Any = Pdb(nosigint=True)
        return debugger.set_trace(sys._getframe(1))  # noqa: SLF001

    def check(self, what: str) -> None:
        """Raise StdinNotImplementedError unless a user can be asked."""
        try:
            self._remote.question(None)
        except NotImplementedError as error:
            raise StdinNotImplementedError(f"{what} needs answers, but {error}") from None

    def _ask(self, prompt: str, password: bool) -> str:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        try:
            answer: str = self._remote.question(prompt, password)
        except NotImplementedError as error:
            raise StdinNotImplementedError(str(error)) from None
        return answer


_questions: _Questions | None = None


@contextlib.contextmanager
def asked(remote: TaskKernel) -> Iterator[None]:
    """Replace the functions that ask while a cell runs."""
    global _questions
    if _questions is None:
        _questions = _Questions(remote)
        builtins.input, getpass.getpass = _questions.input, _questions.getpass
        sys.breakpointhook = _questions.breakpoint
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)  # a debugger sets its own


def check(what: str) -> None:
    """Raise StdinNotImplementedError unless a user can be asked."""
    if _questions is not None:
        _questions.check(what)
