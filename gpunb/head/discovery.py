"""The head processes of this user: their names, their state, and connections to them.

Each head process listens on a Unix socket in the runtime folder. The first packet of either side is
JSON, so that two versions of gpunb can refuse each other with a reason. The other packets are
messages, as between a kernel and its workers.
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
from gpunb.control.client import address
from gpunb.exceptions import GpunbError
from gpunb.system import process_info, runtime_dir, unix_socket
from gpunb.system.signals import Divisible

DEFAULT = "head"
"""The name of a head process if the user gives none."""

PATIENCE = 10.0
"""Seconds in which the other side must answer the first packet."""

LONGEST = 1 << 16
"""Largest size of the first packet in bytes."""

KINDS = 256
"""Functions of a kernel for which the head process keeps the part that is equal in all calls."""

RESERVED = ("auto", "local", "ray")

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")


class RunningHead(NamedTuple):
    """A head process."""

    name: str
    pid: int


def check_name(name: str) -> str:
    """Return the name if a head process may have it.

    Raises:
        ValueError: a head process may not have this name.
    """
    if name in RESERVED or not _NAME.fullmatch(name):
        taken = " or ".join(map(repr, RESERVED))
        raise ValueError(
            f"{name!r} is no name for a head process: it must start with a letter, have at most "
            f"40 letters, digits, '_', '-' and '.', and not be {taken}"
        )
    return name


def path_of(name: str, suffix: str = "sock") -> Path:
    """The path of a head process's socket, or of another file: ``"log"``, ``"lock"``.

    Raises:
        GpunbError: the runtime folder cannot be used.
    """
    return runtime_dir.runtime_folder() / runtime_dir.HEADS / f"{name}.{suffix}"


def running() -> list[RunningHead]:
    """The head processes that run now, sorted by name.

    Raises:
        GpunbError: the runtime folder cannot be used.
    """
    names = [path.stem for path in sorted(path_of("x").parent.glob("*.sock"))]
    return [RunningHead(name, pid) for name in names if (pid := pid_of(name)) is not None]


def pid_of(name: str) -> int | None:
    """The pid of the head process of that name; None if it does not run."""
    try:
        sock, pid = connect(name)
    except OSError:
        return None
    sock.close()
    return pid


def connect(name: str) -> tuple[socket.socket, int]:
    """A connection to a head process, and its pid.

    Raises:
        OSError: no process listens.
        GpunbError: the process belongs to another user.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(PATIENCE)
        with address(path_of(name)) as target, Divisible():
            sock.connect(target)
        pid, uid = unix_socket.peer(sock)
        if uid != os.getuid():
            raise GpunbError(f"the head process {name!r} belongs to another user (uid {uid})")
    except BaseException:
        sock.close()
        raise
    return sock, pid


def versions() -> dict[str, str]:
    """The versions that must be equal on both sides, because they exchange pickles."""
    return {"gpunb": __version__, "python": f"{sys.version_info[0]}.{sys.version_info[1]}"}


def mismatch(theirs: object) -> str | None:
    """The error for a kernel with other versions than this head process; None if they are equal."""
    ours = versions()
    if isinstance(theirs, dict) and all(theirs.get(name) == ours[name] for name in ours):
        return None
    known = theirs if isinstance(theirs, dict) else {}
    return (
        f"it runs gpunb {ours['gpunb']} on Python {ours['python']}, and this kernel has gpunb "
        f"{known.get('gpunb', '?')} on Python {known.get('python', '?')}: both must be the same. "
        "Start the head process from the environment of the kernel"
    )


def introduce(sock: socket.socket, about: dict[str, Any]) -> None:
    """Send the versions of this kernel and the facts about it to the head process.

    Raises:
        GpunbError: the head process refuses the connection; the text has the reason.
        ValueError: what came is no answer.
        OSError: the head process is gone, or did not answer in time.
    """
    sock.send(json.dumps({**versions(), "about": about}).encode())
    with Divisible():
        reply = sock.recv(LONGEST)
    if not reply:
        raise ConnectionResetError("it closed the connection")
    answer = json.loads(reply)
    if not isinstance(answer, dict):
        raise ValueError(f"{reply[:100]!r} is no answer")
    if not answer.get("ok"):
        raise GpunbError(str(answer.get("error") or "the head process refuses, without a reason"))


def open_connection(address: str) -> tuple[socket.socket, str, int]:
    """Open a connection for the messages of this kernel; return it with the head's name and pid.

    Args:
        address: the name of a head process; ``"auto"`` for the only one.

    Raises:
        ValueError: no head process of that name runs.
        GpunbError: `address` is ``"auto"`` and none or several run, or the head process gave no
            answer or refused the connection.
    """
    there = running()
    names = ", ".join(repr(each.name) for each in there)
    if address == "auto":
        if not there:
            raise GpunbError(
                "address='auto' found no head process: start one with `gpunb start --head`, or "
                "leave the address out for a scheduler in this kernel"
            )
        if len(there) > 1:
            raise GpunbError(f"address='auto' found several head processes: name one of {names}")
        address = there[0].name
    try:
        sock, pid = connect(check_name(address))
    except (OSError, ValueError):
        known = f"those that run are {names}" if there else "none runs"
        raise ValueError(
            f"address={address!r} is no head process of this machine ({known}): start it with "
            f"`gpunb start --head --name {address}`, or leave the address out for a scheduler in "
            "this kernel"
        ) from None
    try:
        introduce(sock, process_info.about())
    except (OSError, ValueError) as error:
        sock.close()
        raise GpunbError(f"the head process {address!r} (pid {pid}) gave no answer") from error
    except BaseException:
        sock.close()
        raise
    sock.setblocking(True)
    return sock, address, pid


def may_end(name: str) -> list[str]:
    """Ask a head process to end. Return the work that would be lost; it ends only if that is none.

    Raises:
        GpunbError: the head process does not answer, or refuses.
        OSError: the head process is gone.
    """
    sock, pid = connect(name)
    with sock:
        try:
            sock.send(json.dumps({**versions(), "end": True}).encode())
            reply = json.loads(sock.recv(LONGEST) or b"{}")
        except (OSError, ValueError):
            reply = {}
    if not isinstance(reply, dict):
        reply = {}
    if "lost" not in reply:
        why = reply.get("error") or f"the head process {name!r} (pid {pid}) gave no answer"
        raise GpunbError(str(why))
    lost: list[str] = reply["lost"]
    return lost
