"""What `status()` returns has the form that is written down, and says what it should."""

from __future__ import annotations

import importlib.resources
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import gpunb
from benchmarks.pictures import picture
from gpunb.engine.device_history import POINTS, STEP, DeviceHistory
from gpunb.engine.device_status import joined
from gpunb.live.compact import LIMIT, compact
from gpunb.scheduler.snapshot import VERSION
from gpunb.util.placement_group import placement_group
from gpunb.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from tests.sessions import ROOT
from tests.waiting import PATIENCE, Gate, eventually

SCHEMA = json.loads(
    (importlib.resources.files("gpunb.engine") / "snapshot.schema.json").read_text()
)


def check(snapshot: Any) -> None:
    """It has the form, and nothing that is not written down."""
    jsonschema.Draft202012Validator(SCHEMA).validate(snapshot)
    assert sorted(unknown(snapshot, SCHEMA)) == []


def unknown(value: Any, schema: Any, at: str = "") -> Iterator[str]:
    """The keys that the schema does not know."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    for each in schema.get("anyOf", ()):
        if each.get("type") != "null":
            schema = each
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        yield from (f"{at}.{name}" for name in value if name not in known)
        for name, each in value.items():
            yield from unknown(each, known.get(name, {}), f"{at}.{name}")
    elif isinstance(value, list):
        for each in value:
            yield from unknown(each, schema.get("items") or {}, at)


def test_a_real_one(start: Callable[..., Any], tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    start(simulate="2xA100:40GiB")

    def enter(name: str) -> None:
        gate.enter(name)

    @gpunb.remote(num_gpus=0.5)
    class Keeper:
        def wait(self) -> None:
            gate.enter("keeper")

    with pytest.raises(ZeroDivisionError):
        gpunb.get(gpunb.remote(divmod).remote(1, 0), timeout=PATIENCE)
    half = gpunb.remote(num_gpus=0.5)(enter)
    gpunb.get(gpunb.remote(num_gpus=0.5)(len).remote("four"), timeout=PATIENCE)
    eventually(lambda: gpunb.available_resources()["GPU"] == 2)
    keeper = Keeper.remote()
    refs = [half.remote("a"), half.remote("b"), keeper.wait.remote()]
    waits = gpunb.remote(num_gpus=2)(enter).remote("c")
    for name in ("a", "b", "keeper"):
        gate.await_(name)
    found = gpunb.status()
    check(found)
    assert found["version"] == VERSION == SCHEMA["properties"]["version"]["const"]
    running = {job["id"]: job for job in found["running"]}
    kinds = sorted(job["kind"] for job in running.values())
    assert kinds == ["call", "call", "method"]
    (actor,) = found["actors"]
    assert {job["actor"] for job in running.values()} == {None, actor["id"]}
    held = [pair for device in found["devices"] for pair in device["held"]]
    assert sorted(ident for ident, _ in held) == sorted(
        [actor["id"], *(job["id"] for job in running.values() if job["kind"] == "call")]
    )
    assert all(job["memory"]["share"] == 20 * 2**30 for job in running.values())
    (waiting,) = found["waiting"]
    assert waiting["waits_for"]
    assert found["counts"]["waiting"] == found["queued"] == 1
    states = [job["state"] for job in found["finished"]]
    assert sorted(states) == ["done", "failed"], "a constructor that succeeded is no job"
    gate.open()
    gpunb.get(refs, timeout=PATIENCE)
    gpunb.kill(keeper)
    gpunb.get(waits, timeout=PATIENCE)
    eventually(lambda: not gpunb.status()["running"])
    after = gpunb.status()
    check(after)
    whole = next(job for job in after["finished"] if job["id"] == waiting["id"])
    assert whole["devices"] == [["GPU", 0, 1.0], ["GPU", 1, 1.0]]
    assert whole["waited"] > 0
    assert whole["gpu_seconds"] == pytest.approx(2 * whole["seconds"], abs=0.01)
    assert whole["memory"] == {"now": None, "peak": None, "share": 80 * 2**30}
    ended = next(job for job in after["finished"] if job["id"] == actor["id"])
    assert (ended["kind"], ended["name"], ended["state"]) == ("actor", "Keeper", "cancelled")
    assert (ended["devices"], ended["cell_id"]) == ([["GPU", 0, 0.5]], actor["cell_id"])


def test_what_belongs_together_is_counted_as_one(start: Callable[..., Any], tmp_path: Path) -> None:
    """The tasks and actors of a placement group, and the trials of a sweep."""
    gate = Gate(tmp_path)
    start(simulate="2xA100:40GiB")

    def enter(name: str) -> None:
        gate.enter(name)

    @gpunb.remote(num_gpus=0.5)
    class Keeper:
        def call(self) -> None:
            enter("keeper")

    group = placement_group([{"GPU": 1}])
    inside = PlacementGroupSchedulingStrategy(group)
    keeper = Keeper.options(scheduling_strategy=inside).remote()
    options = {"num_gpus": 0.5, "scheduling_strategy": inside}
    gpunb.get(gpunb.remote(**options)(len).remote("done"), timeout=PATIENCE)
    refs = [keeper.call.remote(), gpunb.remote(**options)(enter).remote("task")]

    def trial(at: int) -> None:
        gpunb.get(gpunb.remote(num_cpus=0)(len).remote("of the trial"))
        if at == 0:
            raise ValueError("bad")
        gate.enter(f"trial {at}")

    sweep = gpunb.sweep(trial, {"at": [0, 1, 2]}, num_gpus=0.5, max_concurrent_trials=2)
    for name in ("keeper", "task", "trial 1", "trial 2"):
        gate.await_(name)
    found = gpunb.status()
    check(found)
    listed = [*found["actors"], *found["running"], *found["finished"]]
    (gang,) = (each for each in found["actors"] if each["kind"] == "group")
    both = {each["kind"]: each for each in found["groups"]}
    assert both["group"]["actor"] == gang["id"]
    assert both["group"]["states"] == {"alive": 1, "running": 1, "done": 1}
    assert both["sweep"]["states"] == {"running": 2, "failed": 1}
    assert (both["sweep"]["name"], both["sweep"]["total"]) == ("trial", 3)
    members = {
        kind: sorted(job["name"] or "Keeper" for job in listed if job["part_of"] == each["id"])
        for kind, each in both.items()
    }
    assert members == {
        "group": ["Keeper", "enter", "len"],
        "sweep": [f"trial at={at}" for at in range(3)],
    }
    small = compact(found)
    assert small["groups"] == found["groups"]
    assert [job.get("part_of") for job in small["running"]] == [
        job["part_of"] for job in found["running"]
    ]
    gate.open()
    gpunb.get(refs, timeout=PATIENCE)
    sweep.wait(PATIENCE)
    over = next(each for each in gpunb.status()["groups"] if each["kind"] == "sweep")
    assert over["states"] == {"done": 2, "failed": 1}
    assert over["began"] < over["ended"] <= time.time()


def test_a_made_up_one_has_the_form() -> None:
    check(picture())


def test_the_form_is_documented() -> None:
    text = (ROOT / "docs" / "snapshot.md").read_text()

    def names(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from schema.get("properties", ())
            for each in schema.values():
                yield from names(each)
        elif isinstance(schema, list):
            for each in schema:
                yield from names(each)

    short_names = {"objects", "references", "bytes", "used", "limit", "spilled"}
    missing = {name for name in names(SCHEMA) if f"`{name}`" not in text} - short_names
    assert missing <= {"running", "waiting", "finished", "actors"}


# ---------------------------------------------------------------- what of it travels to the widget


@pytest.mark.parametrize("devices", [1, 16, 64, 1000])
@pytest.mark.parametrize("jobs", [0, 10, 500, 5000])
def test_a_compact_one_is_small(devices: int, jobs: int) -> None:
    whole = picture(devices, jobs)
    small = compact(whole)
    assert len(json.dumps(small)) <= LIMIT
    assert sorted(unknown(small, SCHEMA)) == []
    assert small["counts"] == whole["counts"]


def test_a_compact_one_shows_something_of_everything() -> None:
    whole = picture(16, 500)
    small = compact(whole)
    assert len(small["devices"]) == 16
    for name in ("running", "waiting", "finished"):
        assert [job["id"] for job in small[name]] == [
            job["id"] for job in whole[name][: len(small[name])]
        ]
        assert len(small[name]) >= 5
    assert len(small["running"]) >= 16


def test_a_compact_one_of_few_jobs_lacks_none() -> None:
    whole = picture(2, 20)
    small = compact(whole)
    for name in ("running", "waiting"):
        assert [job["id"] for job in small[name]] == [job["id"] for job in whole[name]]
    assert small["devices"][0]["held"] == whole["devices"][0]["held"]


def test_very_long_texts_are_cut() -> None:
    whole = picture(1, 5)
    whole["running"][0]["name"] = "x" * 100_000
    whole["waiting"][0]["waits_for"] = "y" * 100_000
    whole["warnings"] = ["z" * 100_000] * 50
    small = compact(whole)
    assert len(json.dumps(small)) <= LIMIT
    assert small["running"][0]["name"].endswith("x…")


# ---------------------------------------------------------------------------- parts of a snapshot


def other(**known: Any) -> dict[str, Any]:
    return {"pid": 1, "user": None, "notebook": None, "share": None, "memory": None, **known}


def test_who_else_is_there_is_told_once() -> None:
    leases = [other(pid=7, share=0.5, notebook="a.ipynb", kind="kernel", user="ada")]
    seen = [other(pid=7, memory=100), other(pid=8, memory=5, kind="outsider")]
    kernel, outsider = joined(leases, seen)
    assert (kernel["pid"], kernel["kind"], kernel["share"]) == (7, "kernel", 0.5)
    assert (kernel["memory"], kernel["notebook"]) == (100, "a.ipynb")
    assert (outsider["pid"], outsider["kind"], outsider["share"]) == (8, "outsider", None)


def test_trends_have_a_point_for_each_step() -> None:
    def device(free: float, used: int | None) -> list[dict[str, Any]]:
        usage = {"memory_used": used, "memory_total": 200, "utilization": None}
        return [{"key": "k", "free": free, "usage": usage}]

    history = DeviceHistory()
    history.note(1000.0, device(1.0, 20))
    history.note(1000.0 + STEP / 2, device(0.0, 100))  # too early
    assert history.of("k") == {
        "step": STEP,
        "memory": [10],
        "utilization": [None],
        "share": [0],
    }
    history.note(1000.0 + 3 * STEP, device(0.5, 100))  # nobody looked meanwhile
    assert history.of("k")["memory"] == [10, None, None, 50]
    for at in range(1000):
        history.note(2000.0 + at * STEP, device(0.5, at % 200))
    assert len(history.of("k")["share"]) == POINTS
    assert history.of("unknown")["share"] == []
