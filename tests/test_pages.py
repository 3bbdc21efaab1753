"""Whether memory was written to since somebody looked."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gpunb import pages
from gpunb.objects import PAGE, Segment


def watch(raw: memoryview) -> pages.Watch:
    try:
        return pages.Watch(raw)
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
def test_a_write_anywhere_is_seen(array: np.ndarray, at: int) -> None:
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
def test_sizes_around_a_page(nbytes: int, offset: int) -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    raw = flat(memory)[offset : offset + nbytes]
    seen = watch(raw)
    assert seen.untouched(raw)
    for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        raw[at] += 1
        assert not seen.untouched(raw)
        seen.arm(raw)


def test_a_neighbour_does_not_count() -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    raw = flat(memory)[PAGE + 10 : 4 * PAGE - 10]
    seen = watch(raw)
    memory[PAGE + 9] = memory[4 * PAGE - 10] = 1
    assert seen.untouched(raw)


def test_what_a_system_call_writes_is_seen() -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    raw = flat(memory)
    seen = watch(raw)
    source, target = os.pipe()
    os.write(target, b"x" * 100)
    os.readv(source, [raw[3 * PAGE : 3 * PAGE + 100]])
    os.close(source)
    os.close(target)
    assert not seen.untouched(raw)


def test_other_memory_at_the_same_place_is_not_taken_for_it() -> None:
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


def test_a_child_has_to_watch_for_itself() -> None:
    memory = np.zeros(8 * PAGE, dtype="u1")
    seen = watch(flat(memory))
    child = os.fork()
    if not child:
        try:
            own = pages.Watch(flat(memory))
            memory[5000] = 1
            os._exit(0 if not own.untouched(flat(memory)) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert seen.untouched(flat(memory))
