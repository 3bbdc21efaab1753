"""Keeps objects within their memory budget: moves some to disk, and many small ones into arenas."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpunb.data.arenas import Arenas
from gpunb.data.files import unnamed_file
from gpunb.data.segment_pool import SegmentPool
from gpunb.data.serialize import INLINE_LIMIT, Payload
from gpunb.engine.object_budget import Budget
from gpunb.exceptions import OutOfMemoryError
from gpunb.system.signals import UNDIVIDED, Divisible

__all__ = ["Memory", "parse_spill"]

_IN_MEMORY_ONLY = {"tmpfs", "ramfs", "devtmpfs"}

_ARENAS = 256
"""Arenas that the limit is worth, so that they need few descriptors."""

_LEAST, _MOST = 4 << 20, 1 << 30
"""Bytes of an arena."""

_POOL = 4
"""The part of the limit that the files of the pool may take, used and unused ones together: a
fourth. It is given back when objects need it."""


class Memory:
    """Makes room for objects. Others move to disk if there is a folder for them.

    A payload that is moved gets another segment. Whoever took the one before can use it on.

    Args:
        limit: bytes that segments may take.
        folder: where to move them to; None if they must not be moved.
        post: hands (function, argument) to the loop's thread.
        later: calls a function after so many seconds.
    """

    def __init__(
        self,
        limit: int,
        folder: str | None = None,
        post: Callable[[tuple[Any, ...]], None] | None = None,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._budget: Budget[Payload] = Budget(limit, spill=folder is not None)
        size = min(max(limit // _ARENAS, _LEAST), _MOST)
        self._pool = SegmentPool(limit // _POOL, later, self._do_soon)
        self.arenas = Arenas(size, full=self._compact_soon, pool=self._pool)
        self._disk = Arenas(_MOST, folder, full=self._compact_soon) if folder is not None else None
        self._freed = 0
        self._post = post
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # reentrant, for signals' handlers
        self._under_way = 0  # on the loop's thread only
        self._compacts = False
        self._closed = False

    def facts(self) -> dict[str, int]:
        """Return figures for `status()`: bytes used, bytes allowed, bytes on disk."""
        return self._budget.facts()

    # --------------------------------------------------------------------------- from any thread

    def admit(self, payload: Payload, what: str) -> None:
        """Make room for a payload, and wait while other objects move. Call `release` later.

        Raises:
            OutOfMemoryError: there is no room, or none on the disk.
        """
        items = _sizes([payload])
        if items:
            self._thin_pool(items)
            self._move(self._budget.admit(items, what), items, what)

    def hold(self, payload: Payload) -> None:
        """Add one holder of the payload."""
        if payload.segment is not None:
            self._budget.add(payload, payload.segment.size)

    def release(self, *payloads: Payload) -> None:
        """Remove one holder of each of the payloads."""
        for each in payloads:
            if each.segment is not None:
                self._budget.remove(each)
                self._freed += each.segment.size if each.segment.place is not None else 0
        if self._freed >= self.arenas.capacity:
            self._freed = 0
            self._compact_soon()

    def touch(self, payload: Payload) -> None:
        """Note that the payload is used now."""
        if payload.segment is not None:
            self._budget.touch(payload)

    def take_in(self, payloads: Iterable[Payload]) -> None:
        """Move small values that came from other processes into arenas, unless they are few."""
        for each in payloads:
            if each.segment is not None:
                if not each.shared:
                    each.segment = self.arenas.take_in(each.segment)
            elif len(each.stream) > INLINE_LIMIT or (each.buffers and each.nbytes > INLINE_LIMIT):
                # One of so many results that a message has no room for their descriptors.
                each.segment, each.spans = self.arenas.write([each.stream, *each.buffers])
                each.stream, each.buffers = b"", ()

    def pin(self, payload: Payload) -> None:
        """Keep the payload in memory until `unpin`, because a task has it."""
        self._budget.pin(payload)

    def unpin(self, payload: Payload) -> None:
        self._budget.unpin(payload)

    # ------------------------------------------------------------------------ on the loop's thread

    def admit_soon(
        self,
        payloads: Sequence[Payload],
        what: str,
        then: Callable[[OutOfMemoryError | None], None],
        *,
        in_order: bool = False,
    ) -> None:
        """Make room as `admit` does, without waiting. `then` is called when there is room, or with
        the error if there is none: at once if nothing has to move. With `in_order`, it is not
        called before earlier calls were answered."""
        items = _sizes(payloads)
        chosen: Sequence[Payload] = ()
        refused: OutOfMemoryError | None = None
        try:
            if items:
                self._thin_pool(items)
                chosen = self._budget.admit(items, what)
        except OutOfMemoryError as error:
            refused = error.with_traceback(None)  # which would hold this frame, and the payloads
        if not chosen and not (in_order and self._under_way):
            then(refused)
            return
        post = self._post
        assert post is not None
        self._under_way += 1

        def finish(error: OutOfMemoryError | None) -> None:
            self._under_way -= 1
            then(error)

        def work() -> None:
            try:
                self._move(chosen, items, what)
            except OutOfMemoryError as error:
                post((finish, error))
            else:
                post((finish, refused))

        self._do_soon(work)

    def close(self) -> None:
        """Move nothing more in the background. This does not wait for a move that has begun."""
        self._closed = True
        self._pool.close()
        if self._thread is not None:
            self._work.put(None)

    def forked(self) -> None:
        """Close the parent's descriptors, in a child that was forked off the kernel."""
        self._pool.forked()
        for each in (self.arenas, self._disk):
            if each is not None:
                each.forked()

    # ------------------------------------------------------------------------------------- inside

    def _do_soon(self, work: Callable[[], None]) -> None:
        """Call a function on the thread that moves objects, which starts with the first call."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="gpunb-spill", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:
                    pass
        if self._thread is not None:
            self._work.put(work)
        else:  # the system gives no thread now, so the caller waits for the disk
            work()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # its objects

    def _compact_soon(self) -> None:
        """Empty arenas in the background if too much of their memory is unused."""
        wasteful = [each for each in self._rooms() if each[0].wastes(each[1])]
        if wasteful and not self._compacts and not self._closed:
            self._compacts = True
            self._do_soon(self._compact)

    def _compact(self) -> None:
        self._compacts = False
        for arenas, room in self._rooms():
            arenas.compact(room)

    def _thin_pool(self, items: Sequence[tuple[Payload, int]]) -> None:
        """Give the memory of unused files back if objects come near the limit."""
        if self._pool.nbytes:
            facts = self._budget.facts()
            total = facts["used"] + sum(nbytes for _, nbytes in items)
            if total > facts["limit"] - facts["limit"] // _POOL:
                self._pool.clear()

    def _rooms(self) -> list[tuple[Arenas, int]]:
        """Return the arenas, and the bytes that may be unused in them."""
        facts = self._budget.facts()
        rooms = [(self.arenas, max(0, facts["limit"] - facts["used"]))]
        return rooms if self._disk is None else [*rooms, (self._disk, facts["spilled"])]

    def _move(
        self, chosen: Sequence[Payload], items: Sequence[tuple[Payload, int]], what: str
    ) -> None:
        done = 0
        try:
            for payload in chosen:
                segment = payload.segment
                assert segment is not None
                assert self._disk is not None
                # The old segment is not closed: a message that has it may still be in the outbox.
                with Divisible():
                    moved = self._disk.spill(segment)
                payload.segment = moved
                del segment  # its memory is free before the books say so
                self._budget.moved(payload)
                done += 1
        except BaseException as error:
            for payload in chosen[done:]:
                self._budget.stays(payload)
            self.release(*[payload for payload, _ in items])
            if not isinstance(error, Exception):
                raise
            total = sum(nbytes for _, nbytes in items)
            raise OutOfMemoryError(self._budget.refusal(what, total, str(error))) from error


def _sizes(payloads: Iterable[Payload]) -> list[tuple[Payload, int]]:
    sized = [(each, each.segment) for each in payloads]
    return [(each, segment.size) for each, segment in sized if segment is not None]


# ------------------------------------------------------------------------------------- the option


def parse_spill(value: object) -> str | None:
    """Return the folder of the option `spill`; None if objects must not move.

    Raises:
        ValueError: there is no such folder, it cannot be written to, or it lies in memory.
        TypeError: neither a bool nor a path.
    """
    if value is None or value is False:
        return None
    if value is True:
        import tempfile

        folders = [tempfile.gettempdir(), "/var/tmp"]
        for folder in folders:
            if not _reason_against(folder):
                return folder
        raise ValueError(
            f"spill=True found no folder on a disk ({_reason_against(folders[0])}): "
            "name one, as in spill='/scratch'"
        )
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"spill must be True or a folder, not {value!r}")
    folder = os.path.abspath(os.path.expanduser(os.fspath(value)))
    reason = _reason_against(folder)
    if reason:
        raise ValueError(f"spill={os.fspath(value)!r} cannot be used: {reason}")
    return folder


def _reason_against(folder: str) -> str | None:
    try:
        with UNDIVIDED:
            os.close(unnamed_file(folder))
    except OSError as error:
        return f"{folder}: {error.strerror}"
    kind = _file_system(folder)
    if kind in _IN_MEMORY_ONLY:
        return f"{folder} is no disk, but memory ({kind})"
    return None


def _file_system(folder: str, table: str = "/proc/self/mountinfo") -> str | None:
    """Return the type of the file system of a folder; None if it is not known."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(table) as mounts:
            for line in mounts:
                mount, _, source = line.partition(" - ")
                if mount.split()[2] == number:
                    return source.split()[0]
    except (OSError, IndexError):
        pass
    return None
