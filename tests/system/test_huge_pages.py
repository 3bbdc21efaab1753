"""The memory of a process that will be forked, in huge pages."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.system import huge_pages, linux
from tests.sessions import ROOT, named
from tests.waiting import eventually

SETTINGS = Path(huge_pages._SETTINGS)
SIZE = 2 << 20
RANGES = 4

AVAILABLE = """
import ctypes, mmap
memory = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(bytes(4 << 20))
start = -(-ctypes.addressof(ctypes.c_char.from_buffer(memory)) // (2 << 20)) * (2 << 20)
raise SystemExit(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(2 << 20), 25))
"""
"""Without gpunb: whether the system makes huge pages, of the usual size."""

COLLAPSED = """
import json, mmap, os

from gpunb.system import huge_pages

def in_huge_pages():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if "AnonHugePages" in line)

memory = mmap.mmap(-1, {ranges} << 21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
text = os.urandom(1 << 16) * ({ranges} << 5)
memory[:] = text
made = huge_pages.collapse(10)
bytes_in_them = in_huge_pages()
child = os.fork()
if child == 0:
    memory[5:10] = b"child"
    os._exit(memory[:] != text[:5] + b"child" + text[10:])
_, status = os.waitpid(child, 0)
print(json.dumps([made, bytes_in_them, memory[:] == text, status]))
"""


@pytest.fixture
def available() -> None:
    """Skips where the system makes no huge pages."""
    if not SETTINGS.exists() or "[never]" in (SETTINGS / "enabled").read_text():
        pytest.skip("this system has no huge pages")
    if subprocess.run([sys.executable, "-c", AVAILABLE], check=False).returncode:
        pytest.skip("this system cannot make huge pages at once")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Lets nothing change; a list of the addresses for which the system was asked."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{SIZE}\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", f"{tmp_path}/")
    addresses: list[int] = []
    monkeypatch.setattr(linux, "madvise", lambda start, length, advice: addresses.append(start))
    return addresses


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    """Some new memory that is empty."""
    with mmap.mmap(-1, (RANGES + 1) * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # else the first write could fill a range
        yield memory


def ranges(memory: mmap.mmap) -> range:
    """The addresses in it where huge pages can begin."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start = -(-first // SIZE) * SIZE
    return range(start, start + RANGES * SIZE, SIZE)


def fill(memory: mmap.mmap, every: int = 1) -> None:
    """Write into each page, or each second one and so on."""
    for offset in range(0, len(memory), every * mmap.PAGESIZE):
        memory[offset] = 1


def test_full_memory_is_put_into_huge_pages_and_keeps_what_it_holds(available: None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLAPSED.format(ranges=RANGES)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    made, bytes_in_them, same, status = json.loads(done.stdout)
    assert made >= RANGES - 1
    assert bytes_in_them >= (RANGES - 1) * SIZE
    assert same
    assert status == 0


def test_the_preload_is_in_huge_pages(
    available: None, start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_preload.py").write_text("import os\ntexts = [os.urandom(1 << 24)]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    start(num_gpus=1, start_method="fork", preload=["large_preload"])
    eventually(lambda: gpunb.status()["preload"])
    (zygote,) = eventually(lambda: len(found := named("gpunb-preload")) == 1 and found)
    lines = Path(f"/proc/{zygote}/smaps_rollup").read_text().splitlines()
    assert sum(int(each.split()[1]) for each in lines if "AnonHugePages" in each) > 0


def test_only_what_is_nearly_full_is_put_into_huge_pages(
    asked: list[int], memory: mmap.mmap
) -> None:
    huge_pages.collapse(10)
    assert not set(ranges(memory)) & set(asked)
    fill(memory, every=2)
    huge_pages.collapse(10)
    assert not set(ranges(memory)) & set(asked)
    fill(memory)
    asked.clear()
    assert huge_pages.collapse(10) == len(asked)
    assert set(ranges(memory)) <= set(asked)
    assert all(each % SIZE == 0 for each in asked)


def test_what_a_child_shares_stays_shared(asked: list[int], memory: mmap.mmap) -> None:
    fill(memory)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    huge_pages.collapse(10)
    assert not set(ranges(memory)) & set(asked)
    os.close(writing)
    os.waitpid(child, 0)
    huge_pages.collapse(10)
    assert set(ranges(memory)) <= set(asked)


@pytest.mark.parametrize(
    ("number", "goes_on"),
    [(errno.EAGAIN, True), (errno.EBUSY, True), (errno.ENOMEM, False), (errno.EINVAL, False)],
)
def test_what_cannot_be_done_now_is_left_out_and_other_errors_end_it(
    number: int,
    goes_on: bool,
    asked: list[int],
    memory: mmap.mmap,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linux, "madvise", failing(number, asked))
    fill(memory)
    assert huge_pages.collapse(10) == 0
    assert len(asked) >= RANGES if goes_on else len(asked) == 1


def failing(number: int, asked: list[int]) -> Callable[[int, int, int], None]:
    def madvise(start: int, length: int, advice: int) -> None:
        asked.append(start)
        raise OSError(number, os.strerror(number))

    return madvise


def test_it_ends_when_its_time_is_over(asked: list[int], memory: mmap.mmap) -> None:
    fill(memory)
    assert huge_pages.collapse(0) == len(asked) == 1


def test_nothing_is_done_where_huge_pages_are_switched_off_or_unknown(
    asked: list[int], memory: mmap.mmap, tmp_path: Path
) -> None:
    fill(memory)
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    assert huge_pages.collapse(10) == 0
    (tmp_path / "enabled").unlink()
    assert huge_pages.collapse(10) == 0
    assert not asked
