"""Random bytes and random plain values at the sockets of a session and of a head process."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import gpunb
from gpunb.control import client
from gpunb.head import discovery
from gpunb.protocol import messages as msg
from gpunb.protocol import verbs
from gpunb.protocol.channel import Channel, ChannelClosed, encode
from gpunb.protocol.plain import framed
from tests.head import heads as starting
from tests.sessions import session

MOST = 50 << 20
"""Bytes by which a process may grow that is told nonsense."""

WORDS = ("status", "timeline", "cancel", "interrupt", "kill", "release", "watch", "logs", "log")

fuzzed = settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([1 << 63, -1, 10**400, "\x1b[31m", "\ud800"])
)
plain = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
requests = st.fixed_dictionaries(
    {"do": st.sampled_from(WORDS) | plain},
    optional=dict.fromkeys(("job", "actor", "position", "force", "interval"), plain),
)


own_folder, head = starting.own_folder, starting.head


def memory(pid: int) -> int:
    """Bytes of a process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def running() -> Iterator[int]:
    """A session of this process, which is as large at the end as at the start."""
    with session():
        assert gpunb.get(gpunb.remote(len).remote("abc")) == 3
        before = memory(os.getpid())
        yield os.getpid()
        assert gpunb.get(gpunb.remote(len).remote("abc")) == 3
        assert memory(os.getpid()) < before + MOST


def answer(data: bytes) -> bytes:
    """What the control socket answers, until it closes or nothing more is to be expected."""
    found = b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        with client.address(client.path_of(os.getpid())) as place:
            sock.connect(place)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(data)
            if b"\n" not in data:
                sock.shutdown(socket.SHUT_WR)
            while not found.endswith(b"\n") and (reply := sock.recv(1 << 16)):
                found += reply
    return found


@fuzzed
@given(st.binary(max_size=200))
@example(b"[" * 60_000 + b"\n")
@example(b'{"a":' * 12_000 + b"\n")
@example(b"1" * 60_000 + b"\n")
@example(b"\xff" * 70_000)
@example(b"\n")
def test_control_socket_survives_bytes(running, data):
    reply = answer(data)
    if b"\n" in data:
        assert json.loads(reply)["ok"] is False
    assert client.ask(running, {"do": "status"})["version"]


@fuzzed
@given(requests, st.integers(0, 30))
@example({"do": "logs", "job": 1, "position": 10**400}, 0)
@example({"do": "watch", "interval": float("nan")}, 0)
@example({"do": "watch", "interval": float("inf")}, 0)
@example({"do": "watch", "interval": 1e308}, 0)
def test_control_socket_answers_every_request(running, request_, cut):
    data = json.dumps(request_).encode() + b"\n"
    reply = answer(data)
    assert reply, "it closed without a word"
    answer(data[:-cut] if cut else data[:1])
    assert client.ask(running, {"do": "status"})["version"]


# ------------------------------------------------------------------------------ the head's socket


@pytest.fixture(scope="module")
def attached(head: dict[str, Any]) -> Iterator[int]:
    """The head process, to which this process is attached all the time."""
    gpunb.init("lab")
    before = memory(head["pid"])
    assert gpunb.get(gpunb.remote(len).remote("abc")) == 3
    yield head["pid"]
    assert gpunb.get(gpunb.remote(len).remote("abc")) == 3
    assert memory(head["pid"]) < before + MOST
    gpunb.shutdown()


def knock(data: bytes) -> bytes:
    """What the head process answers to a first packet."""
    sock, _ = discovery.connect("lab")
    with sock:
        sock.settimeout(5)
        try:
            sock.send(data)
            return sock.recv(discovery.LONGEST)
        except (BrokenPipeError, ConnectionResetError):
            return b""


@fuzzed
@given(st.binary(min_size=1, max_size=200) | plain.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 60_000)
@example(b'{"a":' * 12_000)
@example(json.dumps({**discovery.versions(), "about": [[]]}).encode())
@example(json.dumps({**discovery.versions(), "about": {"pid": []}}).encode())
def test_head_answers_every_first_packet(attached, data):
    reply = knock(data)
    assert not reply or isinstance(json.loads(reply), dict)
    assert gpunb.is_initialized()
    assert gpunb.cluster_resources()["CPU"]


def framed_of(value: Any) -> bytes:
    return framed(pickle.dumps(value, 5))


def asking(verb: str, *fields: Any) -> bytes:
    """The message of a request."""
    return encode(msg.Request(1, 0, 0, verb, fields))


requested = st.builds(
    lambda verb, fields: asking(verb, *fields),
    st.sampled_from(sorted(verbs.names(verbs.OfKernel))),
    st.lists(plain, max_size=8),
)
messages = (
    requested
    | st.binary(max_size=200)
    | st.tuples(st.integers(-2, 20), *[plain] * 5).flatmap(
        lambda values: st.integers(0, len(values)).map(
            lambda count: framed(pickle.dumps(values[:count], 5))
        )
    )
)


@fuzzed
@given(st.lists(messages, min_size=1, max_size=4), st.integers(0, 3))
@example([b"\x00spilled" + b"\xff" * 8], 0)
@example([b"\x00spilled" + b"\xff" * 7 + b"\x7f"], 1)
@example([b"\x00spilled" + bytes(8)], 1)
@example([b"\x80\x05" + b"]" * 60_000 + b"."], 0)
@example([b"\x80\x05\x8e\xff\xff\xff\xff\xff\xff\xff\x7f."], 0)
@example([b"\x80\x05cos\n_exit\nK\x01\x85R."], 0)
@example([asking("Fetch", (1, 2, 3), None, True)], 0)
@example([asking("Fetch", ((1, 2, 3),), None, True)], 0)
@example([asking("WatchStatus", 1, float("nan"))], 0)
@example([asking("Numbers", 1 << 40)], 0)
@example([encode(msg.Held((1, 0), 1 << 70))], 0)
def test_head_survives_what_an_attached_kernel_says(attached, reply, descriptors):
    sock, _ = discovery.connect("lab")
    with sock, contextlib.suppress(ChannelClosed, TimeoutError, OSError):
        discovery.introduce(sock, {"pid": os.getpid()})
        sock.settimeout(5)
        channel = Channel(sock)
        for each in reply:
            null = [os.open(os.devnull, os.O_RDONLY) for _ in range(descriptors)]
            try:
                channel.send_encoded(each or b"\0", null)
            finally:
                for descriptor in null:
                    os.close(descriptor)
    assert gpunb.get(gpunb.remote(len).remote("abcd"), timeout=10) == 4
