"""Arenas: small segments that share files, which nobody can change and nothing but them keeps."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from gpunb.data import arenas, files, serialize
from gpunb.data.arenas import FEW, Arenas
from gpunb.data.blocks import Block
from gpunb.data.segments import LARGE, PAGE, Segment, untouched
from gpunb.exceptions import OutOfMemoryError

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs memory files")
CAPACITY = 1 << 20
SIZE = 50_000


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    assert open_descriptors() <= before


@pytest.fixture
def few():
    """For segments that are as many as may have files of their own."""
    held = []
    yield held
    held.clear()


def made(room=None, folder=None, capacity=CAPACITY):
    """Arenas in which the next segment is a block."""
    new = Arenas(capacity, folder)
    for _ in range(FEW):
        room.append(new._note(Segment.write([b"x"])[0]))
    return new


def content(number, size=SIZE):
    return bytes([number % 251]) * size


def written(into, count, size=SIZE):
    return [into.write([content(number, size)])[0] for number in range(count)]


def places(blocks):
    return {each.place[0] for each in blocks}


# ------------------------------------------------------------------------------- writing, reading


def test_a_few_segments_have_files_of_their_own_and_the_others_share_files():
    new = Arenas(CAPACITY)
    before = open_descriptors()
    first = written(new, FEW)
    assert not any(isinstance(each, Block) for each in first)
    assert open_descriptors() == before + FEW
    others = written(new, 100)
    assert all(isinstance(each, Block) for each in others)
    assert len(places(others)) == 5
    assert open_descriptors() == before + FEW + 5 + 1  # the last can still be written to
    del first[0]
    assert not isinstance(new.write([b"x"])[0], Block)


def test_a_block_has_the_buffers_that_were_written(few):
    new = made(few)
    buffers = [[b"ab", b"", b"c" * 100_000, bytearray(b"de")], np.arange(1000.0), b"", b"end"]
    new.write([b"before"])
    block, spans = new.write(buffers)
    new.write([b"after"])
    view = block.map()
    parts = [bytes(view[start : start + length]) for start, length in spans]
    assert parts == [b"ab" + b"c" * 100_000 + b"de", np.arange(1000.0).tobytes(), b"", b"end"]
    assert all(start % 64 == 0 for start, _ in spans)
    assert block.size == len(view) == spans[-1][0] + 3


def test_each_reader_gets_a_copy_that_is_aligned_and_writable(few):
    new = made(few)
    for number in range(20):
        block, _ = new.write([content(number, 1000 + number)])
        one, other = block.map(), block.map()
        one[:] = bytes(len(one))
        assert other == content(number, 1000 + number)
        assert np.frombuffer(other, "u1").ctypes.data % 64 == 0


def test_a_copy_outlives_its_block(few):
    view = made(few).write([content(7)])[0].map()
    assert view == content(7)


def test_large_segments_and_blocks_are_not_taken_in(few):
    new = made(few)
    large, _ = Segment.write([bytes(LARGE)])
    assert new.take_in(large) is large
    block, _ = new.write([b"abc"])
    assert new.take_in(block) is block


def test_a_segment_of_another_process_is_taken_in(few):
    new = made(few)
    segment, _ = Segment.write([content(3)])
    block = new.take_in(segment)
    segment.close()
    assert isinstance(block, Block)
    assert block.map() == content(3)


def test_a_block_that_is_closed_says_so(few):
    block, _ = made(few).write([b"abc"])
    with block.dup() as other:
        block.close()
        assert block.closed
        assert other.map() == b"abc"
    for use in (block.fileno, block.map, block.dup):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_many_threads_write_at_once(few):
    new = made(few)
    found = {}

    def work(start):
        for number in range(start, start + 40):
            found[number] = new.write([content(number, 20_000 + number)])[0]

    threads = [threading.Thread(target=work, args=(40 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    for number, block in found.items():
        assert block.map() == content(number, 20_000 + number)


def test_a_signal_handler_may_write_while_its_thread_writes(few, monkeypatch):
    new = made(few)
    inner = []
    whole = files.write_all

    def interrupted(descriptor, pieces, offset=0):
        if not inner:
            inner.append(None)
            inner[:] = written(new, 30)  # more than the arena has room for
        whole(descriptor, pieces, offset)

    new.write([b"first"])
    monkeypatch.setattr(arenas, "write_all", interrupted)
    outer, _ = new.write([content(99)])
    later, _ = new.write([content(98)])
    assert outer.map() == content(99)
    assert later.map() == content(98)
    assert [each.map() for each in inner] == [content(number) for number in range(30)]


# ----------------------------------------------------------------------------- nobody can change it


@linux
def test_a_receiver_cannot_change_an_arena(few):
    new = made(few)
    block, _ = new.write([content(1)])
    assert os.fstat(block.fileno()).st_mode & 0o777 == 0o400
    for change in (
        lambda: os.pwrite(block.fileno(), b"b", 0),
        lambda: os.ftruncate(block.fileno(), 10),
        lambda: os.posix_fallocate(block.fileno(), 0, 10),
        lambda: mmap.mmap(block.fileno(), 100, flags=mmap.MAP_SHARED),
    ):
        with pytest.raises(OSError, match=r"Bad file|Invalid|Permission"):
            change()
    assert block.map() == content(1)


@linux
def test_an_arena_that_is_full_is_sealed(few):
    def change(descriptor, how):
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # only root may do this
        try:
            how(again)
        finally:
            os.close(again)

    blocks = written(made(few), 40)
    full, last = blocks[0].place[0], blocks[-1].place[0]
    assert full.writer.closed
    assert not last.writer.closed
    for arena, how in (
        (full, lambda descriptor: os.pwrite(descriptor, b"b", 0)),
        (full, lambda descriptor: os.ftruncate(descriptor, 0)),
        (last, lambda descriptor: os.ftruncate(descriptor, 0)),
    ):
        with pytest.raises(PermissionError):
            change(arena.fileno(), how)


def test_space_that_was_used_once_is_not_written_again(few):
    """A late reader of a block that is gone sees the block, and nothing else."""
    new = made(few)
    kept = written(new, 1)
    gone, _ = new.write([content(5)])
    file, offset = gone.place
    reader = os.dup(file.fileno())
    del gone, file
    kept += written(new, 100)
    assert os.pread(reader, SIZE, offset) == content(5)
    os.close(reader)


@linux
def test_a_forked_child_writes_nothing_to_the_arenas_of_its_parent(few):
    new = made(few)
    arenas.use(new)
    try:
        first = serialize.dumps(np.full(SIZE, 1, "u1"))
        child = os.fork()
        if not child:
            mine = serialize.dumps(np.full(SIZE, 2, "u1"))
            os._exit(isinstance(mine.segment, Block))
        assert os.waitpid(child, 0)[1] == 0
        second = serialize.dumps(np.full(SIZE, 3, "u1"))
    finally:
        arenas.stop(new)
    assert isinstance(second.segment, Block)
    assert (serialize.loads(first) == 1).all()
    assert (serialize.loads(second) == 3).all()
    assert arenas.current is None


# ----------------------------------------------------------------------------------- life and death


@pytest.fixture
def during_close(monkeypatch):
    """Calls a function while a descriptor is closed, as another thread may come in between."""
    calls = []
    close = os.close

    def closing(descriptor):
        if calls:
            calls.pop()()
        close(descriptor)

    monkeypatch.setattr(os, "close", closing)
    return calls


def test_an_arena_that_goes_with_its_last_block_gets_no_new_block(few, during_close):
    new = made(few)
    block, _ = new.write([content(1)])
    later = []
    during_close.append(lambda: later.extend(written(new, 2)))
    del block
    assert not during_close
    assert [each.map() for each in later] == [content(0), content(1)]


def test_a_file_that_goes_with_its_last_block_is_not_used_for_a_later_message(few, during_close):
    mine = payloads(made(few), 2)
    arrived = sent(mine)
    later = []
    during_close.append(lambda: later.extend(sent(mine)))
    arrived.clear()
    assert not during_close
    assert [serialize.loads(each)[0] for each in later] == [0, 1]


@pytest.mark.parametrize("order", ["first", "last", "any"])
def test_an_arena_is_gone_with_its_last_block(few, order):
    new = made(few)
    before = open_descriptors()
    blocks = written(new, 100)
    assert open_descriptors() == before + 6
    if order == "any":
        random.Random(1).shuffle(blocks)
    for left in range(99, -1, -1):
        blocks.pop(0 if order == "first" else -1)
        assert open_descriptors() <= before + len(places(blocks)) + 1
        assert bool(left) == bool(blocks)
    assert open_descriptors() == before


def test_unused_space_is_given_back_when_it_is_too_much(few):
    new = made(few)
    blocks = written(new, 200)
    kept = {number: blocks[number] for number in range(0, 200, 9)}
    del blocks
    size = len(kept) * SIZE
    assert len(places(kept.values())) == 10
    assert new.wastes(0)
    new.compact(0)
    assert not new.wastes(0)
    assert sum(each.end for each in places(kept.values())) <= size + CAPACITY
    assert len(new._arenas()) == len(places(kept.values())) <= 3
    for number, block in kept.items():
        assert block.map() == content(number)


def test_unused_space_may_be_as_much_as_half_of_the_objects_if_there_is_room(few):
    new = made(few, capacity=200_000)
    blocks = written(new, 90)
    del blocks[::4]
    assert new.wastes(0)
    assert not new.wastes(1 << 30)
    new.compact(1 << 30)
    assert len(new._arenas()) == 30
    new.compact(0)
    assert len(new._arenas()) < 30


def test_objects_that_are_freed_in_any_order_take_little_more_than_their_size(few):
    new = made(few, capacity=500_000)
    chance = random.Random(2)
    kept = {}
    for number in range(600):
        size = chance.choice([1000, 30_000, 100_000])
        kept[number] = new.write([content(number, size)])[0]
        if len(kept) > 60:
            del kept[chance.choice(list(kept))]
        if new.wastes(0):
            new.compact(0)
        used = sum(each.size for each in kept.values())
        assert sum(each.end for each in new._arenas()) <= used + 64 * len(kept) + 2 * 500_000
    for number, block in kept.items():
        assert block.map() == content(number, block.size)


def test_a_reader_goes_on_while_its_block_moves(few):
    new = made(few)
    blocks = written(new, 60)
    kept = blocks[::20]
    wires, there = serialize.to_wires(
        [serialize.Payload(segment=each, spans=((0, SIZE),)) for each in kept]
    )
    del blocks
    new.compact(0)
    assert any(block.place[0] is not file for block, file in zip(kept, there, strict=True))
    received = [Segment.adopt(os.dup(each.fileno())) for each in there]
    late = serialize.from_wires(wires, received)
    for number, each, block in zip((0, 20, 40), late, kept, strict=True):
        assert each.segment.map() == block.map() == content(number)


@pytest.mark.parametrize("where", ["sendfile", "memory"])
def test_compaction_that_fails_loses_nothing(few, monkeypatch, where):
    new = made(few)
    blocks = written(new, 60)
    kept = {number: blocks[number] for number in range(0, 60, 20)}
    del blocks

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patch:
        if where == "sendfile":
            patch.setattr(os, "sendfile", fails)
        else:
            patch.setattr(arenas, "memory_file", fails)
            new._open = None
        new.compact(0)
    for number, block in kept.items():
        assert block.map() == content(number)
    new.compact(0)
    assert not new.wastes(0)
    for number, block in kept.items():
        assert block.map() == content(number)


def test_an_error_while_a_block_is_written_leaves_the_others_as_they_are(few, monkeypatch):
    new = made(few)
    one, _ = new.write([content(1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(OutOfMemoryError, match="no room for 50,000 bytes"):
            new.write([content(2)])
    two, _ = new.write([content(3)])
    assert (one.map(), two.map()) == (content(1), content(3))


def test_a_segment_gets_a_file_of_its_own_where_no_arena_can_be_made(few, monkeypatch):
    new = made(few)

    def fails(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(arenas, "read_only", fails)
    segment, _ = new.write([content(1)])
    assert not isinstance(segment, Block)
    assert new.take_in(segment) is segment
    assert segment.map() == content(1)


@linux
def test_a_killed_process_leaves_no_memory():
    script = (
        "import os; from gpunb.data.arenas import Arenas\n"
        "new = Arenas(1 << 22)\n"
        "kept = [new.write([bytes(50_000)]) for _ in range(100)]\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.PIPE)
    assert done.returncode == -9
    assert done.stdout
    assert not set(os.listdir("/dev/shm")) - before


def test_arenas_work_without_memory_files(few, monkeypatch):
    monkeypatch.setattr("gpunb.system.linux.has_memory_files", lambda: False)
    blocks = written(made(few), 50)
    assert [each.map() for each in blocks] == [content(number) for number in range(50)]


# ----------------------------------------------------------------------------------------- messages


def payloads(into, count):
    arenas.use(into)
    try:
        return [serialize.dumps(np.full(SIZE, number, "u1")) for number in range(count)]
    finally:
        arenas.stop(into)


def sent(some):
    """Pass payloads through a message, with new descriptors."""
    wires, segments = serialize.to_wires(some)
    return serialize.from_wires(wires, [Segment.adopt(os.dup(each.fileno())) for each in segments])


def test_a_message_has_each_file_once(few):
    mine = payloads(made(few), 60)
    own = serialize.dumps(np.zeros(LARGE, "u1"))
    mixed = [*mine[:30], own, serialize.dumps("inline"), *mine[30:]]
    wires, segments = serialize.to_wires(mixed)
    assert len(segments) == len(places(each.segment for each in mine)) + 1 == 4
    assert sum(count for _, count in wires) == 4
    back = sent(mixed)
    assert serialize.loads(back.pop(31)) == "inline"
    assert not serialize.loads(back.pop(30)).any()
    for number, each in enumerate(back):
        array = serialize.loads(each)
        assert (array == number).all()
        assert array.ctypes.data % 64 == 0
        array += 1
        assert (serialize.loads(each) == number).all()


def test_a_receiver_keeps_one_descriptor_of_each_file(few):
    mine = payloads(made(few), 60)
    before = open_descriptors()
    kept = [each for number in range(0, 60, 10) for each in sent(mine[number : number + 10])]
    assert open_descriptors() == before + 3
    assert [serialize.loads(each)[-1] for each in kept] == list(range(60))


def test_a_block_that_did_not_arrive_is_an_error(few):
    wires, segments = serialize.to_wires(payloads(made(few), 60))
    there = [Segment.adopt(os.dup(each.fileno())) for each in segments]
    with pytest.raises(ValueError, match=r"needs a segment of 50,\d+ bytes and got none"):
        serialize.from_wires(wires, there[:1])


@pytest.mark.parametrize("place", [(0, -64, 100), (0, 0, CAPACITY + 1), (0, CAPACITY, 64)])
def test_a_block_outside_of_its_file_is_an_error(few, place):
    (payload,) = payloads(made(few), 1)
    ((wire, count),), (file,) = serialize.to_wires([payload])
    with pytest.raises(ValueError, match="a block of"):
        serialize.from_wires([((*wire[:4], place), count)], [file])


# ---------------------------------------------------------------------------------------- on a disk


def test_many_spilled_segments_share_files(few, tmp_path):
    new = made(few, str(tmp_path), 4 * CAPACITY)
    before = open_descriptors()
    moved = []
    for number in range(100):
        segment, _ = Segment.write([content(number)])
        moved.append(new.spill(segment))
    del segment
    assert open_descriptors() == before + 3
    assert os.listdir(tmp_path) == []
    assert os.fstat(moved[0].fileno()).st_mode & 0o777 == 0o400
    assert [each.map() for each in moved] == [content(number) for number in range(100)]
    kept = moved[::10]
    del moved
    new.compact(0)
    assert open_descriptors() == before + 2
    assert [each.map() for each in kept] == [content(number) for number in range(0, 100, 10)]


@linux
def test_a_large_block_on_a_disk_is_mapped(few, tmp_path):
    new = made(few, str(tmp_path), 16 * LARGE)
    small = new.spill(Segment.write([b"small"])[0])
    data = os.urandom(2 * LARGE)
    large = new.spill(Segment.write([data])[0])
    assert large.place[0] is small.place[0]
    assert large.place[1] % PAGE == 0
    one, other = large.map(), large.map()
    assert untouched(one)
    one[0] ^= 1
    assert not untouched(one)
    assert other == data
    huge = new.spill(Segment.write([bytes(5 * LARGE)])[0])
    assert not isinstance(huge, Block)


def test_a_full_disk_raises_a_clear_error(few, tmp_path, monkeypatch):
    new = made(few, str(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    segment, _ = Segment.write([content(1)])
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match=f"50,000 bytes .* in {tmp_path}: No space"):
        new.spill(segment)
    assert segment.map() == content(1)
