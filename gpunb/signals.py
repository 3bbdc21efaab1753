"""What must not be cut in two by Ctrl-C, or by the Stop of a notebook.

Python raises `KeyboardInterrupt` between any two steps of the main thread: also between the moment
when something is booked for its caller and the one when the caller has it. And what a destructor
raises, Python drops.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without enumerations: 10 times as fast
import _thread
import os
import threading
import time
import types
from typing import Any

HEARTBEAT = 0.1
"""Seconds after which who waits looks around: an interrupt is not seen by who sleeps longer."""

_MOMENT = 0.002
"""Seconds after which an interrupt comes that hit a destructor."""


class _Undivided:
    """``with UNDIVIDED:`` lets an interrupt wait until the end of the block, in any thread."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._handler: Any = None
        self._came = False
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return  # no signal is handled there
        if not self._depth:
            handler = _signal.getsignal(_signal.SIGINT)
            if not callable(handler):
                return  # it is ignored, or ends the process, or is not Python's
            # In this order: until the new handler is there, the old one may raise.
            self._came = False
            self._handler = handler
            _signal.signal(_signal.SIGINT, self._note)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != self._main or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            handler, self._handler = self._handler, None
            _signal.signal(_signal.SIGINT, handler)
            if self._came:
                handler(_signal.SIGINT, None)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._came = True

    def _forked(self) -> None:
        self._main = threading.get_ident()


UNDIVIDED = _Undivided()


def interrupt_later() -> None:
    """Have the interrupt that hit a destructor come again, in a moment."""
    # Not threading's own, which waits for the thread: the next signal could come by then.
    _thread.start_new_thread(_interrupt, ())


def _interrupt() -> None:
    time.sleep(_MOMENT)
    os.kill(os.getpid(), _signal.SIGINT)
