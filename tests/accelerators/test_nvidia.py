import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

import gpunb
from gpunb.accelerators import (
    Accelerator,
    DetectionError,
    Lost,
    Process,
    Usage,
    ailing,
    pin_environment,
)
from gpunb.accelerators.nvidia import Nvidia
from gpunb.accelerators.testing import AcceleratorSuite
from gpunb.scheduler.resources import Device
from tests.accelerators.fake_nvml import GIB, Card, FakeNvml, running

ERRORS = {name: value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
A100 = Card()
V100 = Card("Tesla V100-SXM2-16GB", "GPU-1a2b3c4d-0000-0000-0000-000000000001", (0, 0x3B, 0))
T4 = Card(b"Tesla T4", b"GPU-1a2bffff-0000-0000-0000-000000000002", (1, 0x03, 0), 15 * GIB)
T4_KEY = "GPU-1a2bffff-0000-0000-0000-000000000002"


@pytest.fixture
def nvml(monkeypatch):
    """Make `import pynvml` find a stand-in with these cards; it must be closed at the end."""
    fakes = []

    def install(*cards, **errors):
        fake = FakeNvml(*cards, **errors)
        fakes.append(fake)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    yield install
    assert [fake.opened for fake in fakes] == [0] * len(fakes), "NVML was left open"


class TestTwoCards(AcceleratorSuite):
    @pytest.fixture(autouse=True)
    def cards(self, nvml):
        nvml(replace(A100, compute={17: GIB}), T4)

    def make(self) -> Accelerator:
        return Nvidia()

    def test_the_suite_sees_both(self):
        assert len(self.listed()) == 2


class TestNothingButErrors(AcceleratorSuite):
    @pytest.fixture(autouse=True)
    def driver(self, nvml):
        nvml(init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def make(self) -> Accelerator:
        return Nvidia()


class TestThisMachine(AcceleratorSuite):
    """With the real NVML, or without it where there is none."""

    def make(self) -> Accelerator:
        return Nvidia()


@pytest.mark.gpu
def test_a_real_gpu_is_measured():
    plugin = Nvidia()
    devices = plugin.devices()
    if not devices:
        pytest.skip(f"no NVIDIA GPU: {plugin.notes[0]}")
    for device in devices:
        assert device.key.startswith("GPU-")
        assert device.type
    usage = plugin.usage(devices)
    assert all(each.temperature is not None for each in usage.values())


def test_all_facts_of_a_device_are_read(nvml):
    nvml(A100)
    plugin = Nvidia()
    assert plugin.devices() == [
        Device(
            key="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
            id=0,
            name="NVIDIA A100-SXM4-40GB",
            type="A100",
            memory=40 * GIB,
            vendor="nvidia",
        )
    ]
    assert plugin.notes == ()


def test_names_and_uuids_may_be_bytes(nvml):
    nvml(T4)
    (device,) = Nvidia().devices()
    assert (device.key, device.name, device.type) == (T4_KEY, "Tesla T4", "T4")


def test_ids_count_by_domain_bus_and_device(nvml):
    places = [(1, 0, 0), (0, 0x3B, 1), (0, 0xAF, 0), (0, 0x3B, 0), (0, 0x07, 2)]
    nvml(*[Card(uuid=f"GPU-{place}", pci=place) for place in places])
    devices = Nvidia().devices()
    assert [device.key for device in devices] == [f"GPU-{place}" for place in sorted(places)]
    assert [device.id for device in devices] == [0, 1, 2, 3, 4]


def test_one_unknown_pci_address_keeps_nvmls_order(nvml):
    unknown = {"nvmlDeviceGetPciInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}
    nvml(T4, replace(A100, raises=unknown), V100)
    assert [device.type for device in Nvidia().devices()] == ["T4", "A100", "V100"]


def test_without_a_uuid_the_pci_address_or_the_index_is_the_key(nvml):
    no_uuid = {"nvmlDeviceGetUUID": pynvml.NVML_ERROR_NOT_SUPPORTED}
    nothing = {**no_uuid, "nvmlDeviceGetPciInfo": pynvml.NVML_ERROR_UNKNOWN}
    nvml(replace(A100, raises=no_uuid), replace(V100, raises=nothing))
    devices = Nvidia().devices()
    assert [device.key for device in devices] == ["nvidia:0:7:0", "nvidia:1"]
    assert set(Nvidia().usage(devices)) == {"nvidia:0:7:0", "nvidia:1"}


@pytest.mark.parametrize("value", ["N/A", b"N/A", "", None, 7])
def test_an_empty_name_becomes_nvidia_gpu(nvml, value):
    nvml(replace(A100, answers={"nvmlDeviceGetName": value}))
    (device,) = Nvidia().devices()
    assert (device.name, device.type) == ("NVIDIA GPU", None)


def test_a_device_that_shares_the_machines_memory_has_none(nvml):
    """DGX Spark and Jetson: NVML does not support the memory reading there."""
    missing = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}
    nvml(replace(A100, name="NVIDIA GB10", raises=missing))
    (device,) = Nvidia().devices()
    assert (device.type, device.memory) == ("GB10", None)


def test_mig_mode_without_slices_is_noted(nvml):
    nvml(A100, replace(T4, answers={"nvmlDeviceGetMigMode": [1, 1]}))
    plugin = Nvidia()
    assert [device.id for device in plugin.devices()] == [0]
    (note,) = plugin.notes
    assert "device 1 is in MIG mode and has no slices" in note
    assert "nvidia-smi -i 1 -mig 0" in note


def test_mig_mode_that_is_only_pending_is_not_noted(nvml):
    nvml(replace(A100, answers={"nvmlDeviceGetMigMode": [0, 1]}))
    plugin = Nvidia()
    assert plugin.devices()
    assert plugin.notes == ()


# ---------------------------------------------------------------------------------- MIG slices

SLICES = (
    Card("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "MIG-aaaa", total=20 * GIB, used=GIB),
    None,
    Card("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-bbbb", total=5 * GIB),
)
SPLIT = replace(A100, slices=SLICES, answers={"nvmlDeviceGetCudaComputeCapability": (8, 0)})


def test_a_card_that_is_split_is_listed_as_its_slices(nvml):
    nvml(T4, SPLIT)
    devices = Nvidia().devices()
    assert [device.id for device in devices] == ["MIG-aaaa", "MIG-bbbb", 1]
    first, second, _ = devices
    assert (first.type, second.type) == ("A100-MIG-3g.20gb", "A100-MIG-1g.5gb")
    assert (first.memory, second.memory) == (20 * GIB, 5 * GIB)
    assert first.part_of == second.part_of == A100.uuid
    assert (first.capability, first.counts) == ("8.0", (1,))
    assert first.name == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"


def test_whole_cards_beside_slices_are_pinned_by_uuid(nvml):
    """CUDA counts anew where some cards are split, so that an index may mean another card."""
    nvml(T4, SPLIT)
    part, _, whole = Nvidia().devices()
    assert whole.id == 1
    assert pin_environment([whole])["CUDA_VISIBLE_DEVICES"] == T4_KEY
    assert pin_environment([part])["CUDA_VISIBLE_DEVICES"] == "MIG-aaaa"


def test_cards_are_pinned_by_index_where_that_is_clear(nvml):
    nvml(T4, A100)
    assert [device.pin for device in Nvidia().devices()] == [None, None]
    assert pin_environment(Nvidia().devices())["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_cards_beside_one_that_is_left_out_are_pinned_by_uuid(nvml):
    nvml(replace(T4, unreachable=pynvml.NVML_ERROR_GPU_IS_LOST), A100)
    (device,) = Nvidia().devices()
    assert (device.id, device.pin) == (0, A100.uuid)


def test_the_use_of_slices(nvml):
    nvml(T4, SPLIT)
    devices = Nvidia().devices()
    usage = Nvidia().usage(devices)
    assert usage["MIG-aaaa"].memory_used == GIB
    assert usage["MIG-aaaa"].memory_total == 20 * GIB
    assert set(usage) == {device.key for device in devices}


class TestSlices(AcceleratorSuite):
    @pytest.fixture(autouse=True)
    def _split(self, nvml):
        nvml(T4, SPLIT)

    def make(self):
        return Nvidia()


# --------------------------------------------------------------------------------------- health


def health(nvml, card, **answers):
    nvml(replace(card, answers=answers))
    devices = Nvidia().devices()
    return Nvidia().health(devices)[devices[0].key]


def test_a_card_that_is_fine(nvml):
    answers = {
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetRemappedRows": (3, 0, 0, 0),
        "nvmlDeviceGetRetiredPagesPendingStatus": 0,
    }
    assert health(nvml, A100, **answers) is None
    assert health(nvml, A100) is None, "it does not tell"


@pytest.mark.parametrize(
    ("function", "answer", "message"),
    [
        ("nvmlDeviceGetTotalEccErrors", 1, "1 memory error that could not be corrected"),
        ("nvmlDeviceGetTotalEccErrors", 7, "7 memory errors that could not be corrected"),
        ("nvmlDeviceGetRemappedRows", (1, 1, 1, 0), "waits to be replaced by spare rows: it has"),
        ("nvmlDeviceGetRemappedRows", (0, 9, 1, 1), "the card needs to be serviced"),
        ("nvmlDeviceGetRetiredPagesPendingStatus", 1, "memory pages wait to be retired"),
    ],
)
def test_a_card_with_faulty_memory(nvml, function, answer, message):
    reported = health(nvml, A100, **{function: answer})
    assert message in reported
    assert not isinstance(reported, Lost), "it can still be used"


def test_all_faults_of_a_card_are_reported(nvml):
    answers = {"nvmlDeviceGetTotalEccErrors": 2, "nvmlDeviceGetRemappedRows": (0, 2, 1, 0)}
    reported = health(nvml, A100, **answers)
    assert "2 memory errors" in reported
    assert "; faulty memory waits" in reported


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, "fallen off the bus"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, "nvidia-smi --gpu-reset"),
    ],
)
@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"],
)
def test_a_card_that_is_lost_while_it_is_asked(nvml, code, message, function):
    nvml(A100)
    devices = Nvidia().devices()
    nvml(replace(A100, raises={function: code}))
    reported = Nvidia().health(devices)[A100.uuid]
    assert message in reported
    assert isinstance(reported, Lost)


def test_a_card_that_cannot_be_reached_any_more(nvml):
    nvml(A100, T4)
    devices = Nvidia().devices()
    nvml(A100, replace(T4, unreachable=pynvml.NVML_ERROR_GPU_IS_LOST))
    reported = Nvidia().health(devices)
    assert reported[A100.uuid] is None
    assert "fallen off the bus" in reported[T4_KEY]
    nvml(A100)
    assert "does not list it any more" in Nvidia().health(devices)[T4_KEY]


def test_a_slice_is_as_healthy_as_its_card(nvml):
    sick = {**SPLIT.answers, "nvmlDeviceGetTotalEccErrors": 1}
    nvml(T4, replace(SPLIT, answers=sick))
    *parts, whole = Nvidia().devices()
    reported = Nvidia().health([whole, *parts])
    assert reported[whole.key] is None
    assert all("could not be corrected" in reported[part.key] for part in parts)


def test_a_slice_that_was_taken_apart_is_gone(nvml):
    nvml(T4, SPLIT)
    first, second, _ = Nvidia().devices()
    nvml(T4, replace(SPLIT, slices=SLICES[:1]))
    reported = Nvidia().health([first, second])
    assert reported[first.key] is None
    assert isinstance(reported[second.key], Lost)


def test_health_without_a_driver_is_unknown(nvml):
    nvml(A100)
    devices = Nvidia().devices()
    nvml(init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert Nvidia().health(devices) == {A100.uuid: None}


def test_faults_of_devices_of_all_vendors_are_collected(nvml):
    nvml(A100, replace(T4, answers={"nvmlDeviceGetRetiredPagesPendingStatus": 1}))
    devices = Nvidia().devices()
    stranger = replace(devices[0], key="tpu", vendor="no such vendor")
    assert list(ailing([*devices, stranger])) == [T4_KEY]


# --------------------------------------------------------------------------------- capability


@pytest.mark.parametrize(("answer", "reported"), [((9, 0), "9.0"), ((12, 1), "12.1")])
def test_the_compute_capability(nvml, answer, reported):
    nvml(replace(A100, answers={"nvmlDeviceGetCudaComputeCapability": answer}))
    assert Nvidia().devices()[0].capability == reported


def test_an_unknown_compute_capability_is_none(nvml):
    nvml(A100)
    assert Nvidia().devices()[0].capability is None


# ------------------------------------------------------------------ nothing there, or failing


def test_no_driver_library_is_an_empty_list_with_a_reason(nvml):
    nvml(A100, init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    plugin = Nvidia()
    assert plugin.devices() == []
    (note,) = plugin.notes
    assert note.startswith("no NVIDIA driver library (libnvidia-ml.so.1) found: ")


def test_a_card_on_the_bus_without_its_driver_is_an_error(nvml, machine):
    for name, value in (("vendor", "0x10de"), ("device", "0x2684"), ("class", "0x030000")):
        machine.add(f"file /sys/bus/pci/devices/0000:01:00.0/{name}", value)
    nvml(init=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    with pytest.raises(DetectionError, match=r"on the bus at 0000:01:00\.0, .* install the driver"):
        Nvidia().devices()


def test_no_python_package_is_an_empty_list_with_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    plugin = Nvidia()
    assert plugin.devices() == []
    assert "pip install nvidia-ml-py" in plugin.notes[0]
    missing = Device(key="GPU-1", id=0, name="x")
    with plugin.polling():
        assert plugin.usage([missing]) == {"GPU-1": Usage()}


def test_a_driver_without_gpus_is_an_empty_list_with_a_reason(nvml):
    nvml()
    plugin = Nvidia()
    assert plugin.devices() == []
    assert "works but shows no GPU" in plugin.notes[0]


@pytest.mark.parametrize("name", sorted(ERRORS.keys() - {"NVML_ERROR_LIBRARY_NOT_FOUND"}))
def test_every_error_of_nvml_becomes_a_detection_error(nvml, name):
    nvml(A100, init=ERRORS[name])
    with pytest.raises(DetectionError, match=r"the NVIDIA driver does not answer: .+ \(.+\)"):
        Nvidia().devices()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, ["Driver Not Loaded", "modprobe nvidia"]),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, ["different versions", "restart"]),
        (pynvml.NVML_ERROR_NO_PERMISSION, ["Insufficient Permissions", "ls -l /dev/nvidia*"]),
        (pynvml.NVML_ERROR_OPERATING_SYSTEM, ["operating system", "container"]),
        (pynvml.NVML_ERROR_GPU_IS_LOST, ["GPU is lost", "bus"]),
        (pynvml.NVML_ERROR_RESET_REQUIRED, ["--gpu-reset"]),
        (pynvml.NVML_ERROR_INSUFFICIENT_POWER, ["power cables"]),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, ["too old"]),
        (pynvml.NVML_ERROR_UNKNOWN, ["Unknown Error", "run nvidia-smi"]),
    ],
)
def test_an_error_says_what_to_do(nvml, code, words):
    nvml(init=code)
    with pytest.raises(DetectionError) as caught:
        Nvidia().devices()
    assert all(word in str(caught.value) for word in words)


def test_the_advice_is_for_errors_that_pynvml_has():
    from gpunb.accelerators.nvidia import _ADVICE

    assert all(issubclass(getattr(pynvml, name), pynvml.NVMLError) for name in _ADVICE)


def test_a_failing_count_is_told_and_closes_nvml(nvml):
    nvml(A100, count=pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(DetectionError, match="Unknown Error"):
        Nvidia().devices()


def test_a_mismatch_of_pynvml_and_driver_is_told(nvml, monkeypatch):
    """pynvml raises this for a missing function, and it is no NVMLError."""
    fake = nvml(A100)

    def count():
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    monkeypatch.setattr(fake, "nvmlDeviceGetCount", count)
    with pytest.raises(DetectionError, match="Unversioned function called"):
        Nvidia().devices()


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NO_PERMISSION])
def test_a_card_that_cannot_be_reached_is_left_out(nvml, code):
    nvml(V100, replace(A100, unreachable=code), T4)
    plugin = Nvidia()
    assert [(device.id, device.type) for device in plugin.devices()] == [(0, "V100"), (1, "T4")]
    (note,) = plugin.notes
    assert note.startswith("NVIDIA device 1 of 0 to 2 is left out: ")


def test_no_card_that_can_be_reached_is_an_error(nvml):
    nvml(replace(A100, unreachable=pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(DetectionError, match="GPU is lost"):
        Nvidia().devices()


def test_a_failing_shutdown_is_no_error(nvml, monkeypatch):
    fake = nvml(A100)
    shutdown = fake.nvmlShutdown

    def failing():
        shutdown()
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    monkeypatch.setattr(fake, "nvmlShutdown", failing)
    assert len(Nvidia().devices()) == 1


# ---------------------------------------------------------------------------------- use


def measured(nvml, card):
    nvml(card)
    plugin = Nvidia()
    (usage,) = plugin.usage(plugin.devices()).values()
    return usage


def test_all_readings_of_the_use_are_read(nvml):
    card = replace(
        A100, used=5 * GIB, busy=97, celsius=61, milliwatts=211_600, compute={17: 5 * GIB}
    )
    assert measured(nvml, card) == Usage(
        memory_used=5 * GIB,
        memory_total=40 * GIB,
        utilization=97,
        temperature=61,
        processes=(Process(17, 5 * GIB),),
        power=212,
    )


def test_a_reading_of_zero_is_not_unknown(nvml):
    usage = measured(nvml, replace(A100, used=0, busy=0, celsius=0))
    assert (usage.memory_used, usage.utilization, usage.temperature) == (0, 0, 0)


def test_a_busy_device_is_a_hundred_percent_busy(nvml):
    assert measured(nvml, replace(A100, busy=100)).utilization == 100
    assert measured(nvml, replace(A100, busy=101)).utilization is None


def test_no_processes_and_unknown_processes_differ(nvml):
    assert measured(nvml, A100).processes == ()
    unknown = {"nvmlDeviceGetComputeRunningProcesses": pynvml.NVML_ERROR_NO_PERMISSION}
    assert measured(nvml, replace(A100, raises=unknown)).processes is None


def test_processes_that_draw_may_be_unknown(nvml):
    unknown = {"nvmlDeviceGetGraphicsRunningProcesses": pynvml.NVML_ERROR_NOT_SUPPORTED}
    assert measured(nvml, replace(A100, compute={17: 1}, raises=unknown)).processes == ((17, 1),)


def test_a_process_that_computes_and_draws_is_one(nvml):
    computing = {30: 7, 20: None, 40: 5, 50: 1, 60: 8}
    drawing = {30: 3, 20: 2, 10: None, 50: 4, 60: None}
    processes = measured(nvml, replace(A100, compute=computing, graphics=drawing)).processes
    assert processes == ((10, None), (20, 2), (30, 7), (40, 5), (50, 4), (60, 8))


def test_bytes_of_a_process_that_nvml_does_not_know(nvml):
    card = replace(A100, compute={17: 2**64 - 1, 18: "N/A"})
    assert measured(nvml, card).processes == ((17, None), (18, None))


def test_an_old_driver_lists_processes_by_the_second_version(nvml):
    lacking = "nvmlDeviceGetComputeRunningProcesses"
    card = replace(
        A100,
        raises={lacking: pynvml.NVML_ERROR_FUNCTION_NOT_FOUND},
        answers={f"{lacking}_v2": running({17: GIB})},
    )
    assert measured(nvml, card).processes == ((17, GIB),)


def test_memory_of_an_old_driver_counts_the_reserve_as_used(nvml, monkeypatch):
    monkeypatch.setattr(FakeNvml, "nvmlMemory_v2", None)
    assert measured(nvml, replace(A100, used=GIB, reserved=10)).memory_used == GIB + 10


def test_temperature_by_the_newer_function(nvml):
    card = replace(
        A100,
        raises={"nvmlDeviceGetTemperature": pynvml.NVML_ERROR_DEPRECATED},
        answers={"nvmlDeviceGetTemperatureV": 44},
    )
    assert measured(nvml, card).temperature == 44


READINGS = [
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
]


@pytest.mark.parametrize("function", READINGS)
@pytest.mark.parametrize("name", sorted(ERRORS))
def test_any_reading_may_fail_in_any_way(nvml, function, name):
    nvml(replace(A100, raises={function: ERRORS[name]}), T4)
    plugin = Nvidia()
    devices = plugin.devices()
    assert len(devices) == 2
    assert len(plugin.usage(devices)) == 2


def test_all_readings_may_fail_at_once(nvml):
    nvml(replace(A100, raises=dict.fromkeys(READINGS, pynvml.NVML_ERROR_UNKNOWN)))
    plugin = Nvidia()
    devices = plugin.devices()
    assert devices == [Device(key="nvidia:0", id=0, name="NVIDIA GPU", vendor="nvidia")]
    assert plugin.usage(devices) == {"nvidia:0": Usage()}


@pytest.mark.parametrize("function", READINGS)
@pytest.mark.parametrize("value", ["N/A", None])
def test_any_reading_may_be_not_available(nvml, function, value):
    if function == "nvmlDeviceGetPciInfo":
        value = None
    nvml(replace(A100, answers={function: value}))
    plugin = Nvidia()
    devices = plugin.devices()
    assert len(plugin.usage(devices)) == len(devices) == 1


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization"),
        ("nvmlDeviceGetTemperature", "temperature"),
    ],
)
def test_all_ones_stand_for_unknown(nvml, function, field):
    unknown = 2**32 - 1
    answer = unknown if field == "temperature" else type("Rates", (), {"gpu": unknown})
    assert getattr(measured(nvml, replace(A100, answers={function: answer})), field) is None


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_use_without_nvml_is_unknown(nvml, name):
    nvml(A100)
    devices = Nvidia().devices()
    nvml(A100, init=ERRORS[name])
    assert Nvidia().usage(devices) == {A100.uuid: Usage()}


def test_use_of_a_card_that_was_lost_is_unknown(nvml):
    nvml(V100, A100)
    devices = Nvidia().devices()
    nvml(V100, replace(A100, unreachable=pynvml.NVML_ERROR_GPU_IS_LOST))
    usage = Nvidia().usage(devices)
    assert usage[A100.uuid] == Usage()
    assert usage[V100.uuid].temperature == 35


def test_polling_keeps_nvml_open_in_between(nvml):
    fake = nvml(A100)
    plugin = Nvidia()
    devices = plugin.devices()
    with plugin.polling():
        assert fake.opened == 1
        plugin.usage(devices)
        assert fake.opened == 1


def test_polling_without_a_driver_changes_nothing(nvml):
    fake = nvml(A100, init=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    device = Device(key=A100.uuid, id=0, name="x", vendor="nvidia")
    with Nvidia().polling():
        assert Nvidia().usage([device]) == {A100.uuid: Usage()}
    assert fake.opened == 0


def test_an_error_while_polling_closes_nvml(nvml):
    nvml(A100)
    with pytest.raises(ZeroDivisionError), Nvidia().polling():
        1 / 0  # noqa: B018


def test_importing_loads_neither_nvml_nor_metadata():
    code = (
        "import sys, gpunb.accelerators as a; a.NVIDIA_H100; a.pin_environment(()); "
        "heavy = {'pynvml', 'importlib.metadata', 'ctypes', 'numpy'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    root = Path(gpunb.__file__).parents[1]
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=root, timeout=60)
