"""Zygotes that are stopped, lack resources, or send invalid messages."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import signal
import socket
import time
from pathlib import Path

import pytest

import gpunb
from gpunb.exceptions import WorkerCrashedError
from gpunb.protocol.plain import framed
from gpunb.system import linux
from gpunb.system.loop import Loop
from tests.sessions import alive, assert_idle, begun, named, open_files, script
from tests.waiting import PATIENCE, eventually

_PIDFD_GETFD = 438


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


@gpunb.remote
def pid():
    return os.getpid()


@gpunb.remote(num_cpus=0)
def enter(gate, name):
    gate.enter(name)


@gpunb.remote(num_gpus=1, max_retries=0)
def hold(path):
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(1000)


@pytest.fixture
def forked(start):
    start(num_gpus=2, num_cpus=2, start_method="fork")
    eventually(lambda: gpunb.status()["preload"] is not None)


def zygote(name):
    # Its children have its name for a moment.
    (found,) = eventually(lambda: len(found := named(name)) == 1 and found)
    return found


def stop(process):
    os.kill(process, signal.SIGSTOP)
    stat = Path(f"/proc/{process}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def reported():
    return [each for each in gpunb.status()["warnings"] if "has not answered" in each]


# ---------------------------------------------------------------------------------------- stopped


def test_stopped_zygote_is_reported_and_tasks_go_on_with_it(forked, tmp_path):
    process = zygote("gpunb-preload")
    running = hold.remote(tmp_path / "running")
    begun(tmp_path / "running")
    stop(process)
    refs = [pid.remote() for _ in range(8)]
    try:
        (warning,) = eventually(reported)
        assert f"(pid {process})" in warning
        assert f"kill -CONT {process}" in warning
        assert warning.partition(" for ")[0] in "".join(gpunb.status()["notes"])
        # Those that have no process yet say why; the one that runs has no part in it.
        facts = gpunb.status()
        reasons = {each["name"]: each["waits_for"] for each in facts["running"]}
        assert "has not answered" in reasons["pid"]
        assert reasons["hold"] is None
        # That it is to be ended does not reach it either.
        gpunb.cancel(running, force=True)
        ident = next(each["id"] for each in facts["running"] if each["name"] == "hold")
        backend = gpunb.protocol.backend.existing()
        assert "has not answered" in eventually(lambda: backend.ask("why", ident))
    finally:
        os.kill(process, signal.SIGCONT)
    assert len(set(get(refs))) >= 1
    with pytest.raises(gpunb.exceptions.TaskCancelledError):
        get(running)
    eventually(lambda: not reported())
    del refs, running
    assert_idle()


def test_a_stopped_zygote_takes_any_number_of_signals(forked, tmp_path):
    """More than its socket has room for, while the session goes on."""
    process = zygote("gpunb-preload")
    refs = [hold.remote(tmp_path / name) for name in ("one", "two")]
    pids = [begun(tmp_path / name)[0] for name in ("one", "two")]
    loop = gpunb.protocol.backend.existing().loop
    pool = gpunb.protocol.backend.existing().engine.pool
    stop(process)
    try:
        source = gpunb.protocol.backend.existing().engine.source
        (worker, *_) = [each for each in pool.processes() if each.pid == pids[0]]
        for _ in range(1000):
            loop.post((source.signal, worker, signal.SIGCONT))
        done = gpunb.put("served")
        assert get(done) == "served"
        assert gpunb.status()["running"]  # the loop answers
        gpunb.cancel(refs[0], force=True)
        eventually(reported)
    finally:
        os.kill(process, signal.SIGCONT)
    with pytest.raises(gpunb.exceptions.TaskCancelledError):
        get(refs[0])
    assert alive(pids[1])
    gpunb.cancel(refs[1], force=True)
    with pytest.raises(gpunb.exceptions.TaskCancelledError):
        get(refs[1])
    del refs, done
    assert_idle()


def test_a_session_with_stopped_zygotes_ends(start, tmp_path):
    """In order: processes that its workers started end, too."""
    start(num_gpus=1, num_cpus=2, start_method="fork")
    eventually(lambda: gpunb.status()["preload"] is not None)
    ref = hold.remote(tmp_path / "running")
    worker = begun(tmp_path / "running")[0]
    processes = [zygote("gpunb-zygote"), zygote("gpunb-preload")]
    for each in processes:
        stop(each)
    gpunb.shutdown()
    eventually(lambda: not any(map(alive, [*processes, worker])))
    del ref


# --------------------------------------------------------------------------------------- no room


def test_end_of_workers_without_a_zygote_is_seen_although_memory_lacks(
    forked, tmp_path, monkeypatch
):
    """The system refuses to watch one of the processes at first. They die with their zygote, and
    may be gone before they are looked for: their descriptors are opened before."""
    refs = [hold.remote(tmp_path / name) for name in ("one", "two")]
    pids = [begun(tmp_path / name)[0] for name in ("one", "two")]
    opened = {each: linux.pidfd_open(each) for each in pids}
    watch, refused = Loop.watch, []

    def lacks_memory(loop, descriptor, callback):
        if not refused and os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[pidfd]":
            refused.append(descriptor)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        watch(loop, descriptor, callback)

    monkeypatch.setattr(Loop, "watch", lacks_memory)
    monkeypatch.setattr(linux, "pidfd_open", opened.pop)
    os.kill(zygote("gpunb-preload"), signal.SIGKILL)
    for ref in refs:
        with pytest.raises(WorkerCrashedError):
            get(ref)
    assert refused
    assert not any(map(alive, pids))
    del ref, refs
    assert_idle()


LIMITED = """
    import gc, os, resource, signal, sys, time
    from pathlib import Path
    from tests.sessions import alive, named
    from tests.waiting import Gate, eventually
    import gpunb

    def allow(kind, soft, of=0):
        resource.prlimit(of, kind, (soft, resource.getrlimit(kind)[1]))

    def notes(text):
        return eventually(lambda: [each for each in gpunb.status()["notes"] if text in each])

    def only(name):
        "The process of that name; its children have it, too, for a moment."
        return eventually(lambda: len(found := named(name)) == 1 and found)[0]

    def open_files():
        "Without those that are open for a moment only."
        return min(len(os.listdir("/proc/self/fd")) for _ in range(100))

    @gpunb.remote
    def pid():
        return os.getpid()

    @gpunb.remote(max_retries=0)
    def once():
        return os.getpid()

    @gpunb.remote(num_cpus=0, max_retries=0)
    def meet(folder, many):
        "Return when as many run at the same time."
        Path(folder, str(os.getpid())).touch()
        while len(os.listdir(folder)) < many:
            time.sleep(0.01)
        return os.getpid()

    def begin(**settings):
        gpunb.init(num_gpus=1, num_cpus=2, **{{"preload": (), **settings}})

    if __name__ == "__main__":
        PROCESSES, FILES = resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE
        gentle = {{}}
{body}
        print("well")
"""


def limited(body, tmp_path):
    """Run a program as a user who is not root, because root has no limit of processes."""
    import textwrap

    command = []
    if os.getuid() == 0:
        capabilities = "+dac_override,+dac_read_search"
        command = [
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
            *(f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--"),
        ]
        os.chown(tmp_path, 65534, 65534)
    tmp_path.chmod(0o700)
    text = LIMITED.format(body=textwrap.indent(textwrap.dedent(body).strip("\n"), " " * 8))
    done = script(
        text, env={"GPUNB_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}, before=command
    )
    assert not done.stderr, done.stderr
    assert (done.returncode, done.stdout) == (0, "well\n")


def test_a_zygote_that_cannot_be_replaced_at_the_limit_of_processes_is_tried_again(tmp_path):
    body = """
    begin()
    assert gpunb.get(pid.remote())
    eventually(lambda: gpunb.status()["preload"] is not None)
    zygote = only("gpunb-zygote")
    limit = resource.getrlimit(PROCESSES)[0]
    allow(PROCESSES, 0)
    os.kill(zygote, signal.SIGKILL)
    (note,) = notes("cannot be started")
    eventually(lambda: not gpunb.status()["workers"])  # of the zygote that was killed
    refs = [once.remote(), pid.remote()]
    assert "`ulimit -u`" in note and "tried again" in note, note
    def reasons():
        running = gpunb.status()["running"]
        return running and all("ulimit -u" in (each["waits_for"] or "") for each in running)
    eventually(reasons)
    assert gpunb.get(gpunb.put("served")) == "served"
    allow(PROCESSES, limit)
    assert all(gpunb.get(refs, timeout=30))
    eventually(lambda: not any("cannot be started" in each for each in gpunb.status()["notes"]))
    """
    limited(body, tmp_path)


def test_a_zygote_that_cannot_fork_at_the_limit_of_processes_tries_again(tmp_path):
    body = """
    begin()
    assert gpunb.get(pid.remote())
    eventually(lambda: gpunb.status()["preload"] is not None)
    limit = resource.getrlimit(PROCESSES)[0]
    zygotes = [only("gpunb-zygote"), only("gpunb-preload")]
    for each in zygotes:
        allow(PROCESSES, 0, each)
    os.mkdir(folder := os.path.join(os.environ["HOME"], "meeting"))
    refs = [meet.remote(folder, 8) for _ in range(8)]
    (note,) = notes("waits to be forked")
    assert "`ulimit -u`" in note, note
    def held_up():
        reasons = [each["waits_for"] or "" for each in gpunb.status()["running"]]
        return len(reasons) == 8 and sum("ulimit -u" in each for each in reasons)
    eventually(lambda: held_up() > 4)  # the others had standbys
    for each in zygotes:
        allow(PROCESSES, limit, each)
    assert all(gpunb.get(refs, timeout=30))
    eventually(lambda: not any("to be forked" in each for each in gpunb.status()["notes"]))
    """
    limited(body, tmp_path)


def test_a_worker_that_waits_to_be_forked_can_be_cancelled(tmp_path):
    body = """
    begin()
    assert gpunb.get(pid.remote())
    eventually(lambda: gpunb.status()["preload"] is not None)
    limit = resource.getrlimit(PROCESSES)[0]
    zygotes = [only("gpunb-zygote"), only("gpunb-preload")]
    for each in zygotes:
        allow(PROCESSES, 0, each)
    os.mkdir(folder := os.path.join(os.environ["HOME"], "meeting"))
    refs = [meet.remote(folder, 9) for _ in range(8)]
    notes("waits to be forked")
    for each in refs:
        gpunb.cancel(each, force=True)
    for each in refs:
        try:
            gpunb.get(each, timeout=30)
        except gpunb.exceptions.TaskCancelledError:
            continue
        raise AssertionError("it was not cancelled")
    for each in zygotes:
        allow(PROCESSES, limit, each)
    assert gpunb.get(pid.remote(), timeout=30)
    """
    limited(body, tmp_path)


def test_a_worker_that_cannot_be_spawned_at_the_limit_of_processes_is_tried_again(tmp_path):
    body = """
    begin(start_method="spawn")
    assert gpunb.get(pid.remote())
    limit = resource.getrlimit(PROCESSES)[0]
    allow(PROCESSES, 0)
    os.mkdir(folder := os.path.join(os.environ["HOME"], "meeting"))
    refs = [meet.remote(folder, 6) for _ in range(6)]
    (note,) = notes("waits to be started")
    assert "`ulimit -u`" in note, note
    source = gpunb.protocol.backend.existing().engine.source
    eventually(lambda: source._pause > 0.3)  # all have been asked for
    before = open_files()
    eventually(lambda: source._pause == 2.0)  # some more tries
    assert open_files() <= before
    allow(PROCESSES, limit)
    assert all(gpunb.get(refs, timeout=30))
    eventually(lambda: not any("to be started" in each for each in gpunb.status()["notes"]))
    """
    limited(body, tmp_path)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_init_at_the_limit_of_processes_fails_with_the_limit_and_leaves_no_processes(
    tmp_path, method
):
    body = f"""
    limit = resource.getrlimit(PROCESSES)[0]
    allow(PROCESSES, 0)
    try:
        begin(start_method={method!r})
    except gpunb.exceptions.GpunbError as error:
        assert "`ulimit -u`" in str(error) and "0 processes" in str(error), error
    else:
        raise AssertionError("there is a session")
    allow(PROCESSES, limit)
    assert not named("gpunb-zygote")
    begin(start_method={method!r})
    assert gpunb.get(pid.remote())
    gpunb.shutdown()
    """
    limited(body, tmp_path)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_init_without_free_descriptors_fails_with_the_limit(tmp_path, method):
    body = f"""
    begin(start_method={method!r})  # so that all is imported
    gpunb.shutdown()
    limit = resource.getrlimit(FILES)[0]
    resource.setrlimit(FILES, (64, 64))
    there = len(os.listdir("/proc/self/fd"))
    for left in range(0, 24):
        taken = []
        while len(os.listdir("/proc/self/fd")) < 63 - left:
            taken.append(os.dup(0))
        try:
            begin(start_method={method!r})
        except gpunb.exceptions.GpunbError as error:
            assert "descriptor" in str(error) and "`ulimit -n`" in str(error), error
            assert "64" in str(error), error
        else:
            gpunb.shutdown()
        for each in taken:
            os.close(each)
        eventually(lambda: not gc.collect() and len(os.listdir("/proc/self/fd")) <= there)
    """
    limited(body, tmp_path)


def test_session_goes_on_without_free_descriptors(tmp_path):
    """A task that needs a process fails with the reason, or waits with it."""
    body = """
    begin()
    assert gpunb.get(pid.remote())
    eventually(lambda: gpunb.status()["preload"] is not None)
    limit = resource.getrlimit(FILES)[0]
    second, zygote = only("gpunb-preload"), only("gpunb-zygote")
    os.mkdir(folder := os.path.join(os.environ["HOME"], "meeting"))
    refs = [meet.remote(folder, 2) for _ in range(2)]
    gpunb.get(refs)
    allow(FILES, 3)
    refs = [meet.remote(folder, 6) for _ in range(6)]
    # The processes that are there (two, and perhaps one in advance) hold a task each, so that the
    # rest needs new ones.
    assert gpunb.wait(refs, timeout=30)[0]
    for at in range(6):
        os.mkdir(os.path.join(folder, f"other {at}"))
    told = []
    for each in refs:
        try:
            told.append(gpunb.get(each, timeout=30))
        except gpunb.exceptions.WorkerCrashedError as error:
            assert "descriptor" in str(error) and "`ulimit -n`" in str(error), error
    assert len(told) < 6
    for each in (second, zygote):
        os.kill(each, signal.SIGKILL)
    notes("`ulimit -n`")
    allow(FILES, limit)
    assert gpunb.get(pid.remote(), timeout=30)
    eventually(lambda: not any("ulimit" in each for each in gpunb.status()["notes"]))
    """
    limited(body, tmp_path)


# ---------------------------------------------------------------------------------------- garbage


def send_as(process, data):
    """Send bytes to the kernel on all sockets of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(process)
    try:
        sockets = [each for each, to in open_files(process).items() if to.startswith("socket:")]
        ours = [libc.syscall(_PIDFD_GETFD, handle, each, 0) for each in sockets]
        assert ours
        assert min(ours) >= 0, os.strerror(ctypes.get_errno())
        for each in ours:
            with socket.socket(fileno=each) as sock:
                sock.send(data)
    finally:
        os.close(handle)


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


GARBAGE = {
    "bytes": b"garbage",
    "a number": framed(pickle.dumps(7)),
    "an unknown word": framed(pickle.dumps(("unheard", 1))),
    "a pid of everybody": framed(pickle.dumps(("forked", 1, -1))),
    "a status that is none": framed(pickle.dumps(("exited", 1, 1 << 70))),
    "a token that cannot be a key": framed(pickle.dumps(("failed", ([],), "reason"))),
    "deeply nested": b"(" * 60_000 + b"t" * 60_000 + b".",
    "an object": None,
}


@pytest.mark.parametrize("generation", ["gpunb-zygote", "gpunb-preload"])
@pytest.mark.parametrize("what", GARBAGE)
def test_zygote_that_sends_an_invalid_message_is_replaced(
    start, tmp_path, monkeypatch, generation, what
):
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    data = GARBAGE[what] or framed(pickle.dumps(("failed", 1, Evil())))
    start(num_gpus=1, num_cpus=2, start_method="fork")
    eventually(lambda: gpunb.status()["preload"] is not None)
    ref = hold.remote(tmp_path / "running")
    (worker,) = begun(tmp_path / "running")
    process = zygote(generation)
    send_as(process, data)
    with pytest.raises(WorkerCrashedError, match=r"zygote|sent what is no message"):
        get(ref)
    assert not alive(worker)
    eventually(lambda: not alive(process))
    assert any("sent what is no message" in each for each in gpunb.status()["warnings"])
    assert get(pid.remote())
    assert not (tmp_path / "evil").exists()
    del ref
    assert_idle()


def test_value_without_a_free_descriptor_fails_with_the_limit(tmp_path):
    body = """
    begin()
    limit = resource.getrlimit(FILES)[0]
    allow(FILES, 3)
    try:
        gpunb.put(bytes(10_000_000))
    except OSError as error:
        assert "descriptor" in str(error) and "`ulimit -n`" in str(error), error
    else:
        raise AssertionError("there was a descriptor")
    allow(FILES, limit)
    assert len(gpunb.get(gpunb.put(bytes(10_000_000)))) == 10_000_000
    """
    limited(body, tmp_path)
