"""Actors: restarts after crashes, and calls that are tried again."""

from __future__ import annotations

import os
import sys

import pytest

import gpunb
from gpunb.exceptions import ActorDiedError, ActorError, ActorUnavailableError, GetTimeoutError
from tests.api.actors.counter import Counter, back, get, same
from tests.sessions import both
from tests.waiting import eventually

echo = print  # what the code in workers does


@both
def test_a_restart_makes_a_new_instance(four, tmp_path, monkeypatch):
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
        assert back(actor.look) == (*expected, True)
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


def test_a_constructor_that_fails_ends_the_actor(four):
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
def test_a_constructor_that_ends_the_process_ends_the_actor(four, how):
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


def test_an_actor_starts_again_after_a_crash_of_its_constructor(four, tmp_path):
    @gpunb.remote(max_restarts=1, max_task_retries=1)
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
        lost, after = actor.crash.remote(), actor.read.options(max_task_retries=1).remote()
    with pytest.raises(ActorError):
        get(lost)
    with pytest.raises(ActorError, match="status 1" if asynchronous else "not twice"):
        get(after)
    with pytest.raises(ActorDiedError, match="not twice"):
        back(actor.read)


def test_calls_wait_for_a_slow_constructor(four, gate):
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


def test_an_actor_can_restart_many_times_in_a_row(four):
    counter = Counter.options(max_restarts=-1, max_task_retries=0).remote()
    for _ in range(10):
        with pytest.raises(ActorUnavailableError):
            get(counter.crash.remote())
        back(counter.read)
    assert get(counter.add.remote()) == 1


def test_a_restart_goes_before_waiting_tasks(four):
    """Who restarts comes before others that ask for the same."""
    counter = Counter.options(num_gpus=4, max_restarts=1).remote()
    get(counter.read.remote())
    ref = gpunb.remote(num_gpus=4)(os.getpid).remote()
    with pytest.raises(ActorUnavailableError):
        get(counter.crash.remote())
    assert back(counter.read) == 0
    assert gpunb.wait([ref], timeout=0) == ([], [ref])
    del counter
    assert get(ref) > 0
