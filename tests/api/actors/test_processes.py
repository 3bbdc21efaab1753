"""Actors: their output, their memory, and what is left of their processes."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import pytest

import gpunb
from tests.api.actors.counter import Counter, get, gone, same
from tests.sessions import assert_idle, begun, descriptors, marked, script
from tests.waiting import eventually

echo = print  # what the code in workers does


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
    from gpunb.protocol import sink

    class Kept(sink.Sink):
        def __init__(self, name):
            self.name = name
            self.printed = []

        def text(self, stream, text):
            self.printed.append((stream, text))

    sinks = []

    def factory(name):
        sinks.append(Kept(name))
        return sinks[-1]

    sink.install(factory)
    try:
        actor = prints(kind).remote()
        refs = [actor.say.remote(f"call {n}") for n in range(20)]
        refs += [actor.err.remote("to stderr"), actor.say.remote("no newline", flush=True)]
        refs.append(actor.logs.remote("logged"))
        get(refs)
        refs.append(actor.raw.remote("raw\n"))
        get(refs)
    finally:
        sink.install(None)
    printed = ["".join(text for _, text in each.printed) for each in sinks]
    assert printed == [
        "",
        *(f"call {n}\n" for n in range(20)),
        "to stderr\n",
        "no newline",
        "logged\n",
        "raw\n",
    ]
    assert sinks[21].printed[0][0] == "stderr"
    assert {each.name for each in sinks} == {"Sync" if kind != "async" else "Async"}


@pytest.mark.parametrize("kind", ["sync", "threads", "async"])
@pytest.mark.parametrize("end", ["del", "kill", "exit"])
def test_nothing_that_was_printed_is_lost(four, console, kind, end):
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
        text = "".join(console)
        return "the last one" in text and all(f"line {n}\n" in text for n in range(50))

    eventually(all_there, "the output")
    lines = "".join(console).splitlines()
    prefixes = {line.partition(")")[0].split(" pid=")[0] for line in lines}
    assert prefixes == {"(Async" if kind == "async" else "(Sync"}


def test_print_in_a_constructor_and_on_the_way_out(four, console):
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
    eventually(lambda: "at exit" in "".join(console))
    assert "".join(console) == f"(Talks pid={pid}) made\n(Talks pid={pid}) at exit\n"


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
