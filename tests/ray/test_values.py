"""How values and references travel; without Ray."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.protocol.messages import Setup
from gpunb.ray.job_env import JobEnv, Setups, changes, setup_of
from gpunb.ray.ref_table import RefTable
from gpunb.ray.transport import (
    CallHeader,
    JobEnvRef,
    RayPayload,
    ReceivedPayload,
    joined,
    light,
    opened,
    pack,
    separated,
)
from gpunb.scheduler.resources import UNIT
from tests.waiting import eventually

np = pytest.importorskip("numpy")


def sent(sent_payload: RayPayload) -> RayPayload:
    """As Ray does it: large parts stay out of the stream, and arrive read-only."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(sent_payload, protocol=5, buffer_callback=buffers.append)
    assert len(stream) < 10_000
    arrived = [memoryview(bytes(each.raw())) for each in buffers]
    found: RayPayload = pickle.loads(stream, buffers=arrived)
    return found


@pytest.mark.parametrize("size", [10, 1_000, 100_000])
def test_an_array_arrives_writable(size: int) -> None:
    array = np.arange(size, dtype="i8")
    left: list[Any] = []
    sent_payload = sent(pack(serialize.dumps({"a": array}), lambda obj: None))
    value = serialize.loads(ReceivedPayload(sent_payload, left.append))["a"]
    value += 1
    assert value[0] == 1
    assert value.sum() == array.sum() + size
    assert array[0] == 0


def test_references_go_beside_the_value() -> None:
    payload = serialize.dumps([1])
    payload.references = ((7, 0),)
    sent_payload = sent(pack(payload, lambda obj: f"ref of {obj}", more=[(8, 0)], output_of=7))
    assert sent_payload.references == ((7, 0), (8, 0))
    assert sent_payload.refs == ("ref of (7, 0)", "ref of (8, 0)")
    assert sent_payload.output_of == 7
    left: list[Any] = []
    arrived = ReceivedPayload(sent_payload, left.append)
    assert not left
    del arrived
    assert left == [((7, 0), (8, 0))]


HEADER = CallHeader(
    task=1,
    name="f",
    kind="call",
    function="f",
    code=b"code",
    returns=1,
    retry=False,
    timeout=None,
    job_env=JobEnvRef("1/1", b"ref"),
    sink=0,
    parent=None,
    actor=0,
    new=None,
    share=0,
    gpus=False,
)


def test_a_small_call_is_bytes_for_ray() -> None:
    sent_call = joined(HEADER, pack(serialize.dumps((1, "two")), lambda obj: None))
    assert isinstance(sent_call, bytes)
    header, packed = separated(sent_call)
    assert header == HEADER
    assert header.job_env.key == "1/1"
    assert serialize.loads(ReceivedPayload(packed, lambda _: None)) == (1, "two")


@pytest.mark.parametrize("what", ["reference", "buffers", "size", "code", "actor", "environment"])
def test_a_call_with_parts_that_ray_must_see_is_no_bytes(what: str) -> None:
    payload, header = serialize.dumps("value"), HEADER
    if what == "reference":
        payload.references = ((7, 0),)
    elif what in ("buffers", "size"):
        payload = serialize.dumps(np.zeros(5_000) if what == "buffers" else "a" * 5_000)
    else:
        new: Any = "an actor"
        parts = {"code": ["ref"], "actor": new, "environment": JobEnvRef("1/1", ["ref"])}
        field = {"code": "code", "actor": "new", "environment": "job_env"}[what]
        header = HEADER._replace(**{field: parts[what]})
    packed = pack(payload, lambda obj: f"ref of {obj}")
    sent_call = joined(header, packed)
    assert not isinstance(sent_call, bytes)
    found, arguments = separated(sent_call)
    assert found == header
    for part in ("stream", "buffers", "references", "refs"):
        assert getattr(arguments, part) == getattr(packed, part)


@pytest.mark.parametrize(
    "change", [{"output_of": 3}, {"references": ((7, 0),)}, {"failed": True}, {"cancelled": True}]
)
def test_a_result_that_says_more_than_its_value_is_no_bytes(change: dict[str, Any]) -> None:
    payload = pack(serialize.dumps("value"), lambda obj: None)
    assert light(payload) == payload.stream
    for name, value in change.items():
        setattr(payload, name, value)
    assert light(payload) is payload
    assert opened(payload) is payload


def test_an_object_is_known_as_long_as_anything_refers_to_it() -> None:
    gone: list[Any] = []
    table = RefTable(lambda obj, ref: gone.append((obj, ref)))
    table.add((1, 0), "one")
    table.arrive([(1, 0), (2, 0), (3, 0)], ["other", "two", None])
    assert (table.find((1, 0)), table.find((2, 0)), table.find((3, 0))) == ("one", "two", None)
    table.hold((2, 0))
    table.leave([(1, 0), (2, 0), (3, 0)])
    eventually(lambda: gone == [((3, 0), None)])
    assert (table.find((1, 0)), table.find((2, 0))) == ("one", "two")
    table.drop((1, 0))
    table.drop((2, 0))
    eventually(lambda: gone[1:] == [((1, 0), "one"), ((2, 0), "two")])
    assert table.find((1, 0)) is None
    table.close()


def test_changes_of_the_environment_without_what_is_rays() -> None:
    before = {"kept": "1", "gone": "1", "other": "1", "CUDA_VISIBLE_DEVICES": "0"}
    now = {"kept": "1", "other": "2", "new": "3", "RAY_ADDRESS": "x"}
    assert changes(before, now) == {"gone": None, "other": "2", "new": "3"}


def test_the_setup_of_the_call_before_serves_while_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(sys, "path", [*sys.path])
    setups = Setups()
    env = JobEnv(None, {"A": "1"}, None, (*sys.path,), ("a",))

    def of(*call: Any) -> Setup:
        made = setups.of(*call)
        assert made == setup_of(*call)
        assert setups.of(*call) is made
        return Setup(*made)

    assert of(env, (), 0, False).environment["CUDA_VISIBLE_DEVICES"] == ""
    assert of(env, (0, 1), 0, False).environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "UUID")
    assert "CUDA_VISIBLE_DEVICES" not in of(env, (0, 1), 0, False).environment
    assert of(env, (0,), 0, False).caps is None
    assert of(env, (0,), UNIT // 2, False).caps is not None
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb.set_trace")
    assert of(env, (), 0, True).environment["PYTHONBREAKPOINT"] is None
    other = env._replace(changes={})
    assert of(env, (), 0, False).environment["A"] == "1"
    assert "A" not in of(other, (), 0, False).environment
    sys.path.append("own")
    assert of(other, (), 0, False).path[-1] == "own"


def test_a_folder_of_the_path_is_found_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "later"
    call = JobEnv(None, {}, None, (*sys.path, str(folder)), ()), (), 0, False
    setups = Setups()
    assert str(folder) not in Setup(*setups.of(*call)).path
    folder.mkdir()
    assert Setup(*setups.of(*call)).path == [*sys.path, str(folder)]
