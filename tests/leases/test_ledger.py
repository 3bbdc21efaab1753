"""The ledger on disk: several sessions with one book."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpunb.exceptions import GpunbError
from gpunb.leases import ledger_file, liveness
from gpunb.leases.ledger import Ledger
from gpunb.leases.ledger_file import Busy, ledger_folder
from gpunb.leases.records import LEDGER_FILE, digest
from gpunb.leases.report import read_entries
from gpunb.system import runtime_dir
from tests.sessions import ROOT
from tests.waiting import PATIENCE, eventually

GPUS = ("GPU-0", "GPU-1")


@pytest.fixture
def enter(tmp_path):
    """Makes sessions that share a folder."""
    opened = []

    def make(devices=GPUS, **about):
        opened.append(Ledger(tmp_path, devices, {"pid": os.getpid(), **about}))
        return opened[-1]

    make.opened = opened
    yield make
    for each in opened:
        each.close()


def rung(session, within=0.0):
    ready, _, _ = select.select([session.fifo], [], [], within)
    if ready:
        session.clear_fifo()
    return bool(ready)


def take(session, units=10_000, key="GPU-0", **how):
    return session.take({key: units}, **{"lasting": False, "job": "train", **how})


def give(session, units=10_000, key="GPU-0"):
    session.give({key: units}, lasting=False)
    session.publish()


def test_sessions_share_a_device_but_never_more_than_there_is(enter):
    one, two, three = enter(), enter(), enter()
    assert take(one, 6000)
    assert not take(two, 5000)
    assert take(two, 4000)
    assert not take(three, 1)
    assert take(three, 10_000, "GPU-1")
    give(one, 6000)
    assert take(three, 6000)


def test_several_devices_are_leased_together_or_not_at_all(enter):
    one, two = enter(), enter()
    assert take(one, 1, "GPU-1")
    assert not two.take({"GPU-0": 10_000, "GPU-1": 10_000}, lasting=False, job="")
    assert take(one, 10_000, "GPU-0")


def test_waiting_session_is_rung_when_a_lease_is_given_back(enter):
    one, two = enter(), enter()
    assert take(one)
    assert not take(two)
    two.claim({"GPU-0": 10_000})
    assert not rung(two)
    give(one)
    assert rung(two, PATIENCE)
    assert take(two)


def test_holding_session_is_rung_when_another_session_waits(enter):
    one, two, three = enter(), enter(), enter()
    assert take(one)
    two.claim({"GPU-0": 5000})
    assert rung(one, PATIENCE)
    assert one.look().wanted == {"GPU-0"}
    assert not rung(three)
    two.claim(None)
    assert rung(one, PATIENCE)
    assert one.look().wanted == frozenset()


def test_session_that_takes_repeatedly_lets_a_waiting_session_go_first(enter):
    one, two = enter(), enter()
    assert take(one, 5000)
    assert take(one, 5000)
    two.claim({"GPU-0": 10_000})
    give(one, 5000)
    assert not take(one, 5000)
    give(one, 5000)
    assert not take(one, 5000)
    assert take(two)
    two.claim(None)
    give(two)
    assert take(one)


def test_served_session_waits_behind_the_others(enter):
    one, two, three = enter(), enter(), enter()
    assert take(three)
    one.claim({"GPU-0": 10_000})
    two.claim({"GPU-0": 10_000})
    give(three)
    assert not take(two)
    assert take(one)
    give(one)
    assert not take(one)
    assert take(two)


def test_view_shows_the_leases_of_other_sessions(enter):
    one, two = enter(user="ann", notebook="/home/a/train.ipynb"), enter()
    before = time.time()
    assert one.take({"GPU-0": 6000}, lasting=True, job="model")
    after = time.time()
    assert take(one, 1000, "GPU-0")
    view = two.look()
    assert view.outside == {
        "GPU-0": (
            7000,
            6000,
            f"held by another kernel (pid {os.getpid()}, /home/a/train.ipynb)",
        )
    }
    (other,) = two.others("GPU-0")
    assert before <= other.pop("since") <= after
    assert other == {
        "pid": os.getpid(),
        "user": "ann",
        "notebook": "/home/a/train.ipynb",
        "job": "train",
        "share": 0.7,
        "memory": None,
        "kind": "kernel",
    }
    assert two.others("GPU-1") == []
    assert one.look().outside == {}


def test_view_names_the_session_for_which_units_are_kept(enter):
    one, two, three = enter(notebook="/a.ipynb"), enter(), enter()
    assert take(three, 5000)
    one.claim({"GPU-0": 10_000})
    give(three, 5000)
    assert two.look().outside["GPU-0"] == (
        10_000,
        0,
        f"kept for another kernel (pid {os.getpid()}, /a.ipynb), which waited for it before",
    )


def test_closed_session_holds_no_leases_and_leaves_no_files(enter, tmp_path):
    one, two = enter(), enter()
    assert take(one)
    two.claim({"GPU-0": 10_000})
    enter.opened.remove(one)
    one.close()
    assert rung(two, PATIENCE)
    assert take(two)
    enter.opened.remove(two)
    two.close()
    assert os.listdir(tmp_path) == [LEDGER_FILE]
    assert read_entries(tmp_path) == []


def test_leases_of_a_closed_session_last_until_its_last_worker_ends(enter):
    """The worker has inherited the FIFO and outlives its kernel."""
    one, two = enter(), enter()
    assert take(one)
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[one.fifo])
    with worker:
        enter.opened.remove(one)
        one.close()
        assert not take(two)
        two.claim({"GPU-0": 10_000})
        (peer,) = two.peers()
        watched = two.watch(peer)
        poll = select.poll()
        poll.register(watched, 0)
        assert not poll.poll(0)
        worker.kill()
        assert poll.poll(PATIENCE * 1000), "its end was not seen"
        os.close(watched)
        assert take(two)


def test_forked_child_of_the_kernel_does_not_keep_its_leases(enter):
    one, two = enter(), enter()
    assert take(one)
    inside, outside = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(outside)
        one.forked()
        os.read(inside, 1)
        os._exit(0)
    os.close(inside)
    enter.opened.remove(one)
    one.close()
    assert take(two)
    os.close(outside)
    os.waitpid(pid, 0)


def test_next_session_removes_the_files_of_a_killed_one(enter, tmp_path):
    text = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from gpunb.leases.ledger import Ledger
        one = Ledger(Path({str(tmp_path)!r}), ["GPU-0"], {{}})
        assert one.take({{"GPU-0": 10000}}, lasting=True, job="")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    lines = "\n".join(line.strip() for line in text.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [each.alive for each in read_entries(tmp_path)] == [False]
    one = enter()
    assert take(one)
    assert [each.alive for each in read_entries(tmp_path)] == [True]
    assert len(os.listdir(tmp_path)) == 3


def test_book_locked_by_a_stopped_process_raises_busy(enter, tmp_path):
    """Before the lock is released: it does not wait for that."""
    one = enter()
    stopped = os.open(tmp_path / LEDGER_FILE, os.O_RDWR)
    ledger_file.lock(stopped)
    with pytest.raises(Busy):
        take(one)
    os.close(stopped)
    assert take(one)


def test_lease_takes_five_calls_of_the_system(enter):
    """Each task with a device pays for them, beside however many sessions. `benchmarks` has the
    time."""
    sessions = [enter() for _ in range(8)]
    for at, each in enumerate(sessions[1:], start=1):
        assert take(each, 1000, GPUS[at % 2])
    calls = collections.Counter()

    def note(_, event, called):
        if event == "c_call" and called.__module__ in ("posix", "fcntl"):
            calls[called.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        assert take(sessions[0], 100)
    finally:
        sys.setprofile(before)
    assert calls == {"flock": 2, "stat": 1, "pread": 1, "pwrite": 1}


def test_overwritten_book_is_used_again(enter, tmp_path):
    one = enter()
    (tmp_path / LEDGER_FILE).write_bytes(os.urandom(10_000))
    assert take(one)
    two = enter()
    one.look()
    assert not take(two)


def test_facts_of_other_sessions_are_checked_and_cut(enter, tmp_path):
    one, two = enter(), enter()
    assert take(one)
    (facts_file,) = [each for each in tmp_path.glob("*.json") if one.record.id.hex() in each.name]
    facts_file.write_text(json.dumps({"notebook": "\x1b[2J" + "x" * 5000, "user": ["a"]}))
    (other,) = two.others("GPU-0")
    assert other["user"] is None
    assert other["notebook"].startswith("?[2J")
    assert len(other["notebook"]) == 1000
    facts_file.write_text("[")
    assert enter().others("GPU-0")[0]["notebook"] is None


def test_book_has_its_mode_as_soon_as_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise another user, who opens it in between, is refused."""
    fchmod = os.fchmod

    def widen(descriptor, mode):
        assert not (tmp_path / LEDGER_FILE).exists()
        fchmod(descriptor, mode)

    with monkeypatch.context() as patch:
        patch.setattr(ledger_file.os, "fchmod", widen)
        for descriptor in ledger_file.open_ledger_file(tmp_path):
            os.close(descriptor)
    assert os.listdir(tmp_path) == [LEDGER_FILE]


def test_book_that_was_never_finished_is_cleared_away(tmp_path, monkeypatch):
    """As a session leaves it that is killed before the book has its name."""
    with monkeypatch.context() as patch:
        patch.setattr(ledger_file.os, "link", lambda *_, **__: None)
        patch.setattr(ledger_file.os, "unlink", lambda *_, **__: None)
        with pytest.raises(Busy):
            ledger_file.open_ledger_file(tmp_path)
    left = os.listdir(tmp_path)
    assert left
    folder = os.open(tmp_path, os.O_RDONLY)
    liveness.sweep(folder, [])
    assert os.listdir(tmp_path) == left  # a session may be about to name them
    monkeypatch.setattr(liveness, "YOUNG", -1.0)
    liveness.sweep(folder, [])
    assert not os.listdir(tmp_path)
    os.close(folder)


def test_mode_of_the_files_follows_the_mode_of_the_folder(tmp_path):
    for mode, expected in ((0o700, 0o600), (0o770, 0o660), (0o2777, 0o666)):
        path = tmp_path / oct(mode)
        path.mkdir()
        path.chmod(mode)
        one = Ledger(path, GPUS, {})
        modes = {stat.S_IMODE(os.stat(path / each).st_mode) for each in os.listdir(path)}
        one.close()
        assert modes == {expected}


def test_devices_are_known_by_their_keys_and_not_by_their_order(enter):
    one, two = enter(("GPU-1", "GPU-0")), enter(("GPU-1",))
    assert take(one, key="GPU-1")
    assert not take(two, key="GPU-1")
    assert digest("GPU-0") != digest("GPU-1")
    assert digest("a") == 0xAF63DC4C8601EC8C


# -------------------------------------------------------------------------------------- folders


def test_runtime_folder_is_only_for_its_user(tmp_path, monkeypatch):
    monkeypatch.setenv(runtime_dir.VARIABLE, str(tmp_path / "deep" / "run"))
    path = runtime_dir.runtime_folder()
    assert path == tmp_path / "deep" / "run"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {each.name for each in path.iterdir()} >= {"kernels", "leases"}
    path.chmod(0o755)
    with pytest.raises(GpunbError, match=f"{path}, .* may be entered by others .mode 755.*chmod"):
        runtime_dir.runtime_folder()
    path.chmod(0o700)
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))
    with pytest.raises(GpunbError, match="is no folder"):
        runtime_dir.runtime_folder()


def test_runtime_folder_does_not_depend_on_the_login(tmp_path, monkeypatch):
    monkeypatch.delenv(runtime_dir.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    without = runtime_dir.chosen()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_dir.chosen() == without == Path(f"/tmp/gpunb-{os.getuid()}")


def test_a_runtime_folder_of_another_user_is_refused_with_a_way_out(tmp_path, monkeypatch):
    if os.getuid() != 0:
        pytest.skip("only root can make folders of others")
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    os.chown(path, 54_321, 54_321)
    monkeypatch.setenv(runtime_dir.VARIABLE, str(path))
    with pytest.raises(GpunbError, match=r"run, .* belongs to another user .uid 54321.*set GPUNB_"):
        runtime_dir.runtime_folder()


def test_missing_ledger_folder_is_made(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "shared"
    monkeypatch.setenv(ledger_file.VARIABLE, str(path))
    assert ledger_folder() == path
    assert not path.exists()
    assert ledger_folder(make=True) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o2770)
    assert ledger_folder(make=True) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o2770


def test_a_ledger_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(ledger_file.VARIABLE, str(tmp_path / "file" / "shared"))
    with pytest.raises(GpunbError, match=r"GPUNB_LEDGER_DIR='.*shared' cannot be made: Not a dir"):
        ledger_file.check()
    monkeypatch.setenv(ledger_file.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(GpunbError, match=r"GPUNB_LEDGER_DIR=.*name a folder .* or unset GPUNB_"):
        ledger_file.check()


def test_a_ledger_folder_without_a_book_to_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(ledger_file.VARIABLE, str(tmp_path))
    os.mkfifo(tmp_path / LEDGER_FILE)
    with pytest.raises(GpunbError, match=rf"leases in {tmp_path} cannot be used: .*GPUNB_LEDGER"):
        ledger_file.check()
    (tmp_path / LEDGER_FILE).unlink()
    ledger_file.check()
    assert os.listdir(tmp_path) == [LEDGER_FILE]


def test_waiting_session_sees_the_end_of_a_killed_session_at_once(enter, tmp_path):
    """A real process with a lease and a worker, both killed."""
    text = (
        "import sys, os; from pathlib import Path; from gpunb.leases.ledger import Ledger\n"
        "one = Ledger(Path(sys.argv[1]), ['GPU-0'], {})\n"
        "assert one.take({'GPU-0': 10000}, lasting=False, job='')\n"
        "print('ready', flush=True); input()"
    )
    two = enter()
    command = [sys.executable, "-c", text, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, cwd=ROOT) as process:
        assert process.stdout.readline()
        two.claim({"GPU-0": 10_000})
        (peer,) = two.peers()
        poll = select.poll()
        watched = two.watch(peer)
        poll.register(watched, 0)
        process.kill()
        assert poll.poll(PATIENCE * 1000)
        os.close(watched)
        assert take(two)
    eventually(lambda: len(two.peers()) == 0, "the dead one is out of the book")


# ----------------------------------------------------------------------------------- several users

AS_USER = """
import json, os, sys
from pathlib import Path
from gpunb.leases import ledger_file
from gpunb.leases.ledger import Ledger

ledger_file.PATIENCE = 30  # a process with the lock may wait for a processor
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[3]))  # now, because others may not be let in to this interpreter
os.umask(0o077)
one = Ledger(Path(sys.argv[1]), ["GPU-0"], {"user": f"user{sys.argv[3]}"})
for line in sys.stdin:
    print(json.dumps(eval(line), default=repr), flush=True)
"""


@pytest.fixture(params=[0o2770, 0o3770])
def users(request):
    """Starts sessions of other users of one group, who share a folder."""
    if os.getuid() != 0:
        pytest.skip("only root can be somebody else")
    group = 54_321
    with tempfile.TemporaryDirectory() as parent, contextlib.ExitStack() as stack:
        os.chmod(parent, 0o711)
        place = Path(parent) / "ledger"
        place.mkdir()
        os.chown(place, 0, group)
        place.chmod(request.param)

        def start(uid):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", AS_USER, str(place), str(group), str(uid)],
                    stdin=-1,
                    stdout=-1,
                    text=True,
                    cwd=ROOT,
                )
            )
            stack.callback(process.kill)

            def do(text):
                process.stdin.write(text + "\n")
                process.stdin.flush()
                return json.loads(process.stdout.readline())

            do.kill = process.kill
            return do

        yield start


def test_several_users_share_a_folder_of_their_group(users):
    ann, bob = users(54_001), users(54_002)
    assert ann("one.take({'GPU-0': 6000}, lasting=False, job='train')") is True
    assert bob("one.take({'GPU-0': 6000}, lasting=False, job='mine')") is False
    (seen,) = bob("one.others('GPU-0')")
    assert (seen["user"], seen["share"]) == ("user54001", 0.6)
    assert "user user54001" in bob("one.look().outside['GPU-0'][2]")
    bob("one.claim({'GPU-0': 6000})")
    assert ann("list(one.look().wanted)") == ["GPU-0"]
    assert ann("one.give({'GPU-0': 6000}, lasting=False) or one.publish()") is None
    assert bob("__import__('select').select([one.fifo], [], [], 30)[0] != []")
    assert bob("one.take({'GPU-0': 6000}, lasting=False, job='mine')") is True
    bob.kill()
    take_it = "one.take({'GPU-0': 10000}, lasting=False, job='')"
    eventually(lambda: ann(take_it), "what a killed one held is free for other users")


def test_files_of_another_users_dead_session_do_not_disturb(users):
    ann, bob = users(54_001), users(54_002)
    assert bob("one.take({'GPU-0': 10000}, lasting=True, job='')") is True
    bob.kill()
    eventually(lambda: ann("one.take({'GPU-0': 10000}, lasting=False, job='')"), "it is free")
    assert ann("one.look().outside") == {}
    carol = users(54_003)
    assert carol("one.take({'GPU-0': 1}, lasting=False, job='')") is False
    assert carol("len(one.peers())") == 1
