"""Jupyter's Stop: interrupts of the kernel while it submits and waits."""

from __future__ import annotations

import signal

import pytest

import gpunb
from gpunb.exceptions import DeadlockError, GpunbError, TaskError
from tests.api.control.tasks import get
from tests.sessions import running

_STOPS = {
    "get": "gpunb.get(ref)",
    "get with a timeout": "gpunb.get([ref], timeout=30)",
    "wait": "gpunb.wait([ref])",
    "await": "asyncio.run(wait_for(ref))",
    "next": "next(slow_generator.remote(folder))",
    "as_completed": "list(gpunb.as_completed([ref]))",
    "async for": "asyncio.run(loop_over(slow_generator.remote(folder)))",
    "result": "ref.result()",
    "future": "ref.future().result()",
}


@pytest.mark.parametrize("receiver", ["main thread", "other thread"])
def test_an_interrupt_ends_only_the_wait(tmp_path, receiver):
    """An interrupt is noticed wherever the program sleeps, and ends nothing else.

    One that another thread receives does not end the system call in which the main thread waits,
    nor does one that comes just before that call.
    """
    text = f"""
        import asyncio, pathlib, signal, sys, threading, time, gpunb
        from tests.waiting import until_main_sleeps

        folder = pathlib.Path({str(tmp_path)!r})

        @gpunb.remote
        def slow(folder):
            while not (folder / "open").exists():
                time.sleep(0.005)
            return 1

        @gpunb.remote
        def slow_generator(folder):
            yield slow.__wrapped__(folder)

        @gpunb.remote
        class Counter:
            def __init__(self):
                self.value = 0
            def add(self):
                self.value += 1
                return self.value

        async def wait_for(ref):
            return await ref

        async def loop_over(generator):
            async for ref in generator:
                return await ref

        def interrupt():
            until_main_sleeps()
            signal.pthread_kill(receiver(), signal.SIGINT)

        if __name__ == "__main__":
            main = threading.main_thread().ident
            receiver = (lambda: main) if {receiver!r} == "main thread" else threading.get_ident
            gpunb.init(num_cpus=20, num_gpus=1, preload=())
            counter = Counter.options(num_gpus=1).remote()
            gpunb.get(counter.add.remote())
            ref = slow.remote(folder)
            for wait in {list(_STOPS.values())!r}:
                thread = threading.Thread(target=interrupt)
                try:
                    thread.start()
                    eval(wait)
                    print("not stopped")
                except KeyboardInterrupt:
                    print("stopped")
                thread.join()
            print(gpunb.get(counter.add.remote()))
            (folder / "open").touch()
            print(gpunb.get(ref, timeout=10) > 0, gpunb.get(slow.remote(folder), timeout=10) > 0)
    """
    with running(text) as process:
        out, err = process.communicate(timeout=60)
    assert err == ""
    *found, count, both_ = out.splitlines()
    assert dict(zip(_STOPS, found, strict=True)) == dict.fromkeys(_STOPS, "stopped")
    assert (count, both_) == ("2", "True True")


def test_interrupts_at_any_moment_leave_a_session_that_works(tmp_path):
    """Interrupts at any moment of submitting and getting leave a session that works.

    Each is sent inside the `try`: a second one that came before the first was
    handled would hit this program's own lines.
    """
    text = """
        import gc, os, queue, random, signal, sys, threading, time, gpunb

        @gpunb.remote
        def same(x):
            return x

        @gpunb.remote
        class Actor:
            def same(self, x):
                return x

        @gpunb.remote
        def count(n):
            yield from range(n)

        def interrupt():
            random.seed(1)
            for _ in range(INTERRUPTS):
                guarded.get()
                time.sleep(random.random() * 0.03)
                os.kill(os.getpid(), signal.SIGINT)

        def work():
            guarded.put(True)
            actor = Actor.remote()
            while raised < INTERRUPTS:
                ref = gpunb.put([1])
                gpunb.get([same.remote(ref), actor.same.remote([ref])])
                [gpunb.get(each) for each in count.remote(5)]

        if __name__ == "__main__":
            INTERRUPTS = 40
            gpunb.init(num_cpus=2, num_gpus=1, preload=())
            guarded = queue.SimpleQueue()
            threading.Thread(target=interrupt, daemon=True).start()
            raised = 0
            while raised < INTERRUPTS:
                try:
                    work()
                except KeyboardInterrupt:
                    raised += 1
            assert gpunb.get([same.remote(n) for n in range(50)], timeout=10) == list(range(50))
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                gc.collect()
                facts = gpunb.status()
                if not facts["running"] and not facts["actors"]:
                    break
                time.sleep(0.02)
            kept = facts["objects"]["objects"]
            print(raised, facts["running"], facts["actors"], kept)
    """
    with running(text) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.split() == ["40", "[]", "[]", "0"]


def test_errors_name_what_failed(two):
    @gpunb.remote
    def outer():
        return gpunb.get(inner.remote())

    @gpunb.remote
    def inner():
        raise KeyError("deep")

    with pytest.raises(KeyError, match="deep") as caught:
        get(outer.remote())
    assert isinstance(caught.value, TaskError)
    assert "inner" in str(caught.value)
    assert issubclass(DeadlockError, GpunbError)
    assert signal.getsignal(signal.SIGINT) is not None
