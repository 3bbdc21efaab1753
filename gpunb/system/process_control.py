"""System calls for processes that Python has no wrapper for, and facts from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

_SET_PDEATHSIG = 1
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36

_FEW, _MANY = 1 << 12, 1 << 20
"""Bytes of a list of children: as nearly always, and at most."""

LINUX = sys.platform.startswith("linux")
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Let the system send this process a signal when the thread that forked it ends.

    Returns False if `parent` is already gone; then the signal never comes.
    """
    if _libc is not None:
        _libc.prctl(_SET_PDEATHSIG, int(number), 0, 0, 0)
    return os.getppid() == parent


def adopt_orphans() -> None:
    """Make this process the new parent of descendants that lose their parent."""
    if _libc is not None:
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Set the name that process lists show, cut to 15 bytes."""
    if _libc is not None:
        _libc.prctl(_SET_NAME, name.encode()[:15], 0, 0, 0)


def give_way() -> None:
    """Let a process go first that waits for the processor of this thread, before a system call
    that keeps it long: such calls are not interrupted on many systems."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()


def children() -> list[int] | None:
    """Return the children of the calling thread; None where the system has no list of them."""
    try:
        descriptor = os.open("/proc/thread-self/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The system maps a large buffer anew for each read.
        listed = os.read(descriptor, _FEW)
        if len(listed) > _FEW - 16:
            os.lseek(descriptor, 0, os.SEEK_SET)
            listed = os.read(descriptor, _MANY)
        return [int(pid) for pid in listed.split()]
    finally:
        os.close(descriptor)


def other_threads() -> list[str]:
    """Return the names of the threads of this process beside the first one, as the system knows
    them."""
    names, first = [], str(os.getpid())
    with contextlib.suppress(OSError):
        for each in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{each}/comm") as file:
                names += [] if each == first else [file.read().rstrip("\n")]
    return names


def allow_descriptors(wanted: int) -> int:
    """Raise the limit of open files towards `wanted`, as far as allowed; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max(wanted, soft)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):
        return soft
    return limit


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended, but was not reaped."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill_group(leader: int) -> None:
    """Kill a process group. Its leader must be alive or not yet reaped."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def describe_status(status: int) -> str:
    """Return a wait status in words, such as ``"it was killed by SIGSEGV"``."""
    return describe_exit(os.waitstatus_to_exitcode(status))


def describe_exit(code: int | None) -> str:
    """Return an exit code in words; a negative one is a signal, None is unknown."""
    if code is None or code >= 0:
        return f"it exited with status {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"
