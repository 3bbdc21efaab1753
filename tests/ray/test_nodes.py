"""Tasks and actors on a cluster of several nodes."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb import exceptions
from gpunb.protocol import backend
from gpunb.scheduler.resources import UNIT, Demand
from tests.sessions import script
from tests.waiting import Gate, eventually

pytestmark = [pytest.mark.needs_ray, pytest.mark.usefixtures("by_value", "nodes")]
WITHIN = 120


@gpunb.remote
def where() -> tuple[str, list[Any]]:
    import ray

    return ray.get_runtime_context().get_node_id(), gpunb.get_gpu_ids()


def named(resource: str) -> str:
    """The node that has a resource of that name."""
    import ray

    (found,) = [
        each["NodeID"] for each in ray.nodes() if each["Alive"] and resource in each["Resources"]
    ]
    return str(found)


def test_a_type_goes_to_the_node_that_has_it() -> None:
    for kind, resource in (("A100", "first"), ("V100", "second")):
        task = where.options(num_gpus=1, accelerator_type=kind)
        assert gpunb.get(task.remote(), timeout=WITHIN) == (named(resource), [0])


def test_types_in_order_of_preference() -> None:
    task = where.options(num_gpus=1, accelerator_type=["H100", "V100"])
    assert gpunb.get(task.remote(), timeout=WITHIN)[0] == named("second")


def test_what_no_node_can_give_is_refused_with_what_each_has() -> None:
    with pytest.raises(exceptions.InfeasibleRequestError) as caught:
        where.options(num_gpus=2, accelerator_type="V100").remote()
    text = str(caught.value)
    assert "2 GPU" in text
    assert "1 accelerator_type:V100" in text
    assert "no autoscaler" in text
    with pytest.raises(exceptions.InfeasibleRequestError):
        where.options(num_gpus=3).remote()  # three there are, but on two nodes
    refusal = functools.partial(backend.current().ask, "refusal")
    assert "no autoscaler" in refusal(Demand(gpus=3 * UNIT))
    assert refusal(Demand(gpus=UNIT)) is None


@pytest.mark.parametrize("allowed", [True, False])
def test_a_change_of_the_environment_arrives(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Ray was told to pickle no references by themselves."""
    from ray._private import serialization

    monkeypatch.setattr(serialization, "ALLOW_OUT_OF_BAND_OBJECT_REF_SERIALIZATION", allowed)
    monkeypatch.setenv("GPUNB_TEST_CHANGE", str(allowed))

    @gpunb.remote(num_cpus=0)
    def seen(inside: bool) -> str | None:
        if inside:
            return gpunb.get(seen.remote(False), timeout=WITHIN)
        return os.environ.get("GPUNB_TEST_CHANGE")

    assert gpunb.get(seen.remote(False), timeout=WITHIN) == str(allowed)
    assert gpunb.get(seen.remote(True), timeout=WITHIN) == str(allowed)
    assert isinstance(backend.current().job_env().ref, bytes if allowed else list)


def test_memory_of_devices_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"num_gpus=0\.5"):
        where.options(gpu_memory="1GiB").remote()


def test_what_gpunb_alone_schedules_is_refused_with_the_reason() -> None:
    refused: dict[str, dict[str, Any]] = {
        "does not measure": {"num_gpus": "auto"},
        "an order of its own": {"priority": 5},
        "keeps the share": {"num_gpus": 0.5, "retry_oom": True},
    }
    for reason, options in refused.items():
        with pytest.raises(ValueError, match=f"cannot be asked for on Ray.*{reason}"):
            where.options(**options).remote()


def test_objects_and_references_go_between_nodes() -> None:
    @gpunb.remote(resources={"first": 0.1})
    def made() -> Any:
        import numpy as np

        return [gpunb.put(np.arange(100_000))]

    @gpunb.remote(resources={"second": 0.1})
    def used(refs: list[Any], array: Any) -> int:
        array += 1
        return int(gpunb.get(refs[0]).sum() + array.sum())

    refs = gpunb.get(made.remote(), timeout=WITHIN)
    total = sum(range(100_000))
    assert gpunb.get(used.remote(refs, refs[0]), timeout=WITHIN) == 2 * total + 100_000


def test_what_is_ready_on_another_node_is_there_at_once() -> None:
    import ray

    assert ray.get_runtime_context().get_node_id() != named("second")

    @gpunb.remote(resources={"second": 0.1})
    def zeros() -> bytes:
        return bytes(20_000_000)

    for _ in range(5):
        ref = zeros.remote()
        assert gpunb.wait([ref], timeout=WITHIN)[0] == [ref]
        assert len(gpunb.get(ref, timeout=0)) == 20_000_000


def test_the_status_has_the_devices_of_all_nodes(tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    @gpunb.remote(num_gpus=0.5, accelerator_type="V100")
    def holds() -> None:
        gate.enter()

    ref = holds.remote()
    try:
        eventually(gate.came, within=WITHIN)
        eventually(lambda: gpunb.status()["running"], within=WITHIN)
        facts = gpunb.status()
        assert [each["type"] for each in facts["devices"]].count("A100") == 2
        (held,) = [each for each in facts["devices"] if each["held"]]
        assert held["type"] == "V100"
        assert held["held"] == [[ref.task_id, 0.5]]
        assert held["free"] == 0.5
        schema = Path(gpunb.__file__).parent / "engine" / "snapshot.schema.json"
        jsonschema = pytest.importorskip("jsonschema")
        jsonschema.validate(json.loads(json.dumps(facts)), json.loads(schema.read_text()))
    finally:
        gate.open()
        gpunb.get(ref, timeout=WITHIN)


def test_a_process_is_ready_before_there_is_work_for_it(tmp_path: Path) -> None:
    gate, ready = Gate(tmp_path), backend.current().prewarmer.ready
    node = named("second")

    @gpunb.remote(num_gpus=1, accelerator_type="V100")
    def runs(waits: bool = False) -> int:
        if waits:
            gate.enter()
        return os.getpid()

    gpunb.get(runs.remote(), timeout=WITHIN)
    first = eventually(lambda: ready.get(node), within=WITHIN)
    waiting = runs.remote(waits=True)
    try:
        eventually(gate.came, within=WITHIN)
        eventually(lambda: ready[node] is None, within=WITHIN)
        after = runs.remote()
    finally:
        gate.open()
    assert gpunb.get(waiting, timeout=WITHIN) == first
    second = gpunb.get(after, timeout=WITHIN)
    third = eventually(lambda: ready[node], within=WITHIN)
    assert len({first, second, third}) == 3
    eventually(lambda: gpunb.available_resources()["GPU"] == 3, "Ray has all back", within=WITHIN)
    assert gpunb.get(runs.remote(), timeout=WITHIN) == third


def test_a_process_that_is_made_ready_holds_nothing_that_is_shown(tmp_path: Path) -> None:
    """Whether Ray counts its part of a GPU as free or as held by now."""
    import ray

    from gpunb.ray.resources import SLIVER

    gate = Gate(tmp_path)
    (node,) = (each for each in backend.current().cluster.nodes() if "second" in each.total)
    assert node.own
    eventually(lambda: gpunb.available_resources()["GPU"] == 3, within=WITHIN)
    holds = ray.remote(num_cpus=0, num_gpus=SLIVER, resources={node.own: SLIVER})(Gate.enter)
    ref = holds.remote(gate)
    try:
        while ray.available_resources()["GPU"] == 3:
            assert gpunb.available_resources()["GPU"] == 3
        assert gpunb.available_resources()["GPU"] == 3
    finally:
        gate.open()
    ray.get(ref, timeout=WITHIN)


def test_options_for_ray_itself() -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"GPU": 1}, {"GPU": 1}], strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=WITHIN)
    try:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=1)
        task = where.options(num_gpus=1, ray={"scheduling_strategy": strategy})
        assert gpunb.get(task.remote(), timeout=WITHIN)[0] == named("first")
    finally:
        remove_placement_group(group)


def test_another_program_joins_the_cluster_as_it_is(nodes: Any) -> None:
    """And leaves no cluster of its own behind, whatever asks Ray for something after its end."""
    text = """
    import gpunb
    try:
        gpunb.init("ray", num_cpus=2)
    except ValueError as error:
        print(error)
    with gpunb.init("ray"):
        late = gpunb.remote(len).remote("four")
        print(gpunb.get(late), gpunb.cluster_resources()["GPU"] >= 2)
        gpunb.remote(print).remote("not waited for")
    import ray, time
    time.sleep(1)  # by the clock: nothing says that nobody asks Ray any more
    print(ray.is_initialized())
    """
    done = script(text, env={"RAY_ADDRESS": nodes.cluster.address})
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "num_cpus cannot be said, because a Ray cluster runs here already" in first
    assert rest[-2:] == ["4 True", "False"]


def test_a_time_out() -> None:
    @gpunb.remote(timeout=1)
    def sleeps() -> None:
        import time

        time.sleep(60)

    with pytest.raises(TimeoutError, match="its timeout of 1 s"):
        gpunb.get(sleeps.remote(), timeout=WITHIN)


def test_the_loss_of_a_node(nodes: Any, tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    @gpunb.remote(resources={"lost": 1}, max_retries=0)
    def waits() -> None:
        gate.enter("task")

    @gpunb.remote(resources={"lost": 1})
    class Waits:
        def pid(self) -> int:
            return os.getpid()

    node = nodes.add(0, cpus=1, lost=2)
    gpunb.status()  # so that it is known
    ref, actor = waits.remote(), Waits.remote()
    gpunb.get(actor.pid.remote(), timeout=WITHIN)
    eventually(lambda: gate.came("task"), within=WITHIN)
    nodes.lose(node)
    with pytest.raises(exceptions.WorkerCrashedError, match="node"):
        gpunb.get(ref, timeout=WITHIN)

    def gone() -> bool:  # its process outlives its node for a moment, and answers
        try:
            gpunb.get(actor.pid.remote(), timeout=WITHIN)
        except exceptions.ActorError:
            return True
        return False

    eventually(gone, within=WITHIN)
    assert gpunb.get(where.remote(), timeout=WITHIN)


def test_another_attempt_on_another_node(nodes: Any, tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    @gpunb.remote(resources={"either": 1}, max_retries=2)
    def attempt() -> str:
        import ray

        node = ray.get_runtime_context().get_node_id()
        gate.enter(node)
        return str(node)

    first = nodes.add(0, cpus=1, either=1)
    gpunb.status()
    ref = attempt.remote()
    eventually(lambda: gate.count() == 1, within=WITHIN)
    nodes.add(0, cpus=1, either=1)
    nodes.lose(first)
    eventually(lambda: gate.count() == 2, within=WITHIN)
    gate.open()
    came = gpunb.get(ref, timeout=WITHIN)
    assert gate.came(came)
