"""A gate that holds tasks, for tests that need to know where they are."""

from __future__ import annotations

import time
from pathlib import Path

from tests.sessions import eventually


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

    def await_(self, name: object = "task") -> None:
        eventually(lambda: self.came(name), f"{name} came to the gate")

    def open(self) -> None:
        (self.folder / "open").touch()

    def close(self) -> None:
        (self.folder / "open").unlink()
