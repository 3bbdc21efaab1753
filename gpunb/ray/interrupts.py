"""Interrupts of calls in a Ray worker, by the kernel and by Ray.

1. The kernel names the call. A notice of its attempt goes into a pipe, and a signal follows;
   `gpunb.worker.interrupts` raises in the attempt that is meant.
2. Ray signals without a name. If no attempt runs yet, the next one asks Ray whether it was
   cancelled.
3. In an actor that runs several calls, signals reach none of them: a call that was stopped raises
   when it begins, or asks `is_cancelled`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import ray

from gpunb.ray.wakeup import InterruptWaker
from gpunb.scheduler.tasks import TaskId
from gpunb.worker.interrupts import NOTICE, WAKE, WAKE_AFTER, Interrupts, unread


class CallInterrupts:
    """Interrupts the call that is meant.

    Attributes:
        several: whether calls run in threads or coroutines, where signals reach none of them.
        signals: turns signals into `KeyboardInterrupt` on the main thread.
    """

    def __init__(self) -> None:
        reading, self._notices = os.pipe()
        self.signals = Interrupts(reading)
        self.several = False
        self._waker = InterruptWaker()
        self._attempt: tuple[int, int] | None = None
        self._stopped: set[TaskId] = set()
        self._unnamed = False
        self._main = threading.main_thread().ident
        if threading.current_thread() is threading.main_thread():
            self.signals.listen()
            signal.signal(signal.SIGINT, self._on_signal)

    def begin(self, attempt: tuple[int, int]) -> None:
        """Let interrupts reach this attempt from now on.

        Raises:
            KeyboardInterrupt: an interrupt came before, or the call was stopped in an actor that
                runs several calls.
        """
        if self.several:
            if attempt[0] in self._stopped:
                raise KeyboardInterrupt
            return
        self._waker.listen()
        self._attempt = attempt
        self.signals.begin(attempt)
        if self._unnamed:
            self._unnamed = False
            if is_cancelled_by_ray():
                self.signals.hit = True
                raise KeyboardInterrupt

    def end(self) -> None:
        """Let interrupts reach no attempt on the main thread any more."""
        self.signals.end()

    def forget(self, task: TaskId) -> None:
        """Forget whether a call was stopped: it is over."""
        self._stopped.discard(task)

    def interrupt(self, task: TaskId) -> None:
        """Raise KeyboardInterrupt in a call on the main thread; other calls ask `is_cancelled`."""
        self._stopped.add(task)
        if self.several or self._main is None:
            return
        running = self._attempt
        attempt = running[1] if running is not None and running[0] == task else 1
        os.write(self._notices, NOTICE.pack(task, attempt))
        signal.pthread_kill(self._main, signal.SIGINT)
        threading.Thread(target=self._wake, name="gpunb-wake", daemon=True).start()

    def is_cancelled(self, task: TaskId) -> bool:
        """Whether a call was stopped by the kernel or by Ray."""
        return task in self._stopped or is_cancelled_by_ray()

    def _on_signal(self, number: int, frame: Any) -> None:
        self._waker.seen()
        if self.signals.running is None:
            self._unnamed = True  # Ray does not say which attempt it means
        self.signals.signalled(number, frame)

    def _wake(self) -> None:
        for seconds in WAKE_AFTER:
            time.sleep(seconds)
            if not unread(self._notices):
                return
            signal.pthread_kill(self._main or 0, WAKE)


def is_cancelled_by_ray() -> bool:
    """Whether the call in this thread was cancelled, and not only interrupted."""
    try:
        return bool(ray.get_runtime_context().is_canceled())
    except Exception:
        return False  # Ray does not answer on this thread
