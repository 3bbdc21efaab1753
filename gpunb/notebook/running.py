"""A cell in the foreground: hand it in, show what it shows, and end as it ended."""

from __future__ import annotations

import contextlib
import getpass
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpunb import backend
from gpunb.notebook.arriving import Home
from gpunb.notebook.cells import HandedIn, Request, conclude, hand_in
from gpunb.notebook.comms import Blocking
from gpunb.notebook.output import DONE, Answer, Foreground, may_ask, relay
from gpunb.runtime.log import Item

GRACE = 5.0
"""Seconds after Stop that a cell has to end by itself, before its process is killed."""

TICK = 0.5
"""Seconds that the main thread waits at most before it looks up: a Stop that comes just when it
begins to wait does not wake it."""

STOP: Item = ("stop", "", {})


def run(shell: Any, request: Request) -> Home:
    """Run a cell in a worker and wait for it.

    Raises:
        UsageError, InfeasibleRequestError: it could not be handed in.
        BaseException: what the cell raised, with the traceback that IPython made in the worker.
    """
    home, error = bring(shell, request)
    if error is not None:
        raise error
    assert home is not None
    return home


def bring(
    shell: Any, request: Request, begun: Callable[[HandedIn, Foreground], object] | None = None
) -> tuple[Home | None, BaseException | None]:
    """As `run`, but return what the cell raised, beside what came home all the same; `begun` is
    told when it is handed in."""
    sink = Foreground(asks=may_ask(shell))
    with _stops(sink) as user, Blocking():
        handed = hand_in(shell, request, sink)
        current = handed.backend
        try:
            if begun is not None:
                begun(handed, sink)
            interrupted = _follow(shell, current, handed, sink, user)
            outcome = current.fetch([handed.obj], 0)[0]
        except BaseException:  # a cell that nobody waits for must not go on
            handed.give_up()
            current.drop(handed.obj)
            raise
    try:
        return conclude(handed, outcome, interrupted=interrupted, waited_for=True)
    finally:  # now what its values refer to is held by these
        current.drop(handed.obj)


class _User:
    """Answers what the cell asks, unless there is a Stop."""

    def __init__(self, sink: Foreground, thread: int | None) -> None:
        self._sink = sink
        self._thread = thread
        self._asked = False
        self._over = False
        self.stopped = False
        """Whether there was a Stop that nobody has seen yet."""

    def stop(self, *_: object) -> None:
        """The handler of the signal."""
        if not self._over:
            self.stopped = True
            self._sink.queue.put(STOP)
        if self._asked:
            raise KeyboardInterrupt

    def over(self) -> None:
        """On the runtime's thread: the cell is over, and needs no answer any more."""
        self._over = True
        self._sink.done()
        if self._asked and self._thread is not None:
            signal.pthread_kill(self._thread, signal.SIGINT)

    def ask(self, prompt: str, password: bool, answer: Answer) -> None:
        """Ask, as the notebook itself would."""
        try:
            self._asked = True
            if self.stopped or self._over:
                return
            text = getpass.getpass(prompt) if password else input(prompt)
        except KeyboardInterrupt:
            return
        except Exception as error:
            answer(None, error)
            return
        finally:
            self._asked = False
        answer(text, None)


@contextlib.contextmanager
def _stops(sink: Foreground) -> Iterator[_User]:
    """Make of Stop an item among the job's output: it hits no line of ours, and none is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield _User(sink, None)  # signals do not come here
        return
    user = _User(sink, threading.get_ident())
    before = signal.signal(signal.SIGINT, user.stop)
    try:
        yield user
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


def _follow(
    shell: Any, current: backend.Backend, handed: HandedIn, sink: Foreground, user: _User
) -> bool:
    """Relay the job's output until it is over. The first Stop interrupts it, the second kills it.

    Returns whether there was one.
    """
    current.notify(handed.obj, user.over)
    deadline: float | None = None
    while True:
        try:
            left = TICK if deadline is None else deadline - time.monotonic()
            item = sink.queue.get(timeout=min(TICK, max(0.0, left)))
        except queue.Empty:
            if deadline is None or time.monotonic() < deadline:
                continue
            item = STOP
        if item is DONE:
            return deadline is not None
        if item[0] == "ask":
            user.ask(**item[2])
            if deadline is not None:  # it took the Stop, and asks again
                deadline = time.monotonic() + GRACE
            continue
        if item is not STOP:
            relay(shell, *item)
            continue
        user.stopped = False
        if deadline is None:
            current.interrupt(handed.obj)
        else:
            handed.kill()
        deadline = time.monotonic() + GRACE
