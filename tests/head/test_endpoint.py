"""Connections to a head process or a control socket that has no room for them."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpunb.control.server import ControlServer
from gpunb.head import discovery, endpoint
from gpunb.head.server import Head
from gpunb.system.loop import Loop
from tests.waiting import eventually

MEMORY = SimpleNamespace(facts=lambda: {"limit": 1 << 30})


def test_whoever_cannot_be_answered_is_sent_away_at_once():
    engine = SimpleNamespace(loop=Loop(), facts=None, store=SimpleNamespace(memory=MEMORY))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    head = Head(engine, "lab", ours)  # type: ignore[arg-type]
    ours.setblocking(False)
    head._unidentified.add(ours)
    engine.loop.watch(ours.fileno(), lambda: None)
    theirs.send(json.dumps({**discovery.versions(), "about": {}}).encode())
    try:
        while True:
            ours.send(b"x" * 1000)
    except BlockingIOError:
        pass  # theirs reads nothing
    head._on_request(ours)
    theirs.settimeout(5)
    while part := theirs.recv(discovery.LONGEST):
        assert part == b"x" * 1000
    assert not head._clients
    theirs.close()
    engine.loop.close()


def head(engine: Any, listener: socket.socket) -> tuple[Any, Any]:
    made = Head(engine, "lab", listener)
    return made.accepted, made._unidentified


def control_server(engine: Any, listener: socket.socket) -> tuple[Any, Any]:
    made = ControlServer(engine, engine.facts, engine.publisher, lambda: None)
    return made.accepted, made._clients


@pytest.mark.parametrize("host", [head, control_server])
def test_others_are_let_in_after_somebody_for_whom_there_was_no_room(
    host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loop = Loop()
    store = SimpleNamespace(memory=MEMORY)
    engine = SimpleNamespace(loop=loop, publisher=None, facts=None, store=store)
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(tmp_path / "head.sock"))
        listener.listen()
        accepted, inside = host(engine, listener)
        place = listener, tmp_path / "head.sock"
        endpoint.ListeningSocket(loop, place, lambda: place, accepted)
        watch = loop.watch

        def full(*_: Any) -> None:
            monkeypatch.setattr(loop, "watch", watch)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(loop, "watch", full)
        thread = threading.Thread(target=loop.run, args=(lambda item: item(),))
        thread.start()
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
            first.settimeout(5)
            first.connect(str(tmp_path / "head.sock"))
            assert first.recv(1) == b""
            second.connect(str(tmp_path / "head.sock"))
            eventually(lambda: inside, "the second one is inside")
        loop.post(loop.stop)
        thread.join(5)
        for each in inside:
            getattr(each, "sock", each).close()
    loop.close()
