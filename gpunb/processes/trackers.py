"""The trackers of multiprocessing and loky, started only when there is something to track.

They are processes that remove what other processes leave behind, such as shared memory. loky starts
both before it starts a process, and hands their pipes on to it. Each is an interpreter of its own,
of 6 and 12 MB, and hardly any session has work for them. So loky gets the pipes at once, and a
thread starts a tracker when there is the first message for it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

_MODULES = "multiprocessing.resource_tracker", "loky.backend.resource_tracker"

_AGAIN = 1.0
"""Seconds until the start of a tracker that lacked resources is tried again."""

_ENDS = 0.1
"""Seconds in which the thread ends, if no process has the pipes any more."""

_lock = threading.Lock()
_waiting: dict[int, tuple[str, int]] = {}
"""The pipes of trackers that have not started: by the end to read, the tracker's module and the end
to write, which is -1 when it was taken back."""

_threads: list[threading.Thread] = []


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Within the block, loky finds both trackers running.

    Raises:
        OSError: the system has no resources for it.
    """
    trackers = _trackers()
    with _lock:
        _defer(trackers)
        for each in trackers.values():
            each["ensure_running"] = _nothing
        try:
            yield
        finally:
            for each in trackers.values():
                del each["ensure_running"]


def _trackers() -> dict[str, dict[str, Any]]:
    """The attributes of the object by which this process reaches each tracker."""
    return {each: vars(vars(import_module(each))["_resource_tracker"]) for each in _MODULES}


def _nothing() -> None:
    """Stands for a look at a tracker, which would be the first message for it."""


def _defer(trackers: dict[str, dict[str, Any]]) -> None:
    """Give a pipe to each tracker that has none."""
    made = []
    try:
        for module, tracker in trackers.items():
            if tracker["_fd"] is None:
                read, write = os.pipe()
                made.append(read)
                _waiting[read], tracker["_fd"] = (module, write), write
        if made:
            thread = threading.Thread(
                target=_serve, args=(made[:],), name="gpunb-trackers", daemon=True
            )
            thread.start()
            _threads[:] = [*filter(threading.Thread.is_alive, _threads), thread]
    except (OSError, RuntimeError) as error:
        for read in made:
            module, write = _waiting.pop(read)
            trackers[module]["_fd"] = None
            os.close(read)
            os.close(write)
        if isinstance(error, OSError):
            raise
        raise OSError(errno.EAGAIN, str(error)) from error  # no thread can be started


def withdraw() -> None:
    """Take back the pipes of trackers that have had nothing to do: a session has ended. A process
    that was given a pipe and lives on may use it."""
    with _lock:
        for read, (module, write) in [*_waiting.items()]:
            tracker = _trackers()[module]
            with tracker["_lock"]:  # who sends a message has at least begun when they leave it
                if tracker["_fd"] == write and not _poll([read]).poll(0):
                    _waiting[read] = module, -1
                    tracker["_fd"] = None
                    os.close(write)
    for each in _threads:
        each.join(_ENDS)


def _serve(waiting: list[int]) -> None:
    """Start each tracker when there is a message for it, until nobody can send one."""
    poll = _poll(waiting)
    while waiting:
        for read, event in poll.poll():
            if event & select.POLLIN and not _begin(read):
                time.sleep(_AGAIN)
                continue
            poll.unregister(read)
            waiting.remove(read)
            _waiting.pop(read, None)
            if not event & select.POLLNVAL:
                os.close(read)


def _poll(pipes: Iterable[int]) -> select.poll:
    poll = select.poll()
    for each in pipes:
        poll.register(each, select.POLLIN)
    return poll


def _begin(read: int) -> bool:
    """Start the tracker that reads here, once; return whether it has started."""
    with _lock:
        try:
            if read in _waiting:
                module, write = _waiting[read]
                pid = _start(module, read)
                if write >= 0:
                    _trackers()[module]["_pid"] = pid  # whoever stops it waits for its end
        except OSError:
            return False
        _waiting.pop(read, None)
    return True


@atexit.register
def _at_exit() -> None:
    """Start a tracker for messages of the last moment."""
    for read, event in _poll([*_waiting]).poll(0):
        if event & select.POLLIN:
            _begin(read)


def _start(module: str, read: int) -> int:
    """Start a tracker, in a session of its own: a Jupyter server waits for the whole process group
    of a kernel that ends, and a tracker ends only after the kernel."""
    import subprocess
    from multiprocessing import spawn, util

    code = f"from {module} import main; main({read})"
    flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    command = [os.fsdecode(spawn.get_executable()), *flags, "-c", code]
    # A process inherits what a thread blocks. It unblocks these when it is ready for them.
    blocked = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        started = subprocess.Popen(command, pass_fds=[read], start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    started.returncode = 0  # it is not waited for here
    return started.pid


def _forked() -> None:
    """Leave the pipes to the parent process, whose thread waits for messages."""
    global _lock
    if not _lock.acquire(blocking=False):  # the parent is starting a process
        for each in _trackers().values():
            each.pop("ensure_running", None)
    _lock = threading.Lock()
    _threads.clear()
    while _waiting:
        os.close(_waiting.popitem()[0])


os.register_at_fork(after_in_child=_forked)
