"""Interrupts by Ray, which end what the main thread of a worker waits for.

Ray has Python note an interrupt, as if a signal had come. Without a signal a system call goes on,
and so does a `sleep`; so one that does nothing is sent after it. Python tells of the interrupt by
the descriptor for that.
"""

from __future__ import annotations

import os
import signal
import threading

from gpunb.worker.interrupts import WAKE, WAKE_AFTER


class InterruptWaker:
    """Wakes the main thread when it has an interrupt to see."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._seen = threading.Event()
        threading.Thread(target=self._run, name="gpunb-wakes", daemon=True).start()

    def listen(self) -> None:
        """From now on; what ran before may have had another use for the descriptor."""
        if threading.get_ident() == self._main:
            signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def seen(self) -> None:
        """The main thread has seen an interrupt."""
        self._seen.set()

    def _run(self) -> None:
        while True:
            self._seen.clear()
            if signal.SIGINT not in os.read(self._reading, 64):
                continue
            for seconds in WAKE_AFTER:
                if self._seen.wait(seconds):
                    break
                signal.pthread_kill(self._main, WAKE)
