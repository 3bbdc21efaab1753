"""What a kernel sends to a head process, or another user of its socket, is its own fault alone."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.cli.start import start_head
from gpunb.exceptions import GpunbError
from gpunb.head import discovery
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, ChannelClosed
from gpunb.protocol.plain import framed
from gpunb.scheduler.resources import Demand
from tests.head.heads import head, own_folder
from tests.protocol.deep import DEEP
from tests.sessions import alive
from tests.waiting import PATIENCE, eventually

__all__ = ["head", "own_folder"]


@gpunb.remote(num_gpus=0.5)
def add(one: int, two: int) -> int:
    return one + two


@pytest.fixture
def attached(head: dict[str, Any]) -> Iterator[None]:
    gpunb.init("lab")
    yield
    gpunb.shutdown()


def stranger() -> Channel:
    """A connection that the head process takes for a kernel's."""
    sock, _ = discovery.connect("lab")
    discovery.introduce(sock, {"pid": os.getpid()})
    sock.setblocking(True)
    sock.settimeout(PATIENCE)
    return Channel(sock)


@pytest.mark.parametrize(
    "data",
    [
        b"garbage",
        framed(pickle.dumps((99, 1), 5)),
        framed(pickle.dumps(os.path.join, 5)),
        framed(pickle.dumps((msg.NUMBER[msg.Ready], 1), 5)),
        framed(pickle.dumps((msg.NUMBER[msg.Held], "it", 1), 5)),
        b"\x00spilled" + bytes(8),
        *DEEP.values(),
    ],
    ids=["garbage", "unknown number", "a function", "a worker's", "no object", "spilled", *DEEP],
)
@pytest.mark.usefixtures("attached")
def test_a_bad_message_ends_the_connection_of_its_sender_alone(data: bytes) -> None:
    channel = stranger()
    channel.send_encoded(data)
    message, _ = channel.receive()
    assert isinstance(message, msg.Output)
    assert message.kind == "dismissed"
    assert "message of this kernel could not be" in message.content["why"]
    with pytest.raises(ChannelClosed):
        channel.receive()
    channel.close()
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("Attach", ()),
        ("Attach", (("environment",), (1, 2))),
        ("Attach", (({}, None, [], []), (float("inf"), 1))),
        ("Attach", (({}, None, [], []), (-1, 1))),
        ("SubmitNumbered", ()),
        ("SubmitNumbered", (1, None, None, (), 0, None, None, None)),
        ("SubmitNumbered", (1, ("no function",), None, (), 0, None, None, None)),
        ("Submit", (("no call",), False)),
        ("Fetch", (((1, 2, 3),), None, True)),
        ("Fetch", (((1, 0),), float("nan"), True)),
        ("Wait", (((1, 0),), "many", None)),
        ("SendComm", (1, "comm_msg", {}, (1, None, False, False, None))),
        ("Control", (5,)),
        ("Ask", ("log", (1,))),
        ("Numbers", (1 << 40,)),
        ("WatchStatus", ("one", "soon")),
        ("NoSuchVerb", ()),
    ],
    ids=str,
)
@pytest.mark.usefixtures("attached")
def test_any_request_is_answered_or_ends_its_connection(arguments: tuple[str, Any]) -> None:
    channel = stranger()
    channel.send(msg.Request(7, 0, 0, *arguments))
    no_reply = arguments[0] == "SendComm"
    if no_reply:
        channel.send(msg.Request(8, 0, 0, "Numbers", (1,)))
    try:
        while not isinstance(reply := channel.receive()[0], msg.Reply):
            pass
        assert reply.request == (8 if no_reply else 7)
    except ChannelClosed:
        assert no_reply
    channel.close()
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


@pytest.mark.usefixtures("attached")
@pytest.mark.parametrize("line", [b"[" * 60_000, b"\xff", b"[]", b'{"end": 1}', b"NaN"])
def test_any_introduction_is_answered_or_refused(line: bytes) -> None:
    sock, _ = discovery.connect("lab")
    sock.settimeout(PATIENCE)
    sock.send(line)
    answer = sock.recv(1 << 16)
    if answer:
        assert not json.loads(answer).get("ok")
    sock.close()
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


def test_an_attached_kernel_says_why_it_was_sent_away(head: dict[str, Any]) -> None:
    gpunb.init("lab")
    try:
        connection = gpunb.protocol.backend.existing().connection  # type: ignore[union-attr]
        connection.loop.post((connection._send, b"garbage", ()))
        eventually(lambda: connection.lost)
        with pytest.raises(GpunbError, match="could not be received"):
            gpunb.get(add.remote(1, 2), timeout=PATIENCE)
    finally:
        gpunb.shutdown()
    gpunb.init("lab")
    try:
        assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3
    finally:
        gpunb.shutdown()


BREAKS = """
import sys
from gpunb.scheduler import scheduler
right = scheduler.Scheduler.handle
def handle(self, event, now):
    if "Submitted" in type(event).__name__:
        raise AssertionError("the books do not agree")
    return right(self, event, now)
scheduler.Scheduler.handle = handle
from gpunb.cli.start import serve
sys.exit(serve("broken", sys.argv[1]))
"""


def test_the_log_of_a_head_that_breaks_has_the_traceback(own_folder: Path) -> None:
    reading, writing = os.pipe()
    path = own_folder.parent / "broken.log"
    given = {"simulate": "1xA100:40GiB", "num_cpus": 1}
    with path.open("wb") as file, open(reading, "rb") as answer:
        done = subprocess.run(
            [sys.executable, "-c", BREAKS, json.dumps([writing, given])],
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            check=True,
        )
        os.close(writing)
        pid = json.loads(answer.read())["pid"]
    assert done.returncode == 0
    try:
        gpunb.init("broken")
        with pytest.raises(GpunbError):
            gpunb.get(add.remote(1, 2), timeout=PATIENCE)
        gpunb.shutdown()
        eventually(lambda: not alive(pid), "the head process has ended")
    finally:
        gpunb.shutdown()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert "AssertionError: the books do not agree" in path.read_text()


@pytest.mark.parametrize(
    ("number", "last"), [(signal.SIGTERM, " has ended"), (signal.SIGSEGV, None)], ids=str
)
def test_the_log_of_a_head_says_that_it_began_and_how_it_ended(
    own_folder: Path, number: signal.Signals, last: str | None
) -> None:
    facts = start_head("logged", {"simulate": "1xA100:40GiB", "num_cpus": 1})
    log = Path(facts["log"])
    assert f"(pid {facts['pid']}) listens; gpunb {gpunb.__version__}; 1 x A100" in log.read_text()
    os.kill(facts["pid"], number)
    eventually(lambda: not alive(facts["pid"]), "the head process has ended")
    text = log.read_text()
    if last is not None:
        assert f"ends: {number.name}\n" in text
        assert text.endswith(f"{last}\n")
    else:
        assert "Fatal Python error: Segmentation fault" in text


@pytest.mark.usefixtures("attached")
def test_an_attached_kernel_knows_what_can_never_be_met() -> None:
    current = gpunb.protocol.backend.current()
    assert current.ask("refusal", Demand(gpus=10_000)) is None
    assert "2" in current.ask("refusal", Demand(gpus=90_000))
