"""Devices of all kinds as tasks get them: simulated ones, with the rules and variables of real
ones."""

import os

import pytest

import gpunb
from gpunb.exceptions import InfeasibleRequestError
from tests.waiting import eventually

MACHINE = "GeForce-RTX-4090:24GiB,2xA100:80GiB,4xTPU-V4,2xNPU"


@pytest.fixture(scope="module", autouse=True)
def session():
    with gpunb.init(simulate=MACHINE, num_cpus=2, preload=[]) as session:
        yield session


@pytest.fixture(autouse=True)
def idle():
    """Nothing is held any more: a process that ends may take a moment."""
    eventually(lambda: gpunb.available_resources() == gpunb.cluster_resources())


def sees(*names, **options):
    """The ids a task has, and what variables hold there."""

    @gpunb.remote(num_cpus=0, **options)
    def look():
        return gpunb.get_gpu_ids(), [os.environ.get(name) for name in names]

    return gpunb.get(look.remote())


def test_cluster_resources_lists_each_kind_of_device():
    assert gpunb.cluster_resources() == {
        "CPU": 2,
        "GPU": 3,
        "TPU": 4,
        "NPU": 2,
        "accelerator_type:GeForce-RTX-4090": 1,
        "accelerator_type:A100": 2,
        "accelerator_type:TPU-V4": 4,
    }
    assert gpunb.available_resources() == gpunb.cluster_resources()


def test_devices_of_other_kinds_are_pinned_by_their_own_variable():
    names = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "CUDA_VISIBLE_DEVICES")
    assert sees(*names, resources={"TPU": 2}) == ([], ["0,1", "1,2,1", ""])
    names = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    assert sees(*names, num_gpus=1, resources={"NPU": 2}) == ([0], ["0,1", "0"])


def test_the_ids_of_each_kind_by_its_name():
    @gpunb.remote(num_cpus=0, num_gpus=1, resources={"NPU": 2})
    def look():
        return gpunb.get_runtime_context().get_accelerator_ids()

    assert gpunb.get(look.remote()) == {"GPU": ["0"], "TPU": [], "NPU": ["0", "1"]}
    here = gpunb.get_runtime_context().get_accelerator_ids()
    assert here == {"GPU": [], "TPU": [], "NPU": []}


def test_the_ids_of_each_kind_in_an_actor():
    @gpunb.remote(resources={"TPU": 1})
    class Looks:
        def look(self):
            return gpunb.get_runtime_context().get_accelerator_ids()

    actor = Looks.remote()
    assert gpunb.get(actor.look.remote()) == {"GPU": [], "TPU": ["0"], "NPU": []}


def test_a_task_can_have_a_part_of_an_npu():
    names = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    assert sees(*names, resources={"NPU": 0.5}) == ([], ["0", ""])


def test_an_actor_holds_other_devices_until_it_ends():
    @gpunb.remote(resources={"TPU": 4})
    class Holds:
        def chips(self):
            return os.environ["TPU_VISIBLE_CHIPS"]

    actor = Holds.remote()
    assert gpunb.get(actor.chips.remote()) == "0,1,2,3"
    assert "TPU" not in gpunb.available_resources()
    waits = gpunb.remote(resources={"TPU": 1})(os.getpid).remote()
    (job,) = gpunb.status()["waiting"]
    assert job["waits_for"].startswith("needs 1 whole TPU; 0 of 4 are wholly free, held by #")
    assert gpunb.status()["unmet"] == {"CPU": 1, "TPU": 1}
    gpunb.kill(actor)
    assert gpunb.get(waits) != os.getpid()


def test_each_task_with_such_devices_has_a_fresh_process():
    look = gpunb.remote(resources={"TPU": 1}, max_calls=0)(os.getpid)
    assert len({gpunb.get(look.remote()) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resources": {"TPU": 3}}, "ask for one of 1, 2, 4, 8"),
        ({"resources": {"TPU": 8}}, "it asks for 8 TPU and there are 4"),
        ({"resources": {"TPU": 0.5}}, "TPU devices are given out whole"),
        ({"resources": {"HPU": 1}}, "the resource 'HPU': there is none"),
        ({"num_gpus": 1, "accelerator_type": "4080"}, "Did you mean 'GeForce-RTX-4090'"),
        ({"num_gpus": 1, "min_memory": "100GiB"}, "no device has 100 GiB of memory"),
    ],
)
def test_requests_that_can_never_be_met_are_refused(options, message):
    with pytest.raises(InfeasibleRequestError) as raised:
        gpunb.remote(**options)(os.getpid).remote()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"accelerator_type": "4090"}, [0]),
        ({"accelerator_type": "GeForce RTX 4090"}, [0]),
        ({"accelerator_type": "a100-80g"}, [1]),
        ({"accelerator_type": ["H100", "A100"]}, [1]),
        ({"min_memory": "40GiB"}, [1]),
        ({"min_memory": "20GiB"}, [0]),
        ({"resources": {"accelerator_type:A100": 0.001}}, [1]),
    ],
)
def test_devices_by_type_and_size(options, ids):
    assert sees(num_gpus=1, **options) == (ids, [])
