"""Listening Unix sockets for other processes of this machine."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpunb.system.loop import Loop

_CREDENTIALS = struct.Struct("3i")
_PAUSE = 1.0
"""Seconds until the next accept, after no descriptor was left for a connection."""


def accept(loop: Loop, listener: socket.socket) -> socket.socket | None:
    """Accept a connection, on the loop's thread; None if none waits or no descriptor is left."""
    try:
        sock, _ = listener.accept()
    except BlockingIOError:
        return None
    except OSError:  # no descriptor is left: a retry at once would fail again
        descriptor = listener.fileno()
        loop.pause(descriptor, True)
        loop.after(_PAUSE, lambda: loop.pause(descriptor, False))
        return None
    sock.setblocking(False)
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
