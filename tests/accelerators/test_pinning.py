import timeit
from dataclasses import replace

import pytest

from gpunb.accelerators import (
    Accelerator,
    parse_simulate,
    pin_environment,
    register,
    registered,
)
from gpunb.accelerators.simulated import logical
from gpunb.engine.worker_setup import Setups
from gpunb.protocol.messages import Setup
from gpunb.scheduler.option_values import PINNING
from gpunb.scheduler.resources import UNIT, Allocation, Device, Machine

CUDA_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def nvidia(id):
    return Device(key=f"GPU-{id}", id=id, name="Tesla T4", vendor="nvidia")


def amd(id):
    return Device(key=f"amd:{id}", id=id, name="MI300X", vendor="amd")


@pytest.fixture
def amd_plugin(plugins):
    @register
    class Amd(Accelerator):
        name = "amd"
        variable = "HIP_VISIBLE_DEVICES"

        def devices(self):
            return []

    return Amd


@pytest.mark.parametrize(
    ("devices", "value"),
    [
        ([nvidia(0)], "0"),
        ([nvidia(3), nvidia(1)], "1,3"),
        ([nvidia(10), nvidia(9)], "9,10"),
        ([nvidia("MIG-b"), nvidia("MIG-a")], "MIG-a,MIG-b"),
        ([nvidia("GPU-b"), nvidia(2)], "2,GPU-b"),
        (parse_simulate("2xA100:40GiB"), "0,1"),
        ([logical(5)], "5"),
        # The third device of a machine with two: one variable for both kinds.
        ([logical(2), nvidia(0), nvidia(1)], "0,1,2"),
    ],
)
@pytest.mark.parametrize("vendors", [(), ("nvidia",)])
@pytest.mark.parametrize("expose_on_zero", [False, True])
def test_the_ids_ascend_in_the_variable(devices, value, vendors, expose_on_zero):
    environment = pin_environment(devices, vendors, expose_on_zero=expose_on_zero)
    assert environment == {"CUDA_VISIBLE_DEVICES": value, **CUDA_ORDER}


def test_no_task_can_set_a_variable_that_pins():
    """The core cannot ask the plug-ins, so it has the names of those that come with gpunb."""
    pinning = {"ROCR_VISIBLE_DEVICES"}  # within which HIP counts
    for plugin in registered():
        if not plugin.__module__.startswith("gpunb."):
            continue
        for ids in ([], [0], [0, 1]):
            pinning.update(plugin().environment(ids))
    assert pinning - {"JAX_PLATFORMS"} == PINNING


def test_a_task_cannot_set_the_variable_of_a_new_plug_in():
    machine = Machine((logical(0),), UNIT)
    setups = Setups(machine, lambda devices: {"MY_CARDS": ",".join(str(d.id) for d in devices)})
    extra = (("MY_CARDS", "7"), ("OTHER", "7"))
    held = Allocation(shares=(("logical:0", UNIT),))
    setup = Setup(*setups.of(held, extra, {}, setups.now()))
    assert {name: setup.environment[name] for name, _ in extra} == {"MY_CARDS": "0", "OTHER": "7"}


def test_without_devices_none_is_seen():
    hidden = {"CUDA_VISIBLE_DEVICES": "", **CUDA_ORDER}
    assert pin_environment(()) == pin_environment([], ["nvidia"]) == hidden


def test_without_devices_all_can_be_seen():
    assert pin_environment((), ("nvidia",), expose_on_zero=True) == {}


def test_each_vendor_has_its_variable(amd_plugin):
    vendors = ("nvidia", "amd")
    assert pin_environment([amd(1), nvidia(0), amd(0)], vendors) == {
        "CUDA_VISIBLE_DEVICES": "0",
        "HIP_VISIBLE_DEVICES": "0,1",
        **CUDA_ORDER,
    }


def test_the_other_vendors_devices_are_hidden(amd_plugin):
    vendors = ("nvidia", "amd")
    assert pin_environment([nvidia(0)], vendors)["HIP_VISIBLE_DEVICES"] == ""
    assert pin_environment([amd(0)], vendors)["CUDA_VISIBLE_DEVICES"] == ""
    assert pin_environment([], vendors) == {
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        **CUDA_ORDER,
    }


def test_the_variable_of_a_vendor_that_is_not_here_is_left_alone(amd_plugin):
    """ROCm reads CUDA_VISIBLE_DEVICES too, so that setting it could hide the AMD device."""
    assert pin_environment([amd(0)], ("amd",)) == {"HIP_VISIBLE_DEVICES": "0"}
    assert "HIP_VISIBLE_DEVICES" not in pin_environment([nvidia(0)], ("nvidia",))


def test_a_vendor_without_a_variable(plugins):
    @register
    class Apple(Accelerator):
        name = "apple"

        def devices(self):
            return []

    device = Device(key="m3", id=0, name="M3", vendor="apple")
    assert pin_environment([device], ("apple",)) == {}


def test_devices_of_another_kind_bring_no_gpus():
    tpu = Device(key="t", id=2, name="TPU", vendor="tpu", resource="TPU")
    assert pin_environment([tpu], ("nvidia", "tpu")) == {
        "CUDA_VISIBLE_DEVICES": "",
        **CUDA_ORDER,
        "TPU_VISIBLE_CHIPS": "2",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }
    assert pin_environment([tpu])["CUDA_VISIBLE_DEVICES"] == ""
    assert pin_environment([tpu, nvidia(1)])["CUDA_VISIBLE_DEVICES"] == "1"


def test_what_the_variable_holds_may_differ_from_the_id():
    split = [replace(nvidia(1), pin="GPU-b"), replace(nvidia(0), pin="GPU-a")]
    assert pin_environment(split)["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"


def test_a_shared_variable_gets_the_constants_of_both(plugins):
    @register
    class Metax(Accelerator):
        name = "metax"
        variable = "CUDA_VISIBLE_DEVICES"
        constants = {"METAX": "1"}  # noqa: RUF012

        def devices(self):
            return []

    device = Device(key="mx", id=1, name="C500", vendor="metax")
    assert pin_environment([device, nvidia(0)]) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "METAX": "1",
        **CUDA_ORDER,
    }


def test_an_unknown_vendor_is_an_error(plugins):
    with pytest.raises(LookupError, match="no accelerator plug-in is named 'tpu'; known: logical"):
        pin_environment([Device(key="t", id=0, name="t", vendor="tpu")])


def test_the_dict_is_the_callers_own():
    pin_environment([nvidia(0)])["CUDA_VISIBLE_DEVICES"] = "changed"
    assert pin_environment([nvidia(0)])["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_replaced_plug_in_changes_the_cached_environment(plugins):
    def define(value):
        class Amd(Accelerator):
            name = "amd"
            variable = value

            def devices(self):
                return []

        return register(Amd)

    define("ROCR_VISIBLE_DEVICES")
    assert pin_environment([amd(0)]) == {"ROCR_VISIBLE_DEVICES": "0"}
    define("HIP_VISIBLE_DEVICES")
    assert pin_environment([amd(0)]) == {"HIP_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("count", [0, 1, 8])
def test_it_is_fast_enough_for_every_task(count):
    devices = [nvidia(id) for id in range(count)]
    rounds = timeit.repeat(lambda: pin_environment(devices, ("nvidia",)), number=1000, repeat=20)
    assert min(rounds) / 1000 < 5e-6
