"""Cancels of tasks and calls with their children, and time-outs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

import gpunb
from gpunb.exceptions import GetTimeoutError, TaskCancelledError
from gpunb.protocol import backend
from gpunb.worker.interrupts import unread
from tests.api.control.tasks import (
    AsyncWorker,
    Worker,
    found,
    get,
    hold,
    kept,
    on_gpu,
    raises_cancelled,
    same,
)
from tests.sessions import alive, begun, both
from tests.waiting import PATIENCE, eventually


@gpunb.remote
def parent(gate, depth, how="task"):
    """Has a child, which has a child, ..., and waits for it."""
    if depth == 0:
        gate.enter("last")
        return "last"
    if how == "actor":
        actor = Worker.remote()
        child = actor.hold.remote(gate, "last")
    elif how == "async":
        actor = AsyncWorker.remote()
        child = actor.hold.remote(gate, "last")
    elif how == "generator":
        child = next(generate.remote(gate))
    else:
        child = parent.remote(gate, depth - 1)
    kept(gate, depth, child)
    return gpunb.get(child)


@gpunb.remote
def generate(gate):
    gate.enter("last")
    yield "last"


@both
@pytest.mark.parametrize("recursive", [True, False])
def test_cancel_reaches_children_if_recursive(two, gate, recursive):
    ref = parent.remote(gate, 3)
    gate.await_("last")
    children = [found(gate, depth) for depth in (3, 2, 1)]
    gpunb.cancel(ref, recursive=recursive)
    raises_cancelled(ref)
    if recursive:
        raises_cancelled(*children)
        assert not gate.is_open()
    else:
        gate.open()
        assert get(children) == ["last"] * 3


@pytest.mark.parametrize("how", ["actor", "async"])
def test_cancel_reaches_the_calls_of_actors(two, gate, how):
    ref = parent.remote(gate, 1, how)
    gate.await_("last")
    child = found(gate, 1)
    gpunb.cancel(ref)
    raises_cancelled(ref, child)


def test_cancel_reaches_generators(two, gate):
    @gpunb.remote
    def waits(gate):
        return gpunb.get(next(generate.remote(gate)))

    ref = waits.remote(gate)
    gate.await_("last")
    gpunb.cancel(ref)
    raises_cancelled(ref)
    eventually(lambda: not gpunb.status()["running"])
    assert not gate.is_open()


@pytest.mark.parametrize("recursive", [True, False])
def test_children_submitted_before_the_interrupt_are_cancelled(two, gate, recursive):
    @gpunb.remote
    def deaf(gate):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        gate.enter("begun")
        kept(gate, "late", same.remote("child"))
        gate.note("submitted")
        eventually(lambda: gate.came("found"))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        time.sleep(PATIENCE)

    ref = deaf.remote(gate)
    gate.await_("begun")
    gpunb.cancel(ref, recursive=recursive)
    gpunb.status()  # it comes after the cancel
    gate.open()
    gate.await_("submitted")
    child = found(gate, "late")
    gate.note("found")
    if recursive:
        raises_cancelled(child)
    else:
        assert get(child) == "child"
    raises_cancelled(ref)


@gpunb.remote
class Lock:
    def __init__(self):
        self.held = True

    def release(self):
        self.held = False

    def is_held(self):
        return self.held


@gpunb.remote
def locked(gate, lock):
    try:
        gate.enter("begun")
    finally:
        assert gpunb.get(same.remote("a task")) == "a task"
        gpunb.get(lock.release.remote())


@gpunb.remote
class AsyncLocked:
    async def locked_async(self, gate, lock):
        try:
            await gate.enter_async("begun")
        finally:
            await lock.release.remote()


@pytest.mark.parametrize("who", ["task", "call", "async call"])
def test_tasks_submitted_in_a_cleanup_run(two, gate, who):
    lock = Lock.remote()
    if who == "task":
        ref = locked.remote(gate, lock)
    elif who == "call":
        actor = SyncLocked.remote()
        ref = actor.locked.remote(gate, lock)
    else:
        actor = AsyncLocked.remote()
        ref = actor.locked_async.remote(gate, lock)
    gate.await_("begun")
    gpunb.cancel(ref)
    raises_cancelled(ref)
    eventually(lambda: not get(lock.is_held.remote()), "the lock is free")


@gpunb.remote
class SyncLocked:
    def locked(self, gate, lock):
        try:
            gate.enter("begun")
        finally:
            gpunb.get(lock.release.remote())


def test_an_interrupt_is_seen_by_a_call_that_does_not_wake(two, gate):
    """As where the signal comes when Python has just looked for it, and is about to wait."""

    @gpunb.remote(num_gpus=1)
    def waits():
        pipe = signal.getsignal(signal.SIGINT).__self__._pipe
        # Another thread takes the signal, which tells the main one nothing until it looks.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=taking, daemon=True).start()
        gate.note("task")
        eventually(lambda: unread(pipe))
        time.sleep(10 * PATIENCE)

    def taking():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        time.sleep(10 * PATIENCE)

    ref = waits.remote()
    gate.await_()
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        gpunb.get(ref, timeout=PATIENCE)


def test_a_signal_handler_of_the_task_is_called_once(two, gate, tmp_path):
    """Libraries take a second SIGINT for a stop without delay."""
    counted = tmp_path / "counted"

    @gpunb.remote(num_gpus=1)
    def graceful():
        signals = []
        signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
        gate.note("task")
        eventually(lambda: signals)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            time.sleep(0.01)
        counted.write_text(str(len(signals)))

    ref = graceful.remote()
    gate.await_()
    gpunb.cancel(ref)
    eventually(lambda: counted.exists() and counted.read_text() == "1", "it was called once")
    gpunb.wait([ref], timeout=PATIENCE)


def test_cancel_by_force_ends_the_processes_of_children_too(two, gate):
    @gpunb.remote
    def deep(gate):
        child = deaf.remote(gate)
        kept(gate, "child", child)
        return gpunb.get(child)

    @gpunb.remote(num_gpus=1)
    def deaf(gate):
        (gate.folder / "pid").write_text(str(os.getpid()))
        while True:
            try:
                gate.enter("deaf")
            except KeyboardInterrupt:
                pass

    ref = deep.remote(gate)
    gate.await_("deaf")
    (pid,) = begun(gate.folder / "pid")
    child = found(gate, "child")
    gpunb.cancel(ref, force=True)
    raises_cancelled(ref, child)
    eventually(lambda: not alive(pid))


def test_cancel_ends_a_call_of_an_actor_and_not_the_actor(two, gate):
    worker = Worker.remote()
    pid = get(worker.pid.remote())
    running_, queued = worker.hold.remote(gate), worker.same.remote(1)
    gate.await_("held")
    gpunb.cancel(queued)
    raises_cancelled(queued)
    gpunb.cancel(running_)
    raises_cancelled(running_)
    with pytest.raises(ValueError, match=r"force.*gpunb\.kill"):
        gpunb.cancel(worker.hold.remote(gate, "again"), force=True)
    gate.open()
    assert get(worker.pid.remote()) == pid


def test_cancel_from_within_tasks(two, gate):
    @gpunb.remote
    def canceller(refs):
        with pytest.raises(ValueError, match="force"):
            gpunb.cancel(refs[1], force=True)
        for ref in refs:
            gpunb.cancel(ref)
        for ref in refs:
            with pytest.raises(TaskCancelledError):
                gpunb.get(ref)

    refs = [hold.options(num_cpus=0).remote(gate), Worker.remote().hold.remote(gate, "actor")]
    gate.await_("held")
    gate.await_("actor")
    get(canceller.remote(refs))


def test_a_thousand_tasks_can_be_cancelled(two, gate):
    holder = hold.options(num_cpus=2).remote(gate)
    gate.await_("held")
    refs = [same.remote(n) for n in range(1000)]
    for ref in refs:
        gpunb.cancel(ref)
    raises_cancelled(*refs)
    gate.open()
    assert get(holder) == "held"


def test_cancel_of_a_cancelled_or_failed_task_changes_nothing(two):
    failed = gpunb.remote(lambda: 1 / 0).remote()
    with pytest.raises(ZeroDivisionError):
        get(failed)
    for _ in range(2):
        gpunb.cancel(failed)
        gpunb.cancel(failed, force=True)
    with pytest.raises(ZeroDivisionError):
        get(failed)
    with pytest.raises(TypeError, match="ObjectRef"):
        gpunb.cancel([failed])


def test_a_timeout_ends_tasks_and_calls(two, gate):
    class Slow:
        def slow(self):
            time.sleep(PATIENCE)

        @gpunb.method(timeout=0.2)
        def marked(self):
            time.sleep(PATIENCE)

        async def slow_async(self):
            await asyncio.sleep(PATIENCE)

        def quick(self):
            return "quick"

    class Sync:
        slow, marked, quick = Slow.slow, Slow.marked, Slow.quick

    actor, other = gpunb.remote(Sync).remote(), gpunb.remote(Slow).remote()
    refs = [
        hold.options(timeout=0.2).remote(gate),
        actor.marked.remote(),
        actor.slow.options(timeout=0.2).remote(),
        other.slow_async.options(timeout=0.2).remote(),
    ]
    for ref in refs:
        with pytest.raises(TimeoutError, match=r"timeout of 0\.2 s") as caught:
            get(ref)
        assert not isinstance(caught.value, GetTimeoutError)
        assert f"failed in process {os.getpid()}" not in str(caught.value)
    assert get(actor.quick.options(timeout=PATIENCE).remote()) == "quick"
    assert get(other.quick.remote()) == "quick"


def test_a_timeout_fails_a_call_in_a_thread(two, gate):
    """Whoever waits for it is told; the thread goes on, and can see that nobody wants it."""

    @gpunb.remote(max_concurrency=2)
    class Threads:
        def slow(self, gate):
            gate.enter("slow")
            gate.note(gpunb.get_runtime_context().is_canceled())
            return "late"

        def yields(self, gate):
            yield 1
            gate.enter("yields")
            yield 2

        def pid(self):
            return os.getpid()

    actor = Threads.remote()
    pid = get(actor.pid.remote())
    ref = actor.slow.options(timeout=0.2).remote(gate)
    takes = on_gpu.remote(ref)
    process = rf"failed in process {pid}\b"
    for each in (ref, takes):
        with pytest.raises(
            TimeoutError, match=rf"{process}(?s:.*)its timeout of 0\.2 s. Its thread"
        ):
            get(each)
    assert get(actor.pid.remote()) == pid  # there is one more thread
    stream = actor.yields.options(num_returns="streaming", timeout=0.2).remote(gate)
    assert get(next(stream)) == 1
    with pytest.raises(TimeoutError, match=process):
        get(list(stream))
    gate.open()
    gate.await_("True")
    assert get([actor.pid.remote() for _ in range(4)]) == [pid] * 4
    with pytest.raises(TimeoutError):
        get(ref)


def test_an_object_is_let_go_of_whose_put_is_interrupted_by_somebody_else(two):
    """No notice of the kernel belongs to this SIGINT. The worker stays."""

    @gpunb.remote
    def put():
        client = backend.current()
        store = client.put

        def hit(payload):
            store(payload)
            signal.raise_signal(signal.SIGINT)

        client.put = hit
        try:
            gpunb.put(1)
        except KeyboardInterrupt:
            return os.getpid()
        finally:
            del client.put

    pid = gpunb.get(put.remote(), timeout=PATIENCE)
    eventually(lambda: not any(gpunb.status()["objects"].values()))
    assert alive(pid)
