"""Protects steps that Ctrl-C, or the Stop button of a notebook, must not interrupt.

Python raises `KeyboardInterrupt` between any two bytecodes of the main thread: also after a
function has registered an object for its caller and before the caller has received the object. An
interrupt that is raised in a destructor is dropped by Python.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without enumerations: 10 times as fast
import _thread
import math
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

HEARTBEAT = 0.1
"""Seconds of one wait of the main thread; longer waits would delay an interrupt."""

_MOMENT = 0.002
"""Seconds after which an interrupt that hit a destructor is sent again."""


class _Undivided:
    """``with UNDIVIDED:`` delays an interrupt until the end of the block.

    Blocks may be nested, and threads other than the main thread may use them without effect.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._closed = 0
        """The number of nested blocks that keep interrupts out now."""
        self._handler: Any = None
        self._pending = False
        self._note_method = self._note
        os.register_at_fork(after_in_child=self._after_fork)

    def __enter__(self) -> None:
        if _thread.get_ident() != self._main:
            return  # Python handles signals in the main thread only
        if self._depth:
            self._closed += 1
            self._depth += 1
            return
        handler = _signal.getsignal(_signal.SIGINT)
        if not callable(handler) or handler is self._note_method:
            # Python does not raise on this signal; or a destructor runs this block while another
            # block begins or ends, because garbage is collected at any step.
            return
        # In this order: until the new handler is set, the old one may raise. An interrupt that is
        # pending here belongs to a block that ends: a destructor runs this one.
        self._closed = 1
        self._handler = handler
        _signal.signal(_signal.SIGINT, self._note_method)
        self._depth = 1

    def __exit__(self, *_: object) -> None:
        if not self._depth or _thread.get_ident() != self._main:
            return
        self._depth -= 1
        if not self._depth:
            try:
                _signal.signal(_signal.SIGINT, self._handler)
            except BaseException:  # a second interrupt, at once; the first one is raised with it
                self._pending = False
                raise
        else:
            self._closed -= 1
            if self._closed:
                return
        if self._pending:
            self._deliver(None)

    def in_main_thread(self) -> bool:
        """Whether this is the thread that handles signals."""
        return _thread.get_ident() == self._main

    def divide(self) -> int:
        """Allow interrupts in the innermost block; return the argument for `undivide`."""
        closed = self._closed
        if self._depth and closed and _thread.get_ident() == self._main:
            self._closed -= 1
            if self._pending and not self._closed:
                self._deliver(None)
        return closed

    def undivide(self, closed: int) -> None:
        """Undo `divide`."""
        if self._depth and _thread.get_ident() == self._main:
            self._closed = closed

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._pending = True
        if not self._closed:
            self._deliver(frame)

    def _deliver(self, frame: types.FrameType | None) -> None:
        self._pending = False
        # If the handler raises, a divisible part is over: all blocks keep interrupts out again.
        closed, self._closed = self._closed, self._depth
        # The handler may look for a destructor among the frames.
        self._handler(_signal.SIGINT, frame or sys._getframe())  # noqa: SLF001
        self._closed = closed

    def _after_fork(self) -> None:
        self._main = _thread.get_ident()


UNDIVIDED = _Undivided()


class Divisible:
    """``with Divisible():`` allows interrupts again within the innermost undivided block.

    For a long step that can be given up, if the block then undoes its other steps.
    """

    __slots__ = ("_closed",)

    def __enter__(self) -> None:
        self._closed = UNDIVIDED.divide()

    def __exit__(self, *_: object) -> None:
        UNDIVIDED.undivide(self._closed)


def wait_for_gate(gate: threading.Lock, timeout: float | None = None) -> bool:
    """Wait until another thread opens a gate, a lock that it releases; return whether it did within
    `timeout` seconds.

    The main thread waits in slices. Python looks for signals before a wait and after it, and a
    signal ends a wait that has begun. One that comes between the look and the wait, or that another
    thread receives, is seen only when the wait is over.
    """
    longest = HEARTBEAT if UNDIVIDED.in_main_thread() else threading.TIMEOUT_MAX
    left = math.inf if timeout is None else timeout
    end = time.monotonic() + left
    while not gate.acquire(timeout=max(0.0, min(left, longest))):
        left = end - time.monotonic()
        if left <= 0:
            return False
    return True


def interrupt_later() -> None:
    """Send the interrupt that hit a destructor again, after a moment."""
    # Not threading.Thread, whose start waits for the thread: the next signal could come meanwhile.
    _thread.start_new_thread(_interrupt, ())


def _interrupt() -> None:
    time.sleep(_MOMENT)
    os.kill(os.getpid(), _signal.SIGINT)


def whole(destructor: Callable[[T], object]) -> Callable[[T], None]:
    """Make a `__del__` that no interrupt divides and that loses no interrupt.

    An interrupt just before the block or after it calls `destructor` a second time, so the first
    step of `destructor` has to take away the resource that it releases.
    """
    undivided, finalizing = UNDIVIDED, sys.is_finalizing  # at exit the globals may be None

    def __del__(self: T) -> None:  # noqa: N807 - interrupts looks for the name
        try:
            with undivided:
                destructor(self)
        except Exception:
            if not finalizing():
                raise
        except KeyboardInterrupt:
            interrupt_later()
            __del__(self)

    return __del__


def again(destructor: Callable[[T], None]) -> Callable[[T], None]:
    """Call a `__del__` again if an interrupt came just before its first step, where its own code
    could not catch it."""
    _AGAIN.add(destructor.__code__)
    return destructor


_AGAIN = {whole(id).__code__}


def watch_destructors() -> None:
    """Send an interrupt again if Python drops it, as it drops all errors of destructors and of
    weak reference callbacks."""
    if not isinstance(sys.unraisablehook, _Watch):
        sys.unraisablehook = _Watch(sys.unraisablehook)


class _Watch:
    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    def __call__(self, dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt or (
            threading.current_thread() is not threading.main_thread()
        ):
            self._before(dropped)
            return
        interrupt_later()
        step = dropped.exc_traceback
        while step is not None and step.tb_frame.f_code not in _AGAIN:
            step = step.tb_next
        if step is not None:  # the interrupt came before the first step or after the last
            dropped.object(step.tb_frame.f_locals["self"])
