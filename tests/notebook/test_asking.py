"""What the options of a cell ask of the machine."""

from __future__ import annotations

import pytest

from gpunb.core.options import Options
from gpunb.core.resources import UNIT, Demand
from gpunb.notebook.magics import GpuMagics, _options

GiB = 2**30


def asked(line: str) -> Options:
    return _options(GpuMagics.gpu.parser.parse_args(line.split()), "1")


@pytest.mark.parametrize(
    ("line", "demand"),
    [
        ("", Demand(gpus=UNIT)),
        ("--min-memory 20GiB", Demand(gpus=UNIT, min_memory=20 * GiB)),
        ("0.5 --min-memory 20GiB", Demand(gpus=5000, min_memory=20 * GiB)),
        ("--resource NPU=1", Demand(cpus=UNIT, resources=(("NPU", UNIT),))),
        ("0.5 -r NPU=0.25", Demand(gpus=5000, resources=(("NPU", 2500),))),
        ("-r NPU=2 -r port=1", Demand(cpus=UNIT, resources=(("NPU", 2 * UNIT), ("port", UNIT)))),
    ],
)
def test_devices_by_size_and_of_other_kinds(line: str, demand: Demand) -> None:
    assert asked(line).demand() == demand


@pytest.mark.parametrize("text", ["NPU", "NPU=", "=1", "NPU=many", "NPU=nan"])
def test_a_resource_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=AMOUNT, such as NPU=1"):
        asked(f"--resource {text}")


def test_a_size_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="min_memory='20GiB' says how large each device must be"):
        asked("0 --min-memory 20GiB")
