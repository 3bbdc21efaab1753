"""Memory files that are written again, while no process can see the segment before."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gpunb.data import segment_pool
from gpunb.data.segment_pool import MOST_FILES, SegmentPool, alone
from gpunb.data.segments import Segment, untouched
from gpunb.exceptions import OutOfMemoryError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memory files")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.fixture
def timers() -> list[Callable[[], None]]:
    return []


@pytest.fixture
def pool(timers: list[Callable[[], None]]) -> Iterator[SegmentPool]:
    made = SegmentPool(64 * MIB, lambda _, work: timers.append(work))
    yield made
    made.close()


def file_of(segment: Segment) -> int:
    return os.fstat(segment.fileno()).st_ino


def written(pool: SegmentPool, number: int, size: int = MIB) -> Segment:
    return pool.write([bytes([number % 251]) * size])[0]


def content(segment: Segment) -> bytes:
    return bytes(segment.map())


def test_the_file_of_a_segment_that_is_gone_is_written_again(pool: SegmentPool) -> None:
    first = written(pool, 1)
    file = file_of(first)
    first.close()
    second = written(pool, 2)
    assert file_of(second) == file
    assert content(second) == b"\2" * MIB
    assert pool.nbytes == MIB


def test_layout_is_that_of_other_segments(pool: SegmentPool) -> None:
    parts = [b"stream", [b"a" * 70_000, b"b"], np.arange(10.0)]
    written(pool, 7).close()  # the gaps must not show what was there before
    segment, spans = pool.write(parts)
    plain, plain_spans = Segment.write(parts)
    assert spans == plain_spans
    assert content(segment) == content(plain)


@pytest.mark.parametrize("kept", ["segment", "duplicate", "mapping", "sent", "other process"])
def test_a_file_that_is_still_used_is_not_written(pool: SegmentPool, kept: str) -> None:
    first = written(pool, 1)
    file = file_of(first)
    view = None
    left, right = socket.socketpair()
    with left, right:
        end: Callable[[], object]
        if kept == "segment":
            end = first.close
        elif kept == "duplicate":
            end = first.dup().close
        elif kept == "mapping":
            view = first.map()
            end = view.release
        elif kept == "sent":
            socket.send_fds(left, [b"x"], [first.fileno()])
            end = lambda: os.close(socket.recv_fds(right, 1, 1)[1][0])  # noqa: E731
        else:
            ready, done = multiprocessing.Pipe()
            child = os.fork()
            if not child:
                mapped = first.map()
                first.close()
                done.send_bytes(b"ready")
                done.recv_bytes()
                os._exit(0 if bytes(mapped) == b"\1" * MIB else 1)
            assert ready.recv_bytes() == b"ready"

            def end() -> None:
                ready.send_bytes(b"end")
                assert os.waitpid(child, 0)[1] == 0
                ready.close()
                done.close()

        if kept != "segment":
            first.close()
        second = written(pool, 2)
        assert file_of(second) != file
        if view is not None:
            assert bytes(view) == b"\1" * MIB
        end()
        del view
        assert file_of(written(pool, 3)) == file
        assert content(second) == b"\2" * MIB


def test_receivers_cannot_write(pool: SegmentPool) -> None:
    segment = written(pool, 1)
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted|Invalid"):
        os.pwrite(segment.fileno(), b"x", 0)
    with pytest.raises(OSError, match=r"Invalid|Bad file|not permitted"):
        os.ftruncate(segment.fileno(), 0)


def test_writes_to_a_view_stay_in_it(pool: SegmentPool) -> None:
    segment = written(pool, 1)
    view = segment.map()
    assert untouched(view)
    view[0] = 9
    assert not untouched(view)
    assert content(segment) == b"\1" * MIB


def test_a_file_gets_the_size_that_is_needed(pool: SegmentPool) -> None:
    for number, size in enumerate([MIB, 3 * MIB, 2 * MIB + 5, 1_100_000]):
        segment = written(pool, number, size)
        assert segment.size == os.fstat(segment.fileno()).st_size == size
        assert content(segment) == bytes([number]) * size
        del segment
    assert len(pool._files) == 1


def test_a_small_segment_leaves_a_large_file_whole(pool: SegmentPool) -> None:
    large = file_of(written(pool, 1, 20 * MIB))
    assert file_of(written(pool, 2)) != large
    assert file_of(written(pool, 3, 20 * MIB)) == large


def test_files_are_bounded_in_bytes(pool: SegmentPool) -> None:
    held = [written(pool, number, 30 * MIB) for number in range(3)]
    assert pool.nbytes <= 64 * MIB
    assert [content(each)[0] for each in held] == [0, 1, 2]
    file = file_of(held.pop(0))
    assert file_of(written(pool, 4, 40 * MIB)) == file, "the unused one grows"
    assert pool.nbytes <= 64 * MIB
    beyond = written(pool, 5, 65 * MIB)
    assert content(beyond)[-1] == 5


def test_files_are_bounded_in_number(pool: SegmentPool) -> None:
    held = [written(pool, 1, 10_000) for _ in range(MOST_FILES + 3)]
    assert len(pool._files) == MOST_FILES
    del held


def test_files_that_nobody_uses_are_closed_after_a_while(
    pool: SegmentPool, timers: list[Callable[[], None]]
) -> None:
    used, unused = written(pool, 1), written(pool, 2)
    unused.close()
    assert len(timers) == 1
    timers.pop()()
    assert len(pool._files) == 2, "seen unused once"
    timers.pop()()
    assert [file_of(each) for each in pool._files] == [file_of(used)]
    used.close()
    timers.pop()()
    timers.pop()()
    assert not pool._files
    assert not timers, "an empty pool needs no timer"
    assert content(written(pool, 3)) == b"\3" * MIB
    assert len(timers) == 1


def test_a_file_that_is_used_between_two_looks_stays(
    pool: SegmentPool, timers: list[Callable[[], None]]
) -> None:
    written(pool, 1).close()
    timers.pop()()
    used = written(pool, 2)
    timers.pop()()
    used.close()
    timers.pop()()
    assert len(pool._files) == 1


def test_segments_outlive_the_pool(pool: SegmentPool) -> None:
    segment = written(pool, 1)
    pool.close()
    assert content(segment) == b"\1" * MIB
    assert content(written(pool, 2)) == b"\2" * MIB
    assert not pool._files


def test_without_leases_every_segment_has_a_new_file(
    pool: SegmentPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_pool, "alone", lambda _: False)
    assert content(written(pool, 1)) == b"\1" * MIB
    assert not pool._files


def test_without_a_timer_nothing_is_kept() -> None:
    pool = SegmentPool(64 * MIB)
    assert content(written(pool, 1)) == b"\1" * MIB
    assert not pool._files


def test_a_failed_write_leaves_no_file(pool: SegmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment_pool, "write_all", full)
    with pytest.raises(OutOfMemoryError, match="1,048,576 bytes"):
        written(pool, 1)
    assert not pool._files


def test_threads_never_see_the_content_of_others(pool: SegmentPool) -> None:
    wrong: list[int] = []

    def work(first: int) -> None:
        chance = random.Random(first)
        held: list[tuple[int, Segment]] = []
        for number in range(first, first + 40):
            held.append((number % 251, written(pool, number, chance.choice([50_000, 200_000]))))
            chance.shuffle(held)
            del held[3:]
            wrong.extend(mark for mark, each in held if set(content(each)) != {mark})

    threads = [threading.Thread(target=work, args=(number * 1000,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_a_forked_child_lets_the_files_go(pool: SegmentPool) -> None:
    segment = written(pool, 1)
    child = os.fork()
    if not child:
        pool.forked()
        os._exit(content(segment) != b"\1" * MIB)
    assert os.waitpid(child, 0)[1] == 0
    file = file_of(segment)
    segment.close()
    assert file_of(written(pool, 2)) == file


def test_alone_is_false_for_others_descriptors() -> None:
    file = segment_pool._writable(MIB)
    assert file is not None
    with file:
        assert alone(file)
        reader = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
        assert not alone(file)
        os.close(reader)
        assert alone(file)
