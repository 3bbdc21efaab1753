"""Bytes that another user may write into a shared ledger. They must not end a session, delay it, or
mislead it more than a false claim of that user could."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

import gpunb
from gpunb.leases import liveness, records
from gpunb.leases.ledger import Ledger
from gpunb.leases.ledger_file import Busy
from gpunb.leases.records import (
    LATEST,
    LEDGER_FILE,
    LONGEST,
    MOST_STAKES,
    RECORD,
    SessionRecord,
    Stake,
    digest,
)
from gpunb.leases.report import read_entries
from gpunb.scheduler.resources import UNIT
from tests.waiting import PATIENCE

GPUS = ("GPU-0", "GPU-1")
BAD_NUMBERS = [math.nan, math.inf, -math.inf, 1e300, -1e300]


@pytest.fixture
def enter(tmp_path):
    opened = []

    def make(**about):
        opened.append(Ledger(tmp_path, GPUS, {"pid": os.getpid(), **about}))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def take(session, units=10_000, key="GPU-0"):
    return session.take({key: units}, lasting=False, job="train")


def written(tmp_path, session, **changes):
    """Change fields of a session's record in the book."""
    record = SessionRecord(
        **{n: getattr(session.record, n) for n in SessionRecord.__dataclass_fields__} | changes
    )
    with open(tmp_path / LEDGER_FILE, "r+b") as file:
        file.seek(session.place * RECORD)
        file.write(record.encode())


def publish_facts(tmp_path, session, data):
    path = tmp_path / f"{session.record.id.hex()}.json"
    path.unlink()
    path.write_bytes(data)


HOSTILE = {
    "nested": b"[" * 60_000,
    "nested objects": b'{"a":' * 60_000,
    "large": b'{"user": "' + b"x" * (1 << 22) + b'"}',
    "numbers": b'{"notebook": 5, "user": 1e400, "pid": "x", "since": NaN}',
    "infinite": b'{"since": 1e400, "pid": -Infinity}',
    "huge": b'{"since": 1' + b"0" * 4000 + b"}",
    "huger": b'{"since": 1' + b"0" * 60_000 + b"}",
    "types": b'{"notebook": ["a"], "user": {"a": 1}, "since": true, "pid": null}',
    "escapes": b'{"notebook": "\\u001b[2J\\u0000\\u202e", "user": "\\ud800"}',
    "no object": b"5",
    "bytes": bytes(range(256)),
    "nothing": b"",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_facts_about_a_session_are_valid_for_any_file_content(enter, tmp_path, data):
    one, two = enter(), enter()
    assert take(one)
    publish_facts(tmp_path, one, data)
    (other,) = two.others("GPU-0")
    assert_plain(other)
    assert other["share"] == 1.0
    assert other["notebook"] is None or isinstance(other["notebook"], str)
    assert "held by another kernel" in two.look().outside["GPU-0"][2]
    for each in read_entries(tmp_path):
        assert_plain(dict(each.about))


def assert_plain(value):
    """Check that a value is valid JSON with printable texts."""
    text = json.dumps(value, allow_nan=False)
    assert all(each.isprintable() for each in value.values() if isinstance(each, str))
    assert len(text) < 10_000


@pytest.mark.parametrize("kind", ["a pipe", "a pipe that is written to", "a folder", "a link"])
def test_facts_about_a_session_are_missing_if_the_file_is_no_regular_file(enter, tmp_path, kind):
    one, two = enter(), enter()
    assert take(one)
    path = tmp_path / f"{one.record.id.hex()}.json"
    path.unlink()
    writer = None
    if kind == "a folder":
        path.mkdir()
    elif kind == "a link":
        path.symlink_to("/proc/kmsg")
    else:
        os.mkfifo(path)
        writer = os.open(path, os.O_RDWR) if "written" in kind else None
    assert two.others("GPU-0")[0]["notebook"] is None
    if writer is not None:
        os.close(writer)
    if kind == "a folder":
        path.rmdir()


def test_ticket_out_of_range_is_cut_to_the_largest_one(enter, tmp_path):
    one, two, three = enter(), enter(), enter()
    assert take(three)
    one.claim({"GPU-0": 10_000})
    written(tmp_path, one, ticket=2**64 - 1)
    two.claim({"GPU-0": 10_000})
    assert two.record.ticket == 2**63 - 1
    three.claim({"GPU-0": 10_000})
    two.look()


def test_equal_tickets_have_an_order():
    stakes = {1: Stake(0, 0, UNIT)}
    one = SessionRecord(b"a" * 16, 1, 0, ticket=7, stakes=stakes)
    two = SessionRecord(b"b" * 16, 2, 0, ticket=7, stakes=stakes)
    assert (records.room(one, [two], 1, 0), records.room(two, [one], 1, 0)) == (UNIT, 0)


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_invalid_times_in_a_record_are_left_out_of_the_snapshot(enter, tmp_path, value):
    one, two = enter(), enter()
    assert take(one)
    stakes = {key: Stake(UNIT, 0, UNIT, since=value) for key in one.record.stakes}
    written(tmp_path, one, ticket=1, asked=value, seen=value, stakes=stakes)
    (other,) = two.others("GPU-0")
    assert_plain(other)
    assert other["since"] is None
    time.localtime(other["since"] or 0)
    assert not take(two)


@pytest.mark.parametrize("seen", [LATEST, 1e300, math.nan, math.inf])
def test_waiting_session_with_a_sign_from_the_future_has_no_priority(enter, tmp_path, seen):
    one, two = enter(), enter()
    one.claim({"GPU-0": 10_000})
    written(tmp_path, one, seen=seen, asked=0.0)
    assert take(two)


def test_units_in_a_record_are_cut_to_one_device(enter, tmp_path):
    one, two = enter(), enter()
    assert take(one)
    stakes = {
        key: Stake(65_535, 65_535, 65_535, 0, "", 65_535, 65_535) for key in one.record.stakes
    }
    written(tmp_path, one, stakes=stakes)
    assert two.others("GPU-0")[0]["share"] == 1.0
    assert two.look().outside["GPU-0"][:2] == (UNIT, UNIT)


def test_job_name_is_made_printable(enter, tmp_path):
    one, two = enter(), enter()
    assert one.take({"GPU-0": 10_000}, lasting=False, job="\x1b[2J\u202e\0x")
    assert two.others("GPU-0")[0]["job"] == "?[2J??x"


def test_sparse_book_is_read_only_up_to_the_limit_and_cut(enter, tmp_path, monkeypatch):
    """Reading a sparse book of 256 MiB took half a minute, with the book locked."""
    one, two = enter(), enter()
    assert take(one)
    os.truncate(tmp_path / LEDGER_FILE, 1 << 28)
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args[1]) or pread(*args))
    assert not take(two)
    assert len(read_entries(tmp_path)) == 2
    assert max(read) <= LONGEST
    assert os.stat(tmp_path / LEDGER_FILE).st_size <= 2 * RECORD
    assert not take(two)
    assert max(read[-2:]) <= 2 * RECORD


def test_book_full_of_dead_sessions_is_emptied(enter, tmp_path):
    one = enter()
    with open(tmp_path / LEDGER_FILE, "r+b") as file:
        for number in range(1, records.MOST_RECORDS):
            file.seek(number * RECORD)
            file.write(SessionRecord(os.urandom(16), 1, 0).encode())
    two = enter()
    assert take(two)
    assert not take(one)
    assert len(read_entries(tmp_path)) == 2


def test_file_in_place_of_a_fifo_is_not_written_to(enter, tmp_path):
    one = enter()
    victim = SessionRecord(b"v" * 16, 1, 0, ticket=1)
    for make in (lambda path: path.write_text("precious"), os.mkdir, os.mkfifo):
        path = tmp_path / victim.id.hex()
        make(path)
        with open(tmp_path / LEDGER_FILE, "r+b") as file:
            file.seek(RECORD)
            file.write(victim.encode())
        one.publish()
        assert not path.is_file() or path.read_text() == "precious"
        assert one.look().outside == {}
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)


def test_full_fifo_delays_no_session(enter):
    one = enter()
    pipe = os.open(f"/proc/self/fd/{one.fifo}", os.O_WRONLY | os.O_NONBLOCK)
    os.write(pipe, b"!" * 65_536)
    os.close(pipe)
    one.clear_fifo()
    one.clear_fifo()
    one.look()


def test_user_of_a_session_is_the_owner_of_its_files(enter, tmp_path):
    one, two = enter(user="ann"), enter()
    assert take(one)
    written(tmp_path, one, uid=54_321)
    assert "user" not in two.look().outside["GPU-0"][2]
    assert [each.record.uid for each in read_entries(tmp_path)] == [os.getuid()] * 2


def test_search_for_a_circle_is_short_with_many_sessions():
    def waits(number):
        stakes = {device: Stake(1, 0, UNIT, stuck=1) for device in range(MOST_STAKES)}
        return SessionRecord(
            struct.pack("<QQ", number, 0), number, 0, ticket=number + 1, stakes=stakes
        )

    everybody = [waits(number) for number in range(200)]
    looked = []

    class Counted(dict):
        def items(self):
            looked.append(1)
            return super().items()

    for each in everybody:
        each.stakes = Counted(each.stakes)
    me = SessionRecord(b"m" * 16, 1, 0, ticket=1, stakes={0: Stake(0, 0, UNIT)})
    assert records.find_circle(me, everybody) == []
    assert len(looked) < 300


def test_snapshot_is_json_for_any_record_in_the_ledger(start, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUNB_LEDGER_DIR", str(tmp_path))
    other = Ledger(tmp_path, ["sim:0"], {"user": "ann"})
    try:
        assert other.take({"sim:0": 5000}, lasting=False, job="\x1b[2J")
        stakes = {key: Stake(60_000, since=math.nan, job="\x1b") for key in other.record.stakes}
        written(tmp_path, other, ticket=2**64 - 1, seen=math.inf, asked=-1e300, stakes=stakes)
        publish_facts(tmp_path, other, b'{"notebook": 5, "since": Infinity, "user": "\\u001b[2J"}')
        start(simulate="1xA100:40GiB")
        (device,) = json.loads(json.dumps(gpunb.status(), allow_nan=False))["devices"]
        (shown,) = device["others"]
        assert (shown["job"], shown["share"], shown["user"]) == ("?", 1.0, "?[2J")
        ref = gpunb.remote(num_gpus=1)(os.getpid).remote()
        assert gpunb.wait([ref], timeout=0.2)[0] == []
        other.give({"sim:0": 5000}, lasting=False)
        other.publish()
        assert gpunb.get(ref, timeout=PATIENCE)
    finally:
        other.close()


# ----------------------------------------------------------------------------------------- fuzzing

within = st.integers(0, 2**16 - 1)
moment = st.floats(width=64) | st.sampled_from([*BAD_NUMBERS, -0.0, LATEST])


@st.composite
def scribbles(draw):
    """A book with valid heads and stakes, and any values in them."""
    data = bytearray()
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.sampled_from([0, 1, 2, MOST_STAKES, MOST_STAKES + 1, 65_535]))
        head = (
            draw(st.binary(min_size=16, max_size=16)),
            *draw(st.tuples(*[st.integers(0, 2**32 - 1)] * 2)),
        )
        data += records.HEAD.pack(
            b"gpn1", *head, draw(st.integers(0, 2**64 - 1)), draw(moment), draw(moment), count
        )
        for _ in range(min(count, 3)):
            data += records.STAKE.pack(
                draw(st.integers(0, 2**64 - 1)),
                *draw(st.tuples(*[within] * 5)),
                draw(moment),
                draw(st.binary(max_size=40)),
            )
        data = data.ljust(-(-len(data) // RECORD) * RECORD, draw(st.sampled_from([b"\0", b"\xff"])))
    return bytes(data[: draw(st.integers(0, len(data)))])


@settings(max_examples=200)
@given(scribbles() | st.binary(max_size=3 * RECORD))
def test_all_values_from_any_book_are_within_bounds(data):
    reader = records.Reader()
    found = reader.read(data)
    assert reader.read(data) == found == dict(records.records(data))
    for record in found.values():
        assert 0 <= record.pid <= 1 << 22
        assert math.isfinite(record.asked)
        assert math.isfinite(record.seen)
        assert 0 <= record.ticket < 2**63
        assert len(record.stakes) <= MOST_STAKES
        for stake in record.stakes.values():
            assert stake.lasting <= stake.held <= UNIT
            assert stake.stuck <= stake.held
            assert max(stake.wanted, stake.lacks) <= UNIT
            assert 0 <= stake.since <= LATEST
            assert stake.job.isprintable()
        again = records.decode(record.encode())  # what is no text takes more bytes than it did
        assert records.decode(again.encode()) == again
        assert again.held(7) == record.held(7)
    everybody = list(found.values())
    me = SessionRecord(
        b"m" * 16, 1, 0, records.next_ticket(everybody), stakes={7: Stake(0, 0, UNIT)}
    )
    assert records.decode(me.encode()) == me
    for device in {7, *(device for each in everybody for device in each.stakes)}:
        assert records.room(me, everybody, device, 1.0) <= UNIT
    records.find_circle(me, everybody)


@settings(max_examples=100)
@given(st.lists(scribbles(), min_size=2, max_size=4))
def test_reader_of_a_changed_book_returns_the_same_as_a_new_reader(books):
    reader = records.Reader()
    for data in books:
        assert reader.read(data) == dict(records.records(data))


actions = st.sampled_from(
    [
        lambda one: take(one, 3000),
        lambda one: one.record.held(digest("GPU-0")) < 3000 or give(one),
        lambda one: one.claim({"GPU-0": 10_000}),
        lambda one: one.claim(None),
        Ledger.look,
        Ledger.publish,
        lambda one: one.others("GPU-0"),
    ]
)


def give(session):
    session.give({"GPU-0": 3000}, lasting=False)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(actions, st.booleans(), st.none() | scribbles(), st.integers(0, 3 * RECORD)),
        max_size=6,
    )
)
def test_two_sessions_go_on_while_random_bytes_are_written_to_the_book(steps):
    """Each has its leases again as soon as both have written."""
    with tempfile.TemporaryDirectory() as folder:
        two = [Ledger(Path(folder), GPUS, {}) for _ in range(2)]
        for action, which, noise, offset in steps:
            if noise is not None:
                with open(Path(folder) / LEDGER_FILE, "r+b") as file:
                    file.seek(offset)
                    file.write(noise)
            else:
                two[not which].publish()
            with contextlib.suppress(Busy):  # the other one is not in the book any more
                action(two[which])
        for each in two:
            each.publish()
        for each in two:
            held = [one.record.held(digest("GPU-0")) for one in two]
            room = UNIT - sum(held)
            assert not each.take({"GPU-0": max(1, room + 1)}, lasting=False, job="")
        alive = {each.record.id for each in read_entries(Path(folder)) if each.alive}
        assert alive == {each.record.id for each in two}
        for each in two:
            each.close()


json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["user", "notebook", "kernel", "python", "pid", "since", "uid", "other"])


@settings(max_examples=200)
@given(
    st.binary(max_size=500)
    | st.dictionaries(names, json_value).map(lambda value: json.dumps(value).encode())
)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"since": -0.0}')
def test_parsed_facts_are_valid_for_any_bytes(data):
    facts_read = liveness.parse_about(data)
    assert facts_read.keys() <= {"user", "notebook", "kernel", "python", "pid", "since"}
    for name, value in facts_read.items():
        if name in ("pid", "since"):
            assert type(value) in (int, float)
            assert 0 <= value <= LATEST
        else:
            assert type(value) is str
            assert value.isprintable()
            assert len(value) <= liveness.LONGEST
    json.dumps(facts_read, allow_nan=False)
