"""One end of a socket between two processes: whole messages, with file descriptors beside them.

The sockets are SOCK_SEQPACKET pairs: a message arrives whole or not at all, and each side sees the
end of the other at once. A message that is too large for a packet travels as a memory segment.
"""

from __future__ import annotations

import array
import contextlib
import errno
import mmap
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpunb.data.segments import Segment
from gpunb.protocol import plain
from gpunb.protocol.messages import Message, checked, pack, unpack
from gpunb.protocol.plain import Malformed

PACKET = 96 * 1024
"""Bytes of the largest packet; the kernel's default send buffer is about twice that."""

SPIN = 300e-6
"""Seconds for which a receiver spins, which means that it waits without sleeping, if its last
message came as fast: waking up takes a large part of a short call."""

_DESCRIPTORS = 253
_SPACE = socket.CMSG_SPACE(_DESCRIPTORS * 4)
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_AT_ONCE = int(socket.MSG_DONTWAIT)  # plain numbers: to join two members of an enum takes 2 us
_PEEK = int(socket.MSG_PEEK)
_CUT = int(socket.MSG_CTRUNC)
_SPILLED = b"\x00spilled"
_NO_DESCRIPTOR = (
    "no file descriptor was left for a large message: close files, or raise the limit that "
    "`ulimit -n` shows"
)


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """Sends and receives messages. One thread at a time may receive, one may send."""

    def __init__(
        self, sock: socket.socket, decoder: Callable[[Any], Message] | None = None
    ) -> None:
        """Messages are decoded by `decoder`, by default `decode`."""
        self.sock = sock
        self._decode = decoder or decode
        # Pages that no message needs are never touched: most messages of a worker are short.
        self._buffer = memoryview(mmap.mmap(-1, PACKET + 4096, mmap.MAP_PRIVATE))
        self.may_spin = True
        """Whether there is a CPU for a receiver that spins, besides those of the processes that it
        waits for."""
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
            Malformed: the other side sent something that is no message.
            OSError: no descriptor or no memory was left for a large message, which is lost.
        """
        data, descriptors = self.receive_raw(wait=wait)
        try:
            return self._decode(data), descriptors
        except Malformed:
            _close(descriptors)
            raise
        except Exception as error:  # its fields may be of any kind
            _close(descriptors)
            raise Malformed(f"a message that cannot be decoded: {error!r:.200}") from error

    def receive_raw(self, *, wait: bool = True) -> tuple[Any, list[int]]:
        while True:
            try:
                if wait:
                    size, ancillary, flags = self._receive_soon()
                else:
                    size, ancillary, flags = self._receive(_AT_ONCE)
                break
            except ConnectionResetError:
                # The other side went before it had read everything. The system reports this once,
                # then it returns the messages that were sent before.
                continue
        descriptors = _received(ancillary) if ancillary else []
        if size == 0:
            raise ChannelClosed
        data = self._buffer[:size]
        if size == len(_SPILLED) + 8 and data[: len(_SPILLED)] == _SPILLED:
            length = int.from_bytes(data[len(_SPILLED) :], "little")
            if not descriptors and flags & _CUT:
                raise OSError(errno.EMFILE, _NO_DESCRIPTOR)
            return _spilled(length, descriptors), descriptors
        return data, descriptors

    def await_message(self) -> None:
        """Wait until there is a message, or the other side is gone. An interrupt ends the wait, and
        no message is lost by it."""
        begin = time.perf_counter()
        with contextlib.suppress(ConnectionResetError):
            while self._spins and self.may_spin:
                try:
                    self.sock.recv(1, _PEEK | _AT_ONCE)
                    return
                except BlockingIOError:
                    pass  # and no more: it would be the context of an interrupt that comes now
                os.sched_yield()  # let other processes run
                self._spins = time.perf_counter() - begin < SPIN
            self.sock.recv(1, _PEEK)
        self._spins = time.perf_counter() - begin < SPIN

    def _receive(self, flags: int) -> tuple[int, list[tuple[int, int, bytes]], int]:
        return self.sock.recvmsg_into([self._buffer], _SPACE, _CLOEXEC | flags)[:3]

    def _receive_soon(self) -> tuple[int, list[tuple[int, int, bytes]], int]:
        """Wait for a message. Spin, that is, do not sleep, if the message may come at once."""
        begin = time.perf_counter()
        while self._spins and self.may_spin:
            try:
                return self._receive(_AT_ONCE)
            except BlockingIOError:
                pass
            os.sched_yield()  # let other processes run
            self._spins = time.perf_counter() - begin < SPIN
        found = self._receive(0)
        self._spins = time.perf_counter() - begin < SPIN
        return found


def encode(message: Message) -> bytes:
    """Return the bytes of a message whose fields have exactly the types that they must have."""
    return plain.framed(pickle.dumps(pack(message), 5))


def encode_checked(message: Message) -> bytes:
    """As `encode`, for a message that has values of a user.

    Raises:
        TypeError: a value cannot be made plain.
    """
    return plain.dumps(pack(message))


def decode(data: Any) -> Message:
    """Return the message of these bytes, from a sender that is not trusted.

    Raises:
        Malformed: the bytes are no message.
    """
    return checked(plain.loads(data))


def encode_trusted(message: Message) -> bytes:
    """As `encode`, for `decode_trusted`."""
    return pickle.dumps(pack(message), 5)


def decode_trusted(data: Any) -> Message:
    """As `decode`, for messages that only the kernel can send, which a worker trusts."""
    return unpack(pickle.loads(data))


def _spilled(length: int, descriptors: list[int]) -> memoryview:
    """Return the content of a message that came as a segment, the first of the descriptors."""
    try:
        if not descriptors or not 0 < length <= plain.MOST:
            raise Malformed(f"a large message of {length:,} bytes, {len(descriptors)} descriptors")
        with Segment.adopt(descriptors.pop(0), length) as segment:
            return segment.map()
    except BaseException as error:
        _close(descriptors)
        if isinstance(error, MemoryError):
            raise OSError(errno.ENOMEM, f"no memory for a large message: {error}") from error
        if isinstance(error, ValueError) and not isinstance(error, Malformed):
            raise Malformed(str(error)) from error
        raise


def _close(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)
    descriptors.clear()


def _rights(descriptors: Sequence[int]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


def _received(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
