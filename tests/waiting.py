"""Waiting in tests for what should happen, so that no test goes by the clock.

`eventually` waits for something to come true, `written` for the content of a file, a `Gate` holds
tasks until the test opens it and knows which have begun, and `not_before` says that something does
not happen before something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = float(os.environ.get("GPUNB_TEST_PATIENCE", "30"))
"""Seconds; nothing takes so long unless it is broken."""


def eventually(true: Callable[[], Any], what: str = "", within: float = PATIENCE) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + within
    while True:
        answer = true()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what or true}")
        time.sleep(0.005)


def written(path: Path, within: float = PATIENCE) -> str:
    """The text of a file that another process writes: not before it ends with a newline."""

    def text() -> str | None:
        content = path.read_text(encoding="utf-8") if path.exists() else ""
        return content if content.endswith("\n") else None

    return eventually(text, f"{path} has a whole line", within)


def not_before(happened: Callable[[], Any], end: Callable[[], Any], what: str = "") -> None:
    """Wait for ``end``, which must come true later than ``happened`` could; that must not.

    Take for ``end`` something that goes the same way behind what must not happen: the next
    message, the next task. A short wait says nothing on a busy machine.
    """
    eventually(lambda: happened() or end(), f"the end of {what or happened}")
    assert not happened(), f"happened too early: {what or happened}"


def until_main_sleeps() -> None:
    """Wait until the main thread of this process sleeps in the system, and has for two looks.

    For another thread, which then sends an interrupt. To wait for the interpreter's lock is no such
    sleep: this thread lets go of the lock between the looks.
    """
    last: list[str] = []

    def still() -> bool:
        nonlocal last
        about = Path(f"/proc/self/task/{os.getpid()}/status").read_text().splitlines()
        names = ("State", "voluntary_ctxt_switches")
        before, last = last, [each for each in about if each.startswith(names)]
        return last == before and "sleeping" in last[0]

    eventually(still, "the main thread sleeps")


class Gate:
    """Holds tasks until it is opened; knows who came."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def enter(self, name: object = "task") -> None:
        self.note(name)
        while not self.is_open():
            time.sleep(0.005)

    async def enter_async(self, name: object = "task") -> None:
        import asyncio

        self.note(name)
        while not self.is_open():  # noqa: ASYNC110 - it is opened in another process
            await asyncio.sleep(0.005)

    def note(self, name: object) -> None:
        (self.folder / f"came-{name}").touch()

    def is_open(self) -> bool:
        return (self.folder / "open").exists()

    def came(self, name: object = "task") -> bool:
        return (self.folder / f"came-{name}").exists()

    def count(self) -> int:
        """How many came, each name once."""
        return len(list(self.folder.glob("came-*")))

    def await_(self, name: object = "task") -> None:
        eventually(lambda: self.came(name), f"{name} came to the gate")

    def open(self) -> None:
        (self.folder / "open").touch()

    def close(self) -> None:
        (self.folder / "open").unlink()
