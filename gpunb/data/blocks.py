"""Segments that share a file with others; `arenas` makes them, other processes receive them."""

from __future__ import annotations

import os
import weakref

from gpunb.data.files import read_all
from gpunb.data.segments import LARGE, PAGE, Segment, aligned

__all__ = ["Block", "SharedFile", "known_file"]


class Block(Segment):
    """A segment that shares its file with others.

    Attributes:
        place: the file and the offset in it, in one attribute: `compact` replaces both at once.
    """

    __slots__ = ("place",)

    place: tuple[Segment, int] | None

    def __init__(self, size: int, place: tuple[Segment, int] | None = None) -> None:
        self.size = size
        self.place = place

    def _placed(self) -> tuple[Segment, int]:
        place = self.place
        if place is None:
            raise ValueError("the segment is closed")
        return place

    def fileno(self) -> int:
        """Return the descriptor of the file that the block shares.

        Raises:
            ValueError: the segment is closed.
        """
        return self._placed()[0].fileno()

    def map(self) -> memoryview:
        """Return a private, writable copy of the block, aligned to 64 bytes. A large block, as
        there are on disk, is mapped instead.

        Raises:
            OutOfMemoryError: the process gets no more memory.
        """
        file, offset = self._placed()
        if self.size >= LARGE and not offset % PAGE:
            return self._map(file.fileno(), offset)
        view = aligned(self.size)
        read_all(file.fileno(), view, offset)
        return view

    def dup(self) -> Segment:
        """Return another block at the same place, with a descriptor of its own."""
        file, offset = self._placed()
        return Block(self.size, (file.dup(), offset))

    @property
    def closed(self) -> bool:
        """Whether the block is closed."""
        return self.place is None

    def close(self) -> None:
        """Let go of the file, which is closed with its last block."""
        self.place = None

    def __del__(self) -> None:
        """Do nothing, because the file closes itself."""


class SharedFile(Segment):
    """A file of blocks.

    A thread may find it by a weak reference while another thread drops its last block. The weak
    reference finds it until its destructor has run, so the destructor must not close the
    descriptor: `_reader` has that, and is only reached from here.
    """

    __slots__ = ("_reader",)

    def __init__(self, reader: Segment) -> None:
        self._reader = reader
        self.size = reader.size

    def fileno(self) -> int:
        """Return the descriptor, which stays the file's own.

        Raises:
            ValueError: the file is closed.
        """
        return self._reader.fileno()

    @property
    def closed(self) -> bool:
        """Whether the descriptor is closed."""
        return self._reader.closed

    def close(self) -> None:
        """Close the descriptor; further calls do nothing."""
        self._reader.close()

    def __del__(self) -> None:
        """Do nothing: the descriptor is closed with `_reader`."""


_adopted: weakref.WeakValueDictionary[tuple[int, int], Segment] = weakref.WeakValueDictionary()


def known_file(file: Segment) -> Segment:
    """Return the file that came before if it is the same, so that a process that gets many blocks
    of an arena in many messages keeps one descriptor of it."""
    facts = os.fstat(file.fileno())
    return _adopted.setdefault((facts.st_dev, facts.st_ino), SharedFile(file))
