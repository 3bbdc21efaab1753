import sys
from dataclasses import replace

import pynvml
import pytest

import gpunb
from gpunb.accelerators import (
    Accelerator,
    Detection,
    DetectionError,
    Usage,
    detect,
    measure,
    pin_environment,
    register,
    take,
)
from gpunb.accelerators.simulated import logical
from gpunb.scheduler.resources import Device
from tests.accelerators.fake_nvml import GIB, Card, FakeNvml

pytestmark = pytest.mark.usefixtures("plugins")

CARDS = [Card(uuid=f"GPU-{letter}", pci=(0, bus, 0)) for bus, letter in enumerate("abcd")]


@pytest.fixture(autouse=True)
def nvml(monkeypatch):
    """A machine with these cards; without any driver unless the test says otherwise."""

    def install(*cards, **errors):
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*cards, **errors))

    install(init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    return install


def amd(*ids, raises=None):
    """Register an AMD plug-in that finds these ids."""

    class Amd(Accelerator):
        name = "amd"
        variable = "HIP_VISIBLE_DEVICES"

        def devices(self):
            if raises:
                raise raises
            self.notes = () if ids else ("no AMD driver found",)
            return [Device(key=f"amd:{id}", id=id, name="MI300X", vendor="amd") for id in ids]

    return register(Amd)


def test_all_devices_of_a_machine(nvml):
    nvml(*CARDS)
    found = detect({})
    assert [device.id for device in found.devices] == [0, 1, 2, 3]
    assert found.notes == ()
    assert found.vendors == ("nvidia",)
    assert found.value is None


def test_the_processs_own_environment_is_the_default(nvml, monkeypatch):
    nvml(*CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert [device.id for device in detect().devices] == [2]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(detect().devices) == 4


def test_the_variable_limits_the_devices(nvml):
    nvml(*CARDS)
    found = detect({"CUDA_VISIBLE_DEVICES": "3,1"})
    assert [device.id for device in found.devices] == [3, 1]
    assert found.notes == ()
    assert (found.variable, found.value) == ("CUDA_VISIBLE_DEVICES", "3,1")
    with pytest.raises(ValueError, match="num_gpus=3, but CUDA_VISIBLE_DEVICES='3,1'"):
        take(found.devices, 3, found.value, variable=found.variable)


def test_hidden_devices_count_as_hardware_of_the_machine(nvml):
    nvml(*CARDS)
    found = detect({"CUDA_VISIBLE_DEVICES": ""})
    assert found.devices == ()
    assert found.vendors == ("nvidia",)
    assert "hides all devices" in found.notes[0]


def test_a_machine_without_devices_has_one_note():
    found = detect({})
    assert found == Detection(notes=found.notes)
    (note,) = found.notes
    assert note.startswith("no NVIDIA driver library")


def test_a_laptop_with_the_variable_set():
    found = detect({"CUDA_VISIBLE_DEVICES": "1,3"})
    assert found.devices == (logical(1), logical(3))
    assert found.vendors == ()
    assert found.notes[0].startswith("no NVIDIA driver library")
    assert found.notes[1].startswith("CUDA_VISIBLE_DEVICES='1,3', but no such hardware was found")
    assert (found.variable, found.value) == ("CUDA_VISIBLE_DEVICES", "1,3")


def test_a_broken_driver_is_noted_and_may_have_devices(nvml):
    nvml(*CARDS, init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    found = detect({})
    assert found.devices == ()
    assert found.vendors == ("nvidia",)
    assert "different versions" in found.notes[0]


def test_a_lost_card_is_noted(nvml):
    nvml(CARDS[0], replace(CARDS[1], unreachable=pynvml.NVML_ERROR_GPU_IS_LOST))
    found = detect({})
    assert len(found.devices) == 1
    assert "GPU is lost" in found.notes[0]


def test_devices_of_two_vendors(nvml):
    nvml(*CARDS)
    amd(0, 1)
    found = detect({"CUDA_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "1"})
    assert [(device.vendor, device.id) for device in found.devices] == [("nvidia", 2), ("amd", 1)]
    assert found.vendors == ("nvidia", "amd")
    environment = pin_environment(found.devices[1:], found.vendors)
    assert environment["HIP_VISIBLE_DEVICES"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_a_missing_library_of_another_vendor_is_not_noted(nvml):
    nvml(*CARDS)
    amd()
    assert detect({}).notes == ()


def test_without_devices_only_the_first_vendor_is_noted():
    amd()
    found = detect({})
    (note,) = found.notes
    assert note.startswith("no NVIDIA driver library")
    assert found.absent == ("no AMD driver found",)


def test_vendors_without_devices_are_absent_beside_real_devices(nvml):
    nvml(*CARDS)
    amd()
    assert detect({}).absent == ("no AMD driver found",)


def test_a_stray_variable_makes_no_devices_beside_real_ones(nvml):
    nvml(*CARDS)
    amd()
    found = detect({"HIP_VISIBLE_DEVICES": "0,1"})
    assert len(found.devices) == 4
    assert found.value is None


def test_on_a_machine_of_another_vendor_its_variable_counts():
    amd(0, 1)
    found = detect({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "5"})
    assert [device.key for device in found.devices] == ["amd:1"]
    assert (found.variable, found.value) == ("HIP_VISIBLE_DEVICES", "1")


@pytest.mark.parametrize("raises", [RuntimeError("boom"), ZeroDivisionError(), KeyError("x")])
def test_a_plug_in_that_fails_does_not_stop_the_others(nvml, raises):
    nvml(*CARDS)
    amd(raises=raises)
    found = detect({})
    assert len(found.devices) == 4
    assert found.vendors == ("nvidia",)
    (note,) = found.notes
    assert note.startswith(f"the accelerator plug-in 'amd' failed: {type(raises).__name__}: ")


def test_a_failing_library_is_noted_beside_real_devices(nvml):
    nvml(*CARDS)
    amd(raises=DetectionError("the AMD driver does not answer"))
    assert detect({}).notes == ("the AMD driver does not answer",)
    assert detect({}).vendors == ("nvidia", "amd")


def test_a_plug_in_that_cannot_be_made(plugins):
    plugin = amd(0)
    plugin.__init__ = lambda self, needed: None
    assert "failed: TypeError" in detect({}).notes[-1]
    assert detect({}).devices == ()


def test_a_plug_in_that_lists_something_else():
    plugin = amd(0)
    plugin.devices = lambda self: ["GPU 0"]
    assert "failed: TypeError: it lists 'GPU 0', which is no Device" in detect({}).notes[-1]


def test_a_plug_in_that_lists_a_device_twice():
    plugin = amd(0)
    plugin.devices = lambda self: [Device("amd:0", id, "MI", vendor="amd") for id in (0, 1)]
    assert "failed: ValueError: it lists 'amd:0' twice" in detect({}).notes[-1]
    assert detect({}).devices == ()


def test_a_package_that_does_not_load_is_noted(nvml, plugins):
    nvml(*CARDS)
    plugins.add("broken", "no_such_package:Thing")
    for _ in range(2):
        found = detect({})
        assert len(found.devices) == 4
        assert "'broken' (no_such_package:Thing) does not load" in found.notes[0]


def test_indices_on_a_mixed_machine_need_the_order(nvml):
    nvml(CARDS[0], replace(CARDS[1], name="Tesla T4"))
    (note,) = detect({"CUDA_VISIBLE_DEVICES": "1"}).notes
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID, which is not set" in note
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert detect({"CUDA_VISIBLE_DEVICES": "1", **order}).notes == ()
    assert detect({"CUDA_VISIBLE_DEVICES": "GPU-b"}).notes == ()
    assert detect({}).notes == ()


def test_use_is_measured_for_all_vendors(nvml):
    nvml(replace(CARDS[0], used=GIB))
    amd(0)
    devices = (*detect({}).devices, logical(5))
    usage = measure(devices)
    assert usage["GPU-a"].memory_used == GIB
    assert usage["amd:0"] == usage["logical:5"] == Usage()
    assert measure([]) == {}


def test_use_that_cannot_be_measured_is_unknown(nvml):
    nvml(replace(CARDS[0], used=GIB))
    plugin = amd(0)

    def fails(self, devices):
        raise RuntimeError("boom")

    plugin.usage = fails
    stranger = Device(key="tpu:0", id=0, name="TPU", vendor="tpu")
    usage = measure((*detect({}).devices, stranger))
    assert usage["GPU-a"].memory_used == GIB
    assert usage["amd:0"] == usage["tpu:0"] == Usage()


def test_init_and_status_say_what_failed(nvml):
    nvml(*CARDS, init=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    with gpunb.init(num_cpus=1, preload=[]) as session:
        (note,) = session.notes
        assert "different versions" in note
        assert note in repr(session)
        assert note in gpunb.status()["notes"]
