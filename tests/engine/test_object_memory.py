"""Objects that move to disk and into arenas, within the limit on their memory."""

from __future__ import annotations

import errno
import gc
import os
import queue
import threading

import numpy as np
import pytest

from gpunb.data import arenas, serialize
from gpunb.data.arenas import FEW
from gpunb.data.segments import Segment
from gpunb.engine import object_memory as memory
from gpunb.engine.object_memory import Memory, parse_spill
from gpunb.exceptions import OutOfMemoryError
from tests.waiting import eventually

GIB = 1 << 30

# ---------------------------------------------------------------------------------- carried out


@pytest.fixture
def folder(tmp_path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield str(tmp_path)
    assert os.listdir(tmp_path) == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def payload(count=12_500, value=1.0):
    """100,000 bytes of array and a little pickle."""
    return serialize.dumps(np.full(count, value))


def numbers(memory):
    return tuple(memory.facts()[name] for name in ("used", "spilled"))


def on_disk(payload):
    return "memfd:" not in os.readlink(f"/proc/self/fd/{payload.segment.fileno()}")


def test_small_payloads_do_not_count():
    keeper = Memory(1)
    small = serialize.dumps("small")
    for act in (keeper.hold, keeper.touch, keeper.pin, keeper.unpin, keeper.release):
        act(small)
    keeper.admit(small, "a value")
    assert numbers(keeper) == (0, 0)


def test_moving_and_coming_back(folder):
    keeper = Memory(250_000, folder)
    payloads = [payload(value=number) for number in range(4)]
    mapped = payloads[0].segment.map()
    for each in payloads:
        keeper.admit(each, "a value")
    assert [on_disk(each) for each in payloads] == [True, True, False, False]
    size = payloads[0].segment.size
    assert numbers(keeper) == (2 * size, 2 * size)
    for number, each in enumerate(payloads):
        array = serialize.loads(each)
        assert (array == number).all()
        array += 1
        assert (serialize.loads(each) == number).all()
    assert mapped[-1] == 0
    keeper.release(*payloads)
    assert numbers(keeper) == (0, 0)


def test_a_full_disk_says_so_and_books_nothing(folder, monkeypatch):
    keeper = Memory(150_000, folder)
    first, second = payload(), payload()
    keeper.admit(first, "a value")
    used = numbers(keeper)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutOfMemoryError) as info:
            keeper.admit(second, "the value of put")
    for part in (
        "the value of put",
        "101.7 KiB",
        "take 101.7 KiB of the 146.5 KiB",
        "No space left",
        folder,
        "object_memory=",
    ):
        assert part in str(info.value)
    assert "spill=True" not in str(info.value)
    assert numbers(keeper) == used
    assert not on_disk(first)
    keeper.admit(second, "the value of put")
    assert on_disk(first)
    keeper.release(first, second)


def test_an_interrupt_leaves_the_books_right(folder, monkeypatch):
    keeper = Memory(150_000, folder)
    first = payload()
    keeper.admit(first, "a value")
    used = numbers(keeper)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "spilled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keeper.admit(payload(), "a value")
    assert numbers(keeper) == used


def test_small_payloads_that_move_share_files(folder):
    keeper = Memory(250_000, folder)
    before = len(os.listdir("/proc/self/fd"))
    payloads = [payload(value=number) for number in range(FEW + 60)]
    for each in payloads:
        keeper.admit(each, "a value")
    assert all(map(on_disk, payloads[:-2]))
    assert len(os.listdir("/proc/self/fd")) <= before + FEW + 2 + 2
    for number, each in enumerate(payloads):
        assert (serialize.loads(each) == number).all()
    keeper.release(*payloads)
    assert numbers(keeper) == (0, 0)


def test_unused_memory_of_arenas_is_given_back_in_the_background(folder):
    keeper = Memory(GIB, folder)
    arenas.use(keeper.arenas)
    try:
        payloads = [payload(value=number) for number in range(FEW + 200)]
    finally:
        arenas.stop(keeper.arenas)
    for each in payloads:
        keeper.hold(each)
    kept = payloads[FEW::20]
    for number, each in enumerate(payloads):
        if each not in kept:
            keeper.release(each)
            payloads[number] = None
    del each
    arena = keeper.arenas.capacity

    def used():
        return sum(each.end for each in keeper.arenas._arenas())

    eventually(lambda: used() <= len(kept) * 102_000 + 2 * arena < 3 * arena)
    for number, each in enumerate(kept):
        assert (serialize.loads(each) == FEW + 20 * number).all()
    keeper.release(*kept)
    keeper.close()
    keeper._thread.join(10)


class Posts(queue.SimpleQueue):
    def one(self):
        function, argument = self.get(timeout=10)
        function(argument)


def test_what_fits_is_told_at_once_and_the_rest_later(folder):
    posts, reported = Posts(), []
    keeper = Memory(250_000, folder, posts.put)
    first, *rest = [payload(value=number) for number in range(3)]
    keeper.admit_soon([first], "a result", reported.append)
    assert reported == [None]
    keeper.admit_soon(rest, "results", reported.append)
    assert reported == [None]  # not before the loop has its turn
    posts.one()
    assert reported == [None, None]
    assert on_disk(first)
    keeper.release(first, *rest)
    keeper.close()
    keeper._thread.join(10)
    assert not keeper._thread.is_alive()


def test_objects_move_although_the_system_gives_no_thread(folder, monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    posts, reported = Posts(), []
    keeper = Memory(150_000, folder, posts.put)
    one, two, three = (payload(value=number) for number in range(3))
    keeper.admit_soon([one], "a result", reported.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        keeper.admit_soon([two], "a result", reported.append)
        posts.one()
    assert on_disk(one)
    keeper.admit_soon([three], "a result", reported.append)
    posts.one()
    assert on_disk(two)  # by the thread, which there is now
    assert reported == [None] * 3
    keeper.release(one, two, three)
    keeper.close()
    keeper._thread.join(10)


def test_in_order(folder):
    """The end of a generator must not overtake its values."""
    posts, reported = Posts(), []
    keeper = Memory(150_000, folder, posts.put)
    one, two = payload(), payload()
    for name, each, in_order in [
        ("one", [one], True),
        ("two", [two], True),
        ("another's", [], False),
        ("end", [], True),
    ]:
        keeper.admit_soon(each, name, lambda _, name=name: reported.append(name), in_order=in_order)
    assert reported == ["one", "another's"]
    posts.one()
    posts.one()
    assert reported == ["one", "another's", "two", "end"]
    keeper.admit_soon([], "later", reported.append, in_order=True)
    assert reported.pop() is None
    keeper.release(one, two)
    keeper.close()
    keeper._thread.join(10)


def test_no_room_is_told_too(folder, monkeypatch):
    reported = []
    keeper = Memory(150_000)
    keeper.admit_soon([payload(), payload()], "the results of train (#7)", reported.append)
    assert "the results of train (#7) (203.3 KiB)" in str(reported.pop())
    assert numbers(keeper) == (0, 0)
    keeper.close()

    def broken(*_):
        raise RuntimeError("broken")

    posts = Posts()
    keeper = Memory(150_000, folder, posts.put)
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "spilled", broken)
        keeper.admit_soon([payload(), payload()], "the results", reported.append)
        posts.one()
    assert "broken" in str(reported.pop())
    assert numbers(keeper) == (0, 0)
    keeper.admit_soon([both := payload(25_000)], "a result", reported.append)
    posts.one()
    assert reported == [None]  # the thread goes on
    assert on_disk(both)
    keeper.release(both)
    keeper.close()
    keeper._thread.join(10)


# ------------------------------------------------------------------------------------ the options


def test_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_file_system", lambda folder: "ext4")
    assert parse_spill(None) is parse_spill(False) is None
    assert os.path.isdir(parse_spill(True))
    assert parse_spill(tmp_path) == parse_spill(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert parse_spill(".") == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_spill("~") == str(tmp_path)
    (tmp_path / "file").touch()
    for bad in (tmp_path / "none", tmp_path / "file", str(tmp_path / "no" / "such")):
        with pytest.raises(ValueError, match="cannot be used: "):
            parse_spill(bad)
    for bad in (1, [], b"/tmp"):
        with pytest.raises(TypeError, match="True or a folder"):
            parse_spill(bad)


def test_a_folder_in_memory_is_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(ValueError, match=r"memory \(tmpfs\)"):
        parse_spill(tmp_path)
    with pytest.raises(ValueError, match="spill=True found no folder"):
        parse_spill(True)
    monkeypatch.setattr(
        memory, "_file_system", lambda folder: "ext4" if folder == "/var/tmp" else "tmpfs"
    )
    assert parse_spill(True) == "/var/tmp"


def test_file_systems(tmp_path):
    assert memory._file_system("/proc") == "proc"
    assert memory._file_system("/proc", str(tmp_path / "none")) is None
    table = tmp_path / "table"
    table.write_text("broken\n")
    assert memory._file_system("/proc", str(table)) is None
