"""``gpunb status --watch``: shows the sessions of this machine, live."""

from __future__ import annotations

import importlib.util
import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gpunb.cli.machine import gather
from gpunb.control import client
from gpunb.exceptions import GpunbError
from gpunb.live.text import Line, joined, lines

LOOK = 1.0
"""Seconds between two searches for new sessions."""

_STYLES = {
    "head": "bold",
    "soft": "dim",
    "warn": "yellow",
    "job0": "black on bright_blue",
    "job1": "black on bright_red",
    "job2": "black on bright_green",
    "job3": "black on bright_magenta",
    "job4": "black on bright_yellow",
    "job5": "black on bright_cyan",
    "rest0": "bright_white on blue",
    "rest1": "bright_white on red",
    "rest2": "bright_white on green",
    "rest3": "bright_white on magenta",
    "rest4": "bright_white on yellow",
    "rest5": "bright_white on cyan",
}


class WatchedSessions:
    """The snapshots of all sessions. One thread a session waits for its next snapshot."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self.snapshots: dict[int, dict[str, Any]] = {}
        self._watched: set[int] = set()

    def look(self) -> None:
        """Start a thread for each new session."""
        for each in client.sessions():
            if each.pid not in self._watched:
                self._watched.add(each.pid)
                threading.Thread(target=self._follow, args=(each.pid,), daemon=True).start()

    def _follow(self, pid: int) -> None:
        try:
            for snapshot in client.watch(pid):
                self.news.put((pid, snapshot))
        except GpunbError:  # the session has ended
            pass
        self.news.put((pid, None))

    def take(self, timeout: float) -> bool:
        """Take new snapshots, waiting at most `timeout` seconds. Returns whether one came."""
        changed = False
        try:
            while True:
                pid, snapshot = self.news.get(timeout=0 if changed else timeout)
                changed = True
                if snapshot is None:
                    self._watched.discard(pid)
                    self.snapshots.pop(pid, None)
                else:
                    self.snapshots[pid] = snapshot
        except queue.Empty:
            return changed


def watch(once: bool = False, *, as_json: bool = False) -> int:
    """Show the sessions until Ctrl-C, or only `once`. Returns the exit status.

    With `as_json` the state of the machine is printed as a line of JSON after each change.
    """
    sessions = WatchedSessions()
    if once:
        snapshots = {each.pid: client.ask(each.pid, {"do": "status"}) for each in client.sessions()}
        print(_text(snapshots))
        return 0
    show, close = (_Lines().show, bool) if as_json else _screen()
    try:
        sessions.look()
        sessions.take(LOOK)
        show(sessions.snapshots)
        while True:
            if sessions.take(LOOK):
                show(sessions.snapshots)
            else:
                sessions.look()
                if as_json or sys.stdout.isatty():
                    show(sessions.snapshots)  # durations have grown
    except KeyboardInterrupt:
        return 0
    finally:
        close()


Show = Callable[[Mapping[int, Mapping[str, Any]]], object]


class _Lines:
    """Prints ``gpunb status --json`` on one line, after each change."""

    def __init__(self) -> None:
        self._last: object = None

    def show(self, snapshots: Mapping[int, Mapping[str, Any]]) -> None:
        """Print the whole state if it has changed. `found` lacks sessions of other users."""
        facts = gather()
        if (now := _timeless(facts)) != self._last:
            self._last = now
            print(json.dumps(facts), flush=True)


def _timeless(facts: Any) -> Any:
    """The facts without durations."""
    if isinstance(facts, dict):
        return {name: _timeless(each) for name, each in facts.items() if name != "seconds"}
    return [_timeless(each) for each in facts] if isinstance(facts, list) else facts


def _screen() -> tuple[Show, Callable[[], object]]:
    """A function that shows snapshots, and one that ends the display.

    On a terminal each display replaces the last, drawn by rich where it is installed.
    """
    if not sys.stdout.isatty():
        return (lambda snapshots: print(_text(snapshots), flush=True)), bool
    if importlib.util.find_spec("rich") is None:
        clear = "\x1b[H\x1b[J"
        return (lambda snapshots: print(clear + _text(snapshots), flush=True)), bool
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    live = Live(console=console, auto_refresh=False, screen=True)
    live.start()

    def show(snapshots: Mapping[int, Mapping[str, Any]]) -> None:
        pieces = [
            (text, _STYLES.get(style, "")) for line in _all(snapshots) for text, style in line
        ]
        live.update(Text.assemble(*pieces), refresh=True)

    return show, live.stop


def _all(snapshots: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    width = shutil.get_terminal_size((100, 24)).columns
    shown: list[Line] = []
    for pid in sorted(snapshots):
        passed = max(0.0, time.time() - snapshots[pid]["time"])
        shown += [[*line, ("\n", "")] for line in lines(snapshots[pid], width, passed)]
        shown.append([("\n", "")])
    return shown or [[("no session of gpunb runs\n", "soft")]]


def _text(snapshots: Mapping[int, Mapping[str, Any]]) -> str:
    return "\n".join(joined(line).rstrip("\n") for line in _all(snapshots))
