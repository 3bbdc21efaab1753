"""Sockets at which other processes of this machine knock."""

from __future__ import annotations

import socket
import struct

from gpunb.workers.loop import Loop

_CREDENTIALS = struct.Struct("3i")
_PAUSE = 1.0
"""Seconds until who knocks is let in after all, if no descriptor was left."""


def accept(loop: Loop, listener: socket.socket) -> socket.socket | None:
    """Let the next one in, on the loop's thread; None if there is none, or if it has to wait."""
    try:
        sock, _ = listener.accept()
    except BlockingIOError:
        return None
    except OSError:  # no descriptor is left: not again at once
        descriptor = listener.fileno()
        loop.pause(descriptor, True)
        loop.after(_PAUSE, lambda: loop.pause(descriptor, False))
        return None
    sock.setblocking(False)
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
