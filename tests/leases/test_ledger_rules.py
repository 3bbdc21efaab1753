"""The rules between the sessions of a machine: which session may take which units, and in which
order."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from gpunb.leases import records
from gpunb.leases.records import AGE, RECORD, STALE, SessionRecord, Stake, may_take, room
from gpunb.scheduler.resources import UNIT

HALF = UNIT // 2
GPU, OTHER = 1, 2


def session(number, *, ticket=0, asked=0.0, seen=0.0, **stakes):
    """A session that holds and wants parts of devices: ``gpu=(held, wanted)``."""
    record = SessionRecord(bytes([number]) * 16, number, 0, ticket, asked, seen)
    for name, (held, wanted) in stakes.items():
        record.stakes[{"gpu": GPU, "other": OTHER}[name]] = Stake(held, 0, wanted)
    return record


def test_free_units_may_be_taken():
    assert room(session(1), [], GPU, 0) == UNIT
    assert room(session(1), [session(2, gpu=(HALF, 0))], GPU, 0) == HALF
    assert room(session(1, gpu=(HALF, 0)), [session(2, gpu=(HALF, 0))], GPU, 0) == 0


def test_request_for_two_devices_is_granted_whole_or_not_at_all():
    others = [session(2, other=(HALF, 0))]
    assert may_take(session(1), others, {GPU: UNIT, OTHER: HALF}, 0)
    assert not may_take(session(1), others, {GPU: UNIT, OTHER: UNIT}, 0)


def test_session_with_a_share_leaves_the_rest_to_a_waiting_session():
    waits = session(2, ticket=1, gpu=(0, UNIT))
    streams = session(1, gpu=(HALF, 0))
    assert room(streams, [waits], GPU, now=0) == 0


def test_free_units_that_a_waiting_session_needs_are_left_to_it():
    waits = session(2, ticket=1, gpu=(0, UNIT))
    assert room(session(1), [waits], GPU, now=0) == 0
    assert room(waits, [session(1)], GPU, now=0) == UNIT


def test_small_request_overtakes_a_waiting_session_only_for_a_limited_time():
    waits = session(2, ticket=1, seen=AGE, gpu=(0, UNIT))
    holds = session(3, gpu=(HALF, 0))
    assert room(session(1), [waits, holds], GPU, now=AGE - 1) == HALF
    assert room(session(1), [waits, holds], GPU, now=AGE) == 0


def test_units_that_a_waiting_session_does_not_need_may_be_taken():
    waits = session(2, ticket=1, asked=-AGE, gpu=(0, HALF))
    assert room(session(1), [waits], GPU, now=0) == HALF
    assert room(session(1), [waits], OTHER, now=0) == UNIT


def test_lower_ticket_comes_first():
    first = session(1, ticket=1, gpu=(0, UNIT))
    second = session(2, ticket=2, gpu=(0, UNIT))
    assert room(first, [second], GPU, now=0) == UNIT
    assert room(second, [first], GPU, now=0) == 0


def test_ticket_counts_only_for_its_own_devices():
    first = session(1, ticket=1, gpu=(0, UNIT))
    second = session(2, ticket=2, other=(0, UNIT))
    assert room(first, [second], OTHER, now=0) == 0


def test_waiting_session_without_a_recent_sign_has_no_priority():
    waits = session(2, ticket=1, seen=0, gpu=(0, UNIT))
    assert room(session(1), [waits], GPU, now=STALE + 1) == UNIT


def test_units_that_a_waiting_session_holds_count_towards_its_wish():
    waits = session(2, ticket=1, asked=-AGE, gpu=(HALF, UNIT))
    assert room(session(1), [waits], GPU, now=0) == 0
    waits = session(2, ticket=1, asked=-AGE, gpu=(HALF, HALF))
    assert room(session(1), [waits], GPU, now=0) == HALF


def waits(number, **stakes):
    """A session that waits; for each device the units that it wants, lacks and keeps."""
    record = session(number, ticket=number)
    for name, (wanted, lacks, stuck) in stakes.items():
        record.stakes[DEVICES[name]] = Stake(stuck, 0, wanted, lacks=lacks, stuck=stuck)
    return record


DEVICES = {"a": 101, "b": 102, "c": 103}


def circle(me, *others):
    return [each.pid for each in records.find_circle(me, others)]


def test_two_sessions_that_wait_for_each_other_are_a_circle():
    one = waits(1, a=(0, 0, UNIT), b=(UNIT, 0, 0))
    two = waits(2, a=(0, UNIT, 0), b=(0, 0, UNIT))
    assert circle(one, two) == [two.pid]
    assert circle(two, one) == [one.pid]


def test_circle_of_three_does_not_include_another_waiting_session():
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
def test_sessions_that_do_not_block_each_other_are_no_circle(two):
    assert circle(waits(1, a=(0, 0, UNIT), b=(HALF, 0, 0)), two) == []


def test_circle_ends_when_a_session_stops_waiting():
    one = waits(1, a=(0, 0, UNIT), b=(UNIT, 0, 0))
    two = waits(2, a=(UNIT, 0, 0), b=(0, 0, UNIT))
    two.ticket = 0
    assert circle(one, two) == []


def test_decoded_record_equals_the_encoded_one():
    record = session(7, ticket=3, asked=1.5, seen=2.5, gpu=(HALF, 0), other=(0, UNIT))
    record.stakes[GPU].job, record.stakes[GPU].since = "träning", 12.0
    assert records.decode(record.encode()) == record


def test_long_job_name_is_cut_between_characters():
    record = session(7, gpu=(HALF, 0))
    record.stakes[GPU].job = "ü" * 50
    assert records.decode(record.encode()).stakes[GPU].job == "ü" * 20


def test_a_session_with_very_many_devices_fits_its_record():
    record = session(1)
    record.stakes = {at: Stake(UNIT) for at in range(1000)}
    assert len(record.encode()) <= RECORD
    assert len(records.decode(record.encode()).stakes) == records.MOST_STAKES


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=3 * RECORD), st.integers(0, 4))
def test_valid_record_is_read_from_a_book_of_random_bytes(noise, at):
    whole = bytearray(max(len(noise), at * RECORD + RECORD))
    whole[: len(noise)] = noise
    mine = session(3, gpu=(HALF, 0)).encode()
    whole[at * RECORD : at * RECORD + len(mine)] = mine
    assert dict(records.records(bytes(whole)))[at].held(GPU) == HALF


@pytest.mark.parametrize("size", [0, 10, 60, 63, 64, 100])
def test_half_a_record_is_ignored(size):
    record = session(1, gpu=(HALF, 0)).encode()
    count = struct.pack("<H", 60)
    assert records.decode(record[:52] + count + record[54:size]) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_order_of_events_overbooks_a_device_or_starves_a_session(data):
    """Sessions take and give at random. The session with the oldest ticket gets all that it wants
    once the others have given back their present leases."""
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
    waiting = sorted((each for each in sessions if each.waits), key=lambda each: each.ticket)
    for first in waiting:
        wanted = {device: stake.wanted for device, stake in first.stakes.items() if stake.wanted}
        for greedy in sessions:
            if greedy is not first:
                for device, units in wanted.items():
                    assert room(greedy, _but(sessions, greedy), device, now) <= UNIT - units
        assert may_take(first, _but(sessions, first), wanted, now)
        _served(first)


def _act(me, sessions, device, units, now):
    """Take units, or wait for them."""
    stake = me.stakes.setdefault(device, Stake())
    if may_take(me, _but(sessions, me), {device: units}, now):
        stake.held += units
        _served(me)
    elif not me.waits:
        me.ticket, me.asked = records.next_ticket(sessions), now
        stake.wanted = min(UNIT, stake.held + units)


def _but(sessions, one):
    return [each for each in sessions if each is not one]


def _served(one):
    one.ticket = 0
    for stake in one.stakes.values():
        stake.wanted = 0
