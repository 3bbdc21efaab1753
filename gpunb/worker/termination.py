"""SIGTERM to an actor that runs several calls at once: these end before the process does.

Any other worker ends at once, as programs do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

GRACE = 30.0
"""Seconds for the running calls; container managers give as many before they kill."""

_STEP = 0.01
_LAST = 1.0


class Termination:
    """Handles SIGTERM in this process, but not in its forked children, which end at once.

    Attributes:
        asked: whether the signal has come: no more calls are to begin.
    """

    def __init__(self, idle: Callable[[], bool]) -> None:
        """On the main thread. `idle` tells, from any thread, whether all calls are over."""
        self.asked = False
        self._idle = idle
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._signalled)
        # Python drops the signals that a child gets before its first step: they are held back.
        self._masks = threading.local()
        os.register_at_fork(
            before=self._hold_back, after_in_parent=self._let_go, after_in_child=self._reset
        )

    def _hold_back(self) -> None:
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _reset(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._signalled:  # not the user's own handler
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._let_go()

    def _signalled(self, number: int, _: Any) -> None:
        """Wait for the calls; at a second signal, end at once."""
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.asked = True
        threading.Thread(target=self._wait, name="gpunb-termination", daemon=True).start()

    def _wait(self) -> None:
        deadline = time.monotonic() + GRACE
        while not self._idle() and time.monotonic() < deadline:
            time.sleep(_STEP)
        os.kill(self._pid, signal.SIGTERM)
        time.sleep(_LAST)  # the main thread may be in code that handles no signals
        os.kill(self._pid, signal.SIGKILL)
