"""The rules between the sessions of a machine: who may take what, and who comes first."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gpunb.core.resources import UNIT
from gpunb.runtime import book
from gpunb.runtime.book import AGE, RECORD, STALE, Record, Stake, may_take, room

HALF = UNIT // 2
GPU, OTHER = 1, 2


def session(number, *, ticket=0, asked=0.0, seen=0.0, **stakes):
    """A session that holds and wants parts of devices: ``gpu=(held, wanted)``."""
    record = Record(bytes([number]) * 16, number, 0, ticket, asked, seen)
    for name, (held, wanted) in stakes.items():
        record.stakes[{"gpu": GPU, "other": OTHER}[name]] = Stake(held, 0, wanted)
    return record


def test_what_nobody_holds_may_be_taken():
    assert room(session(1), [], GPU, 0) == UNIT
    assert room(session(1), [session(2, gpu=(HALF, 0))], GPU, 0) == HALF
    assert room(session(1, gpu=(HALF, 0)), [session(2, gpu=(HALF, 0))], GPU, 0) == 0


def test_all_of_a_request_or_nothing():
    others = [session(2, other=(HALF, 0))]
    assert may_take(session(1), others, {GPU: UNIT, OTHER: HALF}, 0)
    assert not may_take(session(1), others, {GPU: UNIT, OTHER: UNIT}, 0)


def test_whoever_has_had_a_share_steps_back_for_one_that_waits():
    waits = session(2, ticket=1, gpu=(0, UNIT))
    streams = session(1, gpu=(HALF, 0))
    assert room(streams, [waits], GPU, now=0) == 0


def test_what_has_become_free_for_a_waiter_is_not_taken_before_it_comes():
    waits = session(2, ticket=1, gpu=(0, UNIT))
    assert room(session(1), [waits], GPU, now=0) == 0
    assert room(waits, [session(1)], GPU, now=0) == UNIT


def test_a_small_request_may_overtake_one_that_has_to_wait_on_but_not_for_ever():
    waits = session(2, ticket=1, seen=AGE, gpu=(0, UNIT))
    holds = session(3, gpu=(HALF, 0))
    assert room(session(1), [waits, holds], GPU, now=AGE - 1) == HALF
    assert room(session(1), [waits, holds], GPU, now=AGE) == 0


def test_what_a_waiter_does_not_need_is_for_anybody():
    waits = session(2, ticket=1, asked=-AGE, gpu=(0, HALF))
    assert room(session(1), [waits], GPU, now=0) == HALF
    assert room(session(1), [waits], OTHER, now=0) == UNIT


def test_of_two_that_wait_the_first_comes_first():
    first = session(1, ticket=1, gpu=(0, UNIT))
    second = session(2, ticket=2, gpu=(0, UNIT))
    assert room(first, [second], GPU, now=0) == UNIT
    assert room(second, [first], GPU, now=0) == 0


def test_a_ticket_counts_only_on_the_devices_it_is_for():
    first = session(1, ticket=1, gpu=(0, UNIT))
    second = session(2, ticket=2, other=(0, UNIT))
    assert room(first, [second], OTHER, now=0) == 0


def test_nobody_steps_back_for_one_that_gives_no_sign():
    waits = session(2, ticket=1, seen=0, gpu=(0, UNIT))
    assert room(session(1), [waits], GPU, now=STALE + 1) == UNIT


def test_what_a_waiter_holds_for_itself_counts_for_it():
    waits = session(2, ticket=1, asked=-AGE, gpu=(HALF, UNIT))
    assert room(session(1), [waits], GPU, now=0) == 0
    waits = session(2, ticket=1, asked=-AGE, gpu=(HALF, HALF))
    assert room(session(1), [waits], GPU, now=0) == HALF


def waits(number, **stakes):
    """A session that waits: for each device what it wants, lacks, and holds stuck."""
    record = session(number, ticket=number)
    for name, (wanted, lacks, stuck) in stakes.items():
        record.stakes[DEVICES[name]] = Stake(stuck, 0, wanted, lacks=lacks, stuck=stuck)
    return record


DEVICES = {"a": 101, "b": 102, "c": 103}


def circle(me, *others):
    return [each.pid for each in book.circle(me, others)]


def test_two_that_wait_for_what_the_other_keeps_are_a_circle():
    one = waits(1, a=(0, 0, UNIT), b=(UNIT, 0, 0))
    two = waits(2, a=(0, UNIT, 0), b=(0, 0, UNIT))
    assert circle(one, two) == [two.pid]
    assert circle(two, one) == [one.pid]


def test_three_may_be_a_circle_and_whoever_waits_beside_it_is_not_in_it():
    one = waits(1, a=(0, 0, UNIT), b=(UNIT, 0, 0))
    two = waits(2, b=(0, 0, UNIT), c=(UNIT, 0, 0))
    three = waits(3, c=(0, 0, HALF), a=(HALF, 0, 0))
    beside = waits(4, a=(UNIT, 0, 0))
    assert circle(one, beside, three, two) == [two.pid, three.pid]
    assert circle(beside, one, two, three) == []


@pytest.mark.parametrize(
    "two",
    [
        waits(2, a=(UNIT, 0, 0)),
        waits(2, b=(0, 0, UNIT)),
        waits(2, a=(UNIT, 0, 0), b=(0, 0, HALF - 1)),
        waits(2, a=(UNIT, 0, 0), c=(0, 0, UNIT)),
    ],
    ids=["it keeps nothing", "it wants nothing", "there is room beside it", "it keeps another"],
)
def test_what_is_no_circle(two):
    assert circle(waits(1, a=(0, 0, UNIT), b=(HALF, 0, 0)), two) == []


def test_one_that_does_not_wait_any_more_ends_the_circle():
    one = waits(1, a=(0, 0, UNIT), b=(UNIT, 0, 0))
    two = waits(2, a=(UNIT, 0, 0), b=(0, 0, UNIT))
    two.ticket = 0
    assert circle(one, two) == []


def test_a_record_reads_as_it_was_written():
    record = session(7, ticket=3, asked=1.5, seen=2.5, gpu=(HALF, 0), other=(0, UNIT))
    record.stakes[GPU].job, record.stakes[GPU].since = "träning", 12.0
    assert book.decode(record.encode()) == record


def test_a_long_name_is_cut_between_characters():
    record = session(7, gpu=(HALF, 0))
    record.stakes[GPU].job = "ü" * 50
    assert book.decode(record.encode()).stakes[GPU].job == "ü" * 20


def test_a_session_with_very_many_devices_fits_its_record():
    record = session(1)
    record.stakes = {at: Stake(UNIT) for at in range(1000)}
    assert len(record.encode()) <= RECORD
    assert len(book.decode(record.encode()).stakes) == book.MOST_STAKES


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=3 * RECORD), st.integers(0, 4))
def test_whatever_stands_in_the_book_is_read_without_harm(noise, at):
    whole = bytearray(max(len(noise), at * RECORD + RECORD))
    whole[: len(noise)] = noise
    mine = session(3, gpu=(HALF, 0)).encode()
    whole[at * RECORD : at * RECORD + len(mine)] = mine
    assert dict(book.records(bytes(whole)))[at].held(GPU) == HALF


@pytest.mark.parametrize("size", [0, 10, 60, 63, 64, 100])
def test_half_a_record_is_nobody(size):
    record = session(1, gpu=(HALF, 0)).encode()
    count = struct.pack("<H", 60)
    assert book.decode(record[:52] + count + record[54:size]) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_order_of_events_gives_away_too_much_or_starves_anybody(data):
    """Sessions take and give at random. Whoever waits with the oldest ticket gets what it wants
    once the others have given back what they had by then, however much others would like it."""
    sessions = [session(number) for number in range(1, 5)]
    now = 0.0
    for _ in range(data.draw(st.integers(5, 60))):
        me = data.draw(st.sampled_from(sessions))
        now += data.draw(st.sampled_from([0.0, 0.1, 3.0]))
        for each in sessions:
            each.seen = now
        device = data.draw(st.sampled_from([GPU, OTHER]))
        _act(me, sessions, device, data.draw(st.sampled_from([3000, HALF, UNIT])), now)
        if data.draw(st.booleans()):
            me.stakes[device].held = 0
        for each in (GPU, OTHER):
            assert sum(one.held(each) for one in sessions) <= UNIT
    for each in sessions:
        for stake in each.stakes.values():
            stake.held = 0
    waiting = sorted((each for each in sessions if each.listens), key=lambda each: each.ticket)
    for first in waiting:
        wanted = {device: stake.wanted for device, stake in first.stakes.items() if stake.wanted}
        for greedy in sessions:
            if greedy is not first:
                for device, units in wanted.items():
                    assert room(greedy, _but(sessions, greedy), device, now) <= UNIT - units
        assert may_take(first, _but(sessions, first), wanted, now)
        _served(first)


def _act(me, sessions, device, units, now):
    """Take, or wait for it."""
    stake = me.stakes.setdefault(device, Stake())
    if may_take(me, _but(sessions, me), {device: units}, now):
        stake.held += units
        _served(me)
    elif not me.listens:
        me.ticket, me.asked = book.next_ticket(sessions), now
        stake.wanted = min(UNIT, stake.held + units)


def _but(sessions, one):
    return [each for each in sessions if each is not one]


def _served(one):
    one.ticket = 0
    for stake in one.stakes.values():
        stake.wanted = 0
