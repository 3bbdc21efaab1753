"""The records of the ledger, and the rules between sessions.

Pure: bytes in, values out. Each session writes only its own record, and a record counts only while
its session lives; so a record that a dying session has half written does no harm. Other users may
write into the ledger, too: all values that are read are within bounds, finite and printable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gpunb.scheduler.resources import UNIT

LEDGER_FILE = "book-2"
"""The name of the file. Another format of the records needs another name."""

RECORD = 16384
"""Bytes of one record; enough for some 250 devices."""

AGE = 10.0
"""Seconds of waiting after which a session is not overtaken any more, even by small requests."""

STALE = 20.0
"""Seconds without a sign after which a waiting session loses its priority."""

LONGEST = 1 << 24
"""Bytes of the ledger that are read at most."""

MOST_RECORDS = LONGEST // RECORD
"""Records that the ledger has room for."""

LATEST = 1e11
"""Seconds; later times are not accepted, on any clock. Some three thousand years from now."""

_LAST_TICKET = (1 << 63) - 1
_LAST_PID = 1 << 22
Totals: TypeAlias = Mapping[int, int]

_FOLLOWED = 64
"""Sessions that are followed in search of a circle."""

_MAGIC = b"gpn1"
HEAD = struct.Struct("<4s16sIIQddH")
_COUNT = struct.Struct("<H")
_UNKNOWN = b"?"
"""No record begins with this."""

STAKE = struct.Struct("<QHHHHHxxxxxxd40s")
MOST_STAKES = (RECORD - HEAD.size) // STAKE.size
"""Devices that one record has room for."""


def digest(key: str) -> int:
    """Return the number of a device in the ledger: FNV-1a of its key in 64 bits."""
    number = 0xCBF29CE484222325
    for byte in key.encode():
        number = (number ^ byte) * 0x100000001B3 % (1 << 64)
    return number


@dataclass(slots=True)
class Stake:
    """The units of one device that a session holds and wants.

    Attributes:
        held: units that are leased.
        lasting: the part of `held` that no end of a task frees.
        wanted: units that the session waits for, in total with `held`.
        since: wall-clock time at which the first of `held` was leased.
        job: the name of the job that got the last lease.
        lacks: like `wanted`, for requests that no end of a task in another session can serve.
        stuck: the part of `held` that is not given back while the session waits.
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
class SessionRecord:
    """One session. While it waits, its ticket is not 0; `asked` is the time when it began to wait,
    and `seen` the time of its last sign, on the clock that all processes share."""

    id: bytes
    pid: int
    uid: int
    ticket: int = 0
    asked: float = 0.0
    seen: float = 0.0
    stakes: dict[int, Stake] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        return self.ticket != 0

    @property
    def turn(self) -> tuple[int, bytes]:
        """The place in the queue: the lowest comes first, and no two are equal."""
        return self.ticket, self.id

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
        stakes = self.stakes.items()
        if len(stakes) > MOST_STAKES:
            stakes = dict(sorted(stakes, key=lambda each: not each[1].held)[:MOST_STAKES]).items()
        data = HEAD.pack(
            _MAGIC, self.id, self.pid, self.uid, self.ticket, self.asked, self.seen, len(stakes)
        )
        for device, each in stakes:
            data += STAKE.pack(
                device,
                each.held,
                each.lasting,
                each.wanted,
                each.lacks,
                each.stuck,
                each.since,
                _cut(each.job, 40),
            )
        return data


NOBODY = b"\0" * HEAD.size
"""The content of a free place in the ledger."""


def decode(data: bytes, at: int = 0) -> SessionRecord | None:
    """Return the record at this offset; None if there is none, or the bytes are invalid."""
    if len(data) - at < HEAD.size:
        return None
    magic, ident, pid, uid, ticket, asked, seen, count = HEAD.unpack_from(data, at)
    if magic != _MAGIC or count > MOST_STAKES or len(data) - at < _size(count):
        return None
    record = SessionRecord(
        ident,
        pid if pid <= _LAST_PID else 0,
        uid,
        min(ticket, _LAST_TICKET),
        _moment(asked, LATEST),
        _moment(seen, 0.0),
    )
    start = at + HEAD.size
    for offset in range(start, start + count * STAKE.size, STAKE.size):
        device, held, lasting, wanted, lacks, stuck, since, job = STAKE.unpack_from(data, offset)
        held = min(held, UNIT)
        record.stakes[device] = Stake(
            held,
            min(lasting, held),
            min(wanted, UNIT),
            _moment(since, 0.0),
            printable(job.rstrip(b"\0").decode("utf-8", "replace")),
            min(lacks, UNIT),
            min(stuck, held),
        )
    return record


def records(data: bytes) -> Iterator[tuple[int, SessionRecord]]:
    """Yield all records in the ledger, each with the number of its place."""
    return iter(Reader().read(data).items())


class Reader:
    """Reads a ledger repeatedly, and decodes only the records that have changed."""

    def __init__(self) -> None:
        self._known: list[tuple[bytes, SessionRecord | None]] = []

    def read(
        self, data: bytes, own: int = -1, me: SessionRecord | None = None
    ) -> dict[int, SessionRecord]:
        """Return the records in the ledger by the numbers of their places; do not change them. The
        record at `own` is `me`, if it still belongs to this session."""
        known, records = self._known, {}
        numbers = range(min(MOST_RECORDS, -(-len(data) // RECORD)))
        known += [(NOBODY, None)] * (len(numbers) - len(known))
        for number in numbers:
            at = number * RECORD
            if number == own and me is not None and data.startswith(_MAGIC + me.id, at):
                records[number] = me
                continue
            before, record = known[number]
            if not data.startswith(before, at):
                record = decode(data, at)
                known[number] = _UNKNOWN if record is None else _written(data, at), record
            if record is not None:
                records[number] = record
        return records


def printable(text: str) -> str:
    """Return the text with a question mark for each character that is not printable."""
    return text if text.isprintable() else "".join(x if x.isprintable() else "?" for x in text)


def _moment(value: float, otherwise: float) -> float:
    """Return a time that was read from the ledger, or `otherwise` if it is out of bounds or NaN."""
    return value if 0.0 <= value <= LATEST else otherwise


def _written(data: bytes, at: int) -> bytes:
    """Return the bytes of the record at this offset."""
    (count,) = _COUNT.unpack_from(data, at + HEAD.size - _COUNT.size)
    return data[at : at + _size(count)]


def _size(count: int) -> int:
    return HEAD.size + count * STAKE.size


def _cut(text: str, size: int) -> bytes:
    data = text.encode("utf-8", "replace")
    return data if len(data) <= size else data[:size].decode("utf-8", "ignore").encode()


# ----------------------------------------------------------------------------------------- rules


def room(
    me: SessionRecord,
    others: Sequence[SessionRecord],
    device: int,
    now: float,
    *,
    totals: Totals | None = None,
) -> int:
    """Return the units of a device that this session may take now; below 0 if too many are held.

    These are the free units, less those for sessions that have waited longer. Such a session comes
    first if it has waited for `AGE`, if all that it wants is free now, or if this session holds a
    part of the device already. `totals` saves computing `held_totals` again.
    """
    free = UNIT - me.held(device) - sum([each.held(device) for each in others])
    if free <= 0:
        return free
    most = free
    for waiter in others:
        if not (wanted := waiter.wanted(device)):
            continue
        if totals is None:
            totals = held_totals([me, *others])
        if _goes_first(waiter, me, device, now, totals):
            most = min(most, free + waiter.held(device) - wanted)
    return max(0, most)


def held_totals(everybody: Iterable[SessionRecord]) -> Totals:
    """Return the units of each device that all sessions together hold."""
    totals: dict[int, int] = {}
    for each in everybody:
        for device, stake in each.stakes.items():
            totals[device] = totals.get(device, 0) + stake.held
    return totals


def _goes_first(
    waiter: SessionRecord, me: SessionRecord, device: int, now: float, totals: Totals
) -> bool:
    if not _is_present(waiter, now):
        return False
    if me.waits and me.turn < waiter.turn and me.wanted(device):
        return False
    return me.held(device) > 0 or _is_due(waiter, now, totals)


def _is_present(waiter: SessionRecord, now: float) -> bool:
    """Whether the session waits and has given a sign lately."""
    # A sign from the future does not count: its clock differs, or it was forged.
    return waiter.waits and abs(now - waiter.seen) <= STALE


def _is_due(waiter: SessionRecord, now: float, totals: Totals) -> bool:
    return now - waiter.asked >= AGE or _fits_now(waiter, totals)


def _fits_now(waiter: SessionRecord, totals: Totals) -> bool:
    """Whether the units that no other session holds are enough for the waiter."""
    return all(
        UNIT - totals[device] + stake.held >= stake.wanted
        for device, stake in waiter.stakes.items()
        if stake.wanted
    )


def may_take(
    me: SessionRecord, others: Sequence[SessionRecord], shares: Mapping[int, int], now: float
) -> bool:
    """Whether the session may take all these units now."""
    return all(room(me, others, device, now) >= units for device, units in shares.items())


def next_in_turn(
    everybody: Sequence[SessionRecord], devices: Iterable[int], now: float
) -> list[SessionRecord]:
    """Return the waiting sessions whose turn it may be after a change on these devices.

    The sessions that want a device come first, in their order, and what they want is not free for
    those behind them. If something is left, any session that waits may have a use for it.
    """
    totals = held_totals(everybody)
    waiting = sorted([each for each in everybody if each.waits], key=lambda each: each.turn)
    changed, found = set(devices), dict[bytes, SessionRecord]()
    # Who may have another device depends on whether all that those before want is free.
    wishes = [{at for at, stake in each.stakes.items() if stake.wanted} for each in waiting]
    for device in changed.union(*(each for each in wishes if not changed.isdisjoint(each))):
        free = UNIT - totals.get(device, 0)
        for each in sorted(waiting, key=lambda each: not each.wanted(device)):
            if free <= 0:
                break
            found[each.id] = each
            if _is_present(each, now) and _is_due(each, now, totals):
                free -= max(0, each.wanted(device) - each.held(device))
    return list(found.values())


def next_ticket(everybody: Iterable[SessionRecord]) -> int:
    """Return a ticket behind all others."""
    return min(_LAST_TICKET, 1 + max((each.ticket for each in everybody), default=0))


def find_circle(me: SessionRecord, others: Iterable[SessionRecord]) -> list[SessionRecord]:
    """Return a deadlock of sessions: each waits for units that the next one keeps while it waits
    itself. The list has the sessions after `me`, in order; it is empty if there is no deadlock."""
    everybody = [me, *others]
    stuck: dict[int, list[tuple[SessionRecord, int]]] = {}
    for each in everybody:
        for device, stake in each.stakes.items():
            if stake.stuck:
                stuck.setdefault(device, []).append((each, stake.stuck))
    ways = [[each] for each in _blockers(me, stuck)]
    seen = {me.id, *(way[0].id for way in ways)}
    while ways and len(seen) <= _FOLLOWED:
        way = ways.pop(0)
        for each in _blockers(way[-1], stuck):
            if each is me:
                return way
            if each.id not in seen:
                seen.add(each.id)
                ways.append([*way, each])
    return []


def _blockers(
    waiter: SessionRecord, stuck: Mapping[int, list[tuple[SessionRecord, int]]]
) -> list[SessionRecord]:
    """Return the sessions that keep units which the waiter needs, as long as they wait themselves.
    `stuck` has the units that each session keeps of each device."""
    blockers = []
    if waiter.waits:
        for device, stake in waiter.stakes.items():
            needs = max(stake.wanted, stake.lacks)
            theirs = [each for each in stuck.get(device, ()) if each[0] is not waiter]
            if needs and UNIT - sum(units for _, units in theirs) < needs:
                blockers += [each for each, _ in theirs if each.waits]
    return blockers
