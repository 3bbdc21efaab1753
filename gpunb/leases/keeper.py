"""Keepers: processes that hold a session's new FIFO open for its older processes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

_KEEPER = "import select; poll = select.poll(); poll.register(0, 0); poll.poll()"


def start(fifo: int, life: int) -> int:
    """Start a keeper: a process that has a FIFO open until all processes with `life` are gone.

    Those processes started before this FIFO existed and have not inherited it. Returns the pid.
    """
    watched = os.open(f"/proc/self/fd/{life}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", "-c", _KEEPER],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, watched, 0),
                (os.POSIX_SPAWN_DUP2, fifo, 3),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,  # so that Ctrl-C in a terminal does not reach it
        )
    finally:
        os.close(watched)


def runs(keeper: int, within: float) -> bool:
    """Whether the keeper still runs after so many seconds."""
    deadline = time.monotonic() + within
    while True:
        try:
            if os.waitpid(keeper, os.WNOHANG)[0]:
                return False
        except ChildProcessError:
            return False  # another thread has reaped it
        if time.monotonic() > deadline:
            return True
        time.sleep(0.001)


def end(keeper: int) -> None:
    """End a keeper that another one replaces."""
    if runs(keeper, 0):
        os.kill(keeper, signal.SIGKILL)
        reap(keeper)


def reap(keeper: int) -> None:
    """Wait for the end of a keeper in a thread, so that it leaves no zombie."""

    def wait() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(keeper, 0)

    with contextlib.suppress(RuntimeError):  # the system gives no thread: a zombie stays
        threading.Thread(target=wait, name="gpunb-keeper", daemon=True).start()
