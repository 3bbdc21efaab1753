"""Messages to another process, sent without waiting for it."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from gpunb.exceptions import OutOfMemoryError
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, ChannelClosed
from gpunb.system.loop import Loop


class Described(Protocol):
    """What has a descriptor that can be sent."""

    def fileno(self) -> int:
        """Return the descriptor."""


class Outbox:
    """Sends messages over a channel, in order. On the loop's thread.

    Attributes:
        waiting: the messages for which the socket has no room yet.
    """

    __slots__ = ("_channel", "_encode", "_loop", "_unreachable", "waiting")

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        encode: Callable[[msg.Message], bytes],
        unreachable: Callable[[], object],
    ) -> None:
        """`unreachable` ends the other process: it would wait for ever for a message that could
        not be sent."""
        self._loop = loop
        self._channel = channel
        self._encode = encode
        self._unreachable = unreachable
        self.waiting: deque[tuple[bytes, Sequence[Described]]] = deque()

    def size(self) -> int:
        """Return the bytes of the messages that wait."""
        return sum(len(data) for data, _ in self.waiting)

    def send(self, message: msg.Message, segments: Sequence[Described] = ()) -> None:
        """Send a message; do nothing if the process is gone."""
        data = self._encode(message)
        if self.waiting:
            self.waiting.append((data, segments))
            return
        try:
            self._send_now(data, segments)
        except BlockingIOError:
            self.waiting.append((data, segments))
            self._loop.watch_writing(self._channel.fileno(), True)
        except ChannelClosed:
            pass
        except (OSError, OutOfMemoryError):
            self._unreachable()

    def _send_now(self, data: bytes, segments: Sequence[Described]) -> None:
        descriptors = [each.fileno() for each in segments]
        self._channel.send_encoded(data, descriptors, socket.MSG_DONTWAIT)

    def send_waiting(self) -> None:
        """Send waiting messages, as far as the socket takes them."""
        while self.waiting:
            try:
                self._send_now(*self.waiting[0])
            except BlockingIOError:
                return
            except ChannelClosed:
                self.waiting.clear()
                break
            except (OSError, OutOfMemoryError):
                self.waiting.clear()
                self._loop.watch_writing(self._channel.fileno(), False)
                self._unreachable()  # which may close the channel
                return
            self.waiting.popleft()
        self._loop.watch_writing(self._channel.fileno(), False)
