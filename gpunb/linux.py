"""What sessions need of Linux, also where this Python has no name for it.

Interpreters that are built for old systems too, as those that uv installs, lack some of the calls
that the system has. Other systems have none of them: gpunb can be imported there, and no more.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any

from gpunb.exceptions import GpunbError

MFD_CLOEXEC = 0x1
MFD_ALLOW_SEALING = 0x2
F_ADD_SEALS = 1033
F_SEAL_ALL = 0xF
"""No more sealing, shrinking, growing, writing."""

# New calls have the same number on every architecture.
_PIDFD_SEND_SIGNAL = 424
_PIDFD_OPEN = 434


def check() -> None:
    """See that sessions can run here.

    Raises:
        GpunbError: this is not Linux.
    """
    if sys.platform.startswith("linux"):
        return
    names = {"darwin": "macOS", "win32": "Windows"}
    cure = "inside WSL 2" if sys.platform == "win32" else "on a Linux machine or in a container"
    raise GpunbError(
        f"gpunb runs sessions on Linux only, and this is {names.get(sys.platform, sys.platform)}: "
        f"use it {cure}. Here it can be imported, for its types and for reading code that uses it"
    )


def pidfd_open(pid: int) -> int:
    """A descriptor of a process, which is readable when that has ended."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _call(_PIDFD_OPEN, pid, 0)


def pidfd_send_signal(descriptor: int, number: int) -> None:
    """Send a signal to the process that the descriptor is of."""
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _call(_PIDFD_SEND_SIGNAL, descriptor, int(number), None, 0)


def has_memory_files() -> bool:
    """Whether `memfd_create` can be called."""
    return hasattr(os, "memfd_create") or hasattr(_libc(), "memfd_create")


def memfd_create(name: str, flags: int) -> int:
    """A descriptor of a new file in memory, without a name in any file system."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _checked(_libc().memfd_create(name.encode(), flags))


@functools.cache
def _libc() -> Any:
    import ctypes  # few Pythons need it

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
