"""What the system itself needs: fork, a socket echo, copying memory, starting Python.

Other topics measure their floor beside the thing itself, with `Forks`, `Echo` and `copy_time`.
"""

from __future__ import annotations

import importlib
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, median, skipped, spread

BEFORE_EACH = 3
"""A floor is measured right after others that do not count: they warm the caches up."""


class _Partner:
    """A small process of its own at the other end of a socket; ends with the ``with``."""

    def __init__(self, role: str, *arguments: str) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "benchmarks.floors", role, str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, *arguments], pass_fds=[theirs.fileno()], env=probe.environment()
        )
        theirs.close()
        self._sock.recv(64)  # it is up

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sock.close()
        self._process.wait(10)


class Forks(_Partner):
    """Forks from a small process: os.fork, os._exit in the child, os.waitpid."""

    def __init__(self, *modules: str) -> None:
        super().__init__("forks", *modules)

    def once(self) -> float:
        """Seconds from before the fork until the child was reaped."""
        for _ in range(2):
            self._sock.send(b"fork")
            seconds = int(self._sock.recv(64)) / 1e9
        return seconds


class Echo(_Partner):
    """64 bytes there and back, between two processes."""

    def __init__(self) -> None:
        super().__init__("echo")

    def once(self) -> float:
        """Seconds for one round trip."""
        sock, data = self._sock, bytes(64)
        for _ in range(BEFORE_EACH):
            sock.send(data)
            sock.recv(64)
        start = time.perf_counter()
        sock.send(data)
        sock.recv(64)
        return time.perf_counter() - start


def round_trips(once: Callable[[], object], n: int) -> Result:
    """The seconds of each of n calls, one after the other, with an echo beside every tenth."""
    for _ in range(100):
        once()
    seconds, floor = [], []
    with Echo() as echo:
        for turn in range(n):
            start = time.perf_counter()
            once()
            seconds.append(time.perf_counter() - start)
            if turn % 10 == 0:
                floor.append(echo.once())
    return {"seconds": seconds, "floor": floor}


def copy_time(array: Any) -> float:
    """Seconds for a.copy(): a memcpy into fresh memory, page faults included."""
    start = time.perf_counter()
    copy = array.copy()
    seconds = time.perf_counter() - start
    del copy
    return seconds


def small_copy_time(array: Any) -> float:
    """The same into pages of the ordinary size: numpy asks for huge ones, where the system has
    them to give, and memory that processes share has to do without."""
    import numpy as np

    start = time.perf_counter()
    with mmap.mmap(-1, array.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        copy = np.frombuffer(memory, array.dtype)
        np.copyto(copy, array)
        seconds = time.perf_counter() - start
        del copy
    return seconds


def file_time(array: Any) -> float:
    """Seconds to write the array into a new memory file."""
    view, done = memoryview(array).cast("B"), 0
    start = time.perf_counter()
    descriptor = os.memfd_create("floor")
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], done)
    seconds = time.perf_counter() - start
    os.close(descriptor)
    return seconds


def python_start(code: str = "pass") -> float:
    """Seconds for a whole run of a fresh interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=probe.environment())
    return time.perf_counter() - start


# -------------------------------------------------------------------------------------- probes


def forks(modules: list[str], n: int) -> Result:
    with Forks(*modules) as source:
        return {"seconds": [source.once() for _ in range(n)]}


def echo(n: int) -> Result:
    with Echo() as partner:
        return {"seconds": [partner.once() for _ in range(n)]}


def copies(nbytes: int, n: int) -> Result:
    import numpy as np

    source = np.ones(nbytes // 8)
    target = np.ones(nbytes // 8)
    fresh, small, file, faulted = [], [], [], []
    for _ in range(n):
        fresh.append(copy_time(source))
        small.append(small_copy_time(source))
        file.append(file_time(source))
        start = time.perf_counter()
        np.copyto(target, source)
        faulted.append(time.perf_counter() - start)
    return {"fresh": fresh, "small": small, "file": file, "faulted": faulted}


def starts(n: int) -> Result:
    return {"seconds": [python_start() for _ in range(n)]}


# --------------------------------------------------------------------------------------- lines


def measure(bench: Any) -> Iterator[Line]:
    n = bench.n(200, 30)
    for module in ("", "numpy", "torch"):
        label = f"fork, exit, wait; a small process{' with ' + module if module else ''}"
        modules = [module] if module else []
        result = bench.run(probe.call("floors.forks", *modules, modules=modules, n=n))
        yield _line(label, result)
    yield _line("socket echo, 64 bytes", bench.run(probe.call("floors.echo", n=bench.n(5000, 500))))
    size = 256_000_000
    result = bench.run(probe.call("floors.copies", "numpy", nbytes=size, n=bench.n(9, 3)))
    if "skipped" in result:
        yield skipped("copy 256 MB", "s", result)
    else:
        kinds = {
            "fresh": "fresh memory, a.copy()",
            "small": "fresh memory of ordinary pages",
            "file": "a fresh memory file",
            "faulted": "memory used before",
        }
        for key, words in kinds.items():
            rate = size / median(result[key]) / 1e9
            yield Line(
                f"copy 256 MB into {words}",
                median(result[key]),
                "s",
                note=f"{rate:.2g} GB/s; {spread(result[key])}",
                detail=result,
            )
    result = bench.run(probe.call("floors.starts", n=bench.n(20, 5)))
    yield _line("python -c pass", result)


def _line(name: str, result: Result) -> Line:
    if "skipped" in result:
        return skipped(name, "s", result)
    samples = result["seconds"]
    return Line(name, median(samples), "s", note=spread(samples), detail=result)


# ------------------------------------------------------------------------- in the small process


def _serve_forks(sock: socket.socket) -> None:
    while sock.recv(64):
        start = time.perf_counter_ns()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        sock.send(str(time.perf_counter_ns() - start).encode())


def _serve_echo(sock: socket.socket) -> None:
    while data := sock.recv(64):
        sock.send(data)


def _partner(role: str, descriptor: str, *modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    sock = socket.socket(fileno=int(descriptor))
    sock.send(b"up")
    {"forks": _serve_forks, "echo": _serve_echo}[role](sock)


if __name__ == "__main__":
    _partner(*sys.argv[1:])
