"""Memory files that are written again for new segments: the system need not make their pages anew.

1. Only the process that made a file can write to it. Other processes get a descriptor that is
   read-only.
2. A file is written again only while no other descriptor and no mapping of it exists, in any
   process. The system knows this: it then grants a lease for writing. So a segment never changes,
   although its file is not sealed.
3. The files are bounded in number and bytes, those in use included. Files that are not used for
   some seconds are closed.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Sequence

from gpunb.data.files import clearer, memory_file, read_only, write_all
from gpunb.data.segments import (
    PAGE_ALIGNED_FROM,
    Buffer,
    Segment,
    flat_pieces,
    lay_out,
    without_gaps,
)
from gpunb.system import linux
from gpunb.system.signals import UNDIVIDED

__all__ = ["IDLE", "SegmentPool"]

IDLE = 5.0
"""Seconds after which a file that nobody uses is closed, at most twice as many."""

MOST_FILES = 64


class SegmentPool:
    """Writes large segments, in files that were used before where there are some. For any thread.

    Args:
        limit: bytes of all files together.
        later: calls a function after so many seconds; needed to close idle files.
        background: calls a function on another thread: to give back 1 GiB takes about 0.1 s.
    """

    def __init__(
        self,
        limit: int,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        background: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        self._limit = limit if later is not None and linux.has_memory_files() else 0
        self._later = later
        self._background = background
        self._files: list[Segment] = []
        """A descriptor for writing of each file; the file that was used last comes last."""
        self._idle: set[Segment] = set()
        """Files that nobody used when `trim` looked last."""
        self._waits = False
        self._closed = False
        # Reentrant: a signal's handler may write a segment while this thread writes another.
        self._lock = threading.RLock()

    def write(
        self, buffers: Sequence[Buffer | Sequence[Buffer]]
    ) -> tuple[Segment, tuple[tuple[int, int], ...]]:
        """As `Segment.write`."""
        pieces = flat_pieces(buffers)
        spans, size = lay_out(pieces, PAGE_ALIGNED_FROM)
        try:
            file = self._file(size)
            if file is None:
                return Segment.write(buffers)
            try:
                write_all(file.fileno(), without_gaps(pieces, spans))
                with UNDIVIDED:
                    segment = Segment(read_only(file.fileno()), size)
            except OSError as error:
                file.close()
                raise clearer(error, size) from error
            self._keep(file)
            return segment, spans
        finally:
            pieces.clear()  # the traceback of an error would keep the data alive

    def trim(self) -> None:
        """Close the files that nobody used when this was called last, and uses now."""
        with self._lock:
            unused = {each for each in self._files if alone(each)}
            for each in unused & self._idle:
                self._drop(each)
            self._idle = unused - self._idle
            self._waits = False
            if self._files:
                self._trim_later()

    def clear(self) -> None:
        """Close all files; those in use live on as segments."""
        with self._lock:
            while self._files:
                self._drop(self._files[-1])

    def close(self) -> None:
        """Close all files, and keep none from now on."""
        self._closed = True
        self.clear()

    def forked(self) -> None:
        """Close the parent's descriptors, in a child that was forked off the kernel."""
        self._closed = True
        for each in self._files:  # without the lock, which a thread of the parent may have had
            each.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all files, those in use included."""
        return sum(each.size for each in self._files)

    def _file(self, size: int) -> Segment | None:
        """Return a file of so many bytes that only this process has; None if there is no room.

        A file that is too small or too large is given the size: its pages are worth the same.
        """
        with self._lock:
            if size > self._limit or self._closed:
                return None
            room = self.nbytes + size <= self._limit and len(self._files) < MOST_FILES
            near = sorted(self._files, key=lambda each: abs(each.size - size))
            # A much larger file would lose most of its pages.
            fit = near if not room else [each for each in near if each.size <= 2 * size]
            found = next(filter(alone, fit), None)
            if found is not None:
                self._files.remove(found)
            elif not room:
                return None
        try:
            with UNDIVIDED:
                file = _writable(size) if found is None else found
            if file is None:  # the system grants no lease, so no file could be used again
                self._limit = 0
                return None
            if found is None or found.size != size:
                os.ftruncate(file.fileno(), size)
                file.size = size
            return file
        except OSError:
            return None

    def _keep(self, file: Segment) -> None:
        with self._lock:
            if self._closed or self.nbytes + file.size > self._limit:
                file.close()
                return
            self._files.append(file)
            self._trim_later()

    def _trim_later(self) -> None:
        if not self._waits and self._later is not None:
            self._waits = True
            self._later(IDLE, lambda: self._background(self.trim))

    def _drop(self, file: Segment) -> None:
        self._files.remove(file)
        self._idle.discard(file)
        file.close()


def _writable(size: int) -> Segment | None:
    """Return a new memory file; None if the system does not say whether others have it."""
    with Segment(memory_file(), size) as first:
        # The system counts the writers of a file only for files that were opened by a path.
        file = Segment(os.open(f"/proc/self/fd/{first.fileno()}", os.O_RDWR | os.O_CLOEXEC), size)
    os.fchmod(file.fileno(), 0o400)
    # If a program opens the file just while the system is asked, a signal comes that does nothing.
    fcntl.fcntl(file.fileno(), fcntl.F_SETSIG, signal.SIGURG)
    if not alone(file):
        file.close()
        return None
    return file


def alone(file: Segment) -> bool:
    """Return whether this descriptor is the only one of its file, and nothing maps the file.

    A duplicate of this very descriptor, as in a child that was forked off, does not count.
    """
    try:
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
