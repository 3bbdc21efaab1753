"""Watches that see whether memory was written to."""

from __future__ import annotations

import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest

from gpunb.data import page_map
from gpunb.data.segments import PAGE, Segment, address


def watch(raw: memoryview) -> page_map.Watch:
    try:
        return page_map.Watch(raw)
    except OSError as error:
        pytest.skip(f"this system does not tell: {error}")


def flat(array: np.ndarray) -> memoryview:
    return memoryview(array).cast("B")


@pytest.fixture(params=["own memory", "mapped segment"])
def array(request: pytest.FixtureRequest) -> np.ndarray:
    made = np.arange(300_000, dtype="f8")
    if request.param == "mapped segment":
        segment, _ = Segment.write([made])
        made = np.frombuffer(segment.map(), dtype="f8")
    return made


@pytest.mark.parametrize("at", [0, 1, 511, 512, 150_000, 299_998, 299_999])
def test_write_to_any_place_is_seen(array: np.ndarray, at: int) -> None:
    raw = flat(array)
    seen = watch(raw)
    assert array.sum() > 0
    assert seen.untouched(raw)
    array[at] += 1
    assert not seen.untouched(raw)
    assert not seen.untouched(raw)
    seen.arm(raw)
    assert seen.untouched(raw)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
@pytest.mark.parametrize("offset", [0, 1, 64])
def test_writes_to_buffers_of_about_a_page_are_seen(nbytes: int, offset: int) -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    raw = flat(memory)[offset : offset + nbytes]
    seen = watch(raw)
    assert seen.untouched(raw)
    for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        raw[at] += 1
        assert not seen.untouched(raw)
        seen.arm(raw)


def test_write_to_a_neighbour_does_not_count() -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    raw = flat(memory)[PAGE + 10 : 4 * PAGE - 10]
    seen = watch(raw)
    memory[PAGE + 9] = memory[4 * PAGE - 10] = 1
    assert seen.untouched(raw)


def test_write_of_a_system_call_is_seen() -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    raw = flat(memory)
    seen = watch(raw)
    source, target = os.pipe()
    os.write(target, b"x" * 100)
    os.readv(source, [raw[3 * PAGE : 3 * PAGE + 100]])
    os.close(source)
    os.close(target)
    assert not seen.untouched(raw)


def test_other_memory_at_the_same_address_counts_as_written() -> None:
    memory = np.ones(1 << 22)
    seen = watch(flat(memory))
    before = memory.ctypes.data
    del memory
    for _ in range(20):
        other = np.full(1 << 22, 2.0)
        if other.ctypes.data == before:
            assert not seen.untouched(flat(other))
            return
    pytest.skip("the memory was not used again")


def test_child_watches_its_own_memory() -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    seen = watch(flat(memory))
    child = os.fork()
    if not child:
        try:
            own = page_map.Watch(flat(memory))
            memory[5000] = 1
            os._exit(0 if not own.untouched(flat(memory)) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert seen.untouched(flat(memory))


@pytest.mark.parametrize("first", ["whole", "part"])
def test_overlapping_watches_report_writes_since_their_own_start(
    array: np.ndarray, first: str
) -> None:
    """Each watch has its own start, although a page has only one mark."""
    views = {"whole": flat(array), "part": flat(array[1:200_000])}
    second = {"whole": "part", "part": "whole"}[first]
    seen = {name: watch(raw) for name, raw in views.items()}
    for at in (100_000, 150_000):
        array[at] += 1
        seen[first].arm(views[first])
        assert seen[first].untouched(views[first])
        assert not seen[second].untouched(views[second])
        seen[second].arm(views[second])
        assert seen[second].untouched(views[second])
        assert seen[first].untouched(views[first])
    array[250_000] += 1
    third = watch(flat(array[100_000:]))
    assert seen["part"].untouched(views["part"])
    assert not seen["whole"].untouched(views["whole"])
    assert third.untouched(flat(array[100_000:]))


def test_random_writes_are_seen_by_random_watches() -> None:
    """Compares with a copy of the memory for each watch, made when the watch was armed."""
    dice = random.Random(20261121)
    memory = np.zeros(64 * PAGE, dtype="u1")
    watch(flat(memory))
    for _ in range(60):
        kept: list[tuple[slice, page_map.Watch, bytes]] = []
        for _ in range(40):
            start = dice.randrange(memory.nbytes)
            where = slice(start, dice.randint(start, memory.nbytes))
            raw = flat(memory)[where]
            match dice.choice(["new", "again", "write", "write"]):
                case "new":
                    kept.append((where, watch(raw), bytes(raw)))
                case "again" if kept:
                    which = dice.randrange(len(kept))
                    where, seen, _ = kept[which]
                    seen.arm(flat(memory)[where])
                    kept[which] = where, seen, memory[where].tobytes()
                case "write":
                    memory[start] = dice.randrange(256)
            for where, seen, before in kept:
                raw = flat(memory)[where]
                assert bytes(raw) == before or not seen.untouched(raw)


def test_second_watch_does_not_count_as_a_write(array: np.ndarray) -> None:
    raw = flat(array)
    seen = [watch(raw), watch(raw[1:]), watch(raw)]
    assert [each.untouched(part) for each, part in zip(seen, (raw, raw[1:], raw), strict=True)] == [
        True,
        True,
        True,
    ]


def test_memory_that_is_given_back_to_the_system_counts_as_written() -> None:
    memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    seen = watch(memoryview(memory))
    assert seen.untouched(memoryview(memory))
    memory.madvise(mmap.MADV_DONTNEED, 5 * PAGE, PAGE)
    assert not seen.untouched(memoryview(memory))


def test_new_zero_pages_at_the_same_address_count_as_written() -> None:
    def made() -> mmap.mmap:
        return mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    memory = made()
    memory[:] = b"x" * len(memory)
    inner = slice(PAGE, -PAGE)
    seen = watch(memoryview(memory)[inner])
    place = address(memoryview(memory))
    memory.close()
    other = made()
    if address(memoryview(other)) != place:
        pytest.skip("the memory was not used again")
    assert not seen.untouched(memoryview(other)[inner])
    new = watch(memoryview(other)[inner])
    assert not seen.untouched(memoryview(other)[inner])
    assert new.untouched(memoryview(other)[inner])


@pytest.mark.parametrize("kind", ["anonymous", "file"])
def test_shared_memory_cannot_be_watched(kind: str, tmp_path: Path) -> None:
    watch(flat(np.zeros(8 * PAGE, dtype="u1")))
    number = -1
    if kind == "file":
        (tmp_path / "file").write_bytes(bytes(8 * PAGE))
        number = os.open(tmp_path / "file", os.O_RDWR)
    memory = mmap.mmap(number, 8 * PAGE, flags=mmap.MAP_SHARED)
    with pytest.raises(OSError, match="other processes"):
        page_map.Watch(memoryview(memory))
    if number >= 0:
        os.close(number)


def test_memory_that_is_only_read_can_be_watched() -> None:
    memory = np.arange(300_000, dtype="f8")
    view = memory[:]
    view.flags.writeable = False
    seen = watch(flat(view))
    assert seen.untouched(flat(view))
    memory[150_000] = 0
    assert not seen.untouched(flat(view))
