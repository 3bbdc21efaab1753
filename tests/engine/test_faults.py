"""A fault stays where it happens: its cause is named there, and the session goes on."""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import gpunb
from gpunb.cli.checks import Place, sessions
from gpunb.control import client
from gpunb.data.segments import Segment
from gpunb.engine import faults
from gpunb.engine import job_log as log
from gpunb.exceptions import GpunbError, OutOfMemoryError, WorkerCrashedError
from gpunb.protocol import backend, sink, verbs
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import encode
from gpunb.protocol.plain import framed
from tests.protocol.deep import DEEP
from tests.waiting import PATIENCE, Gate, eventually

Start = Callable[..., Any]

SPILLED = b"\x00spilled"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder of the test's own."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.open()


@gpunb.remote(num_gpus=0.5, max_retries=0)
def sends(data: bytes, *parts: bytes) -> None:
    """Send this to the kernel, with a descriptor for each part, and go on as if nothing were."""
    segments = [Segment.write([each])[0] for each in parts]
    channel = backend.current().transport.channel  # type: ignore[attr-defined]
    channel.send_encoded(data, [each.fileno() for each in segments])
    time.sleep(60)


@gpunb.remote(num_gpus=0.5)
def waits(gate: Gate) -> str:
    gate.enter()
    return "done"


@gpunb.remote(num_gpus=0.5)
def add(one: int, two: int) -> int:
    return one + two


def warnings() -> str:
    return "\n".join(gpunb.status()["warnings"])


def done(report: str, results: tuple[Any, ...] = ()) -> bytes:
    """The message that the first task of the session is over."""
    return framed(pickle.dumps((msg.NUMBER[msg.Done], 1, 1, report, results), 5))


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        *((deep, ()) for deep in DEEP.values()),
        (b"garbage", ()),
        (b"", ()),
        (framed(pickle.dumps((99, 1), 5)), ()),
        (framed(pickle.dumps(("no number",), 5)), ()),
        (framed(pickle.dumps(os.path.join, 5)), ()),
        (framed(b"\x80\x05cos\n_exit\n(K\x07tR."), ()),
        (SPILLED + bytes(8), ()),
        (SPILLED + bytes(8), (b"",)),
        (SPILLED + (1 << 40).to_bytes(8, "little"), (b"short",)),
        (done("perhaps"), ()),
        (encode(msg.Used(("x",))), ()),  # type: ignore[arg-type]
        (encode(msg.Held(("a", "b"), 1)), ()),  # type: ignore[arg-type]
        (encode(msg.Stock((5,))), ()),  # type: ignore[arg-type]
        (encode(msg.Retired()), ()),
    ],
    ids=[
        *DEEP,
        "garbage",
        "nothing",
        "unknown number",
        "no number",
        "a function",
        "a call",
        "spilled without a descriptor",
        "spilled and empty",
        "spilled and too short",
        "unknown report",
        "no figures of memory",
        "no object",
        "no references",
        "for workers",
    ],
)
def test_a_bad_message_ends_the_process_that_sent_it_and_nothing_else(
    start: Start, gate: Gate, data: bytes, parts: tuple[bytes, ...]
) -> None:
    start(simulate="1xA100:40GiB")
    other = waits.remote(gate)
    gate.await_()
    # An empty packet reads like the end of the channel.
    expected = "a message that cannot be understood" if data else "closed its channel"
    with pytest.raises(WorkerCrashedError, match=expected):
        gpunb.get(sends.remote(data, *parts), timeout=PATIENCE)
    gate.open()
    assert gpunb.get(other, timeout=PATIENCE) == "done"
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3
    eventually(lambda: gpunb.available_resources().get("GPU") == 1.0)


def test_too_few_results_are_the_fault_of_the_process(start: Start) -> None:
    start(simulate="1xA100:40GiB")

    @gpunb.remote(num_gpus=0.5, max_retries=0)
    def lies() -> None:
        current = backend.current()
        task = current.context().task
        current.transport.channel.send(msg.Done(task, 1, "ok", ()))  # type: ignore[attr-defined]
        time.sleep(60)

    with pytest.raises(WorkerCrashedError, match="has 1 results, 0 came"):
        gpunb.get(lies.remote(), timeout=PATIENCE)
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


def test_a_request_that_no_option_could_make_is_an_error_of_that_call(start: Start) -> None:
    start(simulate="1xA100:40GiB")

    @gpunb.remote
    def asks(submission: Any) -> str:
        verb = verbs.Submit(submission, False)
        with pytest.raises(Exception, match="Submission") as raised:
            backend.current()._request(verb, [_payload()])  # type: ignore[attr-defined]
        return str(raised.value)

    assert "must have the fields of Submission" in gpunb.get(asks.remote(()), timeout=PATIENCE)
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


def _payload() -> Any:
    from gpunb.data import serialize

    return serialize.dumps(((), {}))


def test_a_time_out_of_numpys_kind_is_a_number_inside_a_task(start: Start) -> None:
    start(simulate="1xA100:40GiB")

    @gpunb.remote
    def outer() -> int:
        import numpy as np

        value: int = gpunb.get(add.remote(1, 2), timeout=np.float64(PATIENCE))
        return value

    assert gpunb.get(outer.remote(), timeout=PATIENCE) == 3


# ------------------------------------------------------------------------------------ environment


class Failing(sink.Sink):
    """A sink that cannot show anything."""

    asks = True

    said: ClassVar[list[str]] = []

    def text(self, stream: str, text: str) -> None:
        Failing.said.append(text)
        raise RuntimeError("no room on the screen")

    def show(self, kind: str, content: Any, payloads: Any) -> None:
        raise RuntimeError("no room on the screen")

    def ask(self, prompt: str | None, password: bool, answer: Any) -> None:
        raise RuntimeError("nobody to ask")

    ended = 0

    def end(self) -> None:
        Failing.ended += 1
        raise RuntimeError("no end either")


def test_a_sink_that_fails_is_named_once_and_its_task_goes_on(start: Start, gate: Gate) -> None:
    start(simulate="1xA100:40GiB")

    @gpunb.remote(num_gpus=0.5)
    def prints() -> int:
        os.write(1, b"one")
        gate.enter()
        os.write(1, b"two")
        return 1

    sink.install(lambda name: Failing())
    try:
        ended = Failing.ended
        Failing.said.clear()
        printing = prints.remote()
        eventually(lambda: "Failing.text" in warnings(), "the sink has failed")
        gate.open()
        assert gpunb.get(printing, timeout=PATIENCE) == 1
        assert Failing.ended == ended + 1
        assert Failing.said == ["one"]
        assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3
    finally:
        sink.install(None)
    assert warnings().count("output is not shown any more: Failing.text") == 1


def test_a_question_that_cannot_be_asked_is_an_error_and_nobody_waits(start: Start) -> None:
    start(simulate="1xA100:40GiB")

    @gpunb.remote(num_gpus=0.5)
    def asks() -> str:
        with pytest.raises(RuntimeError, match="nobody to ask"):
            backend.current().question("well?")  # type: ignore[attr-defined]
        return "told"

    sink.install(lambda name: Failing())
    try:
        assert gpunb.get(asks.remote(), timeout=PATIENCE) == "told"
    finally:
        sink.install(None)


@pytest.mark.parametrize("stream", [None, "fails"])
def test_a_task_prints_where_the_process_has_no_standard_output(
    start: Start, stream: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails:
        def write(self, text: str) -> None:
            raise TypeError("not that")

        def flush(self) -> None:
            raise TypeError("not that either")

    start(simulate="1xA100:40GiB")

    @gpunb.remote(num_gpus=0.5)
    def prints() -> int:
        os.write(1, b"one")
        return 1

    monkeypatch.setattr(sys, "stdout", Fails() if stream else None)
    monkeypatch.setattr(sys, "stderr", Fails() if stream else None)
    assert gpunb.get(prints.remote(), timeout=PATIENCE) == 1
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


def test_a_watcher_that_fails_is_not_told_any_more(start: Start) -> None:
    start(simulate="1xA100:40GiB")
    seen = []

    def fails(snapshot: dict[str, Any] | None) -> bool:
        seen.append(snapshot)
        raise KeyError("a picture without a frame")

    backend.current().watch(fails)  # type: ignore[attr-defined]
    eventually(lambda: seen)
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3
    eventually(lambda: "a live view is not drawn any more" in warnings())
    assert len(seen) == 1


def test_a_timer_that_fails_is_named_and_the_session_goes_on(start: Start) -> None:
    start(simulate="1xA100:40GiB")
    backend.current().later(0.0, lambda: {}.pop("nothing"))  # type: ignore[attr-defined]
    eventually(lambda: "KeyError" in warnings())
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


def test_a_log_on_a_full_disk_begins_anew_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "w+b"))  # noqa: SIM115
    monkeypatch.setattr(log, "problems", [])
    kept = log.Log()
    for number in range(40):
        kept.add(("text", "stdout", {"text": f"{number}" + "x" * 20_000}))
    assert "No space left on device" in log.problems[0]
    text = kept.text()
    assert "not kept: No space left on device" in text
    assert "39xxx" in text


def test_no_memory_for_a_large_message_is_named(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(simulate="1xA100:40GiB")

    @gpunb.remote(num_gpus=0.5, max_retries=0)
    def shows() -> None:
        gate.enter()
        backend.current().show("display_data", {"data": {"text/plain": "x" * 200_000}})  # type: ignore[attr-defined]

    ref = shows.remote()
    gate.await_()

    def full(segment: Segment) -> memoryview:
        raise OutOfMemoryError("the process cannot map more memory")

    monkeypatch.setattr(Segment, "map", full)
    gate.open()
    with pytest.raises(WorkerCrashedError, match="cannot map more memory"):
        gpunb.get(ref, timeout=PATIENCE)
    monkeypatch.undo()
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


def test_no_descriptor_for_a_large_message_is_named_with_the_way_out(
    start: Start, tmp_path: Path
) -> None:
    start(simulate="1xA100:40GiB")
    full = tmp_path / "full"

    @gpunb.remote(num_gpus=0.5, max_retries=0)
    def shows() -> None:
        while not full.exists():
            time.sleep(0.01)
        backend.current().show("display_data", {"data": {"text/plain": "x" * 200_000}})  # type: ignore[attr-defined]

    ref = shows.remote()
    eventually(lambda: gpunb.status()["running"])
    eventually(lambda: gpunb.status()["running"][0]["pid"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard)
    )
    try:
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        full.mkdir()  # needs no descriptor
        with pytest.raises(WorkerCrashedError, match="ulimit -n"):
            gpunb.get(ref, timeout=PATIENCE)
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


def test_a_task_hears_of_a_failure_that_came_just_when_it_began_to_wait(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU that it lends starts the task that it waits for, and that cannot be started."""
    start(num_cpus=1)

    @gpunb.remote(max_retries=0)
    def inner() -> None:
        pass

    @gpunb.remote
    def outer(gate: Gate) -> str:
        ref = inner.remote()
        gate.enter()
        try:
            gpunb.get(ref)
        except WorkerCrashedError as error:
            return str(error)
        return "it was started"

    def refuse(worker: int, **more: object) -> None:
        raise OSError(24, os.strerror(24))

    ref = outer.remote(gate)
    eventually(lambda: gpunb.status()["waiting"])
    monkeypatch.setattr(backend.current().engine.pool, "start", refuse)  # type: ignore[attr-defined]
    gate.open()
    assert "it could not be started: Too many open files" in gpunb.get(ref, timeout=PATIENCE)


# -------------------------------------------------------------------------------- control traffic


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 60_000,
        b'{"do": ' * 9_000,
        b"\xff\xfe",
        b"NaN",
        b'{"do": ["status"]}',
        b'{"do": {}}',
        b'{"do": "logs", "job": 1e999}',
        b'{"do": "watch", "interval": "soon"}',
        b'{"do": "watch", "interval": NaN}',
    ],
)
def test_any_line_at_the_control_socket_has_an_answer_or_a_clean_end(
    start: Start, line: bytes
) -> None:
    start(simulate="1xA100:40GiB")
    (found,) = eventually(client.sessions)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(found.path))
        sock.sendall(line + b"\n")
        answer = sock.recv(1 << 16)
    if answer:
        json.loads(answer.split(b"\n")[0])
    assert gpunb.get(add.remote(1, 2), timeout=PATIENCE) == 3


# ------------------------------------------------------------------------------ broken invariants


def test_a_broken_scheduler_ends_the_session_with_the_traceback_in_every_error(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(simulate="1xA100:40GiB")
    waiting = waits.remote(gate)
    gate.await_()

    def breaks(event: object, now: float) -> None:
        raise AssertionError("the books do not agree")

    monkeypatch.setattr(backend.current().engine.scheduler, "handle", breaks)  # type: ignore[attr-defined]
    with pytest.raises(GpunbError, match="the books do not agree"):
        gpunb.get(add.remote(1, 2), timeout=PATIENCE)
    with pytest.raises(GpunbError, match=r"in breaks"):
        gpunb.get(waiting, timeout=PATIENCE)
    ((path, text),) = faults.reports()
    assert "AssertionError: the books do not agree" in text
    assert str(os.getpid()) in path.name
    assert "the books do not agree" in capsys.readouterr().err
    (finding,) = sessions.broken(Place())
    assert finding.level == "problem"
    assert "the books do not agree" in finding.text
    gpunb.shutdown()
    assert gpunb.get(_in_new_session(), timeout=PATIENCE) == 3


def _in_new_session() -> Any:
    gpunb.init(simulate="1xA100:40GiB")
    return add.remote(1, 2)


def test_a_decision_that_cannot_be_carried_out_is_the_tasks_own(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(simulate="1xA100:40GiB")
    waiting = waits.remote(gate)
    gate.await_()
    engine = backend.current().engine  # type: ignore[attr-defined]

    def fails(*_: object) -> None:
        raise MemoryError("for once")

    with monkeypatch.context() as patch:
        patch.setattr(engine.sampler, "begins", fails)
        with pytest.raises(WorkerCrashedError, match="an internal error: MemoryError"):
            gpunb.get(add.options(max_retries=0).remote(1, 2), timeout=PATIENCE)
    gate.open()
    assert gpunb.get(waiting, timeout=PATIENCE) == "done"
    assert "Run could not be carried out" in warnings()
    eventually(lambda: gpunb.available_resources().get("GPU") == 1.0)
