"""How much of a job's text a notebook is shown: all of it, unless it comes faster than can be read.

What a job may show is a budget that grows with time, so that a progress bar may go on for days,
while a loop that prints without end is cut short: the notebook stays usable and the kernel small.
What is left out is said in its place, and the last of it is shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

BUDGET = 1 << 20
"""Characters that may come at once."""

RATE = 1 << 16
"""Characters a second, in the long run."""

TAIL = 1 << 14
"""Characters of what is left out that are shown in the end."""


class Cap:
    """The budget of one job."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(BUDGET)
        self._since = clock()
        self._tail: deque[str] = deque()
        self._held = 0
        self._dropped = 0

    def feed(self, text: str) -> str:
        """What of the text is to be shown now; the rest may be shown later, as far as it is
        near the end."""
        now = self._clock()
        self._left = min(float(BUDGET), self._left + (now - self._since) * RATE)
        self._since = now
        if not self._held and len(text) <= self._left:
            self._left -= len(text)
            return text
        if not self._held and self._left >= 1:
            at = text.rfind("\n", 0, int(self._left)) + 1
            if not at and len(text) > TAIL:
                at = int(self._left)
            shown, text = text[:at], text[at:]
            self._left = 0.0
            self._keep(text)
            return shown
        self._keep(text)
        # Go on only with some room to spare, or there would be as many notices as lines.
        return self.rest() if self._left >= BUDGET / 2 else ""

    def rest(self) -> str:
        """What was held back, as far as it is shown at all."""
        if not self._held:
            return ""
        text = "".join(self._tail)
        dropped = self._dropped + max(0, len(text) - TAIL)
        text = text[-TAIL:]
        if dropped:
            start = text.find("\n") + 1
            dropped += start
            text = f"\n... {_amount(dropped)} left out ...\n{text[start:]}"
        self._left -= len(text)
        self._tail.clear()
        self._held = self._dropped = 0
        return text

    def _keep(self, text: str) -> None:
        self._tail.append(text)
        self._held += len(text)
        while self._held - len(self._tail[0]) >= TAIL:
            gone = len(self._tail.popleft())
            self._held -= gone
            self._dropped += gone


def _amount(count: int) -> str:
    if count >= 10**6:
        return f"{count / 10**6:.1f} million characters"
    return f"{count:,} characters"
