"""Who of this machine's sessions holds what of each device, in files; no daemon.

All write into one book, each its own record, while they hold its lock (flock). What a session
holds counts until the last of its processes is gone, whatever ends them: `bells` says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpunb.core.resources import UNIT
from gpunb.exceptions import GpunbError
from gpunb.runtime import bells, book, folder
from gpunb.runtime.book import BOOK, NOBODY, RECORD, Record, Stake, digest
from gpunb.runtime.survey import as_dict, in_a_circle, whose

VARIABLE = "GPUNB_LEDGER_DIR"

_PATIENCE = 0.02
"""Seconds to try for the book's lock, which is held for some ten microseconds at a time."""

_PIECE = 16 * RECORD

NONE: Mapping[str, int] = MappingProxyType({})


class Busy(Exception):
    """Somebody holds the book's lock for long: he was stopped while he wrote. Try again later."""


@dataclass(frozen=True, slots=True)
class View:
    """What a session sees of the others.

    Attributes:
        outside: for each device that is not wholly its own to give out: the units that are not,
            the part of them that lasts, and whose they are, in words.
        wanted: the devices of which others wait for a share.
        circle: that it and others wait for each other, in words; empty if they do not.
    """

    outside: Mapping[str, tuple[int, int, str]]
    wanted: frozenset[str]
    circle: str = ""


def ledger_folder() -> Path:
    """Where the book is: what GPUNB_LEDGER_DIR names, else in the runtime folder of this user.

    Raises:
        GpunbError: it is not there, or of no use.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return folder.runtime_folder() / folder.LEASES
    path = Path(named).absolute()
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise GpunbError(
            f"{VARIABLE}={named!r} is not a folder that you can write to: it has to be there, "
            "writable for all who share this machine's devices (such as mode 2770 and a group)"
        )
    return path


class Ledger:
    """A session's part in it. Used by one thread.

    Attributes:
        bell: the descriptor that says that the session is there, and that can be read when
            something has changed which it waits for. It must not be unlocked, only closed.
    """

    def __init__(self, path: Path, devices: Iterable[str], about: Mapping[str, Any]) -> None:
        """Enter the session in the book. `about` is what others are told of it.

        Raises:
            OSError: the folder cannot be used.
            Busy: somebody holds the book's lock for long.
        """
        self._keys = {digest(key): key for key in devices}
        self._numbers = {key: number for number, key in self._keys.items()}
        self._abouts: dict[bytes, Mapping[str, Any]] = {}
        self._me = Record(os.urandom(16), os.getpid(), os.getuid())
        mode = _mode_for(path)
        with contextlib.ExitStack() as undo:
            self._place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._place)
            # Whoever cleans up temporary folders leaves those alone that somebody has locked.
            with contextlib.suppress(OSError):
                fcntl.flock(self._place, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._book = _open_book(path, mode)
            undo.callback(os.close, self._book)
            with self._locked():
                self.bell = bells.make(self._place, self._me.id, mode, about)
                undo.callback(os.close, self.bell)
                everybody = dict(book.records(self._read()))
                for number in [n for n, each in everybody.items() if not self._is_alive(each)]:
                    self._remove(number, everybody.pop(number))
                living = [each.id for each in everybody.values()]
                bells.sweep(self._place, [self._me.id, *living])
                free = (number for number in range(len(everybody) + 1) if number not in everybody)
                self._number = next(free)
                # All of it, so that there is room for it on the disk from now on.
                os.pwrite(self._book, self._me.encode().ljust(RECORD, b"\0"), self._offset)
            undo.pop_all()

    # ------------------------------------------------------------------------------------- leases

    def take(self, shares: Mapping[str, int], *, lasting: bool, job: str) -> bool:
        """Hold these units of devices, all or none; False if others hold, or are to have, them.

        Raises:
            Busy: the book is held up.
        """
        me = self._me
        wanted = {self._numbers[key]: units for key, units in shares.items()}
        if len(me.stakes.keys() | wanted.keys()) > book.MOST_STAKES:
            return False
        now = time.monotonic()
        with self._locked():
            others = self._others()
            if not book.may_take(me, others, wanted, now):
                living = self._without_the_dead(others)
                if len(living) == len(others) or not book.may_take(me, living, wanted, now):
                    return False
                others = living
            if me.listens and any(me.wanted(number) for number in wanted):
                # It has had its turn, and waits for the next one behind all others.
                me.ticket, me.asked = book.next_ticket([*others, me]), now
            for number, units in wanted.items():
                stake = me.stakes.setdefault(number, Stake())
                stake.since = stake.since if stake.held else time.time()
                stake.held += units
                stake.lasting += units if lasting else 0
                stake.job = job
            self._write()
        return True

    def give(self, shares: Mapping[str, int], *, lasting: bool) -> None:
        """Hold these no longer. Nobody hears of it before `tell`, or the next call that writes."""
        for key, units in shares.items():
            number = self._numbers[key]
            stake = self._me.stakes[number]
            stake.held -= units
            stake.lasting -= units if lasting else 0
            stake.stuck = min(stake.stuck, stake.held)
            if stake.empty:
                del self._me.stakes[number]

    def tell(self) -> None:
        """Write down how things are, and ring for those who wait.

        Raises:
            Busy: the book is held up.
        """
        with self._locked():
            others = self._others()
            self._write()
        self._ring(each for each in others if each.listens)

    def claim(
        self,
        wanted: Mapping[str, int] | None,
        lacks: Mapping[str, int] = NONE,
        stuck: Mapping[str, int] = NONE,
    ) -> None:
        """Wait: for so many units of these devices, in total with what is held there already, or
        just for any news if there are none; None to wait no more. `lacks` and `stuck` as in
        `Stake`.

        Raises:
            Busy: the book is held up.
        """
        me, now = self._me, time.monotonic()
        totals = {self._numbers[key]: units for key, units in (wanted or {}).items()}
        with self._locked():
            others = self._others()
            before = {number for number, stake in me.stakes.items() if stake.wanted}
            if wanted is None:
                me.ticket = 0
            elif not me.listens:
                me.ticket, me.asked = book.next_ticket(others), now
            for key, number in self._numbers.items():
                if number in totals or key in lacks:
                    me.stakes.setdefault(number, Stake())
                if (stake := me.stakes.get(number)) is None:
                    continue
                stake.wanted = min(UNIT, totals.get(number, 0))
                stake.lacks = min(UNIT, lacks.get(key, 0))
                stake.stuck = min(stake.held, stuck.get(key, 0))
                if stake.empty:
                    del me.stakes[number]
            self._write()
        touched = before | totals.keys()
        self._ring(each for each in others if each.listens or any(map(each.held, touched)))

    # ------------------------------------------------------------------------------------- others

    def look(self) -> View:
        """How things are now, and a sign that this session is still there.

        Raises:
            Busy: the book is held up.
        """
        now = time.monotonic()
        with self._locked():
            others = self._without_the_dead(self._others())
            self._write()
        outside: dict[str, tuple[int, int, str]] = {}
        wanted = set()
        for number, key in self._keys.items():
            held = sum(each.held(number) for each in others)
            away = UNIT - self._me.held(number) - book.room(self._me, others, number, now)
            if away > 0:
                stakes = [each.stakes[number] for each in others if number in each.stakes]
                lasting = sum(stake.lasting for stake in stakes)
                words = whose(others, number, self._about, kept=away > held)
                outside[key] = away, lasting, words
            if any(each.listens and each.wanted(number) for each in others):
                wanted.add(key)
        circle = in_a_circle(book.circle(self._me, others), self._about)
        return View(outside, frozenset(wanted), circle)

    def heard(self) -> None:
        """The bell was heard."""
        bells.silence(self.bell)

    def peers(self) -> list[bytes]:
        """The sessions that hold or want devices of this one's machine."""
        return [each.id for each in self._known() if not self._keys.keys().isdisjoint(each.stakes)]

    def pids(self) -> set[int]:
        """The kernels in the book, this one among them."""
        return {each.pid for each in [self._me, *self._known()]}

    def watch(self, peer: bytes) -> int | None:
        """A descriptor that hangs up when the session is gone; None if it is gone."""
        return bells.watch(self._place, peer)

    def others(self, key: str) -> list[dict[str, Any]]:
        """What other sessions hold of a device."""
        number = digest(key)
        return [
            as_dict(each, each.stakes[number], self._about(each))
            for each in self._known()
            if each.held(number) and self._is_alive(each)
        ]

    # -------------------------------------------------------------------------------------- ends

    def close(self) -> None:
        """Leave. What workers still hold who are not gone yet is free when they are."""
        last = self.watch(self._me.id)
        os.close(self.bell)
        if last is not None:
            bells.await_end(last)
        with contextlib.suppress(OSError, Busy):
            if not self._is_alive(self._me):
                with self._locked():
                    others = self._others()
                    self._remove(self._number, self._me)
                self._ring(each for each in others if each.listens)
        self._let_go()

    def forked(self) -> None:
        """In a child that was forked off the kernel: it is not to keep the session alive."""
        os.close(self.bell)
        self._let_go()

    def _let_go(self) -> None:
        os.close(self._book)
        os.close(self._place)

    # ------------------------------------------------------------------------------------- inside

    @property
    def _offset(self) -> int:
        return self._number * RECORD

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock(self._book)
        try:
            yield
        finally:
            fcntl.flock(self._book, fcntl.LOCK_UN)

    def _read(self) -> bytes:
        data = os.pread(self._book, _PIECE, 0)
        while data and not len(data) % _PIECE:
            more = os.pread(self._book, _PIECE, len(data))
            if not more:
                break
            data += more
        return data

    def _others(self) -> list[Record]:
        mine = self._me.id
        return [each for _, each in book.records(self._read()) if each.id != mine]

    def _known(self) -> list[Record]:
        """The others, as far as they can be read."""
        try:
            return self._others()
        except OSError:
            return []

    def _write(self) -> None:
        """Write down this session's own record; with the book locked."""
        self._me.seen = time.monotonic()
        os.pwrite(self._book, self._me.encode(), self._offset)

    def _without_the_dead(self, others: list[Record]) -> list[Record]:
        """Those that live; what others left is removed. With the book locked."""
        dead = {each.id for each in others if not self._is_alive(each)}
        if dead:
            for number, each in book.records(self._read()):
                if each.id in dead:
                    self._remove(number, each)
        return [each for each in others if each.id not in dead]

    def _remove(self, number: int, record: Record) -> None:
        """Take a session out of the book that is gone; with the book locked."""
        os.pwrite(self._book, NOBODY, number * RECORD)
        bells.remove(self._place, record.id)

    def _is_alive(self, record: Record) -> bool:
        return bells.is_alive(self._place, record.id)

    def _ring(self, who: Iterable[Record]) -> None:
        bells.ring(self._place, [each.id for each in who])

    def _about(self, record: Record) -> Mapping[str, Any]:
        known = self._abouts.get(record.id)
        if known is None:
            known = self._abouts[record.id] = bells.about(self._place, record.id)
        return known


def lock(descriptor: int) -> None:
    """Lock the book, without ever waiting long: the other may have been stopped.

    Raises:
        Busy: it was locked all the time.
    """
    until = 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            until = until or now + _PATIENCE
            if now > until:
                raise Busy from None
            time.sleep(0.0001)
        else:
            return


def _mode_for(path: Path) -> int:
    """The mode of files for those who may write into the folder."""
    mode = stat.S_IMODE(path.stat().st_mode)
    return 0o600 | (0o060 if mode & 0o020 else 0) | (0o006 if mode & 0o002 else 0)


def _open_book(path: Path, mode: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(2):
        try:
            return os.open(path / BOOK, flags)
        except FileNotFoundError:
            pass
        try:
            descriptor = os.open(path / BOOK, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            continue
        os.fchmod(descriptor, mode)
        return descriptor
    return os.open(path / BOOK, flags)
