"""Each example of the GPU documents, old and new, with what its document says of it."""

from __future__ import annotations

import os
import re

import pytest

from tests.conformance.api.backends import free, get, here, ray, script_that_shows
from tests.conformance.api.differences import differs
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("idle")

ONE = pytest.mark.machine(num_cpus=4, num_gpus=1)
THREE = pytest.mark.machine(num_cpus=6, num_gpus=3)
FOUR = pytest.mark.machine(num_cpus=4, num_gpus=4)
V100 = pytest.mark.machine(num_gpus=1, types="V100")


# ---------------------------------------------------------------------------- starting with GPUs


@FOUR
def test_a_session_has_the_gpus_that_it_was_started_with():
    assert ray.cluster_resources()["GPU"] == 4


@FOUR
def test_more_gpus_than_the_machine_has_are_scheduled_all_the_same():
    @ray.remote(num_gpus=4)
    def use_all():
        return ray.get_gpu_ids()

    assert get(use_all.remote()) == [0, 1, 2, 3]


@pytest.mark.machine(num_gpus=2, visible="1,3")
def test_only_devices_1_and_3_are_seen():
    @ray.remote(num_gpus=1)
    class Sees:
        def variable(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    actors = [Sees.remote(), Sees.remote()]
    assert sorted(get([each.variable.remote() for each in actors])) == ["1", "3"]


# ------------------------------------------------------------------------------- tasks with GPUs


def test_the_text_that_a_gpu_method_returns():
    @ray.remote(num_gpus=1)
    def gpu_method():
        return f"This function is allowed to use GPUs {ray.get_gpu_ids()}."

    assert get(gpu_method.remote()) == "This function is allowed to use GPUs [0]."


def test_a_task_may_set_the_variable_from_its_ids():
    @ray.remote(num_gpus=1)
    def gpu_method():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))
        return os.environ["CUDA_VISIBLE_DEVICES"]

    assert get(gpu_method.remote()) == "0"


def test_a_task_is_told_its_gpu_twice():
    @ray.remote(num_gpus=1)
    def use_gpu():
        return (
            f"ray.get_gpu_ids(): {ray.get_gpu_ids()}",
            f"CUDA_VISIBLE_DEVICES: {os.environ['CUDA_VISIBLE_DEVICES']}",
        )

    assert get(use_gpu.remote()) == ("ray.get_gpu_ids(): [0]", "CUDA_VISIBLE_DEVICES: 0")


def test_a_task_that_ignores_its_gpu_reserves_it_while_it_runs(gate):
    @ray.remote(num_gpus=1)
    def use_gpu(gate):
        gate.enter()

    ref = use_gpu.remote(gate)
    gate.await_()
    eventually(lambda: free().get("GPU") == 1)
    gate.open()
    get(ref)
    eventually(lambda: free().get("GPU") == 2)


def test_the_task_of_the_design_note_returns_nothing():
    @ray.remote(num_gpus=1)
    def gpu_task():
        pass

    assert get(gpu_task.remote()) is None


def test_the_actor_uses_the_first_gpu_and_the_task_the_second():
    line = r"^\((\w+) pid=\d+\) (.*)$"
    printed = script_that_shows(
        line,
        4,
        """
        import os, sys
        ray.init(num_gpus=2)

        @ray.remote(num_gpus=1)
        class GPUActor:
            def ping(self):
                print("ray.get_gpu_ids(): {}".format(ray.get_gpu_ids()))
                print("CUDA_VISIBLE_DEVICES: {}".format(os.environ["CUDA_VISIBLE_DEVICES"]))

        @ray.remote(num_gpus=1)
        def use_gpu():
            print("ray.get_gpu_ids(): {}".format(ray.get_gpu_ids()))
            print("CUDA_VISIBLE_DEVICES: {}".format(os.environ["CUDA_VISIBLE_DEVICES"]))

        gpu_actor = GPUActor.remote()
        ray.get(gpu_actor.ping.remote())
        ray.get(use_gpu.remote())
        sys.stdin.read()
        """,
        RAY_DEDUP_LOGS="0",
    )
    lines = re.findall(line, printed, re.MULTILINE)
    reported = {"ray.get_gpu_ids(): [{}]", "CUDA_VISIBLE_DEVICES: {}"}
    assert len(lines) == 4
    assert set(lines) == {
        (name, text.format(gpu))
        for name, gpu in (("GPUActor", 0), ("use_gpu", 1))
        for text in reported
    }


# ------------------------------------------------------------------------------ actors with GPUs


def test_an_actor_whose_constructor_returns_a_text():
    @ray.remote(num_gpus=1)
    class GPUActor:
        def __init__(self):
            return f"This actor is allowed to use GPUs {ray.get_gpu_ids()}."  # noqa: PLE0101 - it is in the document

        def ids(self):
            return ray.get_gpu_ids()

    actor = GPUActor.remote()
    assert get(actor.ids.remote()) == [0]


def test_an_actor_that_sets_the_variable_in_its_constructor():
    @ray.remote(num_gpus=1)
    class GPUActor:
        def __init__(self):
            self.gpu_ids = ray.get_gpu_ids()
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpu_ids))

        def look(self):
            return self.gpu_ids, os.environ["CUDA_VISIBLE_DEVICES"]

    actor = GPUActor.remote()
    assert get(actor.look.remote()) == ([0], "0")


def test_an_actor_reserves_its_gpu_for_its_life():
    @ray.remote(num_gpus=1)
    class GPUActor:
        def ids(self):
            return ray.get_gpu_ids()

    @ray.remote(num_gpus=1)
    def ids():
        return ray.get_gpu_ids()

    actor = GPUActor.remote()
    (mine,) = get(actor.ids.remote())
    eventually(lambda: free().get("GPU") == 1)
    # It has nothing to do, and nobody else gets its GPU.
    assert [get(ids.remote()) for _ in range(4)] == [[1 - mine]] * 4
    eventually(lambda: free().get("GPU") == 1)
    ray.kill(actor)
    eventually(lambda: free().get("GPU") == 2)


@differs("infeasible-requests")
def test_an_actor_that_asks_for_more_gpus_than_there_are():
    @ray.remote(num_gpus=3)
    class GPUActor:
        def ping(self):
            return "pong"

    if here(ray="waits", gpunb="raises") == "raises":
        with pytest.raises(ValueError, match="3"):
            GPUActor.remote()
    else:
        actor = GPUActor.remote()
        ping = actor.ping.remote()
        assert ray.wait([ping], timeout=0.5) == ([], [ping])
        ray.kill(actor)


# ------------------------------------------------------------------------------------- fractions


@ONE
def test_four_quarter_tasks_run_at_once(gate):
    @ray.remote(num_gpus=0.25)
    def f(gate, name):
        gate.enter(name)
        return ray.get_gpu_ids()

    refs = [f.remote(gate, name) for name in range(4)]
    eventually(lambda: gate.count() == 4, "all four run at once")
    gate.open()
    assert get(refs) == [[0]] * 4


@THREE
def test_three_half_actors_share_two_gpus():
    @ray.remote(num_gpus=0.5)
    class FractionalGPUActor:
        def ping(self):
            return ray.get_gpu_ids()

    actors = [FractionalGPUActor.remote() for _ in range(3)]
    assert sorted(get([each.ping.remote() for each in actors])) == [[0], [0], [1]]


@ONE
def test_two_half_actors_share_a_gpu():
    @ray.remote(num_gpus=0.5)
    class HalfGpuActor:
        def where(self):
            return ray.get_gpu_ids()

    a1, a2 = HalfGpuActor.remote(), HalfGpuActor.remote()
    assert get([a1.where.remote(), a2.where.remote()]) == [[0], [0]]


# ------------------------------------------------------------------ workers that give memory back


@ONE
@pytest.mark.parametrize(
    ("options", "fresh"),
    [
        pytest.param({}, True, id="by default"),
        pytest.param({"max_calls": 1}, True, id="with max_calls=1"),
        pytest.param({"max_calls": 0}, False, id="unless max_calls=0"),
    ],
)
def test_a_gpu_task_gets_a_process_of_its_own(options, fresh):
    @ray.remote(num_gpus=1, **options)
    def leak_gpus():
        return os.getpid()

    processes = [get(leak_gpus.remote()) for _ in range(3)]
    assert (len(set(processes)) == 3) is fresh


def test_the_process_of_a_gpu_task_ends_after_it():
    @ray.remote(num_gpus=1)
    def leak_gpus():
        return os.getpid()

    process = get(leak_gpus.remote())
    eventually(lambda: not os.path.exists(f"/proc/{process}"), "the process is gone")


# ------------------------------------------------------------------------------- types of devices


@V100
def test_a_function_that_needs_a_v100():
    if ray.__name__ == "ray":
        from ray.util.accelerators import NVIDIA_TESLA_V100
    else:
        from gpunb.util.accelerators import NVIDIA_TESLA_V100

    @ray.remote(num_gpus=1, accelerator_type=NVIDIA_TESLA_V100)
    def train(data):
        return "This function was run on a node with a Tesla V100 GPU"

    assert get(train.remote(1)) == "This function was run on a node with a Tesla V100 GPU"


@V100
def test_an_actor_that_needs_a_v100():
    @ray.remote(num_gpus=1, accelerator_type="V100")
    class Trains:
        def where(self):
            return ray.get_gpu_ids()

    actor = Trains.remote()
    assert get(actor.where.remote()) == [0]


@V100
def test_a_typed_request_leaves_no_trace():
    @ray.remote(num_gpus=1, accelerator_type="V100")
    def gpu_task():
        pass

    get(gpu_task.remote(), PATIENCE)
    eventually(lambda: free() == {"CPU": 4, "GPU": 1, "accelerator_type:V100": 1})
