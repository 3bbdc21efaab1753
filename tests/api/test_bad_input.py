"""Whatever users do, they are told what is wrong, and the session goes on."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpunb
from gpunb.exceptions import (
    GpunbError,
    InfeasibleRequestError,
    TaskError,
    WorkerCrashedError,
)
from tests.sessions import alive, assert_idle, marked, script, session
from tests.waiting import PATIENCE, eventually


@pytest.fixture(scope="module")
def started(by_value: None) -> Iterator[None]:
    with session(num_gpus=2, num_cpus=2):
        yield


@pytest.fixture
def two(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free and no strange process."""
    yield
    assert_idle()
    eventually(lambda: set(marked()) <= ours(), f"processes left: {marked()}", within=5)


def ours() -> set[int]:
    """The processes that the session knows: the zygotes and its workers."""
    pool = gpunb.protocol.backend.existing().engine.pool
    known = {process.pid for process in pool.processes()}
    names = ("gpunb-zygote", "gpunb-preload", "gpunb-follow")
    zygotes = {pid for pid in marked() if _comm(pid) in names}
    return known | zygotes


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def get(refs):
    return gpunb.get(refs, timeout=PATIENCE)


def nothing(*args, **kwargs):
    return None


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("holds a lock of mine")


class HidesError(Exception):
    """An exception that pickle cannot carry, because of what it holds."""

    def __init__(self, lock):
        super().__init__("it went wrong")
        self.lock = lock


class NeedsTwo(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises(error, *args):
    def fail():
        raise error(*args)

    return fail


def _recurse(n=0):
    return _recurse(n + 1)


def remote(**options):
    return lambda: gpunb.remote(**options)(nothing)


def call(function, *args, **kwargs):
    """Runs the function as a task that is not tried again."""
    return lambda: get(gpunb.remote(max_retries=0)(function).remote(*args, **kwargs))


def submit(*args, **options):
    return lambda: gpunb.remote(nothing).options(**options).remote(*args)


class Idle:
    pass


def actor():
    return gpunb.remote(Idle).remote()


def _exits():
    sys.exit(4)


def _dies():
    os._exit(3)


def _is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def _segfaults():
    sys.stderr.write("the last words\n")
    ctypes.string_at(0)


def _lock():
    return threading.Lock()  # a class as of Python 3.13, a function before


def _locked():
    raise HidesError(threading.Lock())


def _closure():
    lock = threading.Lock()
    return lambda: lock


def _closes_everything():
    os.closerange(3, 256)


BAD = [
    # options
    (remote(num_gpus=-1), ValueError, "num_gpus=-1 must not be negative"),
    (remote(num_gpus=1.5), ValueError, "num_gpus=1.5 is above 1 and not whole.*1 or 2"),
    (remote(num_gpus=math.nan), ValueError, "num_gpus=nan must be a finite"),
    (remote(num_gpus=math.inf), ValueError, "num_gpus=inf must be a finite"),
    (remote(num_gpus="x"), TypeError, "num_gpus must be a number, not 'x'"),
    (remote(num_gpus=True), TypeError, "num_gpus must be a number"),
    (remote(num_gpus=0.00001), ValueError, "finer than 0.0001"),
    (remote(num_gpus=0.33333), ValueError, "round it to four decimals"),
    (remote(num_cpus=-1), ValueError, "num_cpus=-1"),
    (remote(gpu_memory="ten gigs"), ValueError, "gpu_memory='ten gigs' is not a size"),
    (remote(gpu_memory=-1), ValueError, "gpu_memory=-1"),
    (remote(gpu_memory=[]), TypeError, "gpu_memory must be"),
    (remote(gpu_memory="1GiB", num_gpus=1), ValueError, "exclude each other"),
    (remote(memory="much"), ValueError, "memory='much'"),
    (remote(resources={"GPU": 1}), ValueError, "use num_gpus="),
    (remote(resources={"a": "b"}), TypeError, "must be a number"),
    (remote(resources=["a"]), TypeError, "must be a dict"),
    (remote(accelerator_type=3), TypeError, "accelerator_type must be a text"),
    (remote(accelerator_type=""), ValueError, "must not be empty"),
    (remote(name=3), TypeError, "name must be a text"),
    (remote(num_returns=-1), ValueError, "num_returns=-1"),
    (remote(num_returns=1.0), TypeError, "num_returns must be a whole number"),
    (remote(num_returns="dynamic"), ValueError, "num_returns='dynamic'"),
    (remote(max_calls=-1), ValueError, "max_calls=-1"),
    (remote(max_retries=-2), ValueError, "max_retries=-2 must be -1"),
    (remote(max_retries="3"), TypeError, "max_retries"),
    (remote(retry_exceptions="all"), TypeError, "retry_exceptions"),
    (remote(retry_exceptions=[3]), TypeError, "retry_exceptions"),
    (remote(timeout=0), ValueError, "timeout=0"),
    (remote(timeout=math.inf), ValueError, "timeout=inf"),
    (remote(timeout="1s"), TypeError, "timeout"),
    (remote(runtime_env={"pip": ["torch"]}), ValueError, "'pip'.*only 'env_vars'"),
    (remote(runtime_env={"env_vars": {"A": 1}}), TypeError, "must hold texts"),
    (remote(runtime_env={"env_vars": {"A=B": "1"}}), ValueError, "A=B"),
    (remote(runtime_env={"env_vars": {"A": "1\0"}}), ValueError, "no environment can hold"),
    (
        remote(num_gpus=1, runtime_env={"env_vars": {"CUDA_VISIBLE_DEVICES": "3"}}),
        ValueError,
        "'CUDA_VISIBLE_DEVICES': '3', which no task can choose.*by num_gpus",
    ),
    (remote(num_gpu=1), ValueError, "unknown option 'num_gpu'; did you mean 'num_gpus'"),
    (remote(colour="red"), ValueError, "unknown option 'colour' .known are num_cpus"),
    (remote(max_call=1), ValueError, "did you mean 'max_calls'.*, max_retries,.*max_restarts"),
    (remote(max_retries=1, max_restarts=1), ValueError, "one of classes: nothing can have both"),
    (lambda: gpunb.remote(nothing).options(max_call=1), ValueError, "did you mean 'max_calls'"),
    (remote(accelerator_type=[]), ValueError, "accelerator_type=.. must not be empty: leave it"),
    # what is waited for, and what is ended
    (lambda: gpunb.get(gpunb.put(1), timeout="x"), TypeError, "timeout='x' must be a number of"),
    (lambda: gpunb.get(gpunb.put(1), timeout=math.nan), ValueError, "timeout=nan must be a"),
    (lambda: gpunb.put(1).result("y"), TypeError, "timeout='y' must be a number of seconds, or"),
    (lambda: gpunb.wait([gpunb.put(1)], timeout="z"), TypeError, "timeout='z' must be a number"),
    (lambda: gpunb.as_completed([], timeout=[]), TypeError, r"timeout=\[\] must be a number"),
    (lambda: gpunb.wait([gpunb.put(1)], num_returns="1"), TypeError, "num_returns must.*not '1'"),
    (lambda: gpunb.wait([gpunb.put(1)], num_returns=True), TypeError, "num_returns must.*not True"),
    (lambda: gpunb.cancel(gpunb.put(1), force="x"), TypeError, "force must be True or False, not"),
    (lambda: gpunb.kill(actor(), no_restart="x"), TypeError, "no_restart must be True or False"),
    (lambda: setattr(actor(), "rate", 1), AttributeError, "'rate' cannot be set.*class Idle"),
    (lambda: gpunb.method(nothing), TypeError, r"options by name, as in @gpunb.method\(num_ret"),
    # what is decorated, and how it is called
    (gpunb.remote, TypeError, "needs a function or options"),
    (lambda: gpunb.remote(1), TypeError, "takes a function or a class, not 1"),
    (lambda: gpunb.remote(nothing, num_gpus=1), TypeError, "alone or with options by name"),
    (lambda: gpunb.remote(gpunb.remote(nothing)), TypeError, "remote already"),
    (lambda: gpunb.remote(nothing)(1), TypeError, r"nothing cannot be called directly.*\.remote"),
    (
        lambda: gpunb.remote(lambda a, b: a).remote(1),
        TypeError,
        r"\(a, b\): missing a required argument: 'b'",
    ),
    (lambda: gpunb.remote(lambda a: a).remote(1, 2), TypeError, "too many positional"),
    (lambda: gpunb.remote(lambda a: a).remote(b=1), TypeError, "argument"),
    # more than there is
    (submit(num_gpus=3), InfeasibleRequestError, "nothing: .*3 GPU.*never"),
    (submit(num_cpus=3), InfeasibleRequestError, "3 CPU"),
    (submit(resources={"licence": 1}), InfeasibleRequestError, "licence"),
    (submit(gpu_memory="1GiB"), InfeasibleRequestError, "memory"),
    (submit(num_gpus=1, accelerator_type="A100"), InfeasibleRequestError, "A100"),
    # what does not travel
    (submit({"key": [Unpicklable()]}), TypeError, "argument 1 of nothing.*'key'.*holds a lock"),
    (submit(threading.Lock()), TypeError, "argument 1 of nothing cannot be sent.*lock"),
    (lambda: gpunb.put(threading.Lock()), TypeError, "put.*lock"),
    (lambda: gpunb.remote(_closure()).remote(), TypeError, "lock"),
    (call(_lock), TypeError, r"result of .*lock"),
    # how tasks end
    (call(raises(ValueError, "of the user")), ValueError, "of the user"),
    (call(raises(NeedsTwo, 1, 2)), NeedsTwo, "1 and 2"),
    (call(_locked), HidesError, "it went wrong"),
    (call(raises(KeyboardInterrupt)), TaskError, "KeyboardInterrupt"),
    (call(raises(StopIteration)), StopIteration, "StopIteration"),
    (call(raises(MemoryError, "too much")), MemoryError, "too much"),
    (call(_exits), TaskError, "SystemExit: 4"),
    (call(_dies), WorkerCrashedError, r"_dies \(#\d+\): its worker process \d+ .*status 3"),
    (call(_is_killed), WorkerCrashedError, "killed by SIGKILL"),
    (call(_segfaults), WorkerCrashedError, "killed by SIGSEGV(.|\n)*the last words"),
    (call(_recurse), RecursionError, "maximum recursion depth"),
    (call(_closes_everything), WorkerCrashedError, "ended before the task did"),
]


@pytest.mark.parametrize(("do", "error", "words"), BAD, ids=[words[:40] for *_, words in BAD])
def test_bad_input(two, do, error, words):
    with pytest.raises(error, match=f"(?s){words}"):
        do()


def test_async_functions(two):
    async def later():
        pass

    with pytest.raises(ValueError, match="async"):
        gpunb.remote(later)
    with pytest.raises(TypeError, match="async"):
        get(gpunb.remote(lambda: (later(), 1)[0]).remote())


def test_a_crash_is_retried_and_told_with_its_attempts(two):
    with pytest.raises(WorkerCrashedError, match="attempt 3"):
        get(gpunb.remote(max_retries=2, num_gpus=1)(_is_killed).remote())


def test_a_task_may_do_what_it_likes_with_its_streams(two):
    @gpunb.remote(max_calls=1)
    def spoil(how):
        if how == "none":
            sys.stdout = sys.stderr = None
        elif how == "object":
            sys.stdout = object()
        else:
            sys.stdout.close()
        return how

    assert [get(spoil.remote(how)) for how in ("none", "object", "closed")] == [
        "none",
        "object",
        "closed",
    ]


def test_a_task_that_forks_and_returns_twice(two):
    @gpunb.remote
    def fork():
        pid = os.fork()
        if pid == 0:
            try:
                gpunb.put(1)
            except GpunbError as error:
                return str(error)
            return "no error"
        os.waitpid(pid, 0)
        return "parent"

    assert [get(fork.remote()) for _ in range(3)] == ["parent"] * 3


# ------------------------------------------------------------------------------ what tasks leave


def _leave_threads(path):
    for daemon in (True, False):
        threading.Thread(target=time.sleep, args=(60,), daemon=daemon).start()


def _leave_a_child(path):
    path.write_text(str(subprocess.Popen(["sleep", "60"]).pid))


def _leave_a_daemon(path):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            grandchild = subprocess.Popen(["sleep", "60"], start_new_session=True)
            path.write_text(f"{os.getpid()} {grandchild.pid}")
            os.write(writing, b"x")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        os._exit(0)
    os.read(reading, 1)


def _leave_a_pool(path):
    import multiprocessing

    pool = multiprocessing.get_context("fork").Pool(2)
    path.write_text(" ".join(map(str, pool.map(_pid, range(4)))))
    os._exit(0)


def _pid(_):
    return os.getpid()


@pytest.mark.parametrize("leave", [_leave_threads, _leave_a_child, _leave_a_daemon, _leave_a_pool])
@pytest.mark.parametrize("end", ["returns", "is cancelled by force"])
def test_what_a_task_leaves_is_gone_with_it(two, tmp_path, leave, end):
    path = tmp_path / "pids"

    @gpunb.remote(num_gpus=1, max_retries=0)
    def task(path):
        leave(path)
        if end != "returns":
            (path.parent / "done").touch()
            time.sleep(60)

    ref = task.remote(path)
    if end != "returns" and leave is not _leave_a_pool:
        eventually((tmp_path / "done").exists)
        gpunb.cancel(ref, force=True)
    try:
        get(ref)
    except GpunbError:
        pass
    pids = [int(pid) for pid in path.read_text().split()] if path.exists() else []
    eventually(lambda: gpunb.available_resources()["GPU"] == 2, "the device is free")
    assert not any(map(alive, pids)), "the device is free only when all are gone"


# -------------------------------------------------------------------------------------- the output


def test_ten_million_lines_in_bounded_memory():
    done = script(
        """
        import gpunb, sys

        @gpunb.remote(num_gpus=1)
        def shout(count):
            block = 10_000
            for start in range(0, count, block):
                sys.stdout.write("".join(f"line {i}\\n" for i in range(start, start + block)))

        def rss():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20

        class Counts:
            def __init__(self):
                self.lines, self.first, self.last, self.most = 0, "", "", 0
            def write(self, text):
                self.first = self.first or text[:60]
                self.last = (self.last + text)[-60:]
                self.lines += text.count("\\n")
                self.most = max(self.most, rss())
            def flush(self):
                pass

        gpunb.init(num_gpus=1, num_cpus=1, preload=())
        real, sys.stdout = sys.stdout, Counts()
        before = rss()
        gpunb.get(shout.remote(10_000_000))
        counts, sys.stdout = sys.stdout, real
        print(counts.lines, counts.first.split(") ")[1].split("\\n")[0],
              counts.last.split(") ")[-1].strip(), sep="|")
        print(counts.most - before)
        """
    )
    assert done.returncode == 0, done.stderr
    what, megabytes = done.stdout.splitlines()
    assert what == "10000000|line 0|line 9999999"
    assert int(megabytes) < 100


# -------------------------------------------------------------------------------------- the kernel


def test_a_forked_kernel(two):
    script_ = """
        import gpunb, os, sys

        @gpunb.remote(num_gpus=1)
        def f():
            return gpunb.get_gpu_ids()

        gpunb.init(num_gpus=1, num_cpus=1, preload=())
        ref = gpunb.put("mine")
        assert gpunb.get(f.remote()) == [0]
        for how in ("exit", "_exit", "new session"):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                try:
                    gpunb.get(ref)
                except gpunb.exceptions.GpunbError as error:
                    print(how, "child:", error)
                del ref
                if how == "new session":
                    gpunb.shutdown()
                    gpunb.init(num_gpus=2, num_cpus=1, preload=())
                    print(gpunb.get(f.remote()))
                    gpunb.shutdown()
                sys.stdout.flush()
                os._exit(0) if how == "_exit" else sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            print("parent:", gpunb.get(f.remote()), gpunb.get(ref))
    """
    done = script(script_)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forked") == 3
    assert done.stdout.count("parent: [0] mine") == 3
    assert "\n[0]\n" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("broken", ["missing", "failing"])
def test_without_nvml(broken):
    source = (
        "import sys; sys.modules['pynvml'] = None"
        if broken == "missing"
        else """
        import sys, types
        class NVMLError(Exception):
            value = 9
        def fail(*args):
            raise NVMLError("Driver Not Loaded")
        class Broken(types.ModuleType):
            def __getattr__(self, name):
                if name.startswith("__"):
                    raise AttributeError(name)
                return NVMLError if name.startswith("NVMLError") else fail
        sys.modules['pynvml'] = Broken("pynvml")
        """
    )
    import textwrap

    body = """
        import gpunb
        s = gpunb.init(num_cpus=1, preload=())
        print(len(s.devices), gpunb.get(gpunb.remote(len).remote("abc")))
        print(" ".join(s.notes))
        try:
            gpunb.remote(num_gpus=1)(len).remote("a")
        except ValueError as error:
            print(error)
    """
    done = script(textwrap.dedent(source) + textwrap.dedent(body))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 3\n")
    assert "never be met on this machine: there are no GPUs" in done.stdout


def test_use_after_the_end(started):
    """In a script, because it ends the session."""
    done = script(
        """
        import gpunb
        gpunb.init(num_gpus=1, num_cpus=1, preload=())
        ref = gpunb.put(1)
        current = gpunb.protocol.backend.existing()
        gpunb.shutdown()
        print(repr(ref), gpunb.get_gpu_ids(), gpunb.is_initialized())
        for use in (lambda: current.fetch([ref.id], 1), lambda: current.ask("status")):
            try:
                use()
            except gpunb.exceptions.GpunbError as error:
                print(error)
        """
    )
    assert done.stdout.count("was shut down") == 2, done
    assert done.stdout.startswith("<ObjectRef put")


def test_cancel_of_an_actor_says_what_to_use(two):
    with pytest.raises(TypeError, match=r"gpunb\.kill"):
        gpunb.cancel(actor())
