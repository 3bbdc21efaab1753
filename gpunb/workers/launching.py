"""Starting a new interpreter through loky, which runs nothing of the notebook's `__main__` in it.

This module imports next to nothing, so that a session can have its zygote on its way before it
imports itself.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing.context
import multiprocessing.process
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True, slots=True)
class Launched:
    """A zygote on its way: its process, the socket to it, and the environment it inherited."""

    process: Any
    sock: socket.socket
    environment: dict[str, str]


def launch(process: Any) -> None:
    """Start a loky process."""
    from multiprocessing import resource_tracker

    # Until it has a session of its own, an interrupt of the kernel's group reaches it: it inherits
    # this mask, and lifts it itself. Starting multiprocessing's tracker, as loky does, lifts it
    # here, so that comes first.
    with _trackers_apart():
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # When the interpreter ends, multiprocessing waits for its processes, in forks of this one too.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # noqa: SLF001


@contextlib.contextmanager
def _trackers_apart() -> Iterator[None]:
    """Start the trackers of multiprocessing and loky in sessions of their own. A Jupyter kernel
    that ends waits for its process group, and they do not end before the kernel, nor on SIGTERM."""
    from multiprocessing import util

    plain = util.spawnv_passfds
    setsid = next((each for each in _SETSID if os.access(each, os.X_OK)), b"")

    def spawn(path: Any, args: Sequence[Any], descriptors: Any) -> int:
        return plain(setsid, [setsid, path, *args[1:]], descriptors)

    if setsid:
        util.spawnv_passfds = spawn  # type: ignore[assignment]
    try:
        yield
    finally:
        util.spawnv_passfds = plain


_SETSID = (b"/usr/bin/setsid", b"/bin/setsid")


def zygote() -> Launched:
    """Start a zygote."""
    from loky.backend.process import LokyProcess

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # loky hands descriptors over that are wrapped in a Connection.
    control = Connection(theirs.detach())
    environment = dict(os.environ)
    process = LokyProcess(target=boot, args=(control, os.getpid()), name="gpunb-zygote")
    launch(process)
    control.close()
    return Launched(process, ours, environment)


def boot(control: Connection, kernel: int) -> None:
    """Be the zygote. A function of its own, because the kernel need not import what it runs."""
    from gpunb.workers.zygote import main

    unbind()
    main(control, kernel)


def unbind() -> None:
    """Let multiprocessing see a program of its own here, with its usual start method, and not a
    child of loky's: what users start in workers would be one too."""
    process: Any = multiprocessing.process
    here, own = process.current_process(), process.BaseProcess(name="MainProcess")
    # The key is the kernel's: what that manages for others is open to workers.
    vars(own).update(_config={"authkey": here.authkey, "semprefix": "/mp"})
    vars(own).update(_identity=(), _parent_pid=None)
    vars(process).update(_current_process=own, _parent_process=None)
    vars(process).update(_process_counter=itertools.count(1))
    vars(vars(multiprocessing.context)["_default_context"]).update(_actual_context=None)
