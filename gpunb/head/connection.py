"""The connection of an attached kernel to its head process.

One thread runs a loop. It sends the messages that other threads post, and reads always, so no
message is lost when a thread is interrupted while it waits. Replies go to the threads that wait for
them. All other messages go to the listener, in their order.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.engine.faults import Faults, ended_by
from gpunb.exceptions import GpunbError, OutOfMemoryError
from gpunb.protocol import messages as msg
from gpunb.protocol import verbs
from gpunb.protocol.channel import Channel, ChannelClosed, encode
from gpunb.protocol.plain import Malformed
from gpunb.protocol.rpc import Arrived, Pending, Replies, Waiter, encoded, result
from gpunb.protocol.verbs import Verb
from gpunb.system.loop import Loop
from gpunb.system.signals import UNDIVIDED, Divisible, wait_for_gate

R = TypeVar("R")

SOON = 0.001
"""After a request, the main thread reads the reply itself for at most so many seconds."""

_NOT_UNDERSTOOD = "what the head process said cannot be understood"

AT_ONCE = 32
"""Messages that are read before what was posted has its turn."""

Listener: TypeAlias = Callable[[msg.Output | None, list[Payload]], object]
"""Gets each message that is no reply, on the loop's thread, and None at the end."""


class Connection:
    """Sends requests to the head process. All methods may be called from any thread."""

    def __init__(self, sock: socket.socket, gone: str, listener: Listener, faults: Faults) -> None:
        """`gone` is the error's text once the head process is gone."""
        self.loop = Loop()
        self.loop.failed = faults.of_loop
        self.closed = False
        self._channel = Channel(sock)
        self._gone = gone
        self._listener = listener
        self._pending: Replies = Pending()
        self._backlog: deque[tuple[bytes, Sequence[Segment]]] = deque()
        self._unread: deque[tuple[msg.Message, list[int]]] = deque()
        self._main = threading.main_thread().ident
        self._owner = os.getpid()
        self._failure: GpunbError | None = None
        self._ended = False
        self._arrivals = select.poll()
        self._arrivals.register(sock, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="gpunb", daemon=True)
        self._thread.start()

    def request(self, verb: Verb[R], payloads: Sequence[Payload] = ()) -> tuple[R, list[Payload]]:
        """Send a request, and wait for its reply."""
        self.check_alive()
        with UNDIVIDED:
            waiter = self._pending.expect()
            try:
                self._post(waiter.number, verb, payloads, waiter)
                if waiter.reply is not None:
                    pass
                elif self.loop.mine():
                    self._read_until(waiter)
                elif not self._ended:
                    with Divisible():
                        wait_for_gate(waiter.gate)
            finally:
                self._pending.forget(waiter.number)
        if waiter.reply is None:
            self.check_alive()
            raise GpunbError("the session was shut down")
        return result(waiter.reply)

    def request_soon(self, callback: Callable[[Arrived | None], object], verb: Verb[Any]) -> None:
        """Send a request, and have the callback called with the reply, or with None if no reply
        will come."""
        self.check_alive()
        number = self._pending.call_back(callback)
        if self._ended:
            if self._pending.forget(number):
                self.check_alive()
            return
        self._post(number, verb, ())

    def request_later(self, verb: Verb[Any], payloads: Sequence[Payload] = ()) -> None:
        """Send a request that has no reply."""
        if self.alive:
            self._post(0, verb, payloads)

    def _post(
        self,
        number: int,
        verb: Verb[Any],
        payloads: Sequence[Payload],
        waiter: Waiter[Arrived] | None = None,
    ) -> None:
        wires, segments = serialize.to_wires(payloads) if payloads else ((), [])
        request = encoded(msg.Request(number, 0, 0, *verbs.encode(verb), wires))
        item = self._send, request, segments
        if self.loop.mine():  # in a callback: the loop reads what is posted only after it
            _call(item)
        elif threading.get_ident() == self._main:
            with UNDIVIDED:
                self.loop.do(item, None if waiter is None else lambda: self._read_soon(waiter))
        else:
            self.loop.post(item)

    def send(self, message: msg.Message, *, lazily: bool = False) -> None:
        """Send a message that is no request, without segments. A destructor may call this."""
        if not self.closed and os.getpid() == self._owner:
            item = self._send, encode(message), ()
            if self.loop.mine():
                _call(item)
            elif lazily:
                self.loop.post_lazily(item)
            else:
                self.loop.post(item)

    @property
    def lost(self) -> bool:
        """Whether the head process cannot be reached any more."""
        return self._failure is not None

    @property
    def alive(self) -> bool:
        """Whether requests can be sent."""
        return self._failure is None and not self.closed

    def check_alive(self) -> None:
        """Raises GpunbError if there is no connection any more."""
        if os.getpid() != self._owner:
            raise GpunbError(
                "this process was forked from one that uses gpunb, and gpunb does not work in "
                "forks: call gpunb.shutdown() and gpunb.init() here, or use gpunb.remote instead"
            )
        if self._failure is not None:
            raise GpunbError(str(self._failure))
        if self.closed:
            raise GpunbError("this session was shut down: call gpunb.init() for a new one")

    def hang_up(self) -> bool:
        """End the connection. Return whether it was open."""
        if self.closed or os.getpid() != self._owner:
            return False
        self.closed = True
        self.loop.post((self.loop.stop,))
        return True

    def join(self) -> None:
        """Wait for the end of the loop's thread."""
        if os.getpid() == self._owner:
            self._thread.join(10)

    def forked(self) -> None:
        """In a child that was forked off the kernel: give back the parent's descriptors."""
        self._channel.close()
        self.loop.forked()

    # ------------------------------------------------------------------------ on the loop's thread

    def _run(self) -> None:
        try:
            self.loop.watch(self._channel.fileno(), self._stirs)
            self.loop.run(_call)
        except BaseException as error:
            self._failure = ended_by(error)
        finally:
            self._end()
            self.loop.close()

    def _send(self, data: bytes, segments: Sequence[Segment]) -> None:
        """Send a message without ever waiting; also on a thread that assists the loop."""
        if self._failure is not None:
            return
        if self._backlog or not self._sent(data, segments):
            self._backlog.append((data, segments))
            self.loop.watch_writing(self._channel.fileno(), True)

    def _sent(self, data: bytes, segments: Sequence[Segment]) -> bool:
        descriptors = [each.fileno() for each in segments]
        try:
            self._channel.send_encoded(data, descriptors, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ChannelClosed:
            pass  # the loop's thread reads the end
        except (OSError, OutOfMemoryError) as error:
            # A thread would wait for ever for the reply to a request that was not sent.
            self.end(f"the head process cannot be told any more: {error}")
        return True

    def _flush(self) -> None:
        """Send the backlog, as far as that is possible now."""
        while self._backlog and self._sent(*self._backlog[0]):
            self._backlog.popleft()
            if not self._backlog:
                self.loop.watch_writing(self._channel.fileno(), False)

    def _stirs(self) -> None:
        self._flush()
        self._catch_up()
        for _ in range(AT_ONCE):
            if self._failure is not None or not self._read():
                return

    def _read(self) -> bool:
        """Take in the next message. Return whether there may be more."""
        received = self._receive(wait=False)
        if received is None:
            return False
        self._take_in(*received)
        self._catch_up()
        return self._failure is None

    def _receive(self, *, wait: bool) -> tuple[msg.Message, list[int]] | None:
        """Return the next message; None if there is none now, or the connection is over."""
        try:
            return self._channel.receive(wait=wait)
        except BlockingIOError:
            pass
        except ChannelClosed:
            self.end(self._gone)
        except (Malformed, OSError) as error:
            self.end(f"{_NOT_UNDERSTOOD}: {error}")
        return None

    def _read_soon(self, waiter: Waiter[Arrived]) -> None:
        """While the main thread has the loop's turn, read a reply that comes soon: it takes longer
        to wake the loop's thread, which then wakes this one. No interrupt may come meanwhile, so
        this lasts for `SOON` at most."""
        if self._backlog or self._ended:
            return
        deadline = time.perf_counter() + SOON
        self.loop.pause(self._channel.fileno(), True)
        try:
            while waiter.reply is None and self._failure is None:
                left = deadline - time.perf_counter()
                if left <= 0 or not self._arrivals.poll(left * 1000):
                    return
                self._read()
        finally:
            if not self._ended:
                self.loop.watch_writing(self._channel.fileno(), bool(self._backlog))

    def _read_until(self, waiter: Waiter[Arrived]) -> None:
        """Wait for the reply to a request of a callback. Other messages are taken in after it."""
        while waiter.reply is None and self._failure is None:
            if self._backlog:
                either = select.poll()
                either.register(self._channel, select.POLLIN | select.POLLOUT)
                either.poll()
                self._flush()
            received = self._receive(wait=not self._backlog)
            if received is None:
                continue
            message, descriptors = received
            if isinstance(message, msg.Reply) and message.request == waiter.number:
                self._take_in(message, descriptors)
            else:
                self._unread.append((message, descriptors))
                self.loop.post((self._catch_up,))

    def _catch_up(self) -> None:
        while self._unread:
            self._take_in(*self._unread.popleft())

    def _take_in(self, message: msg.Message, descriptors: list[int]) -> None:
        segments = [Segment.adopt(each) for each in descriptors]
        match message:
            case msg.Reply():
                callback = self._pending.arrived(message.request, (message, segments))
                if callback is not None:
                    self.loop.call_user(callback)
            case msg.Output():
                try:
                    self._listener(message, serialize.from_wires(message.payloads, segments))
                except Exception as error:
                    self.end(f"{_NOT_UNDERSTOOD}: {error!r}")
            case _:
                self.end(f"{_NOT_UNDERSTOOD}: {type(message).__name__}")

    def end(self, why: str) -> None:
        """End the connection for this reason, on the loop's thread."""
        if self._failure is None:
            text = f"{why}: call gpunb.shutdown() and gpunb.init() to go on"
            self._failure = GpunbError(text)
            self.loop.post((self._end,))

    def _end(self) -> None:
        """Wake all threads that wait, and call all callbacks: no reply will come any more."""
        if self._ended:
            return
        self._ended = True
        self.loop.unwatch(self._channel.fileno())
        self._channel.close()
        self._backlog.clear()
        for callback in self._pending.close():
            self.loop.call_user(callback)
        self._listener(None, [])


def _call(item: tuple[Any, ...]) -> None:
    """Call an item that was posted to the loop: a function and its arguments."""
    item[0](*item[1:])
