"""The line below a background cell: its state, updated in place."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpunb.scheduler.markup import as_html, escaped
from gpunb.scheduler.resources import devices_text

if TYPE_CHECKING:
    from gpunb.notebook.background_output import InCell
    from gpunb.notebook.shell import NotebookShell

_NUMBERS = itertools.count(1)
_SIGNS = {"queued": "…", "running": "▶", "done": "✓", "failed": "✗", "cancelled": "■"}

PERIOD = 0.5
"""Seconds between two updates of the cards."""

EACH = 0.02
"""Seconds more for each card, so that hundreds of cards do not keep the kernel busy."""


class Card:
    """The line of one job. It is sent when it has changed."""

    def __init__(self, describe: Callable[[], tuple[str, str]], cell: InCell) -> None:
        """`describe` returns the state of the job and a text; the card is a part of `cell`."""
        self._describe = describe
        self._cell = cell
        self._ident = f"gpunb-{os.getpid()}-{next(_NUMBERS)}"
        self._sent = ""
        self._end: str | None = None
        self._lock = threading.Lock()

    def display(self, shell: NotebookShell) -> None:
        """Show it under the running cell."""
        bundle = self._bundle()
        self._sent = bundle["text/plain"]
        shell.ip.display_pub.publish(data=bundle, transient={"display_id": self._ident})
        self._cell.cleared = self._again

    def update(self) -> None:
        """Send it again if its text has changed; from any thread."""
        with self._lock:
            bundle = self._bundle()
            if bundle["text/plain"] != self._sent:
                self._send("update_display_data", bundle)

    def end(self, text: str) -> None:
        """Show this text from now on."""
        self._end = text
        self.update()

    def _again(self) -> None:
        """Show it again after the output of the cell was cleared."""
        with self._lock:
            self._send("display_data", self._bundle())

    def _send(self, kind: str, bundle: dict[str, str]) -> None:
        self._sent = bundle["text/plain"]
        transient = {"display_id": self._ident}
        self._cell.send_now(kind, {"data": bundle, "metadata": {}, "transient": transient})

    def _bundle(self) -> dict[str, str]:
        state, text = self._describe()
        return bundle_of(state, text if self._end is None else self._end)


class Cards:
    """The cards of jobs that are not over. A thread keeps them up to date."""

    def __init__(self) -> None:
        self._cards: dict[int, Card] = {}
        self._any = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, job: int, card: Card) -> None:
        """Keep the card of a job up to date from now on."""
        self._cards[job] = card
        self._any.set()
        if self._thread is None:
            thread = threading.Thread(target=self._update, name="gpunb-cards", daemon=True)
            thread.start()
            self._thread = thread

    def end(self, job: int, text: str) -> None:
        """Show this text in the card of a job that is over, for good."""
        card = self._cards.pop(job, None)
        if card is not None:
            card.end(text)

    def _update(self) -> None:
        while True:
            self._any.wait()
            self._any.clear()  # before the look at the cards, so that none that comes is missed
            if not (cards := list(self._cards.values())):
                continue
            self._any.set()
            time.sleep(PERIOD + EACH * len(cards))
            for card in cards:
                try:
                    card.update()
                except Exception:  # the session or the kernel is about to end
                    continue


def bundle_of(state: str, text: str) -> dict[str, str]:
    """A card as text and as HTML."""
    style = "font-family:var(--jp-code-font-family,monospace);font-size:.9em;opacity:.85"
    shown = f'<div style="{style}" role="status">{_SIGNS.get(state, "")} {as_html(text)}</div>'
    return {"text/plain": f"<Job {text}>", "text/html": shown}


def facts_text(ident: int, facts: Mapping[str, Any], *, exact: bool = True) -> str:
    """A job in a few words: ``"#7 train running on GPU 1, 3.2 s"``.

    Args:
        exact: if not, a time above a minute is in minutes. A card with seconds would change the
            notebook, and so its file, twice a second.
    """
    took = facts["seconds"]
    shown = seconds(took) if exact or took < 60 else f"{took // 60:.0f} min"
    return escaped(f"#{ident} {facts['name']} {facts['state']}{on_devices(facts)}, {shown}")


def on_devices(facts: Mapping[str, Any]) -> str:
    """The devices of a job, as in ``" on GPU 1"``; empty if it has none."""
    devices = facts["devices"]
    return f" on {devices_text(devices, shares=False)}" if devices else ""


def seconds(value: float) -> str:
    """A time span for people, such as ``3.2 s`` or ``1:02:03``."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
