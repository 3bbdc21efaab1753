"""Interrupts of a worker: each is meant for one attempt of one task, and stops no other.

The kernel writes the task and the attempt that it means into a pipe (the notice), and then sends
SIGINT. The signal can come before, while or after the notice is read. Its attempt can be over,
running or still to begin.

The signal can also come between Python's last look for signals and a system call that waits; then
it does not end that call. So while the notice is not read, another signal (`WAKE`) is sent: it
wakes the main thread, which reads the notice. SIGINT itself is not sent twice, because libraries
take a second one as an order to stop without cleaning up.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import sys
import termios
import time
import types
from collections.abc import Callable
from typing import Any

from gpunb.system.signals import interrupt_later

NOTICE = struct.Struct("<qq")
"""The content of the pipe: the task and the attempt to interrupt."""

Attempt = tuple[int, int]

WAKE = signal.SIGURG
WAKE_AFTER = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds to each of these signals from the one before."""

_SIGNAL_DELAY = 2.0
"""Seconds within which the signal of an interrupt comes, after its notice."""


def unread(pipe: int) -> bool:
    """Whether notices are in the pipe that nobody has read; its end to write to may be asked."""
    try:
        return any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    except OSError:  # not every system tells
        return False


_DEEP = 5
"""Frames to look at for a destructor."""


def _in_destructor(frame: types.FrameType | None) -> bool:
    for _ in range(_DEEP):
        if frame is None:
            return False
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class Interrupts:
    """Turns signals into `KeyboardInterrupt` in the attempt that is meant.

    Attributes:
        running: the attempt that runs on the main thread, or None.
        hit: whether it was interrupted.
        raised: whether a KeyboardInterrupt was raised in it, for this or another reason.
        elsewhere: is asked first about each attempt that is meant; True if it does not run on
            the main thread and was told in another way.
    """

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        self._poll = poll.poll
        self._early: set[Attempt] = set()
        self._unsignalled = 0
        self._expected_until = 0.0
        self._collecting = False
        self._signals: list[None] = []
        self._postponed: list[Attempt] = []
        self.running: Attempt | None = None
        self.hit = self.raised = False
        self.elsewhere: Callable[[Attempt], bool] | None = None

    def listen(self) -> None:
        """From now on. On the main thread."""
        before = sys.unraisablehook
        sys.unraisablehook = lambda dropped: self._dropped(dropped) or before(dropped)
        signal.signal(signal.SIGINT, self.signalled)
        signal.signal(WAKE, self.signalled)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def begin(self, attempt: Attempt) -> None:
        """From now on interrupts are meant for this attempt, and one may have been early.

        Raises:
            KeyboardInterrupt: one was.
        """
        self.hit = self.raised = False
        self.running = attempt
        self._early.update(self._collect(0))
        if attempt in self._early:
            self._early.clear()
            self.hit = self.raised = True
            raise KeyboardInterrupt

    def was_early(self, attempt: Attempt) -> bool:
        """Whether an attempt that does not run on the main thread was to be interrupted before it
        came here."""
        if attempt not in self._early:
            return False
        self._early.discard(attempt)
        return True

    def end(self) -> None:
        """Nothing runs on the main thread any more."""
        self.running = None

    def signalled(self, number: int, frame: Any) -> None:
        """Raise in the attempt that is meant, and in no other; for SIGINT and `WAKE`."""
        woken = number == WAKE
        if woken and signal.getsignal(signal.SIGINT) != self.signalled:
            return  # the task handles SIGINT itself, and has got it
        if self._collecting:
            if not woken:
                self._signals.append(None)  # between two lines of `_collect`, which sees it
            return
        meant = self._collect(0 if woken else 1)
        if self.elsewhere is not None and meant:
            meant = [each for each in meant if not self.elsewhere(each)]
            if not meant:
                return
        if self.running is None:
            self._early.update(meant)  # for what is on its way to this worker
            return
        if not meant:
            if woken or (self._unsignalled >= 0 and time.monotonic() < self._expected_until):
                return  # its notice was read before it came
            self._unsignalled = 0
            self.raised = True
            raise KeyboardInterrupt  # the task raised the signal itself, or a user at a terminal
        if self.running in meant:
            if _in_destructor(frame):
                self._postpone(self.running)
                return
            self.hit = self.raised = True
            raise KeyboardInterrupt

    def _dropped(self, dropped: Any) -> bool:
        """Python has dropped an error, as it does in what a weak reference calls: if it was an
        interrupt of ours, it comes again."""
        if not self.hit or self.running is None or dropped.exc_type is not KeyboardInterrupt:
            return False
        self._postpone(self.running)
        return True

    def _postpone(self, attempt: Attempt) -> None:
        """Interrupt a moment later. What a destructor raises, Python drops."""
        self._postponed.append(attempt)
        interrupt_later()

    def _collect(self, signals: int) -> list[Attempt]:
        """The attempts to interrupt, and the count of what is known of them without its signal."""
        found: list[Attempt] = []
        while True:
            self._collecting = True
            meant = self._notices()
            while self._postponed:
                meant.append(self._postponed.pop())
            if meant:
                self._unsignalled = max(0, self._unsignalled) + len(meant)
                self._expected_until = time.monotonic() + _SIGNAL_DELAY
                found += meant
            self._unsignalled -= signals
            signals = 0
            # The notice of a signal that came by now may have come after the others were read: look
            # again for each that is counted here, also for one that comes while they are counted.
            while self._signals:
                self._signals.pop()
                signals += 1
            self._collecting = False
            if not signals and not self._signals:
                return found

    def _notices(self) -> list[Attempt]:
        if not self._poll(0):  # a third of the time of a read that fails
            return []
        try:
            notices = os.read(self._pipe, 4096)
        except BlockingIOError:
            return []
        whole = len(notices) // NOTICE.size * NOTICE.size
        meant: list[Any] = list(NOTICE.iter_unpack(notices[:whole]))
        return meant
