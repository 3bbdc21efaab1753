"""Runs a cell in the foreground: submits it, relays its output, and raises its error."""

from __future__ import annotations

import contextlib
import getpass
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

from gpunb.engine.job_log import Item
from gpunb.notebook.bind import Home
from gpunb.notebook.capture import CellRequest
from gpunb.notebook.cell import HandedIn, conclude, hand_in
from gpunb.notebook.leading_imports import import_here
from gpunb.notebook.output import DONE, Answer, Foreground, relay
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.widgets import blocking

GRACE = 5.0
"""Seconds after Stop that a cell has to end by itself, before its process is killed."""

TICK = 0.5
"""Seconds after which the waiting main thread looks for a Stop: a Stop that comes just when the
thread begins to wait does not wake it."""

STOP: Item = ("stop", "", {})


def run(shell: NotebookShell, request: CellRequest) -> Home:
    """Run a cell in a worker and wait for it.

    Raises:
        UsageError, InfeasibleRequestError: the cell cannot run.
        BaseException: the error of the cell, with the traceback that IPython made in the worker.
    """
    home, error = bring(shell, request)
    if error is not None:
        raise error
    assert home is not None
    return home


def bring(
    shell: NotebookShell,
    request: CellRequest,
    on_begin: Callable[[HandedIn, Foreground], object] | None = None,
) -> tuple[Home | None, BaseException | None]:
    """As `run`, but return the error of the cell, beside the values that came home all the same;
    call `on_begin` when the cell is submitted."""
    sink = Foreground(has_user=shell.may_ask(), folds=request.folds(shell))
    with stops(sink) as user, blocking():
        handed = hand_in(shell, request, sink)
        current = handed.backend
        try:
            if on_begin is not None:
                on_begin(handed, sink)
            # Here no Stop can interrupt an import: it waits in the sink.
            import_here(handed.shipment.brings)
            interrupted = _follow(handed, sink, user)
            outcome = current.fetch([handed.obj], 0)[0]
        except BaseException:  # the cell must not go on if no code waits for it
            handed.give_up()
            current.drop(handed.obj)
            raise
    try:
        return conclude(handed, outcome, interrupted=interrupted, waited_for=True)
    finally:  # the values hold references of their own now
        current.drop(handed.obj)


class _User:
    """Answers questions of the cell, and takes the user's Stop."""

    def __init__(self, sink: Foreground, thread: int | None) -> None:
        self._sink = sink
        self._thread = thread
        self._asked = False
        self._over = False
        self.stopped = False
        """Whether there was a Stop that `_follow` has not taken yet."""

    def stop(self, *_: object) -> None:
        """Handle SIGINT."""
        if not self._over:
            self.stopped = True
            self._sink.queue.put(STOP)
        if self._asked:
            raise KeyboardInterrupt

    def over(self) -> None:
        """Note that the cell is over and needs no answer any more; on the engine's thread."""
        self._over = True
        self._sink.done()
        if self._asked and self._thread is not None:
            signal.pthread_kill(self._thread, signal.SIGINT)

    def ask(self, prompt: str, password: bool, answer: Answer) -> None:
        """Ask the user, as the notebook itself would."""
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
def stops(sink: Foreground) -> Iterator[_User]:
    """Turn a Stop into an item among the job's output: so it interrupts no code of gpunb, and none
    is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield _User(sink, None)  # only the main thread gets signals
        return
    user = _User(sink, threading.get_ident())
    before = signal.signal(signal.SIGINT, user.stop)
    try:
        yield user
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


def _follow(handed: HandedIn, sink: Foreground, user: _User) -> bool:
    """Relay the output of a cell until its end. The first Stop interrupts the cell, the second
    kills it.

    Returns whether there was a Stop.
    """
    current = handed.backend
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
            if deadline is not None:  # the cell took the Stop, and asks again
                deadline = time.monotonic() + GRACE
            continue
        if item is not STOP:
            relay(handed.shell, *item)
            continue
        user.stopped = False
        if deadline is None:
            current.interrupt(handed.obj)
        else:
            handed.kill()
        deadline = time.monotonic() + GRACE
