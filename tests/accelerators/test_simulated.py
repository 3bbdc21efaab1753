import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.accelerators import (
    Accelerator,
    Simulated,
    Usage,
    measure,
    parse_simulate,
    pin_environment,
)
from gpunb.accelerators.simulated import logical
from gpunb.accelerators.testing import AcceleratorSuite
from gpunb.scheduler.resources import Device

GIB = 2**30


class TestSimulated(AcceleratorSuite):
    def make(self) -> Accelerator:
        return Simulated("2xA100:40GiB,V100,1")

    def test_the_suite_sees_all(self):
        assert len(self.listed()) == 4


def kinds(text):
    return [(device.type, device.memory) for device in parse_simulate(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2xA100:40GiB,1xV100:16GiB", [("A100", 40 * GIB)] * 2 + [("V100", 16 * GIB)]),
        ("A100", [("A100", None)]),
        ("2xH100", [("H100", None)] * 2),
        ("2XH100", [("H100", None)] * 2),
        ("4", [(None, None)] * 4),
        ("2:16GiB", [(None, 16 * GIB)] * 2),
        ("1,A100", [(None, None), ("A100", None)]),
        (
            " 2xA100 : 40 GiB , T4:16GB ",
            [("A100", 40 * GIB)] * 2 + [("T4", 16 * 10**9)],
        ),
        ("GeForce-RTX-5090:32GiB", [("GeForce-RTX-5090", 32 * GIB)]),
        ("xavier", [("xavier", None)]),
        ("A100:1.5GiB", [("A100", 3 * GIB // 2)]),
        ("A100:2000000", [("A100", 2_000_000)]),
    ],
)
def test_devices_from_a_text(text, expected):
    assert kinds(text) == expected


def test_simulated_devices_are_numbered_through():
    assert parse_simulate("1xA100:40GiB,1") == (
        Device(
            key="sim:0",
            id=0,
            name="simulated A100",
            type="A100",
            memory=40 * GIB,
            vendor="simulated",
            logical=True,
        ),
        Device(key="sim:1", id=1, name="simulated GPU", vendor="simulated", logical=True),
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("A100,", "''"),
        (",A100", "''"),
        ("0", "'0'"),
        ("0xA100", "'0xA100'"),
        ("-1", "'-1'"),
        ("2x", "'2x'"),
        ("1.5xA100", "'1.5xA100'"),
        ("2 A100", "'2 A100'"),
        ("A100:", "'A100:'"),
        ("A100:lots", "'A100:lots'"),
        ("A100:40XiB", "'A100:40XiB'"),
        ("A100:0", "'A100:0'"),
        ("A100:-1GiB", "'A100:-1GiB'"),
        ("A100:40GiB:2", "'A100:40GiB:2'"),
        ("V100,3*A100", "'3*A100'"),
        ("V100,A100x2", "'A100x2' should begin with '2xA100'"),
        ("T4X16:16GiB", "'T4X16:16GiB' should begin with '16xT4'"),
        ("2xA100:40", "'2xA100:40' has 40 bytes of memory: write a unit, as in '40GiB'"),
        ("A100: 1024", "'A100: 1024' has 1024 bytes of memory"),
    ],
)
def test_a_wrong_text_is_named_with_the_rule_and_an_example(text, part):
    with pytest.raises(ValueError, match="COUNTxTYPE:MEMORY") as caught:
        parse_simulate(text)
    message = str(caught.value)
    assert message.startswith(f"simulate={text!r}: {part}")
    assert "'2xA100:40GiB,1xV100:16GiB'" in message


def test_types_that_end_in_numbers_and_sizes_in_bytes():
    assert [each.type for each in parse_simulate("GTX1080,RTX4000,MI300X")] == [
        "GTX1080",
        "RTX4000",
        "MI300X",
    ]
    assert parse_simulate("A100:1048576")[0].memory == 2**20
    assert parse_simulate("A100:4KiB")[0].memory == 2**12


@pytest.mark.parametrize("value", [None, 4, ["A100"]])
def test_only_texts(value):
    with pytest.raises(TypeError, match="simulate must be a text"):
        parse_simulate(value)


@given(st.text(alphabet="0123xXAaV:,. GiB-_é", max_size=12))
def test_any_text_gives_devices_or_a_value_error(text):
    try:
        ids = [device.id for device in parse_simulate(text)]
    except ValueError as error:
        reported = str(error)
    else:
        assert ids == list(range(len(ids))) != []
        return
    assert repr(text) in reported


def test_use_is_the_memory_they_were_given():
    devices = (*parse_simulate("A100:40GiB"), logical(1))
    assert measure(devices) == {"sim:0": Usage(memory_total=40 * GIB), "logical:1": Usage()}


# --------------------------------------------------------------------------------- other kinds


@pytest.mark.parametrize(
    ("text", "resource", "vendor", "type", "whole"),
    [
        ("TPU-V4", "TPU", "tpu", "TPU-V4", True),
        ("TPU", "TPU", "tpu", None, True),
        ("Ascend910B", "NPU", "ascend", "Ascend910B", False),
        ("NPU", "NPU", "ascend", None, False),
        ("Intel-GAUDI", "HPU", "gaudi", "Intel-GAUDI", True),
        ("aws-neuron-core", "neuron_cores", "neuron", "aws-neuron-core", True),
        ("FURIOSA_RNGD", "FURIOSA", "furiosa", "FURIOSA_RNGD", True),
        ("MOBILINT_ARIES", "MBLT", "mobilint", "MOBILINT_ARIES", True),
        ("Tenstorrent-n300", "TTNPU", "tenstorrent", "Tenstorrent-n300", True),
        ("RBLN-CA12", "RBLN", "rebellions", "RBLN-CA12", True),
        ("Intel-GPU-Max-1550", "GPU", "simulated", "Intel-GPU-Max-1550", False),
    ],
)
def test_devices_of_other_kinds(text, resource, vendor, type, whole):
    (device,) = parse_simulate(text)
    assert (device.resource, device.vendor, device.type) == (resource, vendor, type)
    assert (device.whole, device.logical) == (whole, True)


def test_each_kind_is_counted_by_itself():
    devices = parse_simulate("A100,2xTPU-V4,A100,NPU")
    assert [(device.resource, device.id) for device in devices] == [
        ("GPU", 0),
        ("TPU", 0),
        ("TPU", 1),
        ("GPU", 1),
        ("NPU", 0),
    ]
    assert len({device.key for device in devices}) == 5
    assert pin_environment(devices[1:3])["TPU_VISIBLE_CHIPS"] == "0,1"
