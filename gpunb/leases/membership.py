"""The membership of a session in the ledger: how it enters, keeps and leaves its record.

All sessions share one *ledger* file. A session may not be able to enter it at once, and anybody may
remove the files at any time. So each use of the ledger (`_locked`) takes these steps:

1. Lock the ledger. If its name was removed meanwhile, open the ledger that the folder has now.
2. If the session's record is not at its place in the ledger, remove the records of dead sessions
   and write the whole record, with all leases, at a free place.
3. After that look for living sessions that are not in this ledger (`_settle`), and wake them.
   Until they have entered, nobody knows their leases, so nobody takes a lease.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpunb.exceptions import GpunbError
from gpunb.leases import keeper, ledger_file, liveness, records
from gpunb.leases.ledger_file import Busy
from gpunb.leases.records import LEDGER_FILE, LONGEST, MOST_RECORDS, NOBODY, RECORD, SessionRecord

_RETRY_PATIENCE = 0.001
"""Seconds to try for the ledger's lock after a try has failed: the caller tries again anyway."""

_SPARE = 16 * RECORD
"""Bytes behind the last record that are not cut off."""

_TRIES = 3
_LEAVING = 0.2
"""Seconds in which a keeper ends after the processes that it watches."""


class _Locked:
    """Locks the ledger for a `with` block. A generator as context manager would take a tenth of the
    time of a lease."""

    __slots__ = ("_lock", "_unlock")

    def __init__(self, lock: Callable[[], list[SessionRecord]], unlock: Callable[[], None]) -> None:
        self._lock = lock
        self._unlock = unlock

    def __enter__(self) -> list[SessionRecord]:
        return self._lock()

    def __exit__(self, *error: object) -> None:
        self._unlock()


class Membership:
    """A session in the ledger. Used by one thread.

    Attributes:
        fifo: the session's FIFO (see `liveness`), readable when another session has written to it;
            -1 if there is none yet. It must not be unlocked, only closed.
        place: the number of the session's record in the ledger; -1 if it is not there.
        record: the session's record.
        life: the descriptor that all processes of the session inherit; the session lives as long
            as one of them.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        *,
        patient: bool = False,
        make: Callable[[], object] | None = None,
    ) -> None:
        """Enter the session in the ledger. `about` has the facts that other sessions may read.

        Args:
            patient: raise nothing if this fails; later calls try again.
            make: makes the folder if it is missing.

        Raises:
            OSError: the folder cannot be used.
            Busy: another process keeps the ledger locked.
        """
        self._path = path
        self._file = str(path / LEDGER_FILE)
        self._make = make
        self._facts = dict(about)
        self.record = SessionRecord(os.urandom(16), os.getpid(), os.getuid())
        self._folder = self._ledger_file = self.place = -1
        self._reader = records.Reader()
        self._size = 0
        self._records: dict[int, SessionRecord] = {}
        self._unlisted = ""
        self._patience = ledger_file.PATIENCE
        self.fifo = self.life = -1
        self._old_fifos: list[int] = []
        self._keepers: list[int] = []
        self._locked = _Locked(self._lock_and_read, self._unlock)
        try:
            with self._locked:
                pass
        except (OSError, Busy):
            if not patient:
                self._abandon()
                raise
            self._make_early_fifo()

    @property
    def entered(self) -> bool:
        """Whether the session is in the ledger, as far as is known here."""
        return self.place >= 0

    @property
    def settled(self) -> bool:
        """Whether all living sessions are in the ledger, as far as is known here."""
        return self.entered and not self._unlisted

    # -------------------------------------------------------------------------------------- ends

    def close(self) -> None:
        """Leave the ledger. Leases of workers that still run end with these workers."""
        last = self.watch(self.record.id)
        self._close_fifos()
        if last is not None:
            liveness.await_end(last)
        while self._keepers:
            if keeper.runs(pid := self._keepers.pop(), _LEAVING):
                keeper.reap(pid)
        with contextlib.suppress(OSError, Busy):
            if self._folder >= 0 and not self._is_alive(self.record):
                self._remove_record()
        self._close_ledger_file()

    def _remove_record(self) -> None:
        """Remove the session's record and files."""
        ident, others = self.record.id, []
        if self.entered:
            ledger_file.lock(self._ledger_file)
            self._size = os.fstat(self._ledger_file).st_size
            self._records = self._reader.read(self._read(), self.place, self.record)
            others = [each.id for each in self._others() if each.waits]
            if self._records.get(self.place) is self.record:
                ledger_file.write(self._ledger_file, NOBODY, self._offset)
        liveness.remove(self._folder, ident)
        self._unlock()
        liveness.notify(self._folder, others)

    def watch(self, peer: bytes) -> int | None:
        """Return a descriptor that ends (hangs up) with a session; None if the session is gone."""
        return liveness.watch(self._folder, peer) if self._folder >= 0 else None

    def forked(self) -> None:
        """Close all descriptors in a forked child, so that it does not keep the session alive."""
        self._close_fifos()
        self._close_ledger_file()

    def _close_fifos(self) -> None:
        for descriptor in {self.fifo, self.life, *self._old_fifos} - {-1}:
            os.close(descriptor)
        self.fifo = self.life = -1
        self._old_fifos = []

    def _close_ledger_file(self) -> None:
        for descriptor in {self._ledger_file, self._folder} - {-1}:
            os.close(descriptor)
        self._folder = self._ledger_file = self.place = -1

    def _abandon(self) -> None:
        """Give up an entry that has failed."""
        if self._folder >= 0:
            liveness.remove(self._folder, self.record.id)
        self._close_fifos()
        self._close_ledger_file()

    # ------------------------------------------------------------------------------------ entering

    def _make_early_fifo(self) -> None:
        """Make a FIFO, or else an unnamed pipe, before the session is in the ledger: its first
        processes inherit it."""
        try:
            if self._folder < 0:
                self._open()
            if self.fifo < 0:
                mode = ledger_file.mode_for(self._folder)
                self.fifo = liveness.make(
                    self._folder, self.record.id, mode, self._facts, early=True
                )
            self.life = self.fifo
        except (OSError, Busy):
            self.life = liveness.unnamed_fifo()

    def _lock_and_read(self) -> list[SessionRecord]:
        """Lock the ledger, with this session in it; return the other sessions."""
        self._lock()
        try:
            self._records = self._reader.read(self._read(), self.place, self.record)
            if self._records.get(self.place) is not self.record:
                self._enter()
            elif self._size > LONGEST or self._size > (max(self._records) + 1) * RECORD + _SPARE:
                os.ftruncate(self._ledger_file, (max(self._records) + 1) * RECORD)
            return self._others()
        except BaseException:
            self._unlock()
            raise

    def _unlock(self) -> None:
        """Unlock the ledger; raise nothing, because the steps under the lock are done."""
        if self._ledger_file < 0:
            return
        try:
            fcntl.flock(self._ledger_file, fcntl.LOCK_UN)
        except OSError:
            self._close_ledger_file()  # closing unlocks the ledger; the next use opens it again

    def _lock(self) -> None:
        """Lock the ledger that the folder has now."""
        for _ in range(_TRIES):
            if self._ledger_file < 0:
                self._open()
            try:
                ledger_file.lock(self._ledger_file, self._patience)
            except Busy:
                self._patience = _RETRY_PATIENCE
                if self._look_up():
                    raise
                continue
            self._patience = ledger_file.PATIENCE
            if self._look_up():
                return
        raise Busy(f"the ledger of leases in {self._path} is removed again and again")

    def _open(self) -> None:
        if self._make is not None:
            try:
                self._make()
            except GpunbError as error:
                raise Busy(str(error)) from error
        self._folder, self._ledger_file = ledger_file.open_ledger_file(self._path)
        self._opened = os.fstat(self._ledger_file)

    def _look_up(self) -> bool:
        """Note the size of the ledger that the folder has. Close the open one, and return False, if
        it was removed, replaced or moved with its folder."""
        try:
            found = os.stat(self._file)
        except FileNotFoundError:
            found = None
        if found is None or not os.path.samestat(found, self._opened):
            self._close_ledger_file()
            return False
        self._size = found.st_size
        return True

    def _enter(self) -> None:
        """Write the session's whole record into the locked ledger; remove records of the dead."""
        listed, me = self._records, self.record
        for number, each in list(listed.items()):
            if each.id == me.id:
                # The session's record from before it lost its place. It would stay at that place,
                # and would count as long as the session lives.
                ledger_file.write(self._ledger_file, NOBODY, number * RECORD)
            elif self._is_alive(each):
                continue
            else:
                self._remove(number, each)
            del listed[number]
        self.place = -1
        number = next(number for number in range(len(listed) + 1) if number not in listed)
        if number >= MOST_RECORDS:
            raise Busy(f"the ledger of leases in {self._path} is full: {len(listed)} sessions run")
        self._ensure_fifo()
        # The full length, so that the disk has room for the record from now on.
        ledger_file.write(self._ledger_file, me.encode().ljust(RECORD, b"\0"), number * RECORD)
        self.place = number
        listed[number] = me
        self._unlisted = "unknown"
        with contextlib.suppress(Busy):
            self._settle([each for each in listed.values() if each is not me])

    def _ensure_fifo(self) -> None:
        """Make sure that the session has a FIFO in the folder."""
        ident = self.record.id
        if self.fifo >= 0:
            liveness.name_fifo(self._folder, ident)
            if liveness.is_in_folder(self._folder, ident, self.fifo):
                return
        fifo = liveness.make(
            self._folder, ident, ledger_file.mode_for(self._folder), self._facts, early=False
        )
        if self.life < 0:
            self.life = fifo
        else:
            try:
                self._keepers.append(keeper.start(fifo, self.life))
            except OSError:
                os.close(fifo)
                liveness.remove(self._folder, ident)
                raise
        if self.fifo >= 0:
            self._old_fifos.append(self.fifo)  # the loop may still watch it
        self.fifo = fifo

    def close_old_fifos(self) -> None:
        """Close FIFOs that were replaced, and end their keepers. The loop must not watch them any
        more. Processes that have inherited one keep it open."""
        past, self._old_fifos = self._old_fifos, []
        for descriptor in past:
            if descriptor != self.life:
                os.close(descriptor)
        while len(self._keepers) > 1:
            keeper.end(self._keepers.pop(0))

    def _settle(self, others: list[SessionRecord]) -> None:
        """Check whether all living sessions are in the ledger, if they were not at the last look.

        Raises:
            Busy: some are not.
        """
        if not self._unlisted:
            return
        known = [self.record.id, *(each.id for each in others)]
        living = liveness.sweep(self._folder, known)
        liveness.notify(self._folder, living)
        pids = {liveness.about(self._folder, each).get("pid", "?") for each in living}
        pids.update(liveness.unlisted_pids(self._folder, known))
        self._unlisted = ""
        if pids:
            self._unlisted = (
                f"process {', '.join(map(str, pids))} has a session whose files in the ledger of "
                f"leases ({self._path}) were removed, and nobody knows what it holds until it has "
                "made new ones"
            )
            raise Busy(self._unlisted)

    # ------------------------------------------------------------------------------------- inside

    @property
    def _offset(self) -> int:
        return self.place * RECORD

    def _read(self) -> bytes:
        return ledger_file.read(self._ledger_file, min(self._size, LONGEST))

    def _others(self) -> list[SessionRecord]:
        ident = self.record.id
        return [each for each in self._records.values() if each.id != ident]

    def _read_others(self) -> list[SessionRecord]:
        """Return the other sessions without the lock; none if the ledger cannot be read."""
        if self._ledger_file < 0:
            return []
        try:
            size = min(os.fstat(self._ledger_file).st_size, LONGEST)
            data = ledger_file.read(self._ledger_file, size)
        except OSError:
            return []
        return [each for each in self._reader.read(data).values() if each.id != self.record.id]

    def _write(self) -> None:
        """Write this session's record into the locked ledger."""
        self.record.seen = time.monotonic()
        ledger_file.write(self._ledger_file, self.record.encode(), self._offset)

    def _without_the_dead(self, others: list[SessionRecord]) -> list[SessionRecord]:
        """Return the living sessions; remove records and files of the others. Needs the lock."""
        dead = {each.id for each in others if not self._is_alive(each)}
        for number, each in list(self._records.items()):
            if each.id in dead:
                self._remove(number, each)
                del self._records[number]
        return [each for each in others if each.id not in dead]

    def _remove(self, number: int, record: SessionRecord) -> None:
        """Remove the record and the files of a dead session. Needs the lock."""
        ledger_file.write(self._ledger_file, NOBODY, number * RECORD)
        liveness.remove(self._folder, record.id)

    def _is_alive(self, record: SessionRecord) -> bool:
        return liveness.is_alive(self._folder, record.id, record.pid)
