"""Actors: classes that live in worker processes of their own."""

from __future__ import annotations

import abc
import asyncio
import ctypes
import dataclasses
import functools
import logging
import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpunb
from gpunb.exceptions import (
    ActorDiedError,
    ActorError,
    ActorUnavailableError,
    GetTimeoutError,
    InfeasibleRequestError,
    PendingCallsLimitExceeded,
    TaskCancelledError,
    TaskError,
)
from tests.sessions import alive, assert_idle, begun, both, descriptors, marked, script, session
from tests.waiting import PATIENCE, eventually

echo = print  # what the code in workers does


@pytest.fixture(scope="module", params=["fork"])
def started(request: pytest.FixtureRequest, by_value: None) -> Iterator[None]:
    """Four simulated devices, two of them A100s."""
    devices = "2xA100:40GiB,2xV100:16GiB"
    with session(simulate=devices, num_cpus=2, start_method=request.param):
        yield


@pytest.fixture
def four(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free."""
    yield
    assert_idle()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is written to the console."""
    from gpunb.runtime import output

    texts: list[str] = []

    class Kept(output.Console):
        def write(self, stream, text):
            texts.append(text)

    output.install(Kept)
    yield texts
    output.install(None)


def get(refs, timeout=PATIENCE):
    return gpunb.get(refs, timeout=timeout)


def gone(pid):
    eventually(lambda: not alive(pid), f"process {pid} is gone")


@gpunb.remote
class Counter:
    """Counts."""

    kind = "counter"

    def __init__(self, start=0, *, step=1):
        self.value = start
        self.step = step
        self.seen = []

    def add(self, n=1, *, times=1):
        self.value += n * times * self.step
        self.seen.append(n)
        return self.value

    def read(self):
        return self.value

    def order(self):
        return self.seen

    def pid(self):
        return os.getpid()

    def hold(self, gate, name="held"):
        gate.enter(name)
        return self.value

    def fail(self, error):
        raise error

    def crash(self, text=""):
        if text:
            echo(text, file=sys.stderr)
        os._exit(3)

    def call(self, function, *args):
        return function(self, *args)

    def leave(self):
        gpunb.actor.exit_actor()

    def _private(self):
        return "private"

    @property
    def double(self):
        return 2 * self.value

    @staticmethod
    def plus(a, b=1):
        return a + b

    @classmethod
    def name_of_class(cls, suffix=""):
        return cls.__name__ + suffix

    def __call__(self, x):
        return x + self.value

    def __len__(self):
        return 7


@gpunb.remote
def same(value):
    return value


@gpunb.remote
def use(handle, n=1):
    return gpunb.get(handle.add.remote(n))


# ------------------------------------------------------------------------------------ the basics


@both
def test_state_and_order(four):
    counter = Counter.remote(5)
    refs = [counter.add.remote(n) for n in range(200)]
    assert get(refs)[-1] == 5 + sum(range(200))
    assert get(counter.order.remote()) == list(range(200))
    assert len({get(counter.pid.remote()) for _ in range(3)}) == 1
    assert get(counter.pid.remote()) != os.getpid()


def test_arguments(four):
    counter = Counter.remote(start=1, step=10)
    assert get(counter.add.remote()) == 11
    assert get(counter.add.remote(n=2)) == 31
    assert get(counter.add.remote(1, times=3)) == 61
    assert get(counter.plus.remote(1)) == 2
    assert get(counter.plus.remote(1, b=5)) == 6
    assert get(counter.name_of_class.remote("!")) == "Counter!"
    assert get(counter.__call__.remote(1)) == 62
    assert get(counter.__len__.remote()) == 7
    assert get(counter._private.remote()) == "private"


def test_wrong_arguments_are_seen_at_once(four):
    with pytest.raises(TypeError, match=r"Counter\(start=\.\.\., \*, step=\.\.\.\)"):
        Counter.remote(1, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stop'"):
        Counter.remote(stop=1)
    counter = Counter.remote()
    for call in (
        lambda: counter.add.remote(1, 2),
        lambda: counter.add.remote(m=1),
        lambda: counter.read.remote(1),
        counter.plus.remote,
        lambda: counter.name_of_class.remote(1, 2),
    ):
        with pytest.raises(TypeError, match=r"Counter\.\w+\("):
            call()
    with pytest.raises(TypeError, match=r"argument 'n' of Counter\.add"):
        counter.add.remote(threading.Lock())
    with pytest.raises(TypeError, match="Counter"):
        Counter.remote(threading.Lock())


def test_what_a_handle_is_not(four):
    counter = Counter.remote()
    with pytest.raises(AttributeError, match=r"no method 'sub'; its methods are add, call"):
        counter.sub.remote(1)
    with pytest.raises(AttributeError, match="double"):
        counter.double  # noqa: B018 - properties are not methods
    with pytest.raises(AttributeError, match="kind"):
        counter.kind  # noqa: B018
    with pytest.raises(TypeError, match=r"use \.add\.remote"):
        counter.add(1)
    with pytest.raises(TypeError, match=r"Counter\.remote"):
        Counter(1)
    with pytest.raises(TypeError, match="derive"):

        class Derived(Counter):
            pass

    with pytest.raises(TypeError, match="remote already"):
        gpunb.remote(Counter)
    with pytest.raises(TypeError, match="is an actor already"):
        gpunb.remote(counter)
    with pytest.raises(TypeError, match="ObjectRef"):
        gpunb.get(counter)
    assert not hasattr(counter, "__len__.x")
    assert Counter.__doc__ == "Counts."
    assert Counter.__name__ == "Counter"
    assert Counter.__wrapped__(3).read() == 3


def test_equality_hash_dir_and_repr(four):
    one, two = Counter.remote(), Counter.options(num_gpus=1).remote()
    again = pickle.loads(pickle.dumps(one))
    assert one == again
    assert hash(one) == hash(again)
    assert one != two
    assert one != 1
    assert {one, again, two} == {one, two}
    assert dir(one)[:2] == ["add", "call"]
    assert "_private" not in dir(one)
    get(two.read.remote())
    text = repr(two)
    assert text.startswith(f"<Actor Counter #{two._actor_id} alive on GPU 0, pid ")
    assert "\n" not in text
    assert repr(two.add).startswith("<method add of <Actor Counter")
    assert "remote class Counter" in repr(Counter)
    pid = get(two.pid.remote())
    assert str(pid) in text
    gpunb.kill(two)
    gone(pid)
    eventually(lambda: "alive" not in repr(two))


def test_top_level_refs_are_resolved_and_nested_ones_not(four):
    @gpunb.remote
    class Looks:
        def __init__(self, value, refs):
            self.first = value, [type(each).__name__ for each in refs]

        def look(self, value, refs=(), **more):
            return self.first, value, [gpunb.get(each) for each in refs], more

    looks = Looks.remote(same.remote(1), [gpunb.put(2)])
    found = get(looks.look.remote(gpunb.put("a"), [same.remote("b")], c=same.remote("d")))
    assert found == ((1, ["ObjectRef"]), "a", ["b"], {"c": "d"})


def test_a_call_waits_for_its_inputs_and_keeps_its_place(four, gate):
    counter = Counter.remote()
    slow = gpunb.remote(lambda gate: gate.enter() or 3).remote(gate)
    first, second = counter.add.remote(slow), counter.add.remote(4)
    gate.await_()
    assert gpunb.wait([second], timeout=0.05) == ([], [second])
    gate.open()
    assert get([first, second]) == [3, 7]


def test_callers_do_not_wait_for_one_another(four, gate):
    """Each has an order of its own."""

    @gpunb.remote(num_cpus=0)
    def calls(counter, gate, wait):
        late = gpunb.remote(num_cpus=0)(lambda gate: gate.enter("late") or 0).remote(gate)
        refs = [counter.add.remote(late)] if wait else []
        refs += [counter.add.remote(n) for n in range(5)]
        gate.note("submitted" if wait else "quick")
        gpunb.get(refs)

    counter = Counter.remote()
    slow = calls.remote(counter, gate, True)
    gate.await_("submitted")
    get(calls.remote(counter, gate, False))
    assert get(counter.order.remote()) == list(range(5))
    gate.open()
    get(slow)
    assert get(counter.order.remote()) == [*range(5), 0, *range(5)]


def test_a_failed_input_fails_the_call_and_nothing_else(four):
    counter = Counter.remote()
    failed = gpunb.remote(lambda: 1 / 0).remote()
    with pytest.raises(ZeroDivisionError):
        get(counter.add.remote(failed))
    assert get(counter.add.remote(1)) == 1
    broken = Counter.remote(failed)
    with pytest.raises(ActorDiedError, match="division"):
        get(broken.read.remote())


def test_errors_of_methods(four):
    counter = Counter.remote()
    with pytest.raises(KeyError) as caught:
        get(counter.fail.remote(KeyError("gone")))
    assert isinstance(caught.value, TaskError)
    assert "Counter.fail" in str(caught.value)
    assert "raise error" in str(caught.value)
    assert "gpunb/workers" not in str(caught.value)
    with pytest.raises(TaskError, match="KeyboardInterrupt"):
        get(counter.fail.remote(KeyboardInterrupt()))
    assert get(counter.read.remote()) == 0


# --------------------------------------------------------------------------- handles that travel


@both
def test_handles_are_passed_on(four):
    @gpunb.remote
    class Owner:
        def __init__(self, handles):
            self.counter = handles["counter"]

        def add(self, n):
            return gpunb.get(self.counter.add.remote(n))

        def give(self):
            return [self.counter]

        def make(self):
            self.other = Counter.remote(100)
            return self.other

    counter = Counter.remote()
    assert get(use.remote(counter, 2)) == 2
    owner = Owner.remote({"counter": counter})
    assert get(owner.add.remote(3)) == 5
    (again,) = get(owner.give.remote())
    assert again == counter
    assert get(again.read.remote()) == 5
    made = get(owner.make.remote())
    assert get(made.add.remote(1)) == 101
    gpunb.kill(owner)
    assert get(made.add.remote(1)) == 102
    assert get(use.remote(made, 1)) == 103


counter_of_the_module = None


def test_handles_in_closures_globals_and_put(four):
    global counter_of_the_module
    counter = Counter.remote()

    @gpunb.remote
    def by_closure():
        return gpunb.get(counter.add.remote())

    @gpunb.remote
    def by_global():
        return gpunb.get(counter_of_the_module.add.remote())

    counter_of_the_module = counter
    assert get(by_closure.remote()) == 1
    assert get(by_global.remote()) == 2
    counter_of_the_module = None
    assert get(get(gpunb.put([counter]))[0].add.remote()) == 3
    assert get(gpunb.remote(lambda method: gpunb.get(method.remote())).remote(counter.add)) == 4


def test_what_only_the_code_refers_to_is_kept(four):
    def make():
        counter, ref, held = Counter.remote(3), gpunb.put("ref"), [same.remote("same")]

        @gpunb.remote
        def look():
            time.sleep(0.05)
            return gpunb.get([counter.add.remote(), ref, *held])

        return look.remote()

    assert get(make()) == [4, "ref", "same"]


def test_a_handle_that_only_a_worker_holds(four, gate):
    @gpunb.remote
    def keep(handles, gate):
        gate.enter("task")
        return gpunb.get(handles[0].add.remote())

    @gpunb.remote
    class Box:
        def put(self, handle):
            self.handle = handle[0]

        def add(self):
            return gpunb.get(self.handle.add.remote())

    counter, box = Counter.remote(), Box.remote()
    get(box.put.remote([counter]))
    ref = keep.remote([counter], gate)
    pid = get(counter.pid.remote())
    del counter
    gate.await_()
    gate.open()
    assert get(ref) == 1
    assert get(box.add.remote()) == 2
    assert alive(pid)
    del box
    gone(pid)


def test_an_actor_made_by_a_task_outlives_it_by_its_handle(four):
    @gpunb.remote(num_gpus=1)
    def make():
        counter = Counter.options(num_gpus=1).remote(1)
        return counter, gpunb.get(counter.pid.remote())

    counter, pid = get(make.remote())
    assert get(counter.add.remote()) == 2
    del counter
    gone(pid)

    @gpunb.remote
    def make_and_forget():
        return gpunb.get(Counter.remote().pid.remote())

    gone(get(make_and_forget.remote()))


# ----------------------------------------------------------------------------------------- ends


def test_the_last_handle_ends_it_after_its_calls(four, gate):
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
def test_devices_come_back_when_the_process_is_gone(four):
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
def test_kill(four, gate):
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


def test_kill_before_it_is_made(four, gate):
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


def test_kill_with_restart(four):
    counter = Counter.options(max_restarts=1).remote(10)
    assert get(counter.add.remote()) == 11
    pid = get(counter.pid.remote())
    gpunb.kill(counter, no_restart=False)
    gone(pid)
    assert get(counter.add.remote()) == 11
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
def test_exit_actor(four, gate, kind):
    class Sync:
        def leave(self, how):
            if how == "exit_actor":
                gpunb.actor.exit_actor()
            sys.exit("no data")

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
        said = "it called exit_actor"
        if how == "sys.exit":
            said = r"is gone: its method leave called sys\.exit\('no data'\)"
        for ref in refs:
            with pytest.raises(ActorDiedError, match=said):
                get(ref)
        cls.options(name="leaves").remote()  # the name is free at once
        with pytest.raises(ActorDiedError, match=said):
            get(actor.pid.remote())
        gone(pid)


def test_why_an_actor_is_not_there_is_said_once(four):
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
    for ref, said in (
        (failed.pid.remote(), "its constructor called sys.exit('no data')"),
        (call, "it was killed"),
        (waits.pid.remote(), "it was killed"),
    ):
        with pytest.raises(ActorDiedError) as caught:
            get(ref)
        assert str(caught.value).count(said) == 1
        assert str(caught.value).endswith(f"is gone: {said}")


def test_exit_actor_elsewhere(four):
    with pytest.raises(TypeError, match="this is none"):
        gpunb.actor.exit_actor()

    @gpunb.remote
    def leave():
        gpunb.actor.exit_actor()

    with pytest.raises(TypeError, match="this is none"):
        get(leave.remote())


def test_ray_terminate_and_ready(four):
    counter = Counter.remote()
    get(counter.__ray_ready__.remote())
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
def test_what_a_crash_says(four):
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


def re_search(pattern, error):
    import re

    return re.search(pattern, str(error), re.DOTALL)


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_what_a_crash_says_with_several_calls(four, kind):
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


# ------------------------------------------------------------------------------------- restarts


@both
def test_a_restart_begins_anew(four, tmp_path, monkeypatch):
    @gpunb.remote(num_gpus=1, max_restarts=2, runtime_env={"env_vars": {"OF_ACTOR": "yes"}})
    class Restarts:
        def __init__(self, by_ref, nested):
            self.first = by_ref, gpunb.get(nested[0])
            self.calls = 0

        def look(self):
            self.calls += 1
            seen = os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OF_ACTOR"]
            again = gpunb.get_runtime_context().was_current_actor_reconstructed
            return self.first, self.calls, gpunb.get_gpu_ids(), seen, again

        def crash(self):
            os._exit(1)

    holder = Counter.options(num_gpus=1).remote()
    get(holder.read.remote())
    actor = Restarts.remote(same.remote([1]), [gpunb.put([2])])
    expected = ([1], [2]), 1, [1], ("1", "yes")
    assert get(actor.look.remote()) == (*expected, False)
    for _ in range(2):
        with pytest.raises(ActorUnavailableError, match="without its state"):
            get(actor.crash.remote())
        assert get(actor.look.remote()) == (*expected, True)
    assert isinstance(actor, gpunb.ActorHandle)
    with pytest.raises(ActorDiedError):
        get(actor.crash.remote())


def test_calls_that_wait_survive_a_restart(four, gate):
    counter = Counter.options(max_restarts=1).remote()
    lost = counter.crash.remote()
    refs = [counter.add.remote() for _ in range(5)]
    with pytest.raises(ActorUnavailableError):
        get(lost)
    assert get(refs) == [1, 2, 3, 4, 5]


def test_max_task_retries(four, tmp_path):
    class Flaky:
        def crash_twice(self, path):
            with open(path, "a") as file:
                file.write("x")
            if len(path.read_text()) < 3:
                os._exit(1)
            return gpunb.get_runtime_context().attempt

        @gpunb.method(max_task_retries=0)
        def crash_once(self, path):
            return Flaky.crash_twice(self, path)

        @gpunb.method(max_task_retries=5)
        def of_its_own(self, path):
            return Flaky.crash_twice(self, path)

    cls = gpunb.remote(max_restarts=-1, max_task_retries=-1)(Flaky)
    actor = cls.remote()
    assert get(actor.crash_twice.remote(tmp_path / "a")) == 3
    with pytest.raises(ActorUnavailableError):
        get(actor.crash_once.remote(tmp_path / "b"))
    other = cls.options(max_task_retries=0).remote()
    assert get(other.of_its_own.remote(tmp_path / "c")) == 3
    with pytest.raises(ActorUnavailableError):
        get(other.crash_twice.remote(tmp_path / "d"))
    changed = other.crash_twice.options(max_task_retries=2)
    assert get(changed.remote(tmp_path / "e")) == 3


def test_retries_after_exceptions(four, tmp_path):
    class Flaky:
        def __init__(self):
            self.tries = 0

        @gpunb.method(max_task_retries=3, retry_exceptions=[OSError])
        def fail(self, kind):
            self.tries += 1
            raise kind("again")

        @gpunb.method(max_task_retries=3, retry_exceptions=True)
        async def fail_once(self):
            self.tries += 1
            if self.tries == 1:
                raise ValueError
            return self.tries

        def count(self):
            tries, self.tries = self.tries, 0
            return tries

    actor = gpunb.remote(Flaky).remote()
    for kind, tries in ((FileNotFoundError, 4), (ValueError, 1)):
        with pytest.raises(kind):
            get(actor.fail.remote(kind))
        assert get(actor.count.remote()) == tries
    assert get(actor.fail_once.remote()) == 2


def test_a_constructor_that_fails(four):
    @gpunb.remote(num_gpus=1, name="broken", max_restarts=3)
    class Broken:
        def __init__(self):
            raise KeyError("no such model")

        def read(self):
            pass

    broken = Broken.remote()
    with pytest.raises(ActorDiedError, match="no such model") as caught:
        get(broken.read.remote())
    assert "raise KeyError" in str(caught.value)
    with pytest.raises(ValueError, match="broken"):
        gpunb.get_actor("broken")
    again = Broken.remote()
    with pytest.raises(ActorDiedError, match="no such model"):
        get(again.read.remote())
    eventually(lambda: not gpunb.status()["actors"])
    with pytest.raises(ActorDiedError, match="no such model"):
        get(again.read.remote())


@pytest.mark.parametrize("how", ["exit", "crash", "unpickled"])
def test_a_constructor_that_ends_the_process(four, how):
    @gpunb.remote
    class Broken:
        def __init__(self, how):
            if how == "exit":
                sys.exit(3)
            echo("on the way out", file=sys.stderr)
            os._exit(5)

        def read(self):
            pass

    class Odd:
        def __reduce__(self):
            return _raise, ("cannot be made",)

    broken = Broken.remote(Odd() if how == "unpickled" else how)
    words = {"exit": "exit", "crash": "exit", "unpickled": "cannot be made"}[how]
    with pytest.raises(ActorDiedError, match=words):
        get(broken.read.remote())


def _raise(text):
    raise ValueError(text)


def test_a_constructor_that_crashes_once(four, tmp_path):
    @gpunb.remote(max_restarts=1)
    class Hard:
        def __init__(self, path):
            if not path.exists():
                path.touch()
                os._exit(1)

        def pid(self):
            return os.getpid()

    hard = Hard.remote(tmp_path / "tried")
    assert get(hard.pid.remote()) > 0
    assert get(same.remote("the runtime goes on")) == "the runtime goes on"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_constructor_that_fails_only_on_restart(four, tmp_path, gate, asynchronous):
    class Once:
        def __init__(self, path):
            if path.exists():
                raise RuntimeError("not twice")
            path.touch()

        def crash(self):
            os._exit(1)

        def read(self):
            return 1

    class Async(Once):
        async def stay(self):
            await gate.enter_async("stay")

    cls = gpunb.remote(max_restarts=5)(Async if asynchronous else Once)
    actor = cls.remote(tmp_path / "made")
    assert get(actor.read.remote()) == 1
    if asynchronous:  # what runs beside the call that crashes is lost with it
        after = actor.stay.remote()
        gate.await_("stay")
        lost = actor.crash.remote()
    else:
        lost, after = actor.crash.remote(), actor.read.remote()
    with pytest.raises(ActorError):
        get(lost)
    with pytest.raises(ActorError, match="status 1" if asynchronous else "not twice"):
        get(after)
    with pytest.raises(ActorDiedError, match="not twice"):
        get(actor.read.remote())


def test_calls_during_a_slow_constructor(four, gate):
    @gpunb.remote
    class Slow:
        def __init__(self, gate):
            gate.enter("constructor")
            self.value = 1

        def read(self):
            return self.value

    slow = Slow.remote(gate)
    ref = slow.read.remote()
    gate.await_("constructor")
    with pytest.raises(GetTimeoutError):
        gpunb.get(ref, timeout=0.01)
    gate.open()
    assert get(ref) == 1


def test_many_restarts_in_a_row(four):
    counter = Counter.options(max_restarts=-1, max_task_retries=0).remote()
    for _ in range(10):
        with pytest.raises(ActorUnavailableError):
            get(counter.crash.remote())
    assert get(counter.add.remote()) == 1


def test_a_restart_while_the_devices_are_taken(four):
    """Who restarts comes before others that ask for the same."""
    counter = Counter.options(num_gpus=4, max_restarts=1).remote()
    get(counter.read.remote())
    ref = gpunb.remote(num_gpus=4)(os.getpid).remote()
    with pytest.raises(ActorUnavailableError):
        get(counter.crash.remote())
    assert get(counter.read.remote()) == 0
    assert gpunb.wait([ref], timeout=0) == ([], [ref])
    del counter
    assert get(ref) > 0


# ---------------------------------------------------------------------------------- concurrency


class Several:
    def __init__(self):
        self.main = threading.get_ident()
        self.inside = 0
        self.most = 0
        self.lock = threading.Lock()

    def hold(self, gate, name):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        gate.enter(name)
        with self.lock:
            self.inside -= 1
        context = gpunb.get_runtime_context()
        return context.get_task_id(), context.get_actor_id(), threading.get_ident() != self.main

    def peak(self):
        return self.most

    def fail(self, n):
        raise ValueError(n)

    def nested(self, n):
        return gpunb.get([same.remote(n + each) for each in range(3)])

    def threads(self):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda i: gpunb.get(same.remote(i)), range(12)))

    def until_cancelled(self, gate):
        gate.note("begun")
        deadline = time.monotonic() + PATIENCE
        while not gpunb.get_runtime_context().is_canceled():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return "stopped"


def test_threads_really_run_at_once(four, gate):
    several = gpunb.remote(max_concurrency=4)(Several).remote()
    refs = [several.hold.remote(gate, i) for i in range(6)]
    for i in range(4):
        gate.await_(i)
    time.sleep(0.05)
    assert not gate.came(4)
    gate.open()
    found = get(refs)
    assert [task for task, _, _ in found] == [ref.task_id for ref in refs]
    assert {actor for _, actor, _ in found} == {several._actor_id}
    assert all(other for _, _, other in found)
    assert get(several.peak.remote()) == 4


@both
def test_threads_fail_and_nest_each_for_itself(four):
    several = gpunb.remote(max_concurrency=8)(Several).remote()
    failing = [several.fail.remote(n) for n in range(5)]
    nested = [several.nested.remote(n) for n in range(30)]
    threads = [several.threads.remote() for _ in range(4)]
    for n, ref in enumerate(failing):
        with pytest.raises(ValueError, match=f"ValueError: {n}$"):
            get(ref)
    assert get(nested) == [[n, n + 1, n + 2] for n in range(30)]
    assert get(threads) == [list(range(12))] * 4


def test_a_thread_can_ask_whether_it_was_cancelled(four, gate):
    several = gpunb.remote(max_concurrency=2)(Several).remote()
    ref = several.until_cancelled.remote(gate)
    gate.await_("begun")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert get(several.nested.remote(1)) == [1, 2, 3]


class Async:
    def __init__(self):
        self.inside = 0
        self.most = 0
        self.log = []
        self.loop = asyncio.get_running_loop()

    async def hold(self, gate, name):
        await gate.enter_async(name)
        return gpunb.get_runtime_context().get_task_id()

    async def sleep(self, seconds):
        self.inside += 1
        self.most = max(self.most, self.inside)
        await asyncio.sleep(seconds)
        self.inside -= 1
        return self.most

    def plain(self, x):
        assert asyncio.get_running_loop() is self.loop
        return x, gpunb.get_runtime_context().get_task_id()

    async def fail(self, n):
        await asyncio.sleep(0)
        raise ValueError(n)

    async def refs(self, refs):
        first = await refs[0]
        return [first, *await asyncio.gather(*refs[1:])]

    async def blocking(self, n):
        return gpunb.get([same.remote(n), same.remote(n + 1)])

    async def in_executor(self, n):
        return await asyncio.to_thread(lambda: gpunb.get(same.remote(n)))

    async def until_cancelled(self, gate):
        try:
            await gate.enter_async("begun")
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def deaf(self, gate):
        try:
            await gate.enter_async("begun")
        except asyncio.CancelledError:
            return "went on"

    async def forget(self, text):
        async def later():
            await asyncio.sleep(0.05)
            self.log.append(text)
            echo(text, flush=True)

        self.task = asyncio.create_task(later())

    async def count(self, n):
        for each in range(n):
            await asyncio.sleep(0)
            yield each

    async def own_cancel(self):
        raise asyncio.CancelledError("of my own")

    async def logged(self):
        return self.log

    async def pid(self):
        return os.getpid()


AsyncActor = gpunb.remote(Async)


def test_coroutines_run_at_once(four, gate):
    actor = AsyncActor.remote()
    refs = [actor.hold.remote(gate, n) for n in range(20)]
    for n in range(20):
        gate.await_(n)
    plain = actor.plain.remote(5)
    assert get(plain) == (5, plain.task_id)
    gate.open()
    assert get(refs) == [ref.task_id for ref in refs]


def test_a_thousand_coroutines(four):
    actor = AsyncActor.remote()
    begin = time.monotonic()
    found = get([actor.sleep.remote(0.5) for _ in range(1000)], 30)
    assert time.monotonic() - begin < 10
    assert max(found) > 300


def test_coroutines_keep_the_limit(four):
    actor = AsyncActor.options(max_concurrency=3).remote()
    assert max(get([actor.sleep.remote(0.01) for _ in range(12)])) == 3


def test_coroutines_fail_each_for_itself(four):
    actor = AsyncActor.remote()
    refs = [actor.fail.remote(n) for n in range(5)]
    for n, ref in enumerate(refs):
        with pytest.raises(ValueError, match=f"{n}$") as caught:
            get(ref)
        assert "gpunb/workers" not in str(caught.value)
    with pytest.raises(BaseException, match="of my own") as caught:
        get(actor.own_cancel.remote())
    assert isinstance(caught.value, (TaskError, asyncio.CancelledError))


def test_coroutines_wait_for_refs(four):
    actor = AsyncActor.remote()
    refs = [same.remote(n) for n in range(10)]
    assert get([actor.refs.remote(refs) for _ in range(5)]) == [list(range(10))] * 5
    assert get(actor.refs.remote([gpunb.put(1), AsyncActor.remote().blocking.remote(1)]))[0] == 1
    with pytest.raises(ZeroDivisionError):
        get(actor.refs.remote([gpunb.remote(lambda: 1 / 0).remote()]))


@both
def test_blocking_calls_in_coroutines(four):
    actor = AsyncActor.remote()
    refs = [actor.blocking.remote(n) for n in range(20)]
    more = [actor.in_executor.remote(n) for n in range(20)]
    more_refs = [actor.refs.remote([same.remote(n)]) for n in range(20)]
    assert get(refs) == [[n, n + 1] for n in range(20)]
    assert get(more) == list(range(20))
    assert get(more_refs) == [[n] for n in range(20)]


@both
def test_cancel_a_coroutine(four, gate):
    actor = AsyncActor.options(max_concurrency=1).remote()
    running, queued = actor.until_cancelled.remote(gate), actor.plain.remote(1)
    gate.await_("begun")
    gpunb.cancel(queued)
    gpunb.cancel(running)
    for ref in (running, queued):
        with pytest.raises(TaskCancelledError):
            get(ref)
    assert get(actor.logged.remote()) == ["cancelled"]
    gate.open()
    for ref in (actor.deaf.remote(gate), running, actor.logged.remote()):
        with pytest.raises(ValueError, match="force"):
            gpunb.cancel(ref, force=True)
        gpunb.wait([ref])
        with pytest.raises(ValueError, match=r"force.*gpunb\.kill"):
            gpunb.cancel(ref, force=True)


def test_a_coroutine_that_ignores_its_cancellation(four, gate):
    actor = AsyncActor.remote()
    ref = actor.deaf.remote(gate)
    gate.await_("begun")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    assert get(actor.logged.remote()) == []


def test_cancel_a_coroutine_at_every_moment(four):
    actor = AsyncActor.remote()
    get(actor.logged.remote())
    for step in range(40):
        ref = actor.sleep.remote(PATIENCE * 3)
        time.sleep(step * 0.00005)
        gpunb.cancel(ref)
        with pytest.raises(TaskCancelledError):
            get(ref)


@pytest.mark.parametrize("threads", [False, True])
def test_cancel_a_method_at_every_moment(four, threads):
    class Waits:
        def wait(self, values):
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline and not gpunb.get_runtime_context().is_canceled():
                time.sleep(0.001)
            assert time.monotonic() < deadline
            raise KeyboardInterrupt

        def alive(self, value):
            return value

    options = {"max_concurrency": 2} if threads else {}
    actor = gpunb.remote(Waits).options(**options).remote()
    value = gpunb.put([1])
    assert get(actor.alive.remote(1)) == 1
    for step in range(40):
        ref = actor.wait.remote([value])
        time.sleep(step * 0.0001)
        gpunb.cancel(ref)
        with pytest.raises((TaskCancelledError, KeyboardInterrupt)):
            get(ref)
        assert get(actor.alive.remote(step)) == step
    assert get(value) == [1]


def test_a_task_left_in_the_background(four, said):
    actor = AsyncActor.remote()
    get(actor.forget.remote("from the background"))
    eventually(lambda: get(actor.logged.remote()) == ["from the background"])
    pid = get(actor.pid.remote())
    eventually(lambda: "from the background" in "".join(said))
    assert "".join(said) == f"(Async pid={pid}) from the background\n"


@both
def test_an_async_generator_of_an_actor(four):
    actor = AsyncActor.remote()
    assert [get(ref) for ref in actor.count.remote(5)] == list(range(5))
    two = [actor.count.remote(100) for _ in range(2)]
    assert [[get(ref) for ref in each] for each in two] == [list(range(100))] * 2


def test_max_pending_calls(four, gate):
    counter = Counter.options(max_pending_calls=3).remote()
    refs = [counter.hold.remote(gate)]
    gate.await_("held")
    refs += [counter.add.remote() for _ in range(2)]
    with pytest.raises(PendingCallsLimitExceeded, match="max_pending_calls=3"):
        counter.add.remote()
    cancelled = refs.pop()
    gpunb.cancel(cancelled)
    with pytest.raises(TaskCancelledError):
        get(cancelled)
    refs.append(counter.add.remote())
    gate.open()
    assert get(refs) == [0, 1, 2]
    assert get([counter.add.remote() for _ in range(3)]) == [3, 4, 5]


@pytest.mark.parametrize("kind", ["sync", "threads", "async"])
def test_forked_children(four, said, kind):
    """A child that returns as if it were the actor is none; others may do as they like."""

    class Sync:
        def returns(self):
            pid = os.fork()
            if pid:
                os.waitpid(pid, 0)
            return pid > 0

        def prints(self):
            pid = os.fork()
            if not pid:
                echo("from the child", flush=True)
                os._exit(0)
            os.waitpid(pid, 0)

        def pool(self):
            import multiprocessing

            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(abs, [-1, -2])

        def pid(self):
            return os.getpid()

    class Async:
        async def returns(self):
            pid = os.fork()
            await asyncio.sleep(0)
            if pid:
                os.waitpid(pid, 0)  # noqa: ASYNC222 - it is over soon
            return pid > 0

        prints, pool, pid = Sync.prints, Sync.pool, Sync.pid

    cls = gpunb.remote(Async if kind == "async" else Sync)
    actor = cls.options(max_concurrency=1 if kind == "sync" else 3).remote()
    pid = get(actor.pid.remote())
    for _ in range(3):
        assert get(actor.returns.remote())
    get(actor.prints.remote())
    assert get(actor.pool.remote()) == [1, 2]
    assert {get(actor.pid.remote()) for _ in range(10)} == {pid}
    eventually(lambda: "from the child" in "".join(said))


def test_threads_that_a_call_left(four, said):
    class Leaves:
        def leave(self):
            def work():
                time.sleep(0.05)
                self.late = gpunb.get(same.remote(5))
                echo("late", self.late)

            self.thread = threading.Thread(target=work)
            self.thread.start()

        def join(self):
            self.thread.join(PATIENCE)
            return self.late

    for concurrency in (1, 2):
        actor = gpunb.remote(Leaves).options(max_concurrency=concurrency).remote()
        get(actor.leave.remote())
        time.sleep(0.2 * (concurrency - 1))
        assert get(actor.join.remote()) == 5
    eventually(lambda: "".join(said).count("late 5\n") == 2)


# -------------------------------------------------------------------------------- named actors


def test_names(four):
    counter = Counter.options(name="the one").remote(1)
    found = gpunb.get_actor("the one")
    assert found == counter
    assert get(found.add.remote()) == 2
    with pytest.raises(ValueError, match=r"'the one' is taken by the actor Counter"):
        Counter.options(name="the one").remote()
    other = Counter.options(name="the one", namespace="mine").remote(10)
    assert gpunb.get_actor("the one", namespace="mine") == other
    with pytest.raises(ValueError, match="no actor has the name 'nobody': there are 'the one'"):
        gpunb.get_actor("nobody")
    with pytest.raises(ValueError, match="empty"):
        gpunb.get_actor("")
    with pytest.raises(TypeError, match="text"):
        gpunb.get_actor(3)

    @gpunb.remote
    def by_name(name):
        return gpunb.get(gpunb.get_actor(name).add.remote(5))

    @gpunb.remote
    class Finder:
        def find(self, name):
            return gpunb.get_actor(name)

    assert get(by_name.remote("the one")) == 7
    assert get(Finder.remote().find.remote("the one")) == counter
    with pytest.raises(ValueError, match="no actor has the name"):
        get(by_name.remote("nobody"))


def test_a_name_is_free_again(four):
    for end in ("del", "kill"):
        counter = Counter.options(name="again").remote()
        get(counter.read.remote())
        if end == "kill":
            gpunb.kill(counter)
        del counter
        with pytest.raises(ValueError, match="again"):
            gpunb.get_actor("again")
    counter = Counter.options(name="again").remote()
    with pytest.raises(ActorDiedError):
        get(counter.crash.remote())
    Counter.options(name="again").remote()


def test_get_if_exists(four):
    @gpunb.remote
    class Other:
        def hello(self):
            return "hello"

    first = Counter.options(name="x", get_if_exists=True).remote(1)
    second = Counter.options(name="x", get_if_exists=True).remote(2)
    assert first == second
    assert get(second.read.remote()) == 1
    third = Other.options(name="x", get_if_exists=True).remote()
    assert third == first
    assert get(third.add.remote()) == 2
    with pytest.raises(AttributeError, match="hello"):
        third.hello  # noqa: B018

    @gpunb.remote
    def inside():
        return Counter.options(name="x", get_if_exists=True).remote()

    assert get(inside.remote()) == first
    with pytest.raises(ValueError, match="needs the name"):
        Counter.options(get_if_exists=True)


def test_the_context_of_an_actor(four):
    @gpunb.remote
    class Self:
        def facts(self):
            context = gpunb.get_runtime_context()
            return context.get_actor_id(), context.get_actor_name(), context.current_actor

        def value(self):
            return 5

    actor = Self.options(name="self").remote()
    ident, name, handle = get(actor.facts.remote())
    assert (ident, name, handle) == (actor._actor_id, "self", actor)
    assert get(handle.value.remote()) == 5
    with pytest.raises(RuntimeError, match="no current actor"):
        gpunb.get_runtime_context().current_actor  # noqa: B018
    assert gpunb.get_runtime_context().get_actor_id() is None


def test_a_detached_actor(four):
    def make():
        counter = Counter.options(name="daemon", lifetime="detached").remote(1)
        return get(counter.pid.remote())

    pid = make()
    assert_still(lambda: alive(pid))
    counter = gpunb.get_actor("daemon")
    assert get(counter.add.remote()) == 2
    gpunb.kill(counter)
    gone(pid)


def assert_still(true, seconds=0.1):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert true()
        time.sleep(0.01)


# -------------------------------------------------------------------------------------- classes


def test_inheritance_and_other_kinds_of_classes(four):
    class Base(abc.ABC):
        def __init__(self, x):
            self.x = x

        @abc.abstractmethod
        def read(self):
            return self.x

        def base(self):
            return "base"

        @staticmethod
        def helper(a):
            return a

    @gpunb.remote
    class Derived(Base):
        def __init__(self, x):
            super().__init__(2 * x)

        def read(self):
            return super().read() + 1

    @gpunb.remote
    @dataclasses.dataclass
    class Data:
        a: int
        b: str = "b"

        def both(self):
            return self.a, self.b

    def logs(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return "logged", function(*args, **kwargs)

        return wrapper

    @gpunb.remote
    class Stack(list):
        __slots__ = ()
        log = math.log

        @logs
        def top(self, n=1):
            return self[-n]

        second = functools.partialmethod(top, n=2)

    derived = Derived.remote(5)
    assert get([derived.read.remote(), derived.base.remote()]) == [11, "base"]
    assert get(derived.helper.remote(3)) == 3
    assert get(Data.remote(1).both.remote()) == (1, "b")
    with pytest.raises(TypeError, match="missing"):
        Data.remote()
    stack = Stack.remote([1, 2])
    get(stack.append.remote(7))
    assert get(stack.top.remote()) == ("logged", 7)
    assert get(stack.second.remote()) == ("logged", 2)
    assert get(stack.log.remote(1)) == 0
    assert get(stack.pop.remote()) == 7


def test_a_remote_class_in_a_closure(four):
    @gpunb.remote
    class Local:
        def read(self):
            return 42

    @gpunb.remote
    def outer():
        @gpunb.remote
        def inner():
            return gpunb.get(Local.remote().read.remote())

        return gpunb.get(inner.remote())

    assert get(outer.remote()) == 42


def helper():
    return 1


def test_a_helper_that_is_redefined_is_seen(four):
    @gpunb.remote
    class Uses:
        def read(self):
            return helper()

    assert get(Uses.remote().read.remote()) == 1
    original = globals()["helper"]
    try:
        globals()["helper"] = lambda: 2
        assert get(Uses.remote().read.remote()) == 2
    finally:
        globals()["helper"] = original


def test_num_returns_of_a_method(four):
    @gpunb.remote
    class Splits:
        @gpunb.method(num_returns=2)
        def two(self):
            return 1, 2

        @gpunb.method(name="shown")
        def fail(self):
            raise ValueError

        def three(self):
            return [1, 2, 3]

    splits = Splits.remote()
    assert get(splits.two.remote()) == [1, 2]
    assert get(splits.three.options(num_returns=3).remote()) == [1, 2, 3]
    assert splits.three.options(num_returns=0).remote() is None
    assert get(splits.two.options(num_returns=1).remote()) == (1, 2)
    with pytest.raises(ValueError, match=r"shown \(#"):
        get(splits.fail.remote())


# -------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_restarts": -2}, ValueError, "max_restarts=-2"),
        ({"max_restarts": 1.5}, TypeError, "max_restarts"),
        ({"max_task_retries": "a"}, TypeError, "max_task_retries"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency=0"),
        ({"max_pending_calls": 0}, ValueError, "max_pending_calls=0"),
        ({"lifetime": "for ever"}, ValueError, "lifetime='for ever'"),
        ({"get_if_exists": 1}, TypeError, "get_if_exists"),
        ({"name": ""}, ValueError, "name=''"),
        ({"name": 3}, TypeError, "name"),
        ({"namespace": 3}, TypeError, "namespace"),
        ({"num_gpus": 1.5}, ValueError, "1.5"),
        ({"num_gpus": "a"}, TypeError, "num_gpus"),
        ({"num_returns": 2}, ValueError, "one of functions and methods, not of classes"),
        ({"max_calls": 2}, ValueError, "one of functions, not of classes"),
        ({"max_retries": 2}, ValueError, "one of functions, not of classes"),
        ({"max_restart": 2}, ValueError, "did you mean 'max_restarts'"),
        ({"runtime_env": {"pip": []}}, ValueError, "'pip'"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_wrong_options(options, error, words):
    class Plain:
        pass

    with pytest.raises(error, match=words):
        gpunb.remote(**options)(Plain)
    with pytest.raises(error, match=words):
        gpunb.remote(Plain).options(**options)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_returns": -1}, ValueError, "num_returns=-1"),
        ({"num_returns": "many"}, ValueError, "'many'"),
        ({"num_returns": 1.5}, TypeError, "num_returns"),
        ({"max_task_retries": -2}, ValueError, "max_task_retries"),
        ({"retry_exceptions": ValueError}, TypeError, "retry_exceptions"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "1"}, TypeError, "timeout"),
        ({"num_gpus": 1}, ValueError, "not of methods"),
        ({"max_retries": 1}, ValueError, "not of methods"),
        ({}, TypeError, "options"),
    ],
    ids=str,
)
def test_wrong_options_of_methods(options, error, words):
    with pytest.raises(error, match=words):
        gpunb.method(**options)


def test_wrong_options_of_calls(four):
    counter = Counter.remote()
    with pytest.raises(ValueError, match="not of methods"):
        counter.add.options(num_gpus=1)
    with pytest.raises(ValueError, match="does not yield"):
        counter.add.options(num_returns="streaming")


def test_what_this_machine_can_never_give(four):
    for options in ({"num_gpus": 5}, {"accelerator_type": "H100"}, {"num_cpus": 3}):
        with pytest.raises(InfeasibleRequestError, match="Counter"):
            Counter.options(name="never", **options).remote()
    with pytest.raises(ValueError, match="never"):
        gpunb.get_actor("never")


# -------------------------------------------------------------------------------------- devices


@gpunb.remote(num_gpus=0.5)
class Pinned:
    def __init__(self):
        self.at_start = gpunb.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    def look(self):
        return self.at_start, gpunb.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    def variable(self, name):
        return os.environ.get(name)


def test_halves_are_packed(four):
    actors = [Pinned.remote() for _ in range(3)]
    for expected, actor in zip([0, 0, 1], actors, strict=True):
        at_start, ids, variable = get(actor.look.remote())
        assert at_start == ([expected], str(expected))
        assert (ids, variable) == at_start
        assert get(actor.look.remote())[1] == [expected]
    typed = Pinned.options(accelerator_type="V100").remote()
    assert get(typed.look.remote())[1] == [2]
    free = Pinned.options(num_gpus=0).remote()
    assert get(free.look.remote()) == (([], ""), [], "")


def test_the_environment_of_an_actor_is_its_own(four, monkeypatch):
    actor = Pinned.options(runtime_env={"env_vars": {"OF_ACTOR": "1"}}).remote()
    assert get(actor.variable.remote("OF_ACTOR")) == "1"
    monkeypatch.setenv("SINCE_THEN", "1")
    assert get(actor.variable.remote("SINCE_THEN")) is None
    assert get(Pinned.remote().variable.remote("SINCE_THEN")) == "1"


def test_an_actor_holds_no_cpus_unless_it_asks(four):
    actors = [Counter.remote() for _ in range(5)]
    get([each.read.remote() for each in actors])
    assert gpunb.available_resources()["CPU"] == 2
    actor = Counter.options(num_cpus=2).remote()
    get(actor.read.remote())
    assert "CPU" not in gpunb.available_resources()
    del actor
    eventually(lambda: gpunb.available_resources().get("CPU") == 2)


def test_actors_in_the_status(four):
    actor = Pinned.options(name="shown").remote()
    get(actor.look.remote())
    (facts,) = gpunb.status()["actors"]
    assert facts["name"] == "shown"
    assert facts["class"] == "Pinned"
    assert alive(facts["pid"])


# --------------------------------------------------------------------------------------- output


def prints(kind):
    class Sync:
        def __init__(self):
            self.log = logging.StreamHandler()  # of this moment's stderr

        def logs(self, text):
            self.log.emit(logging.makeLogRecord({"msg": text}))

        def say(self, text, flush=False):
            echo(text, end="" if flush else "\n", flush=flush)

        def err(self, text):
            echo(text, file=sys.stderr)

        def raw(self, text):
            os.write(1, text.encode())

    class Async:
        __init__, logs = Sync.__init__, Sync.logs

        async def say(self, text, flush=False):
            await asyncio.sleep(0)
            Sync.say(self, text, flush)

        async def err(self, text):
            Sync.err(self, text)

        async def raw(self, text):
            Sync.raw(self, text)

    if kind == "async":
        return gpunb.remote(Async)
    return gpunb.remote(max_concurrency=4 if kind == "threads" else 1)(Sync)


@pytest.mark.parametrize("kind", ["sync", "threads", "async"])
def test_prints_go_to_the_call_that_printed(four, kind):
    from gpunb.runtime import output

    class Kept:
        def __init__(self, name):
            self.name = name
            self.said = []

        def text(self, stream, text):
            self.said.append((stream, text))

        def show(self, kind, content, payloads):
            pass

    sinks = []

    def factory(name):
        sinks.append(Kept(name))
        return sinks[-1]

    output.install(factory)
    try:
        actor = prints(kind).remote()
        refs = [actor.say.remote(f"call {n}") for n in range(20)]
        refs += [actor.err.remote("to stderr"), actor.say.remote("no newline", flush=True)]
        refs.append(actor.logs.remote("logged"))
        get(refs)
        refs.append(actor.raw.remote("raw\n"))
        get(refs)
    finally:
        output.install(None)
    said = ["".join(text for _, text in each.said) for each in sinks]
    assert said == [
        "",
        *(f"call {n}\n" for n in range(20)),
        "to stderr\n",
        "no newline",
        "logged\n",
        "raw\n",
    ]
    assert sinks[21].said[0][0] == "stderr"
    assert {each.name for each in sinks} == {"Sync" if kind != "async" else "Async"}


@pytest.mark.parametrize("kind", ["sync", "threads", "async"])
@pytest.mark.parametrize("end", ["del", "kill", "exit"])
def test_nothing_that_was_printed_is_lost(four, said, kind, end):
    actor = prints(kind).remote()
    refs = [actor.say.remote(f"line {n}") for n in range(50)]
    refs.append(actor.raw.remote("the last one\n"))
    if end == "kill":
        get(refs)
        gpunb.kill(actor)
    elif end == "exit":
        if kind != "sync":
            get(refs)  # else it ends while they run
        actor.__ray_terminate__.remote()
    del actor

    def all_there():
        text = "".join(said)
        return "the last one" in text and all(f"line {n}\n" in text for n in range(50))

    eventually(all_there, "the output")
    lines = "".join(said).splitlines()
    prefixes = {line.partition(")")[0].split(" pid=")[0] for line in lines}
    assert prefixes == {"(Async" if kind == "async" else "(Sync"}


def test_print_in_a_constructor_and_on_the_way_out(four, said):
    @gpunb.remote
    class Talks:
        def __init__(self):
            import atexit

            echo("made")
            atexit.register(echo, "at exit")

        def pid(self):
            return os.getpid()

    actor = Talks.remote()
    pid = get(actor.pid.remote())
    del actor
    gone(pid)
    eventually(lambda: "at exit" in "".join(said))
    assert "".join(said) == f"(Talks pid={pid}) made\n(Talks pid={pid}) at exit\n"


# ------------------------------------------------------------------------- memory and processes


def test_what_an_actor_put_outlives_it(four):
    np = pytest.importorskip("numpy")

    @gpunb.remote
    class Makes:
        def make(self):
            self.kept = gpunb.put(np.ones(1 << 17))
            return [self.kept, same.remote("task")]

    actor = Makes.remote()
    put, made = get(actor.make.remote())
    gpunb.kill(actor)
    eventually(lambda: not gpunb.status()["actors"])
    assert get(put).sum() == 1 << 17
    assert get(made) == "task"


@pytest.mark.parametrize(
    "count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_many_actors_leave_nothing_behind(four, count):
    if count > 1000 and not os.environ.get("GPUNB_SLOW_TESTS"):
        pytest.skip("set GPUNB_SLOW_TESTS for it")

    def round_trip(n):
        counter = Counter.options(num_gpus=0.25).remote(n)
        assert get(counter.add.remote()) == n + 1
        if n % 2:
            gpunb.kill(counter)

    for n in range(10):
        round_trip(n)
    assert_idle()
    before, processes, memory = descriptors(), len(marked()), resident()
    for n in range(count):
        round_trip(n)
    assert_idle()
    eventually(lambda: descriptors() <= before + 8, "descriptors are closed")
    eventually(lambda: len(marked()) <= processes + 2, "processes are gone")
    assert resident() - memory < 20 << 20


def resident():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def shared_pages():
    """Bytes of all memory segments that this process has open."""
    total = 0
    for each in os.listdir("/proc/self/fd"):
        try:
            if "memfd:" in os.readlink(f"/proc/self/fd/{each}"):
                total += os.stat(f"/proc/self/fd/{each}").st_blocks * 512
        except OSError:
            continue
    return total


def test_a_thousand_arrays_cost_their_size(four):
    np = pytest.importorskip("numpy")

    @gpunb.remote
    class Makes:
        def make(self, n):
            return np.full(1 << 17, n)

    actor = Makes.remote()
    count = 200 if not os.environ.get("GPUNB_SLOW_TESTS") else 1000
    before = shared_pages()
    refs = [actor.make.remote(n) for n in range(count)]
    gpunb.wait(refs, num_returns=count, timeout=60)
    assert gpunb.status()["objects"]["bytes"] < count * (1 << 20) * 1.02
    assert shared_pages() - before < count * (1 << 20) * 1.1
    assert get(refs[-1])[0] == count - 1
    del refs
    gpunb.kill(actor)


# --------------------------------------------------------------------- programs of their own


def test_classes_of_main_and_a_detached_actor_until_the_end(tmp_path):
    done = script(f"""
        import gpunb, os, pathlib

        scale = 2

        @gpunb.remote
        class Model:
            def __init__(self, x):
                self.x = x
            def read(self):
                return self.x * scale
            def pid(self):
                return os.getpid()

        if __name__ == "__main__":
            gpunb.init(num_cpus=2, num_gpus=1, preload=())
            model = Model.options(num_gpus=1).remote(3)
            print(gpunb.get(model.read.remote()))
            scale = 5
            print(gpunb.get(model.read.remote()))
            del model
            print(gpunb.get(Model.remote(3).read.remote()))
            Model.options(name="stays", lifetime="detached").remote(1)
            pid = gpunb.get(gpunb.get_actor("stays").pid.remote())
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(pid))
            gpunb.shutdown()
            gpunb.init(num_cpus=2, num_gpus=0, preload=())
            print(gpunb.get(Model.remote(4).read.remote()))
            try:
                gpunb.get_actor("stays")
            except ValueError as error:
                print("gone")
        """)
    assert done.stderr == ""
    assert done.stdout.split() == ["6", "6", "15", "20", "gone"]
    gone(begun(tmp_path / "pid")[0])


def test_a_handle_of_another_session():
    done = script("""
        import gpunb

        @gpunb.remote
        class Counter:
            def read(self):
                return 0

        if __name__ == "__main__":
            gpunb.init(num_cpus=1, num_gpus=0, preload=())
            counter = Counter.remote()
            print(gpunb.get(counter.read.remote()))
            gpunb.shutdown()
            gpunb.init(num_cpus=1, num_gpus=0, preload=())
            try:
                counter.read.remote()
            except gpunb.exceptions.ActorDiedError as error:
                print(error)
            gpunb.kill(counter)
            print(counter)
        """)
    assert done.stderr == ""
    zero, why, shown = done.stdout.splitlines()
    assert zero == "0"
    assert "shut down" in why
    assert shown.startswith("<Actor Counter #")
