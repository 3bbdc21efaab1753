"""Types of devices."""

from __future__ import annotations

import importlib

import pytest

from tests.conformance.api.backends import BACKEND, free, get, here, ray, total
from tests.conformance.api.differences import differs
from tests.waiting import eventually

V100 = pytest.mark.machine(num_gpus=2, types="V100")


def names():
    return importlib.import_module(f"{BACKEND}.util.accelerators")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NVIDIA_TESLA_V100", "V100"),
        ("NVIDIA_TESLA_P100", "P100"),
        ("NVIDIA_TESLA_T4", "T4"),
        ("NVIDIA_TESLA_P4", "P4"),
        ("NVIDIA_TESLA_K80", "K80"),
        ("NVIDIA_TESLA_A10G", "A10G"),
        ("NVIDIA_L4", "L4"),
        ("NVIDIA_A100", "A100"),
        ("NVIDIA_H100", "H100"),
        ("INTEL_MAX_1550", "Intel-GPU-Max-1550"),
        ("AMD_INSTINCT_MI100", "AMD-Instinct-MI100"),
    ],
)
def test_the_constant(name, value):
    assert getattr(names(), name) == value


@V100
def test_the_type_is_listed_among_the_resources():
    assert total()["accelerator_type:V100"] >= 1


@V100
def test_a_task_on_a_device_of_the_type(idle):
    assert get(ray.remote(num_gpus=1, accelerator_type="V100")(ray.get_gpu_ids).remote()) == [0]


@V100
def test_a_share_of_a_device_of_the_type(idle):
    task = ray.remote(num_gpus=0.5, accelerator_type="V100")(ray.get_gpu_ids)
    assert get(task.remote()) == [0]


@V100
def test_the_type_can_be_an_option_of_a_call(idle):
    task = ray.remote(num_gpus=1)(ray.get_gpu_ids)
    assert get(task.options(accelerator_type="V100").remote()) == [0]


@V100
def test_an_actor_on_a_device_of_the_type(idle):
    @ray.remote(num_gpus=1, accelerator_type="V100")
    class Sees:
        def ids(self):
            return ray.get_gpu_ids()

    actor = Sees.remote()
    assert get(actor.ids.remote()) == [0]


@V100
@differs("types-are-of-devices")
def test_many_share_a_type_that_they_reserve_nothing_of(idle, gate):
    @ray.remote(num_cpus=0.1, accelerator_type="V100")
    def stay(gate, name):
        gate.enter(name)

    refs = [stay.remote(gate, name) for name in range(3)]
    for name in range(3):
        gate.await_(name)
    eventually(lambda: free()["CPU"] == pytest.approx(3.7))
    assert free()["GPU"] == 2
    assert free()["accelerator_type:V100"] == here(ray=pytest.approx(0.997), gpunb=2)
    gate.open()
    get(refs)


@V100
@differs("infeasible-requests")
def test_a_type_that_is_not_here():
    task = ray.remote(num_gpus=1, accelerator_type="H100")(ray.get_gpu_ids)
    if here(ray="waits", gpunb="raises") == "raises":
        with pytest.raises(ValueError, match="H100"):
            task.remote()
    else:
        ref = task.remote()
        assert ray.wait([ref], timeout=0.5) == ([], [ref])
        ray.cancel(ref)


@V100
@differs("lists-of-types")
def test_a_list_of_types_in_order_of_preference(idle):
    types = ["H100", "V100"]
    if here(ray="refuses", gpunb="takes") == "refuses":
        with pytest.raises(TypeError):
            ray.remote(num_gpus=1, accelerator_type=types)(ray.get_gpu_ids)
    else:
        task = ray.remote(num_gpus=1, accelerator_type=types)(ray.get_gpu_ids)
        assert get(task.remote()) == [0]


@pytest.mark.machine(num_gpus=1, resources={"accelerator_type:T4": 1})
def test_a_type_declared_as_a_resource_of_logical_devices(idle):
    task = ray.remote(num_gpus=1, accelerator_type="T4")(ray.get_gpu_ids)
    assert get(task.remote()) == [0]


@pytest.mark.machine(num_gpus=1, resources={"licence": 2})
def test_a_custom_resource_is_held(idle, gate):
    @ray.remote(num_cpus=0.1, resources={"licence": 1})
    def stay(gate, name):
        gate.enter(name)

    refs = [stay.remote(gate, name) for name in range(3)]
    eventually(lambda: gate.count() == 2)
    eventually(lambda: "licence" not in free())
    assert ray.wait(refs, num_returns=3, timeout=0.2)[0] == []
    assert gate.count() == 2
    gate.open()
    get(refs)
