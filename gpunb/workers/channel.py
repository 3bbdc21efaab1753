"""One end of a socket between two processes: whole messages, with file descriptors beside them.

The sockets are SOCK_SEQPACKET pairs: a message arrives whole or not at all, and the end of the
other side is seen at once. What is larger than a packet may be travels as a memory segment.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import socket
import time
from collections.abc import Sequence
from typing import Any

from gpunb.objects import Segment
from gpunb.workers.messages import Message, pack, unpack

PACKET = 96 * 1024
"""Bytes of the largest packet; the kernel's default send buffer is about twice that."""

SPIN = 200e-6
"""Seconds for which a receiver stays awake whose last message came as fast: waking up takes a
large part of a short call."""

_DESCRIPTORS = 253
_SPACE = socket.CMSG_SPACE(_DESCRIPTORS * 4)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_AT_ONCE = int(socket.MSG_DONTWAIT)  # plain numbers: to join two members of an enum takes 2 us
_PEEK = int(socket.MSG_PEEK)
_SPILLED = b"\x00spilled"


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """Sends and receives messages. One thread at a time may receive, one may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = memoryview(bytearray(PACKET + 4096))
        self._spins = False

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    def send(self, message: Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message, waiting while the other side is slow.

        Raises:
            ChannelClosed: the other side is gone.
        """
        self.send_encoded(encode(message), [each.fileno() for each in segments])

    def send_encoded(self, data: bytes, descriptors: Sequence[int] = (), flags: int = 0) -> None:
        """As `send`, for what `encode` made.

        Raises:
            BlockingIOError: with MSG_DONTWAIT among the flags, if the other side is slow.
        """
        try:
            if len(data) > PACKET:
                self._send_spilled(data, descriptors, flags)
            elif descriptors:
                self.sock.sendmsg([data], _rights(descriptors), flags)
            else:
                self.sock.send(data, flags)
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError) as error:
            raise ChannelClosed from error

    def _send_spilled(self, data: bytes, descriptors: Sequence[int], flags: int) -> None:
        segment, _ = Segment.write([data])
        with segment:
            rights = _rights([segment.fileno(), *descriptors])
            self.sock.sendmsg([_SPILLED + len(data).to_bytes(8, "little")], rights, flags)

    def receive(self, *, wait: bool = True) -> tuple[Message, list[int]]:
        """The next message and the descriptors that came with it, which the caller now owns.

        Raises:
            ChannelClosed: the other side is gone, and everything it sent was received.
            BlockingIOError: with `wait` false, if there is nothing now.
        """
        data, descriptors = self.receive_raw(wait=wait)
        return decode(data), descriptors

    def receive_raw(self, *, wait: bool = True) -> tuple[Any, list[int]]:
        while True:
            try:
                if wait:
                    size, ancillary = self._receive_soon()
                else:
                    size, ancillary = self._receive(_AT_ONCE)
                break
            except ConnectionResetError:
                # The other side went before it had read everything. The system says so once, and
                # then gives what that had sent before.
                continue
        descriptors = _received(ancillary) if ancillary else []
        if size == 0:
            raise ChannelClosed
        data = self._buffer[:size]
        if size == len(_SPILLED) + 8 and data[: len(_SPILLED)] == _SPILLED:
            spilled = Segment.adopt(descriptors.pop(0))
            with spilled:
                return spilled.map()[: int.from_bytes(data[len(_SPILLED) :], "little")], descriptors
        return data, descriptors

    def await_message(self) -> None:
        """Wait until there is a message, or the other side is gone. An interrupt ends the wait, and
        no message is lost by it."""
        begin = time.perf_counter()
        with contextlib.suppress(ConnectionResetError):
            while self._spins:
                try:
                    self.sock.recv(1, _PEEK | _AT_ONCE)
                    return
                except BlockingIOError:
                    os.sched_yield()  # to whoever has something to do
                self._spins = time.perf_counter() - begin < SPIN
            self.sock.recv(1, _PEEK)
        self._spins = time.perf_counter() - begin < SPIN

    def _receive(self, flags: int) -> tuple[int, list[tuple[int, int, bytes]]]:
        return self.sock.recvmsg_into([self._buffer], _SPACE, _CLOEXEC | flags)[:2]

    def _receive_soon(self) -> tuple[int, list[tuple[int, int, bytes]]]:
        """Wait for a message, and stay awake for it if it may come at once."""
        begin = time.perf_counter()
        while self._spins:
            try:
                return self._receive(_AT_ONCE)
            except BlockingIOError:
                os.sched_yield()  # to whoever has something to do
            self._spins = time.perf_counter() - begin < SPIN
        found = self._receive(0)
        self._spins = time.perf_counter() - begin < SPIN
        return found


def encode(message: Message) -> bytes:
    return pickle.dumps(pack(message), 5)


def decode(data: Any) -> Message:
    return unpack(pickle.loads(data))


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


def _received(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
