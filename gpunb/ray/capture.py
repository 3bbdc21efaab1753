"""Captures the text in a task's standard streams: of Python, C code and child processes.

While a task runs on the main thread, descriptors 1 and 2 are pipes, and a thread reads them.
Between tasks they are what Ray made of them, which writes marks of its own there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpunb.protocol.sink import Pipe
from gpunb.worker.streams import stream

_NAMES = ("stdout", "stderr")


class StreamCapture:
    """Takes the standard streams of this process while tasks run."""

    def __init__(self, on_text: Callable[[str, str], object]) -> None:
        """`on_text` is called with the name of the stream and its text, on a thread."""
        self._on_text = on_text
        self._original = [os.dup(1), os.dup(2)]
        self._pipes = [os.pipe(), os.pipe()]
        self._texts = [Pipe(), Pipe()]
        self._reading = threading.Lock()
        self._ours: list[Any] | None = None
        self._before: tuple[Any, ...] = ()
        self._running = 0
        self._turning = threading.Lock()
        self.wrote = False
        for number in range(2):
            threading.Thread(
                target=self._read, args=(number,), name="gpunb-output", daemon=True
            ).start()

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """While a task runs, or something in between."""
        with self._turning:
            self._running += 1
            if self._running == 1:
                self._begin()
        try:
            yield
        finally:
            _flush()
            with self._turning:
                self._running -= 1
                if not self._running:
                    self._end()
            self.drain()

    def _begin(self) -> None:
        _flush()
        self._before = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
        self.wrote = False
        for number in range(2):
            os.dup2(self._pipes[number][1], number + 1)
        if self._ours is None:
            self._ours = [stream(1), stream(2)]
        sys.stdout, sys.stderr = self._ours
        sys.__stdout__, sys.__stderr__ = self._ours  # type: ignore[misc]

    def _end(self) -> None:
        for number in range(2):
            os.dup2(self._original[number], number + 1)
        sys.stdout, sys.stderr = self._before[:2]
        sys.__stdout__, sys.__stderr__ = self._before[2:]  # type: ignore[misc]

    def drain(self, patience: float = 2.0) -> None:
        """Return when all that was written has been read, or after so many seconds: a child process
        may write without a pause, and a finalizer that writes may run on the thread that reads."""
        until = time.monotonic() + patience
        while (left := until - time.monotonic()) > 0:
            if not self._unread() and self._reading.acquire(timeout=left):
                try:
                    if not self._unread():
                        return
                finally:
                    self._reading.release()
            time.sleep(0.0005)

    def _unread(self) -> bool:
        return any(map(_waiting, (self._pipes[0][0], self._pipes[1][0])))

    def _read(self, number: int) -> None:
        source, text, name = self._pipes[number][0], self._texts[number], _NAMES[number]
        poll = select.poll()
        poll.register(source, select.POLLIN)
        while True:
            poll.poll()
            with self._reading:
                data = os.read(source, 1 << 16)
                written = text.feed(data)
                if written:
                    self.wrote = True
                    self._on_text(name, written)


def _waiting(descriptor: int) -> int:
    """Bytes in a pipe."""
    data = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0")
    count: int = struct.unpack("i", data)[0]
    return count


def _flush() -> None:
    for each in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            each.flush()
