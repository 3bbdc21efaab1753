"""What stands under a background cell: one line on how it goes, brought up to date in place."""

from __future__ import annotations

import html
import itertools
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpunb.core.resources import devices_text, size_text

if TYPE_CHECKING:
    from gpunb.notebook.arriving import Home
    from gpunb.notebook.job import Job
    from gpunb.notebook.late import InCell

_NUMBERS = itertools.count(1)
_SIGNS = {"queued": "…", "running": "▶", "done": "✓", "failed": "✗", "cancelled": "■"}

PERIOD = 0.5
"""Seconds after which cards are brought up to date."""

EACH = 0.02
"""Seconds more for each of them, so that hundreds of them do not keep the kernel busy."""


class Card:
    """The line of one job. It is sent when it has changed."""

    def __init__(self, job: Job, cell: InCell | None = None) -> None:
        self.job = job
        self._cell = cell
        self._ident = f"gpunb-{os.getpid()}-{next(_NUMBERS)}"
        self._sent = ""
        self._end: str | None = None
        self._lock = threading.Lock()

    def text(self) -> str:
        """What it says now."""
        if self._end is not None:
            return self._end
        job = self.job
        facts = job._facts  # noqa: SLF001 - the card is a view of it
        text = facts_text(job.id, facts)
        if facts["state"] == "queued" and (why := job._why()):  # noqa: SLF001
            text += f": {why}"
        return text

    def bundle(self) -> dict[str, str]:
        """As text and as HTML."""
        text, sign = self.text(), _SIGNS.get(self.job.state, "")
        style = "font-family:var(--jp-code-font-family,monospace);font-size:.9em;opacity:.85"
        shown = f'<div style="{style}" role="status">{sign} {html.escape(text)}</div>'
        return {"text/plain": f"<Job {text}>", "text/html": shown}

    def display(self, shell: Any) -> None:
        """Show it under the running cell."""
        bundle = self.bundle()
        self._sent = bundle["text/plain"]
        shell.display_pub.publish(data=bundle, transient={"display_id": self._ident})
        if self._cell is not None:
            self._cell.cleared = self._again

    def update(self) -> None:
        """Bring it up to date, from any thread."""
        with self._lock:
            bundle = self.bundle()
            if bundle["text/plain"] != self._sent:
                self._send("update_display_data", bundle)

    def end(self, text: str) -> None:
        """From now on it says this."""
        self._end = text
        self.update()

    def _again(self) -> None:
        """The cell's output was cleared, and this with it."""
        with self._lock:
            self._send("display_data", self.bundle())

    def _send(self, kind: str, bundle: dict[str, str]) -> None:
        self._sent = bundle["text/plain"]
        if self._cell is not None:
            transient = {"display_id": self._ident}
            self._cell.send_now(kind, {"data": bundle, "metadata": {}, "transient": transient})


class Cards:
    """Those of jobs that are not over, kept up to date by a thread."""

    def __init__(self) -> None:
        self._cards: dict[int, Card] = {}
        self._any = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, card: Card) -> None:
        """Keep it up to date from now on."""
        self._cards[card.job.id] = card
        self._any.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._update, name="gpunb-cards", daemon=True)
            self._thread.start()

    def end(self, job: Job, text: str) -> None:
        """The job is over: its card says this for good."""
        card = self._cards.pop(job.id, None)
        if card is not None:
            card.end(text)

    def _update(self) -> None:
        while True:
            self._any.wait()
            cards = list(self._cards.values())
            if not cards:
                self._any.clear()
                if not self._cards:
                    continue
                self._any.set()
            time.sleep(PERIOD + EACH * len(cards))
            for card in cards:
                try:
                    card.update()
                except Exception:  # the session or the kernel is about to end
                    continue


def facts_text(ident: int, facts: Mapping[str, Any]) -> str:
    """A job in a few words: ``"#7 train running on GPU 1, 3.2 s"``."""
    return f"#{ident} {facts['name']} {facts['state']}{_on(facts)}, {seconds(facts['seconds'])}"


def summary(job: Job, home: Home | None) -> str:
    """How a job ended, in one line."""
    facts = job._facts  # noqa: SLF001 - a view of it
    took = seconds(facts["seconds"])
    text = f"#{job.id} {facts['name']} {facts['state']} after {took}{_on(facts)}"
    if facts.get("hint"):
        text += f", {facts['hint']}"
    elif facts.get("peak"):
        text += f", peak {size_text(facts['peak'])} of GPU memory"
    elif job.peak:
        text += f", peak {size_text(job.peak)}"
    if home is None:
        return text
    bound = sorted(home.values.keys() - set(home.unbound))
    if bound:
        text += f"; bound {', '.join(bound)}"
    if home.unbound:
        text += f"; changed here meanwhile, so left alone: {', '.join(home.unbound)}"
        text += f" (Out[{job.number}].names has this cell's)"
    return text


def _on(facts: Mapping[str, Any]) -> str:
    devices = facts["devices"]
    return f" on {devices_text(devices, shares=False)}" if devices else ""


def seconds(value: float) -> str:
    """A time as one reads it."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
