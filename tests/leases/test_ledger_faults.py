"""A ledger in use that is locked for long, or whose files are removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpunb.leases import ledger_file, membership
from gpunb.leases.ledger import Ledger
from gpunb.leases.ledger_file import Busy
from gpunb.leases.records import LEDGER_FILE
from gpunb.leases.report import read_entries
from tests.sessions import descriptors
from tests.waiting import PATIENCE, eventually

GPUS = ("GPU-0", "GPU-1")


@pytest.fixture
def place(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture
def enter(place):
    """Makes sessions that share a folder, and try again if they cannot enter."""
    opened = []

    def make(**about):
        about = {"pid": os.getpid(), **about}
        made = lambda: place.mkdir(mode=0o700, exist_ok=True)  # noqa: E731
        opened.append(Ledger(place, GPUS, about, patient=True, make=made))
        return opened[-1]

    make.opened = opened
    before = descriptors()
    yield make
    for each in opened:
        each.close()
    assert descriptors() <= before


def take(session, units=10_000, key="GPU-0"):
    return session.take({key: units}, lasting=False, job="train")


def give(session, units=10_000, key="GPU-0"):
    session.give({key: units}, lasting=False)
    session.publish()


def rung(session):
    ready, _, _ = select.select([session.fifo], [], [], PATIENCE)
    session.clear_fifo()
    return bool(ready)


@contextlib.contextmanager
def locked(place):
    """The book is locked by a process that was stopped."""
    place.mkdir(exist_ok=True)
    descriptor = os.open(place / LEDGER_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def remove_all(place):
    shutil.rmtree(place)


def remove_book(place):
    (place / LEDGER_FILE).unlink()


def replace_book(place):
    (place / "new").touch()
    (place / "new").rename(place / LEDGER_FILE)


removed = pytest.mark.parametrize("remove", [remove_all, remove_book, replace_book])


# --------------------------------------------------------------------------------- entering late


def test_session_enters_the_locked_ledger_later_and_takes_no_lease_before(enter, place):
    with locked(place):
        one, two = enter(), enter()
        life = one.life
        assert life >= 0
        assert not one.entered
        with pytest.raises(Busy, match="has the ledger of leases locked"):
            take(one)
        assert read_entries(place) == []
    assert take(one)
    assert one.entered
    assert one.life == one.fifo == life
    assert not take(two)
    assert len(read_entries(place)) == 2


def test_session_that_never_entered_leaves_no_files(enter, place):
    with locked(place):
        one = enter()
        assert len(os.listdir(place)) == 3
        enter.opened.remove(one)
        one.close()
        assert os.listdir(place) == [LEDGER_FILE]


def test_files_of_a_process_killed_before_it_entered_are_removed(enter, place, monkeypatch):
    text = (
        "import sys, os; from pathlib import Path; from gpunb.leases.ledger import Ledger\n"
        "Ledger(Path(sys.argv[1]), ['GPU-0'], {}, patient=True); os._exit(1)"
    )
    with locked(place):
        subprocess.run([sys.executable, "-c", text, str(place)], check=False)
        assert len(os.listdir(place)) == 3
    monkeypatch.setattr("gpunb.leases.liveness.YOUNG", 0.0)
    enter()
    assert len(os.listdir(place)) == 3
    assert len(read_entries(place)) == 1


def test_files_of_a_session_that_waits_for_the_lock_are_not_removed(enter, place):
    with locked(place):
        late = enter()
    early = enter()
    assert take(early)
    assert late.look().outside["GPU-0"][0] == 10_000


def test_second_try_for_a_held_lock_waits_less(enter, place, monkeypatch):
    waits = []
    clock = SimpleNamespace(sleep=waits.append, monotonic=lambda: sum(waits))
    monkeypatch.setattr("gpunb.leases.ledger_file.time", clock)
    with locked(place):
        one = enter()
        first = len(waits)
        with pytest.raises(Busy):
            one.look()
        assert len(waits) - first < first / 2


def test_session_enters_when_a_full_disk_has_room_again(enter, place, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkfifo", full)
        one = enter()
        with pytest.raises(OSError, match="No space left"):
            take(one)
    life = one.life
    assert take(one)
    two = enter()
    assert not take(two)
    assert one.life == life != one.fifo


# ------------------------------------------------------------------------------- files are removed


@removed
def test_no_lease_is_taken_until_a_session_with_removed_files_has_entered_again(
    enter, place, remove
):
    one = enter()
    assert take(one)
    remove(place)
    two = enter()
    with pytest.raises(Busy, match=rf"process {os.getpid()} has a session whose files in the led"):
        take(two)
    with pytest.raises(Busy):
        take(two, key="GPU-1")
    assert rung(one)
    one.look()
    assert not take(two)
    assert take(two, key="GPU-1")
    view = two.look()
    assert view.outside["GPU-0"][0] == 10_000
    give(one)
    assert take(two)


@pytest.mark.parametrize("first", [0, 1])
def test_sessions_share_the_folder_that_is_there_after_theirs_was_moved(enter, place, first):
    one = enter()
    place.rename(place.with_name("moved"))
    sessions = [one, enter()]
    assert take(sessions[first])
    assert not take(sessions[1 - first])


@removed
def test_any_call_writes_the_record_again_after_the_files_were_removed(enter, place, remove):
    actions = [
        lambda one: take(one, key="GPU-1"),
        give,
        lambda one: one.claim({"GPU-1": 10_000}),
        Ledger.look,
    ]
    for action in actions:
        one = enter()
        assert take(one)
        remove(place)
        action(one)
        (entry,) = read_entries(place)
        assert entry.alive
        assert entry.record.stakes.keys() == one.record.stakes.keys()
        enter.opened.remove(one)
        one.close()
        remove_all(place)


def test_two_sessions_with_removed_files_do_not_take_each_others_leases(enter, place):
    one, two, three = enter(), enter(), enter()
    assert take(one, 6000)
    assert take(two, 4000)
    remove_all(place)
    with pytest.raises(Busy):
        take(one, 4000)
    with pytest.raises(Busy):
        take(two, 6000)
    assert three.look().outside["GPU-0"][0] == 10_000
    assert not take(one, 1)
    assert not take(three, 1)


def test_session_with_a_removed_fifo_counts_as_alive(enter, place):
    one, two = enter(), enter()
    assert take(one)
    (place / one.record.id.hex()).unlink()
    assert not take(two)
    assert two.look().outside["GPU-0"][0] == 10_000
    assert rung(one)
    one.look()
    assert (place / one.record.id.hex()).is_fifo()
    two.claim({"GPU-0": 10_000})
    assert rung(one)


@removed
def test_older_worker_keeps_the_leases_after_a_new_fifo_was_made(enter, place, remove):
    """The worker has not inherited the new FIFO."""
    one = enter()
    assert take(one)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[one.life])
    with worker:
        remove(place)
        two = enter()
        one.look()
        assert not take(two)
        enter.opened.remove(one)
        one.close()
        assert not take(two)
        worker.kill()
        eventually(lambda: take(two), "what the worker held is free")


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


@removed
def test_repeated_removal_of_the_files_leaks_no_descriptors_or_keepers(enter, place, remove):
    one = enter()
    assert take(one)
    left = []
    for _ in range(5):
        remove(place)
        one.look()
        one.close_old_fifos()
        left.append((descriptors(), len(children())))
        two = enter()
        assert not take(two)
        enter.opened.remove(two)
        two.close()
    eventually(lambda: len(children()) <= left[0][1], "one process keeps the last FIFO")
    assert left[-1][0] <= left[0][0]


def test_view_names_devices_that_two_sessions_hold(enter, place, monkeypatch):
    """They cannot see each other, like users of two containers."""
    monkeypatch.setattr("gpunb.leases.liveness.unlisted_pids", lambda *_: [])
    one = enter(notebook="/a.ipynb")
    assert take(one)
    remove_all(place)
    two = enter(notebook="/b.ipynb")
    assert take(two)
    assert "/b.ipynb" in one.look().twice["GPU-0"]
    assert "/a.ipynb" in two.look().twice["GPU-0"]
    give(one)
    assert not take(one, 1)
    assert one.look().twice == two.look().twice == {}


def test_session_enters_again_after_the_folder_was_moved(enter, place):
    one = enter()
    assert take(one)
    place.rename(place.with_name("old"))
    one.look()
    (entry,) = read_entries(place)
    assert entry.record.id == one.record.id


def test_overwritten_record_is_written_again_at_another_place(enter, place):
    one, two = enter(), enter()
    assert take(one)
    with open(place / LEDGER_FILE, "r+b") as file:
        file.write(two.record.encode())  # where the first one's was
    one.look()
    assert not take(two)
    assert {each.record.id for each in read_entries(place)} >= {one.record.id, two.record.id}


def test_lease_is_not_held_if_the_record_cannot_be_written(enter, monkeypatch):
    one, two = enter(), enter()

    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(one, "_write", fails)
        with pytest.raises(OSError, match="Input/output"):
            take(one)
    one.look()
    assert take(two)


def test_second_forked_call_closes_no_new_descriptors(enter):
    """New descriptors may have the old numbers by then."""
    one = enter()
    pid = os.fork()
    if pid == 0:
        one.forked()
        own = os.pipe()
        one.forked()
        status = 1
        with contextlib.suppress(OSError):
            os.write(own[1], b"x")
            status = 0
        os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_removed_book_that_stays_locked_delays_no_session(enter, place):
    one = enter()
    with open(place / LEDGER_FILE, "rb") as before:
        fcntl.flock(before, fcntl.LOCK_EX)
        remove_book(place)
        with pytest.raises(Busy):
            ledger_file.lock(one._ledger_file)
        assert one.look().outside == {}


@pytest.mark.parametrize("code", [errno.EINTR, errno.ENOLCK])
def test_book_that_cannot_be_unlocked_is_closed(enter, monkeypatch, code):
    one, two = enter(), enter()

    def fails(descriptor, how):
        if how == fcntl.LOCK_UN:
            raise OSError(code, os.strerror(code))
        flock(descriptor, how)

    flock = fcntl.flock
    with monkeypatch.context() as patch:
        patch.setattr(membership, "fcntl", SimpleNamespace(flock=fails, LOCK_UN=fcntl.LOCK_UN))
        assert take(one)
        assert not take(two)
        give(one)
    assert take(two)
    give(two)


def test_session_that_enters_at_another_place_leaves_no_record_at_the_first(enter, monkeypatch):
    one, two = enter(), enter()
    assert take(two)
    one.close()
    with monkeypatch.context() as patch:
        patch.setattr(membership, "fcntl", SimpleNamespace(flock=_fails, LOCK_UN=fcntl.LOCK_UN))
        two.look()  # the book cannot be unlocked, so it is closed
    two.look()
    give(two)
    assert take(enter())


def _fails(descriptor, how):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_record_is_read_and_written_whole_by_calls_that_take_a_part(enter, monkeypatch):
    one, two, three = enter(), enter(), enter()

    def some(data):
        return data[: max(1, len(data) // 2)]

    part = SimpleNamespace(
        pread=lambda book, size, at: some(os.pread(book, size, at)),
        pwrite=lambda book, data, at: os.pwrite(book, some(data), at),
    )
    monkeypatch.setattr(ledger_file, "os", part)
    assert take(two)
    assert not take(three)
    give(two)
    assert take(three)
    assert not take(one)
    assert [each.record.pid for each in read_entries(one._path)] == [os.getpid()] * 3
