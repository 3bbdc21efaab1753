"""The channel of a worker to the kernel, which all threads of the worker share.

Usually no thread only reads, because a worker should be free to fork. So whoever waits, reads:

1. A thread that waits for a reply, or the main thread that waits for work, acquires `_reading` and
   takes one message off the channel.
2. It leaves the message where another thread looks: a reply in its waiter, what the front end
   says to a running cell in `_comms`, and work in `_work`.
3. It gives `_reading` back and wakes one thread that waits for a reply, to read next.
4. A thread that nobody woke looks by itself after `_LOOK_AGAIN` seconds.

An interrupt may come between any two steps of the main thread while a task runs:

1. Before or after it acquires `_reading`: `_reader` names the thread that has the lock, so the same
   thread goes on where it was.
2. While it waits for a message: `_read_whole` only looks whether there is one, and takes it off
   the channel with interrupts held back, so no message is lost.
3. Before it forgets a request, or while it holds a lock: `recover` clears up after the attempt, if
   no other thread is left that may use what it clears.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, ChannelClosed, encode, encode_checked
from gpunb.protocol.rpc import Arrived, Pending, Replies, Waiter, encoded
from gpunb.system.signals import UNDIVIDED

_LOOK_AGAIN = 0.05
"""Seconds after which a thread that waits for a reply looks for itself whether any thread reads."""

Received: TypeAlias = tuple[msg.Message, list[int]]
"""A message, and the descriptors that came beside it."""

Listener: TypeAlias = Callable[[msg.CommMessage, Sequence[Payload]], None]


class Transport:
    """Sends and receives messages. All methods but `next_work` may be called from any thread.

    Attributes:
        pending: the requests that have no reply yet.
        idle: whether no task runs, so that no interrupt comes.
        beside: is called by the thread that has read work, where the main thread does not wait for
            work but looks when it is told.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pending: Replies = Pending()
        self.idle = False
        self.beside: Callable[[], None] | None = None
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._reader: int | None = None
        self._work: deque[Received] = deque()
        self._comms: deque[tuple[msg.CommMessage, list[int]]] = deque()
        self._starting = threading.Lock()
        self._callback_reader: threading.Thread | None = None
        self._listener: Listener | None = None
        self._listener_thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------ sending

    def send(self, message: msg.Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message and the memory that belongs to it."""
        descriptors = [each.fileno() for each in segments]
        if isinstance(message, msg.Request):
            data = encoded(message)
        else:
            data = encode_checked(message) if isinstance(message, msg.Printed) else encode(message)
        with self._sending:
            self.channel.send_encoded(data, descriptors)

    @property
    def busy(self) -> bool:
        """Whether a thread waits for a reply, or just sends a message."""
        return self.pending.waits or self._sending.locked()

    # ------------------------------------------------------------------------------------ reading

    def is_quiet(self, seconds: float) -> bool:
        """Whether there is no message, and none comes within so many seconds."""
        return not self._work and not select.select([self.channel], [], [], seconds)[0]

    def next_work(self, patience: float | None) -> Received | None:
        """Return the next work, or None if no message comes within so many seconds."""
        while not self._work:
            if patience is not None and not select.select([self.channel], [], [], patience)[0]:
                return None
            if self._reads(_LOOK_AGAIN):
                self._read(lambda: bool(self._work))
        return self._work.popleft()

    def work_now(self) -> Iterator[Received]:
        """Yield the work that is there, without waiting.

        Raises:
            ChannelClosed: the kernel is gone.
        """
        while True:
            while self._work:
                yield self._work.popleft()
            if not self._reads():
                return  # the thread that reads calls `beside`
            try:
                self._read(lambda: bool(self._work), wait=False)
            except BlockingIOError:
                return

    def wait_for(self, waiter: Waiter[Arrived]) -> Arrived:
        """Return the reply that a waiter gets."""
        while waiter.reply is None:
            if self._reads():
                self._read_whole(lambda: waiter.reply is not None)
            else:
                waiter.gate.acquire(timeout=_LOOK_AGAIN)
        return waiter.reply

    def _reads(self, patience: float = 0.0) -> bool:
        """Acquire `_reading`. A thread that comes here and has it was interrupted before it read,
        or before it gave it back."""
        me = threading.get_ident()
        if self._reader != me:
            with UNDIVIDED:
                if not self._reading.acquire(timeout=patience):
                    return False
                self._reader = me
        return True

    def _read(self, there: Callable[[], bool], *, wait: bool = True) -> None:
        """Take one message off the channel, unless what the caller wants is there. The caller has
        acquired `_reading`, which is given back here. An interrupt loses the message."""
        callback: Callable[[], object] | None = None
        try:
            if not there():
                callback = self._sort(*self.channel.receive(wait=wait))
        finally:
            self._read_enough()
        if callback is not None:
            callback()

    def _read_whole(self, there: Callable[[], bool]) -> None:
        """As `_read`; an interrupt may come at any time, and loses nothing."""
        try:
            if not there():
                self.channel.await_message()
            with UNDIVIDED:
                self._read(there, wait=False)
        except BaseException:
            if self._reader == threading.get_ident():
                self._read_enough()
            raise

    def _read_enough(self) -> None:
        if self.idle:  # no interrupt comes between two tasks, and this takes 1 us less
            self._reader = None
            self._reading.release()
        else:
            with UNDIVIDED:
                self._reader = None
                self._reading.release()
        self.pending.wake_one()

    def _sort(self, message: msg.Message, descriptors: list[int]) -> Callable[[], object] | None:
        """Leave a message where it belongs. Return the callback to call once `_reading` is free."""
        if isinstance(message, msg.CommMessage) and self._listener is not None:
            self._comms.append((message, descriptors))
            return None
        if isinstance(message, msg.ExecuteAhead):
            for permit, fields in enumerate(message.tasks, message.permit):
                self._work.append((msg.Execute._make((*fields, permit)), []))
            return self.beside
        if isinstance(message, msg.Execute):
            self.channel.may_spin = message.spin
        if not isinstance(message, msg.Reply):
            self._work.append((message, descriptors))
            return self.beside
        segments = [Segment.adopt(each) for each in descriptors]
        return self.pending.arrived(message.request, (message, segments))

    # ------------------------------------------------------------------------- threads that read

    def read_for_callbacks(self) -> None:
        """Start a thread that reads as long as callbacks wait for replies."""
        with self._starting:
            if self._callback_reader is None:
                thread = threading.Thread(
                    target=self._read_for_callbacks, name="gpunb-callbacks", daemon=True
                )
                thread.start()  # before it counts: the system may give no thread
                self._callback_reader = thread

    def _read_for_callbacks(self) -> None:
        try:
            while True:
                with self._starting:
                    if not self.pending.calls_back:
                        self._callback_reader = None
                        return
                if self._reads(_LOOK_AGAIN):
                    self._read(lambda: not self.pending.calls_back)
        except (ChannelClosed, OSError):
            pass  # the main thread finds out by itself

    def listen_to(self, listener: Listener | None) -> None:
        """While a task runs, have a thread call the listener with what the front end says. With
        None, what it says is work again."""
        with self._starting:
            self._listener = listener
            if listener is None:
                self._work.extend(self._take_comms())
            elif self._listener_thread is None or not self._listener_thread.is_alive():
                if self._listener_thread is None:  # its lock must not stay closed in a fork
                    os.register_at_fork(after_in_child=lambda: _open(self._sending))
                thread = threading.Thread(target=self._listen, name="gpunb-listener", daemon=True)
                thread.start()
                self._listener_thread = thread

    def _listen(self) -> None:
        """Call the listener as long as there is one. The thread waits without `_reading`, so that
        other threads can read meanwhile."""
        try:
            while (listener := self._listener) is not None:
                for message, descriptors in self._take_comms():
                    listener(message, arrived(message.payloads, descriptors))
                ready = select.select([self.channel], [], [], _LOOK_AGAIN)[0]
                if ready and self._reads(_LOOK_AGAIN):
                    with contextlib.suppress(BlockingIOError):
                        self._read(lambda: bool(self._comms), wait=False)
        except (ChannelClosed, OSError, ValueError):
            pass  # the main thread finds out by itself

    def _take_comms(self) -> Iterator[tuple[msg.CommMessage, list[int]]]:
        while True:
            try:
                yield self._comms.popleft()
            except IndexError:
                return

    def recover(self) -> bool:
        """Clear up after an interrupt of the main thread. Return False if other threads go on."""
        if self._listener_thread is not None:
            self._listener_thread.join(2 * _LOOK_AGAIN)
        if threading.active_count() > 1:
            return False
        self._reader = None
        self.pending.clear()
        for lock in (self._reading, self._sending, self._starting):
            _open(lock)
        return True


def arrived(wires: Sequence[tuple[msg.Wire, int]], descriptors: Sequence[int]) -> list[Payload]:
    """Return the payloads of a message, with the segments that came beside it."""
    return serialize.from_wires(wires, [Segment.adopt(each) for each in descriptors])


def _open(lock: threading.Lock) -> None:
    try:
        lock.release()
    except RuntimeError:
        pass  # it is open already
