"""``gpunb status --watch``: the sessions of this machine, live."""

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

from gpunb.cli.lanes import Line, joined, lines
from gpunb.cli.machine import gather
from gpunb.exceptions import GpunbError
from gpunb.runtime import kernels

LOOK = 1.0
"""Seconds between two looks for sessions that have begun."""

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
}


class Sessions:
    """The snapshots of all sessions, each from a thread that waits for the next one."""

    def __init__(self) -> None:
        self.news: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self.snapshots: dict[int, dict[str, Any]] = {}
        self._watched: set[int] = set()

    def look(self) -> None:
        """Watch those that are new."""
        for each in kernels.sessions():
            if each.pid not in self._watched:
                self._watched.add(each.pid)
                threading.Thread(target=self._follow, args=(each.pid,), daemon=True).start()

    def _follow(self, pid: int) -> None:
        try:
            for snapshot in kernels.watch(pid):
                self.news.put((pid, snapshot))
        except GpunbError:  # it has ended meanwhile
            pass
        self.news.put((pid, None))

    def take(self, timeout: float) -> bool:
        """Take what is new, after waiting for it so many seconds; whether there was anything."""
        found = False
        try:
            while True:
                pid, snapshot = self.news.get(timeout=0 if found else timeout)
                found = True
                if snapshot is None:
                    self._watched.discard(pid)
                    self.snapshots.pop(pid, None)
                else:
                    self.snapshots[pid] = snapshot
        except queue.Empty:
            return found


def watch(once: bool = False, *, as_json: bool = False) -> int:
    """Show the sessions until Ctrl-C, or `once`; returns the exit status. `as_json` is for
    programs: the machine as a line of JSON, and another one whenever something has changed."""
    sessions = Sessions()
    if once:
        found = {each.pid: kernels.ask(each.pid, {"do": "status"}) for each in kernels.sessions()}
        print(_text(found))
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
                    show(sessions.snapshots)  # time has passed
    except KeyboardInterrupt:
        return 0
    finally:
        close()


Show = Callable[[Mapping[int, Mapping[str, Any]]], object]


class _Lines:
    """The machine as ``gpunb status --json`` has it, on a line each time that it has changed."""

    def __init__(self) -> None:
        self._last: object = None

    def show(self, found: Mapping[int, Mapping[str, Any]]) -> None:
        """Look at all of it: also at what no session tells, such as those of other users."""
        facts = gather()
        if (now := _timeless(facts)) != self._last:
            self._last = now
            print(json.dumps(facts), flush=True)


def _timeless(facts: Any) -> Any:
    """Without how long things have lasted."""
    if isinstance(facts, dict):
        return {name: _timeless(each) for name, each in facts.items() if name != "seconds"}
    return [_timeless(each) for each in facts] if isinstance(facts, list) else facts


def _screen() -> tuple[Show, Callable[[], object]]:
    """What shows snapshots, and what ends it: in place with rich, in place without, or one below
    the other where there is no terminal."""
    if not sys.stdout.isatty():
        return (lambda found: print(_text(found), flush=True)), bool
    if importlib.util.find_spec("rich") is None:
        clear = "\x1b[H\x1b[J"
        return (lambda found: print(clear + _text(found), flush=True)), bool
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    live = Live(console=console, auto_refresh=False, screen=True)
    live.start()

    def show(found: Mapping[int, Mapping[str, Any]]) -> None:
        pieces = [(text, _STYLES.get(style, "")) for line in _all(found) for text, style in line]
        live.update(Text.assemble(*pieces), refresh=True)

    return show, live.stop


def _all(found: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    width = shutil.get_terminal_size((100, 24)).columns
    shown: list[Line] = []
    for pid in sorted(found):
        passed = max(0.0, time.time() - found[pid]["time"])
        shown += [[*line, ("\n", "")] for line in lines(found[pid], width, passed)]
        shown.append([("\n", "")])
    return shown or [[("no session of gpunb runs\n", "soft")]]


def _text(found: Mapping[int, Mapping[str, Any]]) -> str:
    return "\n".join(joined(line).rstrip("\n") for line in _all(found))
