"""Looking at sessions while somebody listens, and not otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpunb.runtime import folder
from gpunb.server import machine
from gpunb.server.watching import Listener, Watching
from tests.waiting import PATIENCE

pytest.importorskip("jupyter_server")


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the desks."""
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv("GPUNB_SIMULATE", "1xA100:40GiB")
    return folder.runtime_folder() / folder.KERNELS


class Desk:
    """Stands for a session: says what it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.visitors: list[asyncio.StreamWriter] = []
        self.asked: list[Any] = []
        self._came = asyncio.Event()

    async def __aenter__(self) -> Desk:
        self.server = await asyncio.start_unix_server(self._visit, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        self.server.close()
        for writer in self.visitors:
            writer.close()
        await eventually(lambda: not self.visitors)
        await asyncio.sleep(0)

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(json.loads(await reader.readline()))
        self.visitors.append(writer)
        self._came.set()
        with contextlib.suppress(OSError):
            await reader.read()
        self.visitors.remove(writer)
        writer.close()

    async def say(self, **snapshot: Any) -> None:
        """Send a snapshot to all visitors, once there is one."""
        await asyncio.wait_for(self._came.wait(), PATIENCE)
        for writer in self.visitors:
            writer.write(json.dumps({"snapshot": snapshot}).encode() + b"\n")


class Ear:
    """A listener that keeps what it is told."""

    def __init__(self, watching: Watching, interval: float = 0.25) -> None:
        self.said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.hold = asyncio.Event()
        self.hold.set()
        self._watching = watching
        self.listener = Listener(self._hear, interval)
        watching.join(self.listener)

    async def _hear(self, text: str) -> None:
        await self.hold.wait()
        self.said.put_nowait(json.loads(text))

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.said.get(), PATIENCE)

    async def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            said = await self.next()
            if true(said):
                return said

    def leave(self) -> None:
        self._watching.leave(self.listener)


async def eventually(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - tells of files and lists, not of events
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[Watching]:
    """Ends with nothing running."""
    made = Watching()
    yield made
    for listener in list(made._listeners):
        made.leave(listener)
    await asyncio.sleep(0)
    assert made.idle


def run(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


def test_a_listener_hears_everything_and_then_what_changes(kernels: Path) -> None:
    async def story() -> None:
        async with watching() as looking, Desk(kernels / "71.sock") as desk:
            ear = Ear(looking)
            await desk.say(notes=[1], finished=[], time=1.0)
            first = await ear.until(lambda said: "71" in said["sessions"])
            assert first["whole"]
            assert first["sessions"]["71"]["notes"] == [1]
            await desk.say(notes=[1], finished=[2], time=2.0)
            assert await ear.next() == {
                "sessions": {"71": {"finished": [2], "time": 2.0}},
                "gone": [],
                "whole": False,
            }

    run(story)


def test_a_session_that_starts_and_ends_is_seen(kernels: Path) -> None:
    async def story() -> None:
        async with watching() as looking:
            ear = Ear(looking)
            assert (await ear.next())["machine"]["devices"][0]["type"] == "A100"
            async with Desk(kernels / "71.sock") as desk:
                await desk.say(running=[])
                await ear.until(lambda said: "71" in said["sessions"])
            await ear.until(lambda said: said["gone"] == [71])

    run(story)


def test_nothing_is_done_while_nobody_listens(kernels: Path) -> None:
    async def story() -> None:
        async with watching() as looking, Desk(kernels / "71.sock") as desk:
            assert looking.idle
            ear, other = Ear(looking), Ear(looking)
            await desk.say(running=[])
            await ear.until(lambda said: "71" in said["sessions"])
            ear.leave()
            assert not looking.idle
            other.leave()
            assert looking.idle
            await eventually(lambda: not desk.visitors)
            assert len(asyncio.all_tasks()) <= 2  # this one, and the desk's

    run(story)


def test_a_second_listener_shares_the_connection(kernels: Path) -> None:
    async def story() -> None:
        async with watching() as looking, Desk(kernels / "71.sock") as desk:
            ear = Ear(looking)
            await desk.say(notes=[5])
            await ear.until(lambda said: "71" in said["sessions"])
            other = Ear(looking)
            assert (await other.next())["sessions"]["71"]["notes"] == [5]
            assert len(desk.asked) == 1

    run(story)


def test_a_slow_listener_gets_the_latest_and_not_all(kernels: Path) -> None:
    async def story() -> None:
        async with watching() as looking, Desk(kernels / "71.sock") as desk:
            ear = Ear(looking)
            await desk.say(notes=[0])
            await ear.until(lambda said: "71" in said["sessions"])
            ear.hold.clear()
            other = Ear(looking)
            await other.next()
            for number in range(1, 4):
                await desk.say(notes=[number])
                await other.until(
                    lambda said, number=number: said["sessions"]["71"]["notes"] == [number]  # type: ignore[misc]
                )
            ear.hold.set()
            heard = [await ear.next(), await ear.next()]
            assert heard[1]["sessions"]["71"]["notes"] == [3]
            assert ear.said.empty()

    run(story)


def test_a_dead_socket_is_removed(kernels: Path) -> None:
    path = kernels / "4000000.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def story() -> None:
        async with watching() as looking:
            ear = Ear(looking)
            assert (await ear.next())["sessions"] == {}
            await eventually(lambda: not path.exists())

    run(story)


def test_a_session_that_does_not_answer_is_named(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpunb.runtime.kernels.TIMEOUT", 0.05)

    async def story() -> None:
        async with watching() as looking, Desk(kernels / "71.sock"):
            ear = Ear(looking)
            said = await ear.until(lambda said: "71" in said["sessions"])
            (text,) = said["sessions"]["71"]["warnings"]
            assert "process 71" in text
            assert "does not answer" in text

    run(story)


def test_what_cannot_be_read_ends_a_session_and_nothing_else(kernels: Path) -> None:
    async def story() -> None:
        async with watching() as looking, Desk(kernels / "71.sock") as desk:
            ear = Ear(looking)
            await desk.say(notes=[1])
            await ear.until(lambda said: "71" in said["sessions"])
            await desk.say(running=[2])
            await ear.until(lambda said: said["gone"] == [71])
            await eventually(lambda: len(desk.asked) == 2)

    run(story)


def test_a_folder_of_no_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o755)
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "open"))

    async def story() -> None:
        async with watching() as looking:
            said = await Ear(looking).next()
            assert "may be entered by others" in said["machine"]["problem"]
        assert "may be entered by others" in (await machine.whole())["machine"]["problem"]

    run(story)


def test_without_a_session_the_notes_say_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUNB_SIMULATE", "2xA100:nonsense")
    facts = asyncio.run(machine.facts())
    assert facts["devices"] == []
    assert "GPUNB_SIMULATE" in facts["notes"][0]
