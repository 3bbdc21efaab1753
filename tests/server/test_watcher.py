"""Sessions are watched while there are listeners, and only then."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpunb.server import machine
from gpunb.server.watcher import NewsListener, Watcher
from gpunb.system import runtime_dir
from tests.waiting import PATIENCE

pytest.importorskip("jupyter_server")


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control sockets."""
    monkeypatch.setenv(runtime_dir.VARIABLE, str(tmp_path / "run"))
    monkeypatch.setenv("GPUNB_SIMULATE", "1xA100:40GiB")
    return runtime_dir.runtime_folder() / runtime_dir.KERNELS


class ControlServer:
    """Stands for a session: sends the snapshots that a test gives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.visitors: list[asyncio.StreamWriter] = []
        self.asked: list[Any] = []
        self._came = asyncio.Event()

    async def __aenter__(self) -> ControlServer:
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

    async def send(self, **snapshot: Any) -> None:
        """Send a snapshot to all visitors, once there is one."""
        await asyncio.wait_for(self._came.wait(), PATIENCE)
        for writer in self.visitors:
            writer.write(json.dumps({"snapshot": snapshot}).encode() + b"\n")


class Recorder:
    """A listener that records the messages."""

    def __init__(self, watcher: Watcher, interval: float = 0.25) -> None:
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.hold = asyncio.Event()
        self.hold.set()
        self._watcher = watcher
        self.listener = NewsListener(self._receive, interval)
        watcher.join(self.listener)

    async def _receive(self, text: str) -> None:
        await self.hold.wait()
        self.messages.put_nowait(json.loads(text))

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.messages.get(), PATIENCE)

    async def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message = await self.next()
            if true(message):
                return message

    def leave(self) -> None:
        self._watcher.leave(self.listener)


async def eventually(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - tells of files and lists, not of events
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[Watcher]:
    """Ends with nothing running."""
    made = Watcher()
    yield made
    for listener in list(made._listeners):
        made.leave(listener)
    await asyncio.sleep(0)
    assert made.idle


Test = Callable[..., Awaitable[None]]


def story(test: Test) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))  # type: ignore[arg-type]

    return run


FIRST = {"notes": [1], "finished": [], "time": 1.0}


@pytest.mark.parametrize(
    ("snapshots", "expected", "connections"),
    [
        pytest.param(
            [FIRST],
            lambda message: message["whole"] and message["sessions"]["71"]["notes"] == [1],
            1,
            id="whole-state-at-first",
        ),
        pytest.param(
            [FIRST, {**FIRST, "finished": [2], "time": 2.0}],
            {"sessions": {"71": {"finished": [2], "time": 2.0}}, "gone": [], "whole": False}.__eq__,
            1,
            id="changes-after-that",
        ),
        pytest.param(
            [FIRST, {"running": [2]}],
            lambda message: message["gone"] == [71],
            2,
            id="end-of-a-session-with-an-invalid-snapshot",
        ),
    ],
)
@story
async def test_a_listener_gets(
    kernels: Path,
    snapshots: list[dict[str, Any]],
    expected: Callable[[dict[str, Any]], bool],
    connections: int,
) -> None:
    before = time.time()
    async with watching() as looking, ControlServer(kernels / "71.sock") as control_server:
        recorder = Recorder(looking)
        await control_server.send(**snapshots[0])
        message = await recorder.until(lambda message: "71" in message["sessions"])
        for snapshot in snapshots[1:]:
            await control_server.send(**snapshot)
            message = await recorder.next()
        assert before <= message.pop("time") <= time.time()
        assert expected(message)
        await eventually(lambda: len(control_server.asked) == connections)


@story
async def test_sessions_that_start_and_end_are_sent(kernels: Path) -> None:
    async with watching() as looking:
        recorder = Recorder(looking)
        assert (await recorder.next())["machine"]["devices"][0]["type"] == "A100"
        async with ControlServer(kernels / "71.sock") as control_server:
            await control_server.send(running=[])
            await recorder.until(lambda message: "71" in message["sessions"])
        await recorder.until(lambda message: message["gone"] == [71])


@story
async def test_there_is_no_task_without_listeners(kernels: Path) -> None:
    async with watching() as looking, ControlServer(kernels / "71.sock") as control_server:
        assert looking.idle
        recorder, other = Recorder(looking), Recorder(looking)
        await control_server.send(running=[])
        await recorder.until(lambda message: "71" in message["sessions"])
        recorder.leave()
        assert not looking.idle
        other.leave()
        assert looking.idle
        await eventually(lambda: not control_server.visitors)
        assert len(asyncio.all_tasks()) <= 2  # this one, and the control server's


@story
async def test_a_second_listener_shares_the_connection(kernels: Path) -> None:
    async with watching() as looking, ControlServer(kernels / "71.sock") as control_server:
        recorder = Recorder(looking)
        await control_server.send(notes=[5])
        await recorder.until(lambda message: "71" in message["sessions"])
        other = Recorder(looking)
        assert (await other.next())["sessions"]["71"]["notes"] == [5]
        assert len(control_server.asked) == 1


@story
async def test_a_slow_listener_gets_merged_news(kernels: Path) -> None:
    async with watching() as looking, ControlServer(kernels / "71.sock") as control_server:
        recorder = Recorder(looking)
        await control_server.send(notes=[0])
        await recorder.until(lambda message: "71" in message["sessions"])
        recorder.hold.clear()
        other = Recorder(looking)
        await other.next()
        for number in range(1, 4):
            await control_server.send(notes=[number])
            await other.until(
                lambda message, number=number: message["sessions"]["71"]["notes"] == [number]  # type: ignore[misc]
            )
        recorder.hold.set()
        messages = [await recorder.next(), await recorder.next()]
        assert messages[1]["sessions"]["71"]["notes"] == [3]
        assert recorder.messages.empty()


@story
async def test_a_dead_socket_is_removed(kernels: Path) -> None:
    path = kernels / "4000000.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with watching() as looking:
        recorder = Recorder(looking)
        assert (await recorder.next())["sessions"] == {}
        await eventually(lambda: not path.exists())


@story
async def test_a_session_that_does_not_answer_is_named(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpunb.control.client.TIMEOUT", 0.05)
    async with watching() as looking, ControlServer(kernels / "71.sock"):
        recorder = Recorder(looking)
        message = await recorder.until(lambda message: "71" in message["sessions"])
        (text,) = message["sessions"]["71"]["warnings"]
        assert "process 71" in text
        assert "does not answer" in text


@story
async def test_an_unusable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o755)
    monkeypatch.setenv(runtime_dir.VARIABLE, str(tmp_path / "open"))
    async with watching() as looking:
        message = await Recorder(looking).next()
        assert "may be entered by others" in message["machine"]["problem"]
    assert "may be entered by others" in (await machine.whole())["machine"]["problem"]


def test_without_a_session_the_notes_say_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPUNB_SIMULATE", "2xA100:nonsense")
    facts = asyncio.run(machine.facts())
    assert facts["devices"] == []
    assert "GPUNB_SIMULATE" in facts["notes"][0]
    monkeypatch.setenv("GPUNB_SIMULATE", "")
    assert not any("GPUNB_SIMULATE" in each for each in asyncio.run(machine.facts())["notes"])
