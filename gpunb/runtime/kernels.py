"""The running sessions of this user, as another process sees them: who is there, and what they say.

The other side of `gpunb.runtime.desk`. Imports nothing of the runtime.
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
from gpunb.runtime import folder

TIMEOUT = 2.0
"""Seconds for an answer."""

_LONGEST = 100
"""Bytes of a path that a socket's address has room for, with something to spare."""


@dataclass(frozen=True, slots=True)
class Running:
    """A session: the process that has it, and the socket of its desk."""

    pid: int
    path: Path


def path_of(pid: int) -> Path:
    """The socket of the desk of a process.

    Raises:
        GpunbError: the folder for it is of no use.
    """
    return folder.runtime_folder() / folder.KERNELS / f"{pid}.sock"


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """What to bind or connect to for a path, however long it is."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def sessions() -> list[Running]:
    """The sessions that run now, by pid. Sockets on which nobody listens are removed.

    Raises:
        GpunbError: the folder for them is of no use.
    """
    found = []
    for path in (folder.runtime_folder() / folder.KERNELS).glob("*.sock"):
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
            pass  # it has no time now
        found.append(Running(int(path.stem), path))
    return sorted(found, key=lambda each: each.pid)


def ask(pid: int, request: Mapping[str, Any], timeout: float = TIMEOUT) -> Any:
    """What the session of a process answers to one request.

    Raises:
        GpunbError: there is none, it does not answer in time, or it refuses.
    """
    with contextlib.closing(_lines(pid, request, timeout)) as lines:
        answer = next(lines, None)
    if answer is None:
        raise GpunbError(f"the session of process {pid} has ended")
    if not answer.get("ok"):
        raise GpunbError(str(answer.get("error") or f"process {pid} gave no answer"))
    return answer.get("value")


def watch(pid: int, interval: float = 0.25) -> Iterator[dict[str, Any]]:
    """The snapshots of a session: one at once, then whenever something has changed, until it ends.

    Raises:
        GpunbError: there is none.
    """
    with contextlib.closing(_lines(pid, {"do": "watch", "interval": interval}, None)) as lines:
        for said in lines:
            if "snapshot" not in said:
                raise GpunbError(str(said.get("error")))
            yield said["snapshot"]


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
                if deadline is not None:
                    sock.settimeout(max(0.001, deadline - time.monotonic()))
                else:
                    sock.settimeout(None)
                said = sock.recv(1 << 16)
                if not said:
                    return
                *whole, rest = (rest + said).split(b"\n")
                for line in whole:
                    yield json.loads(line)
        except TimeoutError:
            text = f"the session of process {pid} did not answer within {timeout:g} s"
            raise GpunbError(text) from None
        except OSError:
            return  # it has ended


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
