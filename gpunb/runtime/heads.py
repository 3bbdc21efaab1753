"""The head processes of this user: their names, who runs, and how to reach one.

Each listens on a Unix socket in the runtime folder. The first packet of either side is JSON, so
that those which cannot understand each other can say so; the rest are messages of `workers`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from gpunb._version import __version__
from gpunb.exceptions import GpunbError
from gpunb.runtime import doors, folder
from gpunb.runtime.kernels import address

DEFAULT = "head"
"""The name of a head process that was given none."""

PATIENCE = 10.0
"""Seconds for the first words."""

LONGEST = 1 << 16
"""Bytes of the first packet."""

KINDS = 256
"""Functions of which a kernel need not say again what their calls have in common."""

RESERVED = ("auto", "local", "ray")

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")


class Running(NamedTuple):
    """A head process."""

    name: str
    pid: int


def check_name(name: str) -> str:
    """The name, if it is one that a head process may have.

    Raises:
        ValueError: it is not.
    """
    if name in RESERVED or not _NAME.fullmatch(name):
        taken = " or ".join(map(repr, RESERVED))
        raise ValueError(
            f"{name!r} is no name for a head process: it must start with a letter, have at most "
            f"40 letters, digits, '_', '-' and '.', and not be {taken}"
        )
    return name


def path_of(name: str, suffix: str = "sock") -> Path:
    """The socket of a head process, or another of its files: ``"log"``, ``"lock"``.

    Raises:
        GpunbError: the folder for it is of no use.
    """
    return folder.runtime_folder() / folder.HEADS / f"{name}.{suffix}"


def running() -> list[Running]:
    """Those that run now, by name.

    Raises:
        GpunbError: the folder for them is of no use.
    """
    names = [path.stem for path in sorted(path_of("x").parent.glob("*.sock"))]
    return [Running(name, pid) for name in names if (pid := pid_of(name)) is not None]


def pid_of(name: str) -> int | None:
    """The process of that head; None if there is none."""
    try:
        sock, pid = connect(name)
    except OSError:
        return None
    sock.close()
    return pid


def connect(name: str) -> tuple[socket.socket, int]:
    """A connection to a head process, and its pid.

    Raises:
        OSError: nobody listens.
        GpunbError: who listens is another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(PATIENCE)
        with address(path_of(name)) as target:
            sock.connect(target)
        pid, uid = doors.peer(sock)
        if uid != os.getuid():
            raise GpunbError(f"the head process {name!r} belongs to another user (uid {uid})")
    except BaseException:
        sock.close()
        raise
    return sock, pid


def versions() -> dict[str, str]:
    """What has to be the same on both sides, because they exchange pickles."""
    return {"gpunb": __version__, "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}


def mismatch(theirs: Any) -> str | None:
    """What a kernel is told whose versions are not the head's; None if they are."""
    ours = versions()
    if isinstance(theirs, dict) and all(theirs.get(name) == ours[name] for name in ours):
        return None
    known: dict[str, Any] = theirs if isinstance(theirs, dict) else {}
    return (
        f"it runs gpunb {ours['gpunb']} on Python {ours['python']}, and this kernel has gpunb "
        f"{known.get('gpunb', '?')} on Python {known.get('python', '?')}: both must be the same. "
        "Start the head process from the environment of the kernel"
    )


def introduce(sock: socket.socket, about: dict[str, Any]) -> None:
    """Say who we are to the head process at the other end.

    Raises:
        GpunbError: it refuses, and says why.
        OSError: it is gone, or has no time.
    """
    sock.send(json.dumps({**versions(), "about": about}).encode())
    said = sock.recv(LONGEST)
    if not said:
        raise ConnectionResetError("it closed the connection")
    answer = json.loads(said)
    if not answer.get("ok"):
        raise GpunbError(str(answer.get("error")))


def may_end(name: str) -> list[str]:
    """Have a head process end, unless something would be lost with it: what that is.

    Raises:
        GpunbError: it does not answer, or does not understand.
        OSError: it is gone.
    """
    sock, pid = connect(name)
    with sock:
        try:
            sock.send(json.dumps({**versions(), "end": True}).encode())
            said = json.loads(sock.recv(LONGEST) or b"{}")
        except (OSError, ValueError):
            said = {}
    if "lost" not in said:
        why = said.get("error") or f"the head process {name!r} (pid {pid}) gave no answer"
        raise GpunbError(str(why))
    lost: list[str] = said["lost"]
    return lost
