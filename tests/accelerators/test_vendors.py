"""Each vendor's devices, from recorded machines: see `recordings/`."""

import sys

import pytest

from gpunb.accelerators import (
    DetectionError,
    Process,
    Usage,
    detect,
    find,
    pin_environment,
    probing,
)
from gpunb.accelerators.registry import _built_in
from gpunb.accelerators.testing import AcceleratorSuite
from tests.accelerators.machines import RECORDINGS

GIB = 2**30
MIB = 2**20

# recording: (plug-in, [(id, key, name, type, memory, capability)])
FOUND = {
    "amd-mi300x": (
        "amd",
        [
            (
                id,
                key,
                "AMD Instinct MI300X",
                "AMD-Instinct-MI300X-OAM",
                206141652992,
                "gfx942",
            )
            for id, key in enumerate(["GPU-21b409ea8c2dd64c", "GPU-317de4cd2f39b4a9"])
        ],
    ),
    "amd-radeon-and-apu": (
        "amd",
        [
            (
                1,
                "GPU-8e8adeb1bb6c0b31",
                "AMD Radeon RX 7900 XTX",
                "AMD-Radeon-RX-7900-XTX",
                25753026560,
                "gfx1100",
            )
        ],
    ),
    "intel-max-1100": (
        "intel",
        [
            (
                0,
                "00000000-0000-004d-0000-002f0bda8086",
                "Intel Data Center GPU Max 1100",
                "Intel-GPU-Max-1100",
                48 * GIB,
                None,
            )
        ],
    ),
    "intel-laptop-and-arc": (
        "intel",
        [(1, "intel:0000:03:00.0", "Intel Arc B580", "Intel-Arc-B580", None, None)],
    ),
    "apple-m2-pro": ("apple", [(0, "apple:0", "Apple M2 Pro", "M2-Pro", None, None)]),
    "metax-c500": (
        "metax",
        [
            (0, "GPU-2a6b5f70-16ba-4f40-8d5c-4d2c07b6e0aa", "MetaX MXC500", "MXC500", None, None),
            (
                2,
                "GPU-51f0c7d2-0a31-46ed-9d0e-6f2f43c1a7c3",
                "MetaX MXC550-AL",
                "MXC550",
                None,
                None,
            ),
        ],
    ),
    "metax-library": ("metax", [(0, "metax:0", "MetaX MXC500", "MXC500", None, None)]),
    "ascend-910b": (
        "ascend",
        [
            (0, "ascend:0000:c1:00.0", "Ascend 910B3", "Ascend910B3", 64 * GIB, None),
            (1, "ascend:0000:c2:00.0", "Ascend 910B3", "Ascend910B3", 64 * GIB, None),
        ],
    ),
    "gaudi2": (
        "gaudi",
        [
            (
                2,
                "01P0-HL2080A0-15-TNPS34-19-05-02",
                "Intel HL-225",
                "Intel-GAUDI",
                96 * GIB,
                None,
            ),
            (
                3,
                "01P0-HL2080A0-15-TNPS34-20-07-08",
                "Intel HL-225",
                "Intel-GAUDI",
                96 * GIB,
                None,
            ),
        ],
    ),
    "neuron-trn1": (
        "neuron",
        [
            (id, f"neuron:00:1e.0/{id}", f"Neuron core {id}", "aws-neuron-core", 16 * GIB, None)
            for id in range(2)
        ],
    ),
    "neuron-trn2": (
        "neuron",
        [
            (
                id,
                f"neuron:0000:{'cc' if id < 4 else 'b5'}:00.0/{id % 4}",
                f"Neuron core {id}",
                "aws-neuron-core",
                24 * GIB,
                None,
            )
            for id in range(8)
        ],
    ),
    "tpu-v5e": (
        "tpu",
        [
            (id, f"tpu:0000:00:0{id + 4}.0", "Google TPU-V5LITEPOD", "TPU-V5LITEPOD", None, None)
            for id in range(4)
        ],
    ),
    "rebellions-atom": (
        "rebellions",
        [
            (id, key, "Rebellions RBLN-CA12", "RBLN-CA12", 16877879296, None)
            for id, key in enumerate(
                ["d86d3e84-f99d-4a6c-9d0f-2b6f0d1f3a01", "0c1f6a52-54b4-4b7c-8f1d-91e60c7a1d02"]
            )
        ],
    ),
    "furiosa-rngd": (
        "furiosa",
        [
            (0, "C0413086-0708-4606", "Furiosa RNGD", "FURIOSA_RNGD", 51002736640, None),
            (2, "89413086-0709-4707", "Furiosa RNGD", "FURIOSA_RNGD", 51002736640, None),
        ],
    ),
    "tenstorrent-n300": (
        "tenstorrent",
        [
            (
                0,
                "tenstorrent:0100014511730106/0",
                "Tenstorrent n300",
                "Tenstorrent-n300",
                None,
                None,
            ),
            (
                1,
                "tenstorrent:0000046131925046/1",
                "Tenstorrent p150",
                "Tenstorrent-p150",
                None,
                None,
            ),
        ],
    ),
    "mobilint-aries": (
        "mobilint",
        [
            (id, f"mobilint:/dev/aries{id}", "Mobilint Aries", "MOBILINT_ARIES", None, None)
            for id in range(11)
        ],
    ),
}

KINDS = {
    "ascend": ("NPU", False, ()),
    "gaudi": ("HPU", True, ()),
    "neuron": ("neuron_cores", True, ()),
    "tpu": ("TPU", True, (1, 2, 4, 8)),
    "rebellions": ("RBLN", True, ()),
    "furiosa": ("FURIOSA", True, ()),
    "tenstorrent": ("TTNPU", True, ()),
    "mobilint": ("MBLT", True, ()),
}


def playing(machine, monkeypatch, name):
    if name.startswith("apple"):
        monkeypatch.setattr(sys, "platform", "darwin")
    machine.play(name)
    return find(FOUND[name][0])()


def test_every_recording_is_of_a_vendor():
    assert {path.stem.removesuffix("-busy") for path in RECORDINGS.glob("*.txt")} == set(FOUND)
    assert {vendor for vendor, _ in FOUND.values()} == set(_built_in)


@pytest.mark.parametrize("name", FOUND)
def test_the_devices(name, machine, monkeypatch):
    devices = playing(machine, monkeypatch, name).devices()
    reported = [(d.id, d.key, d.name, d.type, d.memory, d.capability) for d in devices]
    assert reported == FOUND[name][1]


@pytest.mark.parametrize("name", FOUND)
def test_detection_finds_them_with_the_rules_of_their_kind(name, machine, monkeypatch):
    vendor = FOUND[name][0]
    playing(machine, monkeypatch, name)
    found = detect({})
    assert {device.vendor for device in found.devices} == set(found.vendors) == {vendor}
    for device in found.devices:
        rules = (device.resource, device.whole, device.counts)
        assert rules == KINDS.get(vendor, ("GPU", False, ()))
    assert found.value is None


class Recorded(AcceleratorSuite):
    """What every plug-in promises, on each recorded machine."""

    @pytest.fixture(autouse=True, params=FOUND)
    def _play(self, request, machine, monkeypatch):
        playing(machine, monkeypatch, request.param)
        self.plugin = find(FOUND[request.param][0])

    def make(self):
        return self.plugin()


class TestRecorded(Recorded):
    pass


class TestNothingThere(AcceleratorSuite):
    """The same where there is neither hardware nor software."""

    @pytest.fixture(autouse=True, params=_built_in)
    def _nothing(self, request, machine):
        self.plugin = find(request.param)

    def make(self):
        return self.plugin()

    def test_a_machine_without_devices_lists_none(self):
        assert self.listed() == []


# ---------------------------------------------------------------------- what else devices tell


def test_the_use_of_amd_devices(machine):
    plugin = find("amd")()
    first, second = machine.play("amd-mi300x") and plugin.devices()
    usage = plugin.usage([first, second])
    assert usage[first.key] == Usage(296026112, 206141652992, 7, 41, (Process(4321, GIB),))
    assert usage[second.key] == Usage(None, 206141652992, None, None, ())
    health = plugin.health([first, second])
    assert health[first.key] is None
    assert health[second.key] == "2 memory errors that could not be corrected: reset it"


def test_partitions_of_an_amd_card_are_told_apart(machine):
    machine.play("amd-mi300x")
    first = "/sys/class/kfd/kfd/topology/nodes/1"
    for name in ("properties", "mem_banks/0/properties"):
        text = (machine.root / f"{first}/{name}".lstrip("/")).read_text()
        machine.add(f"file /sys/class/kfd/kfd/topology/nodes/3/{name}", text)
    plugin = find("amd")()
    keys = [device.key for device in plugin.devices()]
    assert keys[2] == f"{keys[0]}/2"
    assert len(set(plugin.usage(plugin.devices()))) == 3


def test_an_amd_device_that_is_gone(machine):
    plugin = find("amd")()
    machine.play("amd-mi300x")
    first, second = plugin.devices()
    machine.remove("/sys/class/kfd/kfd/topology/nodes/2/properties")
    assert list(plugin.devices()) == [first]
    assert "does not list it any more" in plugin.health([second])[second.key]


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("1", ["GPU-317de4cd2f39b4a9"]),
        ("1,0", ["GPU-317de4cd2f39b4a9", "GPU-21b409ea8c2dd64c"]),
        ("GPU-317DE4CD2F39B4A9", ["GPU-317de4cd2f39b4a9"]),
        ("0,7,1", ["GPU-21b409ea8c2dd64c"]),
        ("", []),
    ],
)
def test_amd_devices_are_counted_within_those_that_rocr_shows(machine, monkeypatch, value, left):
    """HIP counts what ROCR_VISIBLE_DEVICES leaves, and workers inherit that."""
    machine.play("amd-mi300x")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", value)
    devices = find("amd")().devices()
    assert [(device.id, device.key) for device in devices] == list(enumerate(left))
    environment = pin_environment(devices, ("amd",))
    assert "ROCR_VISIBLE_DEVICES" not in environment
    assert environment["HIP_VISIBLE_DEVICES"] == (",".join(map(str, range(len(left)))) or "-1")


def test_an_amd_card_without_its_driver(machine):
    for name, value in (("vendor", "0x1002"), ("device", "0x74a1"), ("class", "0x120000")):
        machine.add(f"file /sys/bus/pci/devices/0000:05:00.0/{name}", value)
    with pytest.raises(DetectionError, match=r"on the bus at 0000:05:00.0, .* --device /dev/kfd"):
        find("amd")().devices()


def test_a_processors_own_graphics_is_noted_and_left_out(machine):
    plugin = find("amd")()
    machine.play("amd-radeon-and-apu")
    plugin.devices()
    assert plugin.notes == ("AMD device 0 is a processor's own graphics, and is left out",)


def test_metax_devices_that_are_not_available(machine):
    plugin = find("metax")()
    machine.play("metax-c500")
    plugin.devices()
    assert plugin.notes == ("MetaX device 1 is not available, and left out",)


def test_the_health_of_ascend_npus(machine):
    plugin = find("ascend")()
    machine.play("ascend-910b")
    first, second = plugin.devices()
    reported = plugin.health([first, second])
    assert reported == {first.key: None, second.key: "npu-smi says of its health: Warning"}


def test_the_use_of_ascend_npus(machine):
    plugin = find("ascend")()
    machine.play("ascend-910b-busy")
    first, second = plugin.devices()
    usage = plugin.usage([first, second])
    mine = (Process(2311, 2150 * MIB), Process(2312, 64 * MIB))
    assert usage[first.key] == Usage(5375 * MIB, 65536 * MIB, 37, 51, mine)
    assert usage[second.key] == Usage(3160 * MIB, 65536 * MIB, 0, 48, ())


def test_the_use_of_ascend_npus_is_unknown_where_their_tool_is_gone(machine):
    plugin = find("ascend")()
    machine.play("ascend-910b")
    (first, *_) = plugin.devices()
    (machine.tools / "npu-smi").unlink()
    assert plugin.usage([first]) == {first.key: Usage()}
    assert plugin.health([first]) == {first.key: None}


def test_the_use_of_gaudi_cards(machine):
    plugin = find("gaudi")()
    machine.play("gaudi2")
    by_id = {device.id: device for device in plugin.devices()}
    usage = plugin.usage(list(by_id.values()))
    assert usage[by_id[3].key] == Usage(768 * MIB, 98304 * MIB, 0, 26)
    assert usage[by_id[2].key] == Usage(32768 * MIB, 98304 * MIB, 97, None)


def test_the_use_and_health_of_neuron_cores(machine):
    plugin = find("neuron")()
    machine.play("neuron-trn1-busy")
    first, second = plugin.devices()
    usage = plugin.usage([first, second])
    assert usage[first.key] == Usage(2 * GIB, 16 * GIB, processes=(Process(4711, None),))
    assert usage[second.key] == Usage(None, 16 * GIB, processes=())
    reported = plugin.health([first, second])
    assert set(reported.values()) == {
        "3 memory errors that could not be corrected: reset the device"
    }


def test_the_use_and_health_of_rebellions_npus(machine):
    plugin = find("rebellions")()
    machine.play("rebellions-atom")
    first, second = plugin.devices()
    assert plugin.usage([second])[second.key] == Usage(GIB, 16877879296)
    reported = plugin.health([first, second])
    assert reported == {first.key: None, second.key: "rbln-stat says of its status: error"}


def test_a_gaudi_card_that_is_being_reset(machine):
    machine.add("file /sys/class/accel/accel0/device/vendor", "0x1da3")
    machine.add("file /sys/class/accel/accel0/device/status", "In reset")
    plugin = find("gaudi")()
    (device,) = plugin.devices()
    assert plugin.health([device]) == {device.key: "the driver says of its state: In reset"}


def test_the_second_generation_of_tpus_is_told_by_its_subsystem(machine):
    for at, subsystem in enumerate(["0x004e", "0x004f"]):
        place = f"file /sys/bus/pci/devices/0000:00:0{at}.0"
        for name, value in (("vendor", "0x1ae0"), ("device", "0x0027"), ("class", "0x120000")):
            machine.add(f"{place}/{name}", value)
        machine.add(f"{place}/subsystem_device", subsystem)
        machine.add(f"file /dev/accel{at}")
    assert [device.type for device in find("tpu")().devices()] == ["TPU-V2", "TPU-V3"]


def test_tpus_without_device_nodes(machine):
    machine.play("tpu-v5e")
    for at in range(4):
        machine.remove(f"/dev/vfio/{at}")
    with pytest.raises(DetectionError, match="no /dev/accel0 or /dev/vfio/0"):
        find("tpu")().devices()


# ------------------------------------------------------------------------------------- pinning


@pytest.mark.parametrize(
    ("vendor", "ids", "environment"),
    [
        ("amd", [1, 3], {"HIP_VISIBLE_DEVICES": "1,3"}),
        ("amd", [], {"HIP_VISIBLE_DEVICES": "-1"}),
        (
            "intel",
            [0, 2],
            {
                "ZE_AFFINITY_MASK": "0,2",
                "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1",
                "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
            },
        ),
        ("apple", [0], {}),
        ("metax", [0], {"CUDA_VISIBLE_DEVICES": "0"}),
        ("ascend", [4, 5], {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}),
        ("gaudi", [3], {"HABANA_VISIBLE_MODULES": "3"}),
        ("neuron", [0, 1], {"NEURON_RT_VISIBLE_CORES": "0,1"}),
        (
            "tpu",
            [2],
            {
                "TPU_VISIBLE_CHIPS": "2",
                "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
                "TPU_HOST_BOUNDS": "1,1,1",
            },
        ),
        (
            "tpu",
            [0, 1, 2, 3],
            {
                "TPU_VISIBLE_CHIPS": "0,1,2,3",
                "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
                "TPU_HOST_BOUNDS": "1,1,1",
            },
        ),
        ("tpu", [], {"TPU_VISIBLE_CHIPS": "", "JAX_PLATFORMS": "cpu"}),
        ("rebellions", [1], {"RBLN_DEVICES": "1"}),
        ("tenstorrent", [0], {"TT_VISIBLE_DEVICES": "0"}),
        ("furiosa", [0, 2], {"FURIOSA_DEVICES": "npu:0,npu:2"}),
        ("mobilint", [0], {"QBRUNTIME_VISIBLE_DEVICES": "0"}),
    ],
)
def test_the_environment(vendor, ids, environment):
    assert find(vendor)().environment(ids) == environment


def test_an_empty_mask_of_intel_would_show_all():
    assert find("intel")().environment([])["ZE_AFFINITY_MASK"] == "65535"


@pytest.mark.parametrize(
    ("name", "variable", "value", "ids"),
    [
        ("amd-mi300x", "HIP_VISIBLE_DEVICES", "1", [1]),
        ("amd-mi300x", "HIP_VISIBLE_DEVICES", "-1", []),
        ("intel-max-1100", "ZE_AFFINITY_MASK", "0.0,0.1", [0]),
        ("ascend-910b", "ASCEND_RT_VISIBLE_DEVICES", "1", [1]),
        ("gaudi2", "HABANA_VISIBLE_MODULES", "3", [3]),
        ("neuron-trn2", "NEURON_RT_VISIBLE_CORES", "1-3,6", [1, 2, 3, 6]),
        ("tpu-v5e", "TPU_VISIBLE_CHIPS", "0,1", [0, 1]),
        ("furiosa-rngd", "FURIOSA_DEVICES", "npu:2", [2]),
    ],
)
def test_the_users_own_variable_limits_the_devices(name, variable, value, ids, machine):
    machine.play(name)
    found = detect({variable: value})
    assert [device.id for device in found.devices] == ids
    gpus = FOUND[name][0] not in KINDS
    assert (found.value == value) == gpus, "num_gpus counts GPUs only"


# ---------------------------------------------------------------------- tools that do not answer

TOOLS = {
    "intel-max-1100": "xpu-smi",
    "apple-m2-pro": "system_profiler",
    "metax-c500": "mx-smi",
    "ascend-910b": "npu-smi",
    "gaudi2": "hl-smi",
    "neuron-trn1": "neuron-ls",
    "rebellions-atom": "rbln-stat",
    "furiosa-rngd": "furiosa-smi",
}
NEEDED = ("apple-m2-pro", "metax-c500")
"""Where nothing is known without the tool."""

SCRIPTS = {
    "fails": "echo broken driver >&2; exit 3",
    "crashes": "kill -SEGV $$",
    "hangs": "exec /bin/sleep 1000",
    "says something else": "echo hello",
}


@pytest.mark.parametrize("how", SCRIPTS)
@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_that_does_not_answer(name, how, machine, monkeypatch):
    """The devices are listed with what is known without it, or a reason is given."""
    monkeypatch.setattr(probing, "PATIENCE", 0.2 if how == "hangs" else 30)
    plugin = playing(machine, monkeypatch, name)
    tool = machine.tools / TOOLS[name]
    tool.write_text(f"#!/bin/sh\n{SCRIPTS[how]}\n")
    if name in NEEDED:
        with pytest.raises(DetectionError, match=TOOLS[name]):
            plugin.devices()
        return
    devices = plugin.devices()
    assert devices
    if not name.startswith("intel"):  # it lists the card all the same, by its sysfs files
        assert any(TOOLS[name] in note for note in plugin.notes), plugin.notes
    assert set(plugin.health(devices).values()) <= {None}
    assert set(plugin.usage(devices)) == {device.key for device in devices}


def test_neuron_devices_without_the_tool_and_with_an_old_driver(machine):
    machine.add("file /dev/neuron0")
    with pytest.raises(DetectionError, match="neither the driver nor neuron-ls"):
        find("neuron")().devices()


def test_a_library_that_crashes_does_not_end_this_process(machine):
    machine.play("metax-library")
    machine.add("python pymxsml", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(DetectionError, match=r"pymxsml crashed \(SIGSEGV\)"):
        find("metax")().devices()


def test_a_library_that_is_not_there(machine):
    machine.play("metax-library")
    (machine.libraries / "pymxsml.py").unlink()
    with pytest.raises(DetectionError, match=r"0000:06:00\.0, but its software does not answer: "):
        find("metax")().devices()
