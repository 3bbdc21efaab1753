"""Actors: every way to end, and the errors of those who still call."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import pytest

import gpunb
from gpunb.exceptions import ActorDiedError, ActorError, ActorUnavailableError
from tests.api.actors.counter import Counter, back, get, gone
from tests.sessions import both
from tests.waiting import eventually

echo = print  # what the code in workers does


def test_the_last_handle_ends_the_actor_after_its_calls(four, gate):
    counter = Counter.options(num_gpus=1).remote()
    pid = get(counter.pid.remote())
    refs = [counter.hold.remote(gate), *(counter.add.remote() for _ in range(5))]
    gate.await_("held")
    again = pickle.loads(pickle.dumps(counter))
    del counter
    del again
    gate.open()
    assert get(refs) == [0, 1, 2, 3, 4, 5]
    gone(pid)


@both
def test_devices_are_free_when_the_process_is_gone(four):
    @gpunb.remote(num_gpus=4)
    class Whole:
        def __init__(self, before=None):
            self.clean = before is None or not os.path.exists(f"/proc/{before}")

        def facts(self):
            return os.getpid(), self.clean, gpunb.get_gpu_ids()

    before = None
    for step in range(4):
        actor = Whole.remote(before)
        before, clean, ids = get(actor.facts.remote())
        assert clean
        assert ids == [0, 1, 2, 3]
        if step % 2:
            gpunb.kill(actor)
        del actor


@both
def test_kill_ends_the_process_and_fails_its_calls(four, gate):
    counter = Counter.options(num_gpus=1, name="victim").remote()
    pid = get(counter.pid.remote())
    running, queued = counter.hold.remote(gate), counter.add.remote()
    gate.await_("held")
    gpunb.kill(counter)
    for ref in (running, queued):
        with pytest.raises(ActorDiedError, match="it was killed"):
            get(ref)
    Counter.options(name="victim").remote()
    gone(pid)
    gpunb.kill(counter)
    with pytest.raises(ActorDiedError, match="it was killed") as caught:
        get(counter.read.remote())
    assert isinstance(caught.value, ActorError)
    gpunb.kill(counter)
    with pytest.raises(ValueError, match="handle of an actor"):
        gpunb.kill(running)
    eventually(lambda: gpunb.available_resources()["GPU"] == 4)


def test_an_actor_can_be_killed_before_it_is_made(four, gate):
    holder = Counter.options(num_gpus=4).remote()
    get(holder.read.remote())
    waiting = Counter.options(num_gpus=1).remote(gpunb.put(1))
    ref = waiting.read.remote()
    eventually(lambda: gpunb.status()["queued"] == 2)
    assert "starting" in repr(waiting)
    gpunb.kill(waiting)
    with pytest.raises(ActorDiedError, match="killed"):
        get(ref)

    @gpunb.remote
    class Slow:
        def __init__(self, gate):
            gate.enter("constructor")

        def read(self):
            pass

    slow = Slow.remote(gate)
    ref = slow.read.remote()
    gate.await_("constructor")
    gpunb.kill(slow)
    with pytest.raises(ActorDiedError, match="killed"):
        get(ref)


def test_kill_with_restart_starts_the_actor_anew(four):
    counter = Counter.options(max_restarts=1).remote(10)
    assert get(counter.add.remote()) == 11
    pid = get(counter.pid.remote())
    gpunb.kill(counter, no_restart=False)
    gone(pid)
    assert back(counter.add) == 11
    pid = get(counter.pid.remote())
    gpunb.kill(counter, no_restart=False)
    gone(pid)
    with pytest.raises(ActorDiedError):
        get(counter.read.remote())
    restartable = Counter.options(max_restarts=-1).remote()
    pid = get(restartable.pid.remote())
    gpunb.kill(restartable)
    gone(pid)
    with pytest.raises(ActorDiedError, match="killed"):
        get(restartable.read.remote())


@both
@pytest.mark.parametrize("kind", ["sync", "threads", "async"])
def test_exit_actor_ends_the_actor_after_the_call(four, gate, kind):  # noqa: C901 - three kinds of actors
    class Sync:
        def leave(self, how):
            if how == "exit_actor":
                gpunb.actor.exit_actor()
            sys.exit(0)

        def hold(self, gate):
            gate.enter("held")

        def pid(self):
            return os.getpid()

    class Async:
        async def leave(self, how):
            Sync.leave(self, how)

        async def hold(self, gate):
            await gate.enter_async("held")

        async def pid(self):
            return os.getpid()

    for how in ("exit_actor", "sys.exit"):
        options = {"max_restarts": 1, "name": "leaves", "max_concurrency": 3}
        if kind == "sync":
            del options["max_concurrency"]
        cls = gpunb.remote(Async if kind == "async" else Sync)
        actor = cls.options(**options).remote()
        pid = get(actor.pid.remote())
        refs = [actor.leave.remote(how)]
        if kind == "sync":
            refs.append(actor.hold.remote(gate))
        else:
            refs.insert(0, actor.hold.remote(gate))
        reason = "it called exit_actor"
        if how == "sys.exit":
            reason = r"is gone: its method leave called sys\.exit\(0\)"
        for ref in refs:
            with pytest.raises(ActorDiedError, match=reason):
                get(ref)
        cls.options(name="leaves").remote()  # the name is free at once
        with pytest.raises(ActorDiedError, match=reason):
            get(actor.pid.remote())
        gone(pid)


def terminate(pid):
    """Send SIGTERM, and wait until the process waits for its calls, in another thread."""
    threads = Path(f"/proc/{pid}/task")
    before = len(list(threads.iterdir()))
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: len(list(threads.iterdir())) > before, "it waits for its calls")


class InThreads:
    def pid(self):
        return os.getpid()

    def hold(self, gate, name):
        gate.enter(name)
        return name


class InCoroutines:
    async def pid(self):
        return os.getpid()

    async def hold(self, gate, name):
        await gate.enter_async(name)
        return name


@pytest.mark.parametrize("cls", [InThreads, InCoroutines])
def test_at_sigterm_the_running_calls_end_before_the_process(four, gate, cls):
    actor = gpunb.remote(max_concurrency=4)(cls).remote()
    pid = get(actor.pid.remote())
    running = [actor.hold.remote(gate, each) for each in ("first", "second")]
    gate.await_("first")
    gate.await_("second")
    terminate(pid)
    late = actor.hold.remote(gate, "late")
    gate.open()
    assert get(running) == ["first", "second"]
    with pytest.raises(ActorDiedError, match="SIGTERM"):
        get(late)
    gone(pid)


@pytest.mark.parametrize("cls", [InThreads, InCoroutines])
def test_at_a_second_sigterm_the_process_ends_at_once(four, gate, cls):
    actor = gpunb.remote(max_concurrency=4)(cls).remote()
    pid = get(actor.pid.remote())
    running = actor.hold.remote(gate, "running")
    gate.await_("running")
    terminate(pid)
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ActorDiedError, match="SIGTERM"):
        get(running)


def test_exit_actor_in_a_coroutine_that_the_constructor_has_started_ends_the_actor(four, gate):
    @gpunb.remote
    class Ends:
        def __init__(self, gate):
            self.task = asyncio.get_running_loop().create_task(self.end(gate))

        async def end(self, gate):
            await gate.enter_async("end")
            gpunb.actor.exit_actor()

        async def pid(self):
            return os.getpid()

    actor = Ends.remote(gate)
    pid = get(actor.pid.remote())
    gate.open()
    gone(pid)
    with pytest.raises(ActorDiedError):
        get(actor.pid.remote())


@pytest.mark.parametrize("kind", ["sync", "threads", "async"])
def test_exit_that_failed_restarts_the_actor_where_it_may(four, kind):
    class Sync:
        def leave(self, code):
            sys.exit(code)

        def pid(self):
            return os.getpid()

    class Async(Sync):
        async def leave(self, code):
            sys.exit(code)

    cls = gpunb.remote(Async if kind == "async" else Sync)
    options = {"max_concurrency": 2} if kind == "threads" else {}
    actor = cls.options(max_restarts=1, **options).remote()
    pid = get(actor.pid.remote())
    with pytest.raises(ActorUnavailableError, match=r"method leave called sys\.exit\('no data'\)"):
        get(actor.leave.remote("no data"))
    again = back(actor.pid)
    assert again != pid
    with pytest.raises(ActorDiedError, match=r"called sys\.exit\(1\)"):
        get(actor.leave.remote(1))
    gone(again)


def test_constructor_that_crashes_ends_with_the_last_handle(four, tmp_path):
    @gpunb.remote(max_restarts=-1)
    class Crashes:
        def __init__(self, path):
            with path.open("a") as file:
                file.write("x")
            os._exit(1)

        def read(self):
            pass

    begin = time.monotonic()
    actor = Crashes.remote(tmp_path / "tries")
    eventually(lambda: (tmp_path / "tries").exists() and len((tmp_path / "tries").read_text()) > 2)
    assert time.monotonic() - begin >= 0.3  # by the clock: two pauses, which no load makes shorter
    del actor
    eventually(lambda: not gpunb.status()["actors"], "it has ended")


def test_constructor_that_crashes_ends_without_a_handle_though_a_call_waits(four, tmp_path):
    @gpunb.remote(max_restarts=-1)
    class Crashes:
        def __init__(self, path):
            with path.open("a") as file:
                file.write("x")
            os._exit(3)

        def read(self):
            pass

    Crashes.remote(tmp_path / "dropped").read.remote()
    waits = Crashes.remote(tmp_path / "kept").read.remote()
    with pytest.raises(ActorDiedError, match="ended while it was made: it exited with status 3"):
        get(waits)
    eventually(lambda: not gpunb.status()["actors"], "both have ended")
    assert (tmp_path / "kept").read_text() == (tmp_path / "dropped").read_text() == "xx"


def test_call_to_an_actor_whose_new_constructor_hangs(four, gate):
    @gpunb.remote(max_restarts=1)
    class Hangs:
        def __init__(self, gate):
            if gate.came("made"):
                gate.enter("again")
            gate.note("made")

        def crash(self):
            os._exit(1)

        def read(self):
            return 1

    actor = Hangs.remote(gate)
    with pytest.raises(ActorUnavailableError):
        get(actor.crash.remote())
    gate.await_("again")
    with pytest.raises(ActorUnavailableError, match="starts again without its state"):
        get(actor.read.remote())
    waits = actor.read.options(max_task_retries=1).remote()
    gate.open()
    assert get(waits) == 1


def test_the_reason_of_an_actors_end_stands_once_in_the_error(four):
    @gpunb.remote
    class Fails:
        def __init__(self):
            sys.exit("no data")

        def pid(self):
            return os.getpid()

    failed = Fails.remote()
    holder = Counter.options(num_gpus=1).remote()
    get(holder.read.remote())
    waits = Fails.options(num_gpus=4).remote()
    call = waits.pid.remote()
    gpunb.kill(waits)
    for ref, reason in (
        (failed.pid.remote(), "its constructor called sys.exit('no data')"),
        (call, "it was killed"),
        (waits.pid.remote(), "it was killed"),
    ):
        with pytest.raises(ActorDiedError) as caught:
            get(ref)
        assert str(caught.value).count(reason) == 1
        assert str(caught.value).endswith(f"is gone: {reason}")


def test_exit_actor_is_refused_outside_of_actors(four):
    with pytest.raises(TypeError, match="this is none"):
        gpunb.actor.exit_actor()

    @gpunb.remote
    def leave():
        gpunb.actor.exit_actor()

    with pytest.raises(TypeError, match="this is none"):
        get(leave.remote())


def test_ray_terminate_and_ready(four):
    counter = Counter.remote()
    assert get(counter.__ray_ready__.remote()) is True
    pid = get(counter.pid.remote())
    add, end = counter.add.remote(), counter.__ray_terminate__.remote()
    assert get(add) == 1
    with pytest.raises(ActorDiedError):
        get(end)
    gone(pid)

    @gpunb.remote
    class Broken:
        def __init__(self):
            raise RuntimeError("no way")

    with pytest.raises(ActorDiedError, match="no way"):
        get(Broken.remote().__ray_ready__.remote())


def _segfault(counter):
    echo("about to read what is not there", file=sys.stderr)
    ctypes.string_at(0)


def _be_killed(counter):
    echo("about to be killed", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


@both
def test_the_error_of_a_crash_has_the_reason_and_the_last_output(four):
    counter = Counter.remote()
    with pytest.raises(ActorDiedError, match="last words") as caught:
        get(counter.crash.remote("the last words"))
    assert re_search(r"exit.* 3", caught.value)
    counter = Counter.remote()
    with pytest.raises(ActorDiedError, match="SIGKILL") as caught:
        get(counter.call.remote(_be_killed))
    assert "about to be killed" in str(caught.value)
    with pytest.raises(ActorDiedError, match="SIGKILL"):
        get(counter.read.remote())
    counter = Counter.remote()
    with pytest.raises(ActorDiedError, match="SIGSEGV") as caught:
        get(counter.call.remote(_segfault))
    assert "what is not there" in str(caught.value)
    assert re_search('test_ends.py", line [0-9]+ in _segfault\n', caught.value)


def re_search(pattern, error):
    import re

    return re.search(pattern, str(error), re.DOTALL)


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_the_error_of_a_crash_during_several_calls_has_the_last_output(four, kind):
    class Sync:
        def crash(self):
            echo("words of this call", file=sys.stderr)
            os._exit(4)

    class Async:
        async def crash(self):
            Sync.crash(self)

    cls = (
        gpunb.remote(Sync).options(max_concurrency=2) if kind == "threads" else gpunb.remote(Async)
    )
    with pytest.raises(ActorDiedError, match="words of this call"):
        get(cls.remote().crash.remote())
