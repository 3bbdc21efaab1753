"""What the sessions of a machine write down about themselves, and the rules between them.

Pure: bytes in, values out; the files are `ledger`'s. Each session writes one record, its own. So
a record that a dying session left half written harms nobody: it counts only as long as somebody
lives who wrote it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpunb.core.resources import UNIT

BOOK = "book-2"
"""The name of the file; another form of the records will have another name."""

RECORD = 16384
"""Bytes of one record, enough for some 250 devices."""

AGE = 10.0
"""Seconds after which whoever waits is no longer overtaken, not even by small requests."""

STALE = 20.0
"""Seconds without a sign from a session that waits, after which nobody steps back for it."""

_MAGIC = b"gpn1"
_HEAD = struct.Struct("<4s16sIIQddH")
_STAKE = struct.Struct("<QHHHHHxxxxxxd40s")
MOST_STAKES = (RECORD - _HEAD.size) // _STAKE.size
"""Devices that one session can write down."""


def digest(key: str) -> int:
    """The number under which a device is written down: FNV-1a in 64 bits."""
    number = 0xCBF29CE484222325
    for byte in key.encode():
        number = (number ^ byte) * 0x100000001B3 % (1 << 64)
    return number


@dataclass(slots=True)
class Stake:
    """What a session has to do with one device, in units.

    `lasting` is the part of `held` that no end of a task frees. `wanted` is what it waits to have
    in total, with what it holds there already; `lacks` the same where no end of a task elsewhere
    will help. `stuck` is the part of `held` that is not free as long as it waits. `since` in
    seconds of the wall clock; `job` is the last one that was given a share.
    """

    held: int = 0
    lasting: int = 0
    wanted: int = 0
    since: float = 0.0
    job: str = ""
    lacks: int = 0
    stuck: int = 0

    @property
    def empty(self) -> bool:
        return not (self.held or self.wanted or self.lacks)


@dataclass(slots=True)
class Record:
    """One session. While it waits, it `listens`: its ticket is not 0, `asked` and `seen` say when
    it began to and when it was last heard of, on the clock that all processes share."""

    id: bytes
    pid: int
    uid: int
    ticket: int = 0
    asked: float = 0.0
    seen: float = 0.0
    stakes: dict[int, Stake] = field(default_factory=dict)

    @property
    def listens(self) -> bool:
        return self.ticket != 0

    def held(self, device: int) -> int:
        stake = self.stakes.get(device)
        return stake.held if stake else 0

    def wanted(self, device: int) -> int:
        stake = self.stakes.get(device)
        return stake.wanted if stake else 0

    def stuck(self, device: int) -> int:
        stake = self.stakes.get(device)
        return stake.stuck if stake else 0

    def encode(self) -> bytes:
        stakes = sorted(self.stakes.items(), key=lambda each: not each[1].held)[:MOST_STAKES]
        head = _HEAD.pack(
            _MAGIC, self.id, self.pid, self.uid, self.ticket, self.asked, self.seen, len(stakes)
        )
        return head + b"".join(
            _STAKE.pack(
                device,
                each.held,
                each.lasting,
                each.wanted,
                each.lacks,
                each.stuck,
                each.since,
                _cut(each.job, 40),
            )
            for device, each in stakes
        )


NOBODY = b"\0" * _HEAD.size
"""What stands where a record may be written."""


def decode(data: bytes, at: int = 0) -> Record | None:
    """The record there; None if nobody's is, or what is there makes no sense."""
    if len(data) - at < _HEAD.size:
        return None
    magic, ident, pid, uid, ticket, asked, seen, count = _HEAD.unpack_from(data, at)
    if magic != _MAGIC or len(data) - at < _HEAD.size + count * _STAKE.size:
        return None
    record = Record(ident, pid, uid, ticket, asked, seen)
    start = at + _HEAD.size
    for offset in range(start, start + count * _STAKE.size, _STAKE.size):
        device, held, lasting, wanted, lacks, stuck, since, job = _STAKE.unpack_from(data, offset)
        text = job.rstrip(b"\0").decode("utf-8", "replace")
        record.stakes[device] = Stake(held, lasting, wanted, since, text, lacks, stuck)
    return record


def records(data: bytes) -> Iterator[tuple[int, Record]]:
    """All that stand in the book, each with its number."""
    for number in range(-(-len(data) // RECORD)):
        record = decode(data, number * RECORD)
        if record is not None:
            yield number, record


def _cut(text: str, size: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= size else data[:size].decode("utf-8", "ignore").encode()


# ----------------------------------------------------------------------------------------- rules


def room(me: Record, others: Iterable[Record], device: int, now: float) -> int:
    """The units of the device that this session may take now.

    What nobody holds, less what must be left to those who have waited longer: they come first if
    they have waited for `AGE`, if what they want is there by now, or if this session has had a
    share of the device already.
    """
    others = list(others)
    free = UNIT - me.held(device) - sum(each.held(device) for each in others)
    most = free
    for waiter in others:
        wanted = waiter.wanted(device)
        if wanted and free > 0 and _goes_first(waiter, me, others, device, now):
            left = free + waiter.held(device) - wanted
            most = min(most, left)
    return max(0, most) if free >= 0 else free


def _goes_first(waiter: Record, me: Record, others: list[Record], device: int, now: float) -> bool:
    if not waiter.listens or now - waiter.seen > STALE:
        return False
    if me.listens and me.ticket < waiter.ticket and me.wanted(device):
        return False
    return now - waiter.asked >= AGE or me.held(device) > 0 or _is_there(waiter, [me, *others])


def _is_there(waiter: Record, everybody: list[Record]) -> bool:
    """Whether the others leave it what it wants."""
    return all(
        UNIT - sum(each.held(device) for each in everybody if each is not waiter) >= stake.wanted
        for device, stake in waiter.stakes.items()
        if stake.wanted
    )


def may_take(me: Record, others: Iterable[Record], shares: Mapping[int, int], now: float) -> bool:
    """Whether the session may have all these units of devices now."""
    others = list(others)
    return all(room(me, others, device, now) >= units for device, units in shares.items())


def next_ticket(everybody: Iterable[Record]) -> int:
    """A ticket behind all others."""
    return 1 + max((each.ticket for each in everybody), default=0)


def circle(me: Record, others: Iterable[Record]) -> list[Record]:
    """The others of a circle in which each waits for what the next has and will not give back as
    long as it waits itself: those after `me`, in their order. Empty if there is none."""
    everybody = [me, *others]
    ways = [[each] for each in _waited_for(me, everybody)]
    seen = {me.id, *(way[0].id for way in ways)}
    while ways:
        way = ways.pop(0)
        for each in _waited_for(way[-1], everybody):
            if each is me:
                return way
            if each.id not in seen:
                seen.add(each.id)
                ways.append([*way, each])
    return []


def _waited_for(waiter: Record, everybody: list[Record]) -> list[Record]:
    """Who has to give something back before the waiter gets what it waits for, and does not as
    long as it waits itself."""
    found = []
    if waiter.listens:
        for device, stake in waiter.stakes.items():
            needs = max(stake.wanted, stake.lacks)
            stuck = [(each, each.stuck(device)) for each in everybody if each is not waiter]
            if needs and UNIT - sum(units for _, units in stuck) < needs:
                found += [each for each, units in stuck if units and each.listens]
    return found
