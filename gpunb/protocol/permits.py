"""Permits to begin the tasks, or calls of an actor, that a worker is sent ahead.

A permit is a number, in a pipe that the kernel and the worker both read:

1. The kernel writes the numbers of some tasks at once, and then sends the tasks.
2. The worker reads one number before it begins such a task. If the number belongs to a later one,
   the worker keeps it, and drops the task.
3. To take back what has not begun, the kernel reads all numbers that are left.

The system gives each number to one of the two readers, so both always know which tasks run. The
worker reports the end of a task before it reads the next number.
"""

from __future__ import annotations

import os
import struct

_NUMBER = struct.Struct("<q")
_ALL = 1 << 16


class Permits:
    """The kernel's end.

    Attributes:
        agreed: whether the worker has got its end. It may have no descriptor left.
    """

    __slots__ = ("_left", "_read", "_sent", "_write", "agreed")

    def __init__(self) -> None:
        """Open the pipe.

        Raises:
            OSError: no descriptor is left.
        """
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._sent = self._left = 0
        self.agreed = False

    def fileno(self) -> int:
        """Return the descriptor for the worker."""
        return self._read

    def grant(self, count: int) -> int:
        """Permit the worker to begin so many more tasks. Return the number of the first permit."""
        first = self._sent + 1
        self._sent += count
        os.write(self._write, b"".join(map(_NUMBER.pack, range(first, first + count))))
        return first

    def take_back(self) -> int:
        """Take back the permits that the worker has not taken. Return how many these are; after
        `close`, as many as the last time before."""
        if self._read >= 0:
            try:
                self._left = len(os.read(self._read, _ALL)) // _NUMBER.size
            except BlockingIOError:
                self._left = 0
        return self._left

    def close(self) -> None:
        """Close the pipe, which others may go on to use."""
        for each in (self._read, self._write):
            os.close(each)
        self._read = self._write = -1


class PermitReader:
    """The worker's end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._last = 0

    def take(self, number: int) -> bool:
        """Take the permit of this number. Return False if the kernel has taken it back."""
        if self._last < number:
            try:
                (self._last,) = _NUMBER.unpack(os.read(self._descriptor, _NUMBER.size))
            except BlockingIOError:
                return False
        return self._last == number
