"""Requests that wait for their replies: numbers, waiting threads and callbacks.

A worker, an attached kernel and a worker on Ray send and read in different ways. This part is the
same for all of them:

1. `expect` gives a request its number and a waiter, before the request is sent.
2. The thread that asks waits at the gate of its waiter, or reads replies itself meanwhile.
3. The thread that reads calls `arrived`, which leaves the reply in the waiter and opens the gate.
4. The thread that asks calls `forget`, also after an interrupt. The reply to a request that was
   forgotten finds no waiter, and is dropped.
5. When the connection is lost, `close` opens all gates. A waiter without a reply then means that
   none will come.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import encode, encode_checked
from gpunb.protocol.verbs import OF_IDS

T = TypeVar("T")


Arrived: TypeAlias = tuple[msg.Reply, list[Segment]]
"""A reply, with the memory segments that came beside it."""


def result(arrived: Arrived) -> tuple[Any, list[Payload]]:
    """Return the value and the payloads of a reply, or raise the error in it."""
    reply, segments = arrived
    payloads = serialize.from_wires(reply.payloads, segments) if reply.payloads else []
    if reply.failed:
        raise serialize.loads(payloads[0])
    return reply.value, payloads


def encoded(request: msg.Request) -> bytes:
    """Return the bytes of a request. Users' values are in some, such as a name of a kind that is
    derived from `str`: these are made plain."""
    return encode(request) if request.verb in OF_IDS else encode_checked(request)


class Waiter(Generic[T]):
    """A thread that waits for a reply. Its gate is a lock that other threads open."""

    __slots__ = ("gate", "number", "reply")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reply: T | None = None
        self.gate = threading.Lock()
        self.gate.acquire()

    def wake(self) -> None:
        """Open the gate, if it is closed."""
        try:
            self.gate.release()
        except RuntimeError:
            pass  # it is open already


class Pending(Generic[T]):
    """The requests of a process that have no reply yet. From any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiters: dict[int, Waiter[T]] = {}
        self._callbacks: dict[int, Callable[[T | None], object]] = {}

    @property
    def waits(self) -> bool:
        """Whether a thread waits for a reply."""
        return bool(self._waiters)

    @property
    def calls_back(self) -> bool:
        """Whether a callback waits for a reply."""
        return bool(self._callbacks)

    def expect(self) -> Waiter[T]:
        """Return the waiter for the reply to a new request."""
        number = next(self._numbers)
        waiter: Waiter[T] = Waiter(number)
        self._waiters[number] = waiter
        return waiter

    def call_back(self, callback: Callable[[T | None], object]) -> int:
        """Return the number of a new request, for whose reply this is to be called; with None if
        no reply will come."""
        number = next(self._numbers)
        self._callbacks[number] = callback
        return number

    def forget(self, number: int) -> bool:
        """Wait for this reply no more. Return whether a callback was still to be called."""
        self._waiters.pop(number, None)
        return self._callbacks.pop(number, None) is not None

    def arrived(self, number: int, reply: T) -> Callable[[], object] | None:
        """Give a reply to its waiter. Return the callback for it, if there is one instead."""
        waiter = self._waiters.get(number)
        if waiter is not None:
            waiter.reply = reply
            waiter.wake()
            return None
        callback = self._callbacks.pop(number, None)
        return None if callback is None else functools.partial(callback, reply)

    def wake_one(self) -> None:
        """Open one closed gate: that thread looks whether it has to read the next reply."""
        for waiter in list(self._waiters.values()):
            if waiter.gate.locked():
                waiter.wake()
                return

    def close(self) -> list[Callable[[], object]]:
        """Open all gates: no reply will come any more. Return the callbacks that are to be told."""
        for waiter in list(self._waiters.values()):
            waiter.wake()
        callbacks: list[Callable[[], object]] = []
        while self._callbacks:
            callbacks.append(functools.partial(self._callbacks.popitem()[1], None))
        return callbacks

    def clear(self) -> None:
        """Forget the waiting threads, which an interrupt may have kept from `forget`."""
        self._waiters.clear()


Replies: TypeAlias = Pending[Arrived]
