"""Calls CUDA's driver library (libcuda.so.1) through ctypes.

The library comes with the driver, so these few functions need no package. Only a worker calls them:
the kernel never opens the library.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

LIBRARY = "libcuda.so.1"


_NOT_INITIALIZED = 3
"""The status of most functions in a process that does not use CUDA."""

_LOCK_TIMEOUT = 10_000
"""Milliseconds in which the work on the device must end before it can be locked."""

_SINCE = {"cuCheckpointProcessLock": ": driver 570 or newer has it"}

_REFUSED = {
    600: f"work on the device did not end within {_LOCK_TIMEOUT // 1000} s",
    801: "the driver does not do this for its use of CUDA, such as memory that it shares with "
    "another process (CUDA IPC)",
}
"""Texts for the status codes of the checkpoint functions."""


class _LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs."""

    _fields_ = (
        ("timeout", ctypes.c_uint),
        ("reserved", ctypes.c_uint),
        ("more", ctypes.c_uint64 * 7),
    )


class CudaError(Exception):
    """A function of the driver failed, or is missing. The text has the reason."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class CudaDriver:
    """The functions of the driver, for this process."""

    def __init__(self, library: Any = None, *, loaded: bool = False) -> None:
        """
        Args:
            library: a stand-in for the library.
            loaded: only if this process has loaded the library already; else no function is
                called, as if CUDA were not initialized.

        Raises:
            CudaError: the library cannot be loaded.
        """
        if library is None:
            try:
                mode = os.RTLD_NOLOAD | os.RTLD_NOW if loaded else ctypes.DEFAULT_MODE
                library = ctypes.CDLL(LIBRARY, mode)
            except OSError as error:
                if not loaded:
                    raise CudaError(f"the driver's library does not load: {error}") from None
        self._library = library

    def make_context(self) -> None:
        """Make the primary context of the first visible device, which all libraries share.

        Raises:
            CudaError: there is no such device, or no room on it.
        """
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), device)

    def park(self, pid: int) -> bool:
        """Move the device memory of a process to the host, and free the device. Until `restore`,
        its calls of CUDA wait. False if the process does not use CUDA.

        Raises:
            CudaError: the driver or the use of the device does not allow it; the process goes on.
        """
        if self._library is None:
            return False
        arguments = _LockArguments(timeout=_LOCK_TIMEOUT)
        try:
            self._call("cuCheckpointProcessLock", pid, ctypes.byref(arguments))
        except CudaError as error:
            if error.status == _NOT_INITIALIZED:
                return False
            raise _explained(error) from None
        try:
            self._call("cuCheckpointProcessCheckpoint", pid, None)
        except CudaError as error:
            self._call("cuCheckpointProcessUnlock", pid, None)
            raise _explained(error) from None
        return True

    def restore(self, pid: int) -> None:
        """Undo `park`.

        Raises:
            CudaError: the process cannot use CUDA any more.
        """
        self._call("cuCheckpointProcessRestore", pid, None)
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaError(f"the driver has no function {name}{_SINCE.get(name, '')}")
        status = function(*arguments)
        if status:
            raise CudaError(f"{name} failed: {self._text(status)}", status)

    def _text(self, status: int) -> str:
        """The name of an error and its number."""
        name = ctypes.c_char_p()
        try:
            self._library.cuGetErrorName(status, ctypes.byref(name))
        except AttributeError:
            pass  # a stand-in, or a driver from before 2014
        return f"{(name.value or b'error').decode()} ({status})"


def _explained(error: CudaError) -> CudaError:
    why = _REFUSED.get(error.status)
    return CudaError(f"{error}: {why}", error.status) if why else error
