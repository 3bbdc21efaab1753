"""Waiting in tests: for something to come true, and at a gate that holds tasks."""

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
