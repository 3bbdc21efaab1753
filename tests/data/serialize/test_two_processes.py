"""Tests that need two real processes: identity, isolation and write access."""

from __future__ import annotations

import builtins
import gc
import os
import pickle
import socket
import subprocess
import sys

import numpy as np
import pytest

from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload, dump_failure, dumps, load_failure, loads

WORKER = """
import os, pickle, socket, sys
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload, dump_failure, dumps, loads

link = socket.socket(fileno=int(sys.argv[1]))
while True:
    data, descriptors, _, _ = socket.recv_fds(link, 1 << 17, 1)
    if not data:
        break
    wire, fresh = pickle.loads(data)
    if fresh:
        namespace = {"__name__": "__main__"}
    segment = Segment.adopt(descriptors[0]) if descriptors else None
    failed = False
    try:
        function, *arguments = loads(
            Payload.from_wire(wire, segment), namespace=namespace
        )
        payload = dumps(function(*arguments))
        del function, arguments
    except Exception as error:
        payload = dump_failure(error, task="the task")
        failed = True
    if segment is not None:
        segment.close()
    inner = [payload.segment.fileno()] if payload.segment is not None else []
    socket.send_fds(link, [pickle.dumps((payload.wire(), failed))], inner)
    if payload.segment is not None:
        payload.segment.close()
link.close()
"""


class Worker:
    """Calls functions in another process; in a new namespace if `fresh`."""

    def __init__(self):
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", WORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    def call(self, function, *arguments, **options):
        return self.send(dumps((function, *arguments)), **options)

    def send(self, payload, *, fresh=True, **options):
        segment = [payload.segment.fileno()] if payload.segment is not None else []
        socket.send_fds(self.link, [pickle.dumps((payload.wire(), fresh))], segment)
        data, descriptors, _, _ = socket.recv_fds(self.link, 1 << 17, 1)
        wire, failed = pickle.loads(data)
        with_segment = Segment.adopt(descriptors[0]) if descriptors else None
        payload = Payload.from_wire(wire, with_segment)
        try:
            if failed:
                raise load_failure(payload)
            return loads(payload, **options)
        finally:
            if with_segment is not None:
                with_segment.close()

    def close(self):
        self.link.close()
        assert self.process.wait(10) == 0


@pytest.fixture(scope="module")
def shared_worker():
    made = Worker()
    yield made
    made.close()


@pytest.fixture
def worker(shared_worker):
    def there():
        return len(__import__("os").listdir("/proc/self/fd"))

    here, away = len(os.listdir("/proc/self/fd")), shared_worker.call(there)
    yield shared_worker
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= here
    shared_worker.call(lambda: __import__("gc").collect())
    assert shared_worker.call(there) == away


def notebook(code, **names):
    space = {"__name__": "__main__", "__builtins__": builtins, **names}
    exec(compile(code, "<cell>", "exec", dont_inherit=True), space)
    return space


CLASSES = """
import enum, dataclasses
class C:
    made = 0
    def __init__(self, v): self.v = v
class Colour(enum.Enum):
    RED = 1
    BLUE = 2
@dataclasses.dataclass
class D:
    x: int
class E(Exception):
    def __init__(self, a, *, b): self.b = b
def keep(thing): kept_here.append(thing); return thing
def is_same(thing): return type(thing) is type(kept_here[-1]), isinstance(thing, C)
kept_here = []
def make(v): return C(v)
def colour(c): return c, c is Colour.RED, Colour.BLUE
def fail(): raise E(1, b=2)
"""


def test_class_keeps_its_identity_in_both_directions(worker):
    home = notebook(CLASSES)
    instance = home["C"](5)
    back = worker.call(home["keep"], instance)
    assert (type(back) is home["C"], back.v, back is instance) == (True, 5, False)
    assert worker.call(home["is_same"], home["C"](6), fresh=False) == (True, True)
    assert isinstance(worker.call(home["make"], 7), home["C"])
    assert isinstance(worker.call(lambda: [home["D"](3)])[0], home["D"])
    assert worker.call(lambda: [home["D"](3)]) == [home["D"](3)]


def test_changed_class_is_not_set_back_by_a_result(worker):
    home = notebook(CLASSES)
    payload = dumps((home["make"], 1))
    home["C"].made = 9
    assert isinstance(worker.send(payload), home["C"])
    assert home["C"].made == 9


def test_members_of_enums_keep_their_identity(worker):
    home = notebook(CLASSES)
    red, same, blue = worker.call(home["colour"], home["Colour"].RED)
    assert red is home["Colour"].RED
    assert blue is home["Colour"].BLUE
    assert same


def test_error_class_of_the_notebook_keeps_its_identity(worker):
    home = notebook(CLASSES)
    with pytest.raises(home["E"]) as info:
        worker.call(home["fail"])
    assert info.value.b == 2
    assert info.value.process == worker.process.pid


def test_class_made_in_a_worker_keeps_its_identity_in_both_directions(worker):
    make = notebook(
        "def make():\n"
        "    global New\n"
        "    class New: pass\n"
        "    return New()\n"
        "def check(thing): return type(thing) is New\n"
    )
    home = notebook("")
    instance = worker.call(make["make"], namespace=home)
    assert worker.call(make["check"], instance, fresh=False)
    assert worker.call(make["check"], type(instance)(), fresh=False)


def test_returned_functions_use_the_notebooks_namespace(worker):
    away = notebook("def outer():\n    global k, f\n    k = 1\n    def f(): return k\n    return f")
    home = notebook("")
    f = worker.call(away["outer"], namespace=home)
    assert f.__globals__ is home
    assert f() == 1
    home["k"] = 2
    assert f() == 2


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_writes_of_one_process_are_not_seen_in_the_other(worker, size):
    array = np.zeros(size)
    payload = dumps((lambda a: (a.__iadd__(1), a.flags.writeable), array))
    for _ in range(2):  # the second call would see what the first one wrote
        back, writable = worker.send(payload)
        assert writable
        assert (back == 1).all()
        back += 1
        assert (array == 0).all()


def test_a_receiver_cannot_change_a_segment(worker):
    def attack(number):
        import mmap
        import os

        tried = []
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if "memfd:gpunb" not in os.readlink(f"/proc/self/fd/{descriptor}"):
                    continue
            except OSError:
                continue
            for change in (
                lambda d=descriptor: os.pwrite(d, b"x", 0),
                lambda d=descriptor: os.ftruncate(d, 1),
                lambda d=descriptor: mmap.mmap(d, 4096, flags=mmap.MAP_SHARED),
            ):
                try:
                    change()
                    tried.append("done")
                except PermissionError:
                    tried.append("refused")
        return tried

    payload = dumps((attack, np.zeros(100_000)))
    assert set(worker.send(payload)) == {"refused"}
    assert loads(payload)[1].sum() == 0


def test_many_large_values_leave_no_shared_memory(worker):
    before = set(os.listdir("/dev/shm"))
    for n in range(20):
        assert worker.call(lambda a: a * 2, np.full(50_000, n)).sum() == 100_000 * n
    assert set(os.listdir("/dev/shm")) == before


def test_error_of_another_process_names_function_and_pid(worker):
    def fail():
        return {}["missing"]

    with pytest.raises(KeyError) as info:
        worker.call(fail)
    assert "in fail" in str(info.value)
    assert f"failed in process {worker.process.pid}" in str(info.value)


def test_what_cannot_be_sent_back_is_named(worker):
    def lock():
        import threading

        return {"here": threading.Lock()}

    with pytest.raises(TypeError, match=r"\['here'\] is a _thread.lock"):
        worker.call(lock)


def test_a_failure_survives_a_third_process(worker):
    home = notebook(CLASSES)
    with pytest.raises(home["E"]) as info:
        worker.call(home["fail"])
    back = load_failure(dump_failure(info.value, task="outer (#2)"))
    assert isinstance(back, home["E"])
    assert str(back).startswith(f"outer (#2) failed in process {os.getpid()}")
    assert f"because the task failed in process {worker.process.pid}" in str(back)
