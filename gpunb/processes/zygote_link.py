"""The kernel's end of the socket to a zygote: sends requests, and notices if no answer comes.

A zygote may be stopped (SIGSTOP) or slow. The loop never waits for it: a request that the socket
does not take now is sent later, in order. Not every request has an answer of its own, so a ping
follows the requests; its answer shows that the zygote has received them.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gpunb.protocol import plain
from gpunb.system import process_control
from gpunb.system.loop import Loop

Answer: TypeAlias = tuple[Any, ...]

PATIENCE = 2.0
"""Seconds without an answer after which a zygote is reported as silent."""

_BOOT = 10.0
"""The same for a zygote that has never answered: its interpreter has to start first."""

_CHECK = 0.5
_RETRY = 0.1
_LONGEST = 1 << 18
"""Bytes of the longest answer; a socket's usual buffer allows no longer packets."""

_NO_ROOM = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)


class Link:
    """Sends requests to a zygote and receives its answers, on the loop's thread."""

    def __init__(
        self, loop: Loop, on_answer: Callable[[Answer], None], on_end: Callable[[bool], None]
    ) -> None:
        """`on_answer` is called with each answer. `on_end` is called once: with True if the zygote
        is gone, with False if it has sent an invalid answer."""
        self._loop = loop
        self._on_answer = on_answer
        self._on_end = on_end
        self._sock: socket.socket | None = None
        self._backlog: deque[tuple[bytes, Sequence[int], bool]] = deque()
        self._closed = False
        self._full = False
        self._retrying = False
        self._since: float | None = None  # time of the first request without an answered ping
        self._since_ping: float | None = None  # time of the first request after the ping
        self._pinged = False
        self._checking = False
        self._answered = False

    def connect(self, sock: socket.socket) -> None:
        """Start to send to this zygote, and to receive its answers.

        Raises:
            OSError: the loop cannot watch another descriptor.
        """
        sock.setblocking(False)
        self._loop.watch(sock.fileno(), self._on_readable)
        self._sock = sock
        self._flush()
        if self._since is not None:
            self._since = time.monotonic()
            self._check_soon()

    def ask(
        self, request: tuple[Any, ...], descriptors: Sequence[int] = (), *, lent: bool = False
    ) -> None:
        """Send a request without waiting. The link closes its descriptors, unless they are
        `lent`."""
        self._backlog.append((plain.dumps(request), descriptors, lent))
        if len(self._backlog) == 1:
            self._flush()
        if self._since is None:
            self._since = time.monotonic()
            self._check_soon()
        elif self._pinged and self._since_ping is None:
            self._since_ping = time.monotonic()

    def silent_seconds(self) -> float | None:
        """Return for how many seconds the zygote has not answered; None if not for too long."""
        if self._since is None or self._sock is None:
            return None
        seconds = time.monotonic() - self._since
        patience = PATIENCE if self._answered else _BOOT
        return seconds if seconds > patience and self._pinged else None

    def is_gone(self) -> bool:
        """Return whether the zygote has ended, of which `on_end` may not have been told yet."""
        if self._closed or self._sock is None:
            return self._closed
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))  # even if answers wait to be read, the system reports a hang-up

    def close(self) -> None:
        """Stop sending and receiving."""
        if self._sock is not None and not self._closed:
            self._loop.unwatch(self._sock.fileno())
        self.forked()

    def forked(self) -> None:
        """Close all descriptors; called directly in a fork of the kernel."""
        self._closed = True
        if self._sock is not None:
            self._sock.close()
        while self._backlog:
            self._drop()

    # ------------------------------------------------------------------------------------- inside

    def _check_soon(self) -> None:
        if not self._checking and self._sock is not None:
            self._checking = True
            self._loop.after(_CHECK, self._check)

    def _check(self) -> None:
        """Send a ping if requests have had no answer and no ping is under way."""
        self._checking = not self._closed and self._since is not None
        if not self._checking:
            return
        if not self._pinged:
            self.ask(("ping",))
            self._pinged = True
        self._loop.after(_CHECK, self._check)

    def _on_readable(self) -> None:
        assert self._sock is not None
        if self._backlog:
            self._flush()
        try:
            data = self._sock.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        answer = parse_answer(data) if data else None
        if answer is None:
            self._on_end(not data)
            return
        self._answered = True
        if answer[0] == "pong":
            # The zygote has received every request before the ping.
            self._since, self._since_ping, self._pinged = self._since_ping, None, False
        self._on_answer(answer)

    def _flush(self) -> None:
        """Send what can be sent now."""
        if self._sock is None or self._closed:
            return
        while self._backlog:
            data, descriptors, _ = self._backlog[0]
            try:
                socket.send_fds(self._sock, [data], descriptors)
            except BlockingIOError:
                self._watch_writing(True)
                return
            except OSError as error:
                if error.errno in _NO_ROOM:  # of the system: no event reports new room
                    self._retry()
                    return
                # The zygote is gone. `on_end` is called when all its answers have been read.
            self._drop()
        self._watch_writing(False)

    def _drop(self) -> None:
        _, descriptors, lent = self._backlog.popleft()
        for each in () if lent else descriptors:
            os.close(each)

    def _watch_writing(self, full: bool) -> None:
        """Start or stop waiting for room in the socket."""
        if self._sock is not None and full != self._full:
            self._full = full
            self._loop.watch_writing(self._sock.fileno(), full)

    def _retry(self) -> None:
        def again() -> None:
            self._retrying = False
            self._flush()

        if not self._retrying:
            self._retrying = True
            self._loop.after(_RETRY, again)


def parse_answer(data: bytes) -> Answer | None:
    """Return the answer in these bytes; None if they are invalid."""
    try:
        answer = plain.loads(data)
        return tuple(answer) if _is_answer(answer) else None
    except Exception:
        return None


def _is_answer(answer: Any) -> bool:
    match answer:
        case ("pong",):
            return True
        case ("forked", token, int(pid)):
            return _is_token(token) and pid > 1
        case ("exited", token, int(status)):
            return _is_token(token) and bool(process_control.describe_status(status))
        case ("failed" | "delayed", token, str()):
            return _is_token(token)
        case ("preloaded", dict(problems), None | str(), str()):
            return _are_texts(problems)
        case ("loaded", list(names) | tuple(names), dict(changed), str(), str()):
            return all(isinstance(each, str) for each in names) and _are_texts(changed)
    return False


def _are_texts(table: dict[Any, Any]) -> bool:
    texts = [*table, *(each for each in table.values() if each is not None)]
    return all(isinstance(each, str) for each in texts)


def _is_token(token: Any) -> bool:
    return isinstance(token, (int, tuple)) and hash(token) is not None
