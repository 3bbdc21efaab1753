"""Limits the text that a notebook shows of one job to a rate that people can read.

A job has a budget of characters that grows with time. So a progress bar may go on for days, while
a loop that prints without end is cut short: the notebook stays usable and the kernel small. A line
tells how much text was left out, and the end of that text is shown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

BUDGET = 1 << 20
"""Characters that may come at once."""

RATE = 1 << 16
"""Characters a second, in the long run."""

TAIL = 1 << 14
"""Characters at the end of the text left out that are shown all the same."""


class Cap:
    """The budget of one stream of a job."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left = float(BUDGET)
        self._since = clock()
        self._tail: deque[str] = deque()
        self._held = 0
        self._dropped = 0

    def feed(self, text: str) -> str:
        """The part of the text to show now. The end of the other part may be shown later."""
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
        # Go on only with much budget, or there would be as many notices as lines.
        return self.rest() if self._left >= BUDGET / 2 else ""

    def rest(self) -> str:
        """The text that was held back, as far as it is shown at all."""
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


class OutputCaps:
    """The budgets of one job: a `Cap` for each stream."""

    def __init__(self) -> None:
        self._caps: dict[str, Cap] = {}

    def feed(self, stream: str, text: str) -> str:
        """As `Cap.feed`, of a stream."""
        return self._caps.setdefault(stream, Cap()).feed(text)

    def rest(self) -> Iterator[tuple[str, str]]:
        """Each stream with the text that was held back, as far as it is shown at all."""
        for stream, cap in self._caps.items():
            if text := cap.rest():
                yield stream, text


def _amount(count: int) -> str:
    if count >= 10**6:
        return f"{count / 10**6:.1f} million characters"
    return f"{count:,} characters"
