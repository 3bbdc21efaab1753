"""Linux system calls that sessions need, also for Pythons that have no wrapper for them.

Pythons that are built for old systems, such as those that uv installs, lack some wrappers. Other
systems lack the calls: there gpunb can be imported, but runs no sessions.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
from typing import Any

from gpunb.exceptions import GpunbError

MFD_CLOEXEC = 0x1
MFD_ALLOW_SEALING = 0x2
F_ADD_SEALS = 1033
F_SEAL_SIZE = 0x6
"""Forbids shrinking and growing."""
F_SEAL_ALL = 0xF
"""Forbids sealing, shrinking, growing and writing."""
F_SEAL_ALL_FUTURE = 0x17
"""The same, except that mappings that exist already may still write."""
MADV_COLLAPSE = 25
"""Puts a range of memory into huge pages at once."""

# New calls have the same number on every architecture.
_PIDFD_SEND_SIGNAL = 424
_PIDFD_OPEN = 434


def check() -> None:
    """Check that sessions can run in this process.

    Raises:
        GpunbError: this is not Linux, or another library has replaced what sessions need.
    """
    if sys.platform.startswith("linux"):
        _check_patches()
        return
    names = {"darwin": "macOS", "win32": "Windows"}
    cure = "inside WSL 2" if sys.platform == "win32" else "on a Linux machine or in a container"
    raise GpunbError(
        f"gpunb runs sessions on Linux only, and this is {names.get(sys.platform, sys.platform)}: "
        f"use it {cure}. Here it can be imported, for its types and for reading code that uses it"
    )


def _check_patches() -> None:
    """Check that threads, sockets and `select` are not patched: a session has a thread that waits
    for processes while the kernel computes, and a greenlet in its place cannot do that."""
    monkey: Any = sys.modules.get("gevent.monkey")
    names = ("threading", "select", "socket") if monkey is not None else ()
    patched = [name for name in names if monkey.is_module_patched(name)]
    if not patched and hasattr(select, "epoll"):
        return
    by = "gevent" if monkey is not None else "another library, such as eventlet,"
    what = ", ".join(patched or ["select"])
    raise GpunbError(
        f"{by} has patched {what} in this process, and a session needs them as they are: patch "
        "without them, as in gevent.monkey.patch_all(thread=False, select=False, socket=False), or "
        "run in a process of its own what needs the patches"
    )


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process. It becomes readable when the process has ended."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """Send a signal to the process of a descriptor from `pidfd_open`."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, descriptor, int(number), None, 0)


def has_memory_files() -> bool:
    """Whether `memfd_create` can be called."""
    return hasattr(os, "memfd_create") or hasattr(_libc(), "memfd_create")


def memfd_create(name: str, flags: int) -> int:
    """Return a descriptor of a new file in memory, without a name in any file system."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _checked(_libc().memfd_create(name.encode(), flags))


def madvise(start: int, length: int, advice: int) -> None:
    """Advise the system on the use of `length` bytes of memory from the address `start`."""
    import ctypes

    _checked(_libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice))


@functools.cache
def _libc() -> Any:
    import ctypes  # here, because few Pythons need it

    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | None) -> int:
    import ctypes

    longs = [each if each is None else ctypes.c_long(each) for each in arguments]
    return _checked(_libc().syscall(ctypes.c_long(number), *longs))


def _checked(result: int) -> int:
    if result < 0:
        import ctypes

        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
