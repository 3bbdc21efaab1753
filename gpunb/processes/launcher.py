"""Starts a new interpreter through loky, which runs nothing of the notebook's `__main__` in it.

This module imports little, so that a session can start its zygote before it imports the rest of
gpunb.
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Launched:
    """A zygote that starts: its process, the socket to it, and the environment it inherited."""

    process: Any
    sock: socket.socket
    environment: dict[str, str]


def launch(process: Any) -> None:
    """Start a loky process."""
    from gpunb.processes import trackers  # not for the zygote, which imports this module

    # An interrupt of the kernel's process group reaches the new process until it has its own
    # session. So it inherits a mask that blocks the signal, and unblocks the signal itself.
    with trackers.deferred():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            _start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(process: Any) -> None:
    """Start a loky process like `process.start()`, with three differences.

    1. The standard streams are not flushed: they may be missing or broken.
    2. The process is not registered with multiprocessing, which would wait for its end when this
       interpreter or a fork of it exits.
    3. If the system has no resources, no descriptors stay open and the error is raised.
    """
    from loky.backend.popen_loky_posix import Popen

    started: Any = Popen.__new__(Popen)
    vars(started).update(returncode=None, _fds=[])
    try:
        started._launch(process)  # noqa: SLF001
    except (OSError, UnboundLocalError) as error:
        _close_left(error)
        if isinstance(error, OSError):
            raise
        # No local variable for it: a cycle of frames would keep the pipes open.
        raise error.__context__ or error from None
    vars(process).update(_popen=started, _sentinel=started.sentinel)
    for each in ("_target", "_args", "_kwargs"):
        delattr(process, each)


def _close_left(error: BaseException) -> None:
    """Close the pipe ends that a failed start of loky leaves open."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_launch" and "pid" not in frame.f_locals:
            # loky closes the others, and `child_w` too if the second pipe was made.
            name = "parent_w" if "parent_w" in frame.f_locals else "child_w"
            if name in frame.f_locals:
                os.close(frame.f_locals[name])


def forked(process: Any) -> None:
    """Close the sentinel pipe in a fork of the process that started this one."""
    os.close(process.sentinel)


def zygote() -> Launched:
    """Start a zygote.

    Raises:
        OSError: the system has no resources for another process.
    """
    from loky.backend.process import LokyProcess

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # loky passes on only descriptors that are wrapped in a Connection.
    control = Connection(theirs.detach())
    environment = dict(os.environ)
    process = LokyProcess(target=boot, args=(control, os.getpid()), name="gpunb-zygote")
    try:
        launch(process)
    except BaseException:
        ours.close()
        _withdraw_trackers()
        raise
    finally:
        control.close()
    return Launched(process, ours, environment)


def end(launched: Launched) -> None:
    """End a zygote that is not used."""
    launched.sock.close()
    os.kill(launched.process.pid, signal.SIGKILL)
    launched.process.join()
    _withdraw_trackers()


def _withdraw_trackers() -> None:
    from gpunb.processes import trackers

    trackers.withdraw()


def boot(control: Connection, kernel: int) -> None:
    """Run the zygote, in the new process. The kernel does not import the zygote's modules."""
    from gpunb.worker.main import unbind
    from gpunb.worker.zygote import main

    unbind()
    main(control, kernel)
