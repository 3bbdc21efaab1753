"""Asks running sessions of this user through their control sockets.

The other side of `gpunb.control.server`. Imports nothing of the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpunb.exceptions import GpunbError
from gpunb.system import runtime_dir

TIMEOUT = 2.0
"""Seconds until an answer has to come."""

_LONGEST = 100
"""Bytes of the longest path that is used as a socket's address; the system allows 107."""


@dataclass(frozen=True, slots=True)
class RunningSession:
    """A running session: its process and its control socket."""

    pid: int
    path: Path


def path_of(pid: int) -> Path:
    """Return the path of a process's control socket.

    Raises:
        GpunbError: the runtime folder cannot be used.
    """
    return runtime_dir.runtime_folder() / runtime_dir.KERNELS / f"{pid}.sock"


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """Yield a socket address for a path of any length."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def sessions() -> list[RunningSession]:
    """Return the running sessions, sorted by pid. Sockets of dead sessions are removed.

    Raises:
        GpunbError: the runtime folder cannot be used.
    """
    sessions = []
    for path in (runtime_dir.runtime_folder() / runtime_dir.KERNELS).glob("*.sock"):
        if not path.stem.isdigit():
            continue
        try:
            _connect(path, TIMEOUT).close()
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            continue
        except FileNotFoundError:
            continue
        except OSError:
            pass  # the session is busy
        sessions.append(RunningSession(int(path.stem), path))
    return sorted(sessions, key=lambda each: each.pid)


def ask(pid: int, request: Mapping[str, Any], timeout: float = TIMEOUT) -> Any:
    """Send one request to the session of a process; return its answer.

    Raises:
        GpunbError: there is no session, it does not answer in time, or it refuses.
    """
    with contextlib.closing(_lines(pid, request, timeout)) as lines:
        answer = next(lines, None)
    if answer is None:
        raise GpunbError(f"the session of process {pid} has ended")
    if not answer.get("ok"):
        raise GpunbError(str(answer.get("error") or f"process {pid} gave no answer"))
    return answer.get("value")


def watch(pid: int, interval: float = 0.25) -> Iterator[dict[str, Any]]:
    """Yield snapshots of a session: one at once, then one after each change, until it ends.

    Raises:
        GpunbError: there is no session.
    """
    with contextlib.closing(_lines(pid, {"do": "watch", "interval": interval}, None)) as lines:
        for line in lines:
            if "snapshot" not in line:
                raise GpunbError(str(line.get("error")))
            yield line["snapshot"]


def _lines(
    pid: int, request: Mapping[str, Any], timeout: float | None
) -> Generator[dict[str, Any], None, None]:
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        sock = _connect(path_of(pid), TIMEOUT if timeout is None else timeout)
    except (FileNotFoundError, ConnectionRefusedError):
        raise GpunbError(f"process {pid} has no session of gpunb") from None
    except OSError as error:
        raise GpunbError(f"the session of process {pid} cannot be reached: {error}") from error
    with sock:
        try:
            sock.sendall(json.dumps(request).encode() + b"\n")
            rest = b""
            while True:
                left = None if deadline is None else max(0.001, deadline - time.monotonic())
                sock.settimeout(left)
                data = sock.recv(1 << 16)
                if not data:
                    return
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    yield json.loads(line)
        except TimeoutError:
            text = f"the session of process {pid} did not answer within {timeout:g} s"
            raise GpunbError(text) from None
        except OSError:
            return  # the session has ended


def _connect(path: Path, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        with address(path) as target:
            sock.connect(target)
    except OSError:
        sock.close()
        raise
    return sock
