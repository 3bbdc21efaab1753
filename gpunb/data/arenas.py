"""Arenas: files that many small segments share, so that many objects need few descriptors.

1. Only the process that made an arena writes to it. Each byte is written once: a reader with the
   descriptor sees the same content for as long as it likes, also of blocks that are not used any
   more. Other processes get a descriptor that is read-only.
2. An arena that is full is sealed, as every segment is.
3. An arena lives as long as one of its blocks, in any process. Nothing else keeps it.
4. The space of single blocks is not used again where it is. Instead `compact` copies the other
   blocks into another arena when too much of an arena is unused.
5. A reader gets a copy of a block. A view of the arena's memory would keep all of the arena.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from gpunb.data.blocks import Block, SharedFile
from gpunb.data.files import (
    clearer,
    copy,
    fix_size,
    memory_file,
    read_only,
    reserve,
    seal,
    unnamed_file,
    write_all,
)
from gpunb.data.segment_pool import SegmentPool
from gpunb.data.segments import (
    ALIGNMENT,
    LARGE,
    PAGE,
    Buffer,
    Segment,
    flat_pieces,
    lay_out,
    round_up,
    without_gaps,
)
from gpunb.system.signals import UNDIVIDED

__all__ = ["FEW", "Arenas", "current", "stop", "use", "write_large"]

FEW = 64
"""Segments with a file of their own that may exist before further ones become blocks: a session
with few objects needs neither the copies nor the bookkeeping."""

Spans = tuple[tuple[int, int], ...]


class _Arena(SharedFile):
    """A file with blocks of this process. Its descriptor is read-only, that of `writer` is not."""

    __slots__ = ("_blocks", "_gone", "busy", "end", "live", "writer")

    def __init__(self, reader: Segment, writer: Segment) -> None:
        super().__init__(reader)
        self.writer = writer
        self.busy = False
        self.end = 0
        """Bytes up to the end of the last block."""
        self.live = 0
        """Bytes of blocks that exist, as far as `settle` has counted."""
        self._blocks: dict[weakref.ref[Block], int] = {}
        # A weak reference's callback that is no Python code cannot be interrupted.
        self._gone: deque[weakref.ref[Block]] = deque()

    def take(self, block: Block, start: int) -> None:
        """Make this the place of a block."""
        size = round_up(block.size, ALIGNMENT)
        self._blocks[weakref.ref(block, self._gone.append)] = size
        self.live += size
        block.place = (self, start)

    def leave(self, block: Block) -> None:
        """Note that a block has another place now."""
        self.live -= self._blocks.pop(weakref.ref(block), 0)

    def settle(self) -> None:
        """Count the blocks that are gone."""
        while self._gone:
            self.live -= self._blocks.pop(self._gone.popleft(), 0)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks that exist."""
        for each in list(self._blocks):
            block = each()
            if block is not None:
                yield block

    def seal(self) -> None:
        """Forbid all changes, and close the descriptor that could write."""
        if not self.writer.closed:
            seal(self.writer.fileno())
            self.writer.close()


class Arenas:
    """Places segments in arenas. For any thread.

    Args:
        capacity: bytes of one arena.
        folder: the folder of the arenas' files; None for files in memory.
        full: is called when an arena is full.
        pool: for segments that are too large for an arena.
    """

    def __init__(
        self,
        capacity: int = 16 << 20,
        folder: str | None = None,
        full: Callable[[], object] = int,
        pool: SegmentPool | None = None,
    ) -> None:
        self.capacity = capacity
        self.pool = pool
        self._folder = folder
        self._full = full
        self._all: set[weakref.ref[_Arena]] = set()
        self._open: weakref.ref[_Arena] | None = None
        self._single: set[weakref.ref[Segment]] = set()
        # Reentrant: a signal's handler may put an object while this thread writes another.
        self._lock = threading.RLock()

    def write(self, buffers: Sequence[Buffer | Sequence[Buffer]]) -> tuple[Segment, Spans]:
        """As `Segment.write`, for less than `LARGE` bytes. Buffers do not get pages to themselves.

        Raises:
            OutOfMemoryError: no memory is left.
            BufferError: a buffer is not contiguous.
        """
        if len(self._single) >= FEW:
            pieces = flat_pieces(buffers)
            spans, size = lay_out(pieces, float("inf"))

            def fill(descriptor: int, start: int) -> None:
                write_all(descriptor, without_gaps(pieces, spans), start)

            try:
                return self._place(Block(size), ALIGNMENT, fill), spans
            except OSError:
                pass  # perhaps there is room for a file of its own; otherwise its error is better
            finally:
                pieces.clear()  # the error's traceback would keep the data alive
        segment, spans = Segment.write(buffers)
        return self._note(segment), spans

    def take_in(self, segment: Segment) -> Segment:
        """Return a segment with the same content that needs no descriptor of its own, unless it is
        one of a few or large. A block of another process's arena is copied, too: its memory is
        not ours to count."""
        place = segment.place
        if segment.size >= LARGE or (place is not None and isinstance(place[0], _Arena)):
            return segment
        if place is None and len(self._single) < FEW:
            return self._note(segment)
        try:
            return self._copied(segment)
        except OSError:
            return segment

    def spill(self, segment: Segment) -> Segment:
        """Return a segment with the same content in the folder.

        Raises:
            OutOfMemoryError: the disk, or the user's quota, is full.
            OSError: no file can be made in the folder.
        """
        assert self._folder is not None
        if len(self._single) < FEW or segment.size > self.capacity // 4:
            return self._note(segment.spilled(self._folder))
        try:
            return self._copied(segment)
        except OSError as error:
            raise clearer(error, segment.size, f"in {self._folder}") from error

    def compact(self, room: int) -> None:
        """Copy the blocks of arenas that are mostly unused into others, while `wastes(room)`."""
        while self._emptied(room):
            pass

    def wastes(self, room: int) -> bool:
        """Return whether more memory is unused than a third of all, or than there is `room` for.
        The unused part of one arena never counts as too much."""
        return self._worst(room) is not None

    def forked(self) -> None:
        """Close the parent's descriptors, in a child that was forked off the kernel."""
        for arena in self._arenas():
            arena.close()
            arena.writer.close()

    def _arenas(self) -> list[_Arena]:
        return [arena for each in self._all.copy() if (arena := each()) is not None]

    def _worst(self, room: int) -> _Arena | None:
        """Return the arena with the largest unused part, if it has to be emptied."""
        with self._lock:
            arenas = self._arenas()
            for each in arenas:
                each.settle()
            # A reader may still have one without blocks, which nothing else keeps.
            arenas = [each for each in arenas if each.live]
            live = sum(each.live for each in arenas)
            unused = sum(each.end for each in arenas) - live
            if unused <= max(self.capacity, min(live // 2, room)):
                return None
            now = self._open() if self._open is not None else None
            full = [each for each in arenas if each is not now and each.live < each.end]
            return min(full, key=lambda each: each.live / each.end, default=None)

    def _emptied(self, room: int) -> bool:
        """Empty one arena; return False if there is none to be emptied, or no room elsewhere."""
        worst = self._worst(room)
        return worst is not None and all(self._moved(each, worst) for each in worst.blocks())

    def _moved(self, block: Block, worst: _Arena) -> bool:
        """Give a block a place in another arena; return False if that is not possible."""
        with self._lock:
            place = block.place
            if place is None or place[0] is not worst:
                return True
            alignment = PAGE if block.size >= LARGE else ALIGNMENT
            try:
                self._place(block, alignment, self._copying(worst, place[1], block.size))
            except OSError:
                return False
            worst.leave(block)
            return True

    def _copied(self, segment: Segment) -> Block:
        file, offset = segment.place or (segment, 0)
        alignment = PAGE if segment.size >= LARGE else ALIGNMENT
        fill = self._copying(file, offset, segment.size)
        return self._place(Block(segment.size), alignment, fill)

    def _copying(self, file: Segment, offset: int, size: int) -> Callable[[int, int], None]:
        def fill(descriptor: int, start: int) -> None:
            if self._folder is not None:
                reserve(descriptor, start, size)
            copy(file.fileno(), offset, size, descriptor, start)

        return fill

    def _place(self, block: Block, alignment: int, fill: Callable[[int, int], None]) -> Block:
        """Give a block its place, after `fill(descriptor, offset)` has written its content.

        Space that an error leaves behind stays unused.
        """
        with self._lock:
            arena = self._with_room(block.size, alignment)
            start = round_up(arena.end, alignment)
            arena.end = round_up(start + block.size, ALIGNMENT)
            arena.busy = True
            try:
                fill(arena.writer.fileno(), start)
                arena.take(block, start)
            finally:
                arena.busy = False
            return block

    def _with_room(self, size: int, alignment: int) -> _Arena:
        """Return the arena for the next block. One that is busy belongs to an outer frame of this
        thread, which a signal's handler has interrupted."""
        arena = self._open() if self._open is not None else None
        if arena is not None and not arena.busy:
            if round_up(arena.end, alignment) + size <= arena.size:
                return arena
            self._open = None
            arena.seal()
        arena = self._new()
        self._all.add(weakref.ref(arena, self._all.discard))
        self._open = weakref.ref(arena)
        self._full()
        return arena

    def _new(self) -> _Arena:
        with UNDIVIDED:
            made = memory_file() if self._folder is None else unnamed_file(self._folder)
            writer = Segment(made, self.capacity)
        if self._folder is None:
            os.ftruncate(writer.fileno(), self.capacity)
            os.fchmod(writer.fileno(), 0o400)
            fix_size(writer.fileno())
        with UNDIVIDED:
            return _Arena(Segment(read_only(writer.fileno()), self.capacity), writer)

    def _note(self, segment: Segment) -> Segment:
        """Count a segment among the few while it exists."""
        self._single.add(weakref.ref(segment, self._single.discard))
        return segment


current: Arenas | None = None
"""The arenas of this process's session, in which small values are written at once."""


def write_large(buffers: Sequence[Buffer | Sequence[Buffer]]) -> tuple[Segment, Spans]:
    """As `Segment.write`, with memory that was used before if the session of this process has a
    pool of it. For `LARGE` bytes and more."""
    pool = current.pool if current is not None else None
    return Segment.write(buffers) if pool is None else pool.write(buffers)


def use(arenas: Arenas) -> Arenas:
    """Write small values of this process to these arenas from now on; return them."""
    global current
    current = arenas
    return arenas


def stop(arenas: Arenas) -> None:
    """Undo `use`."""
    global current
    if current is arenas:
        current = None


def _forked() -> None:
    """Write nothing to the arenas of the parent, in a child."""
    global current
    current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
