"""The connection of a kernel to the head process that it is attached to.

One thread runs a loop, which sends what other threads post and reads always, so that nobody who is
interrupted while he waits takes anything with him. Answers go to those who wait, and all else to
the listener, in the order in which the head process said it.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from gpunb import serialize
from gpunb.exceptions import GpunbError, OutOfMemoryError
from gpunb.objects import Segment
from gpunb.serialize import Payload
from gpunb.signals import UNDIVIDED
from gpunb.workers import messages as msg
from gpunb.workers.channel import Channel, ChannelClosed, encode
from gpunb.workers.loop import Loop

SOON = 0.001
"""Seconds for which the main thread reads for itself what it has asked for."""

AT_ONCE = 32
"""Messages that are read before what was posted has its turn."""

Listener: TypeAlias = Callable[[msg.Output | None, list[Payload]], object]
"""Is told, on the loop's thread, what no one asked for; None at the end."""


class _Answer(NamedTuple):
    message: msg.Reply
    segments: list[Segment]


class _Question:
    """Somebody who waits for an answer."""

    __slots__ = ("answer", "gate")

    def __init__(self) -> None:
        self.answer: _Answer | None = None
        self.gate = threading.Lock()
        self.gate.acquire()


class Connection:
    """Asks the head process for things. All methods may be called from any thread."""

    def __init__(self, sock: socket.socket, gone: str, listener: Listener) -> None:
        """`gone` is what there is to say when the head process is."""
        self.loop = Loop()
        self.closed = False
        self._channel = Channel(sock)
        self._gone = gone
        self._listener = listener
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._callbacks: dict[int, Callable[[msg.Reply | None], object]] = {}
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

    def request(
        self, verb: str, arguments: tuple[Any, ...], payloads: Sequence[Payload] = ()
    ) -> tuple[Any, list[Payload]]:
        """Ask the head process for something, and wait for its answer."""
        self.check_alive()
        number = next(self._numbers)
        question = self._questions[number] = _Question()
        try:
            self._post(number, verb, arguments, payloads, question)
            if question.answer is not None:
                pass
            elif self.loop.mine():
                self._read_until(question)
            elif not self._ended:
                question.gate.acquire()
        finally:
            self._questions.pop(number, None)
        if question.answer is None:
            self.check_alive()
            raise GpunbError("the session was shut down")
        reply, segments = question.answer
        values = serialize.from_wires(reply.payloads, segments)
        if reply.failed:
            raise serialize.loads(values[0])
        return reply.value, values

    def request_soon(
        self,
        callback: Callable[[msg.Reply | None], object],
        verb: str,
        arguments: tuple[Any, ...],
    ) -> None:
        """Ask for something; what comes, or None if nothing will, is for the callback."""
        self.check_alive()
        number = next(self._numbers)
        self._callbacks[number] = callback
        if self._ended:
            if self._callbacks.pop(number, None) is not None:
                self.check_alive()
            return
        self._post(number, verb, arguments, ())

    def request_later(
        self, verb: str, arguments: tuple[Any, ...], payloads: Sequence[Payload] = ()
    ) -> None:
        """Ask for something to which there is no answer."""
        if self.alive:
            self._post(0, verb, arguments, payloads)

    def _post(
        self,
        number: int,
        verb: str,
        arguments: tuple[Any, ...],
        payloads: Sequence[Payload],
        question: _Question | None = None,
    ) -> None:
        wires, segments = serialize.to_wires(payloads)
        item = self._send, encode(msg.Request(number, 0, 0, verb, arguments, wires)), segments
        if self.loop.mine():  # in a callback, until whose end nothing that is posted is looked at
            _call(item)
        elif threading.get_ident() == self._main:
            with UNDIVIDED:
                self.loop.do(item, None if question is None else lambda: self._read_soon(question))
        else:
            self.loop.post(item)

    def tell(self, message: msg.Message, *, lazily: bool = False) -> None:
        """Send something that is no question; from a destructor even, but no segments with it."""
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
        """Whether anything can be asked."""
        return self._failure is None and not self.closed

    def check_alive(self) -> None:
        """Raises GpunbError if there is no connection any more."""
        if os.getpid() != self._owner:
            raise GpunbError(
                "this process was forked from one that uses gpunb, and gpunb does not work in "
                "forks: call gpunb.shutdown() and gpunb.init() here, or use gpunb.remote instead"
            )
        if self._failure is not None:
            raise GpunbError(str(self._failure)) from self._failure.__cause__
        if self.closed:
            raise GpunbError("this session was shut down: call gpunb.init() for a new one")

    def close(self) -> bool:
        """Hang up; whether this process had not done so before."""
        if self.closed or os.getpid() != self._owner:
            return False
        self.closed = True
        self.loop.post((self.loop.stop,))
        self._thread.join(10)
        return True

    def forked(self) -> None:
        """In a child that somebody forked off the kernel: let go of what is the parent's."""
        self._channel.close()

    # ------------------------------------------------------------------------ on the loop's thread

    def _run(self) -> None:
        try:
            self.loop.watch(self._channel.fileno(), self._stirs)
            self.loop.run(_call)
        except BaseException as error:
            failure = GpunbError(
                f"the runtime stopped after an error: {error!r}; call gpunb.shutdown() and "
                "gpunb.init() to go on"
            )
            failure.__cause__ = error
            self._failure = failure
        finally:
            self._end()
            self.loop.close()

    def _send(self, data: bytes, segments: Sequence[Segment]) -> None:
        """Send something without ever waiting; also on a thread that assists the loop."""
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
            pass  # it is heard of
        except (OSError, OutOfMemoryError) as error:
            # Somebody would wait for ever for what could not be sent.
            self._unreachable(f"the head process cannot be told any more: {error}")
        return True

    def _flush(self) -> None:
        """Send what could not be sent before, as far as that is possible now."""
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
        """Take in the next message, if there is one."""
        try:
            message, descriptors = self._channel.receive(wait=False)
        except BlockingIOError:
            return False
        except (ChannelClosed, OSError):
            self._lost()
            return False
        self._take_in(message, descriptors)
        self._catch_up()
        return True

    def _read_soon(self, question: _Question) -> None:
        """While the main thread has the loop's turn: an answer that comes soon is read there, as
        it takes long to wake one thread to wake another. Not for longer, as no interrupt may come.
        """
        if self._backlog or self._ended:
            return
        deadline = time.perf_counter() + SOON
        self.loop.pause(self._channel.fileno(), True)
        try:
            while question.answer is None and self._failure is None:
                left = deadline - time.perf_counter()
                if left <= 0 or not self._arrivals.poll(left * 1000):
                    return
                self._read()
        finally:
            if not self._ended:
                self.loop.watch_writing(self._channel.fileno(), bool(self._backlog))

    def _read_until(self, question: _Question) -> None:
        """What was asked from a callback is answered before anything else is looked at."""
        while question.answer is None and self._failure is None:
            if self._backlog:
                either = select.poll()
                either.register(self._channel, select.POLLIN | select.POLLOUT)
                either.poll()
                self._flush()
            try:
                message, descriptors = self._channel.receive(wait=not self._backlog)
            except BlockingIOError:
                continue
            except (ChannelClosed, OSError):
                self._lost()
                return
            if isinstance(message, msg.Reply) and self._questions.get(message.request) is question:
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
                question = self._questions.get(message.request)
                if question is not None:
                    question.answer = _Answer(message, segments)
                    question.gate.release()
                elif (callback := self._callbacks.pop(message.request, None)) is not None:
                    self.loop.tell(callback, message)
            case msg.Output():
                self._listener(message, serialize.from_wires(message.payloads, segments))
            case _:
                pass

    def _lost(self) -> None:
        """The head process is gone."""
        self._unreachable(self._gone)

    def _unreachable(self, why: str) -> None:
        """Say why from now on; the rest is for the loop's thread."""
        if self._failure is None:
            text = f"{why}: call gpunb.shutdown() and gpunb.init() to go on"
            self._failure = GpunbError(text)
            self.loop.post((self._end,))

    def _end(self) -> None:
        """Nothing more is heard: whoever waits is told so."""
        if self._ended:
            return
        self._ended = True
        self.loop.unwatch(self._channel.fileno())
        self._channel.close()
        self._backlog.clear()
        for question in list(self._questions.values()):
            if question.answer is None and question.gate.locked():
                question.gate.release()
        while self._callbacks:
            self.loop.tell(self._callbacks.popitem()[1], None)
        self._listener(None, [])


def _call(item: tuple[Any, ...]) -> None:
    """What is posted to the loop: a function and its arguments."""
    item[0](*item[1:])
