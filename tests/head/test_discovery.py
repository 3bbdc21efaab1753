"""Head processes are found by their names, and let in kernels of their own versions."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunb.control.client import address as socket_address
from gpunb.exceptions import GpunbError
from gpunb.head import discovery
from gpunb.head.discovery import RunningHead
from tests.waiting import PATIENCE

OK = json.dumps({"ok": True}).encode()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder without head processes."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(path))
    return path


@contextlib.contextmanager
def listening(name: str) -> Iterator[socket.socket]:
    """The socket of a head process, at which connections are not answered."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        with socket_address(discovery.path_of(name)) as target:
            sock.bind(target)
        sock.listen()
        yield sock


@contextlib.contextmanager
def answering(name: str, reply: bytes) -> Iterator[list[Any]]:
    """A head process that answers each first packet. Yields these packets."""
    packets: list[Any] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # the listener was shut down
            with sock:
                if packet := sock.recv(discovery.LONGEST):
                    packets.append(json.loads(packet))
                    sock.send(reply)

    with listening(name) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield packets
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)


# ------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["lab", "head", "a", "A.b-c_1", "autos", "x" * 40])
def test_name_of_a_head_process(name: str) -> None:
    assert discovery.check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "1lab", "-lab", ".lab", "a/b", "a b", "lab\n", "ä", "x" * 41, "auto", "local", "ray"],
)
def test_name_that_no_head_process_may_have(name: str) -> None:
    with pytest.raises(ValueError, match="is no name for a head process"):
        discovery.check_name(name)


def test_files_of_a_head_process_are_in_the_runtime_folder(folder: Path) -> None:
    assert discovery.path_of("lab") == folder / "heads" / "lab.sock"
    assert discovery.path_of("lab", "log") == folder / "heads" / "lab.log"
    assert (folder / "heads").stat().st_mode & 0o777 == 0o700


# ------------------------------------------------------------------------------- the running ones


def test_running_head_processes_are_listed_by_name() -> None:
    assert discovery.running() == []
    with listening("second"), listening("first"):
        discovery.path_of("third", "log").touch()
        found = [RunningHead("first", os.getpid()), RunningHead("second", os.getpid())]
        assert discovery.running() == found


def test_head_process_that_is_gone_is_not_listed() -> None:
    with listening("lab"):
        assert discovery.pid_of("lab") == os.getpid()
    assert discovery.path_of("lab").exists()  # as after it was killed
    assert discovery.pid_of("lab") is None
    assert discovery.running() == []
    for name in ("lab", "never"):
        with pytest.raises(OSError, match=r"refused|No such file"):
            discovery.connect(name)


def test_socket_below_a_long_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a socket has room for 107 bytes."""
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / ("x" * 120)))
    with listening("lab"):
        assert discovery.pid_of("lab") == os.getpid()


# ---------------------------------------------------------------------------------------- versions


def test_kernel_with_the_same_versions_is_let_in() -> None:
    assert discovery.mismatch(discovery.versions()) is None
    assert discovery.mismatch({**discovery.versions(), "about": {}}) is None


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        ({"gpunb": "0.0.1"}, "this kernel has gpunb 0.0.1 on Python "),
        ({"python": "2.7"}, "on Python 2.7: both must be the same"),
        ({"gpunb": None, "python": None}, "this kernel has gpunb None on Python None"),
    ],
)
def test_kernel_with_other_versions_is_refused(theirs: dict[str, Any], text: str) -> None:
    why = discovery.mismatch({**discovery.versions(), **theirs})
    assert why is not None
    assert text in why
    assert f"it runs gpunb {discovery.versions()['gpunb']} on Python" in why


@pytest.mark.parametrize("theirs", [None, [], "lab", 3, {}])
def test_introduction_that_is_no_introduction_is_refused(theirs: object) -> None:
    why = discovery.mismatch(theirs)
    assert why is not None
    assert "this kernel has gpunb ? on Python ?" in why


# ----------------------------------------------------------------------------------- introductions


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.settimeout(PATIENCE)
    with ours, theirs:
        yield ours, theirs


def test_kernel_introduces_itself(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.send(OK)
    discovery.introduce(ours, {"pid": 5})
    packet = json.loads(theirs.recv(discovery.LONGEST))
    assert packet == {**discovery.versions(), "about": {"pid": 5}}
    assert discovery.mismatch(packet) is None


@pytest.mark.parametrize(
    ("reply", "error", "text"),
    [
        (b'{"ok": false, "error": "other versions"}', GpunbError, "other versions"),
        (b"{}", GpunbError, "without a reason"),
        (b"[]", ValueError, "is no answer"),
        (b"nonsense", ValueError, "Expecting value"),
        (b"", ConnectionResetError, "it closed the connection"),
    ],
    ids=["refused", "no word", "no object", "nonsense", "closed"],
)
def test_kernel_that_is_not_let_in_knows_why(
    pair: tuple[socket.socket, socket.socket],
    reply: bytes,
    error: type[Exception],
    text: str,
) -> None:
    ours, theirs = pair
    if reply:
        theirs.send(reply)
    else:
        theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(error, match=text):
        discovery.introduce(ours, {})


@pytest.mark.parametrize("address", ["lab", "auto"])
def test_connection_is_to_the_head_process_that_is_meant(address: str) -> None:
    with answering("lab", OK) as packets:
        sock, name, pid = discovery.open_connection(address)
        with sock:
            assert (name, pid, sock.gettimeout()) == ("lab", os.getpid(), None)
    assert packets[0]["about"]["pid"] == os.getpid()


def test_one_of_several_has_to_be_named() -> None:
    with answering("lab", OK), listening("other"):
        with pytest.raises(GpunbError, match=r"found several .* name one of 'lab', 'other'"):
            discovery.open_connection("auto")
        sock, name, _ = discovery.open_connection("lab")
        sock.close()
    assert name == "lab"


@pytest.mark.parametrize("address", ["never", "127.0.0.1:6379", "auto"])
def test_address_without_a_head_process_says_how_to_start_one(address: str) -> None:
    kind, text = ValueError, r"\(none runs\): start it with `gpunb start --head"
    if address == "auto":
        kind, text = GpunbError, "found no head process: start one with `gpunb start --head`"
    with pytest.raises(kind, match=text):
        discovery.open_connection(address)


def test_address_of_no_head_process_lists_those_that_run() -> None:
    with (
        listening("lab"),
        pytest.raises(ValueError, match=r"'other' is no head process .*\(those that run are 'lab'"),
    ):
        discovery.open_connection("other")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"nonsense", "the head process 'lab' .* gave no answer"),
        (b'{"ok": false, "error": "other versions"}', "other versions"),
    ],
)
def test_head_process_that_refuses_a_kernel_is_named(reply: bytes, text: str) -> None:
    with answering("lab", reply), pytest.raises(GpunbError, match=text):
        discovery.open_connection("lab")


# ------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("lost", [[], ["#3 train"]])
def test_head_process_that_is_asked_to_end_says_what_would_be_lost(lost: list[str]) -> None:
    with answering("lab", json.dumps({"lost": lost}).encode()) as packets:
        assert discovery.may_end("lab") == lost
    assert packets == [{**discovery.versions(), "end": True}]


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b'{"error": "other versions"}', "other versions"),
        (b"{}", "the head process 'lab' .* gave no answer"),
        (b"[]", "the head process 'lab' .* gave no answer"),
        (b"nonsense", "the head process 'lab' .* gave no answer"),
    ],
)
def test_head_process_that_does_not_end_says_why(reply: bytes, text: str) -> None:
    with answering("lab", reply), pytest.raises(GpunbError, match=text):
        discovery.may_end("lab")


def test_head_process_that_is_gone_cannot_be_asked_to_end() -> None:
    with pytest.raises(FileNotFoundError):
        discovery.may_end("lab")
