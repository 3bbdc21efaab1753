"""Whether a device is of the type that was asked for."""

from __future__ import annotations

import pytest

from gpunb.scheduler.resources import Device
from gpunb.scheduler.type_match import matches, near

GiB = 1024**3


def device(type: str | None, name: str = "", memory: float | None = None) -> Device:
    size = int(memory * GiB) if memory else None
    return Device("key", 0, name or (type or "a device"), type, size)


RTX_4090 = device("GeForce-RTX-4090", "NVIDIA GeForce RTX 4090", 23.99)
RTX_4080_SUPER = device("GeForce-RTX-4080-SUPER", "NVIDIA GeForce RTX 4080 SUPER", 15.99)
RTX_3090_TI = device("GeForce-RTX-3090-Ti", "NVIDIA GeForce RTX 3090 Ti", 24)
LAPTOP = device("GeForce-RTX-4080-Laptop-GPU", "NVIDIA GeForce RTX 4080 Laptop GPU", 11.99)
A100_40 = device("A100", "NVIDIA A100-SXM4-40GB", 39.5)
A100_80 = device("A100", "NVIDIA A100 80GB PCIe", 79.3)
T4 = device("T4", "Tesla T4", 14.75)
V100 = device("V100", "Tesla V100-SXM2-16GB", 15.8)
ADA = device("RTX-6000", "NVIDIA RTX 6000 Ada Generation", 47.99)
A6000 = device("RTX-A6000", "NVIDIA RTX A6000", 47.99)
PRO = device("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6)
MI300X = device("AMD-Instinct-MI300X-OAM", "AMD Instinct MI300X", 192)
MAX = device("Intel-GPU-Max-1550", "Intel Data Center GPU Max 1550", 128)
MIG = device("A100-MIG-1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75)
M2_PRO = device("M2-Pro", "Apple M2 Pro")
TPU = device("TPU-V4", "Google TPU-V4")
B580 = device("Intel-Arc-B580", "Intel Arc B580")


@pytest.mark.parametrize(
    ("wanted", "of"),
    [
        ("GeForce-RTX-4090", RTX_4090),
        ("GeForce RTX 4090", RTX_4090),
        ("NVIDIA GeForce RTX 4090", RTX_4090),
        ("4090", RTX_4090),
        ("rtx4090", RTX_4090),
        ("RTX_4090", RTX_4090),
        ("rtx-4090-24gb", RTX_4090),
        ("3090ti", RTX_3090_TI),
        ("RTX 3090 Ti", RTX_3090_TI),
        ("4080super", RTX_4080_SUPER),
        ("4080 laptop", LAPTOP),
        ("A100", A100_40),
        ("a100", A100_80),
        ("A100-40G", A100_40),
        ("A100-80G", A100_80),
        ("a100-80g", A100_80),
        ("A100 80GB", A100_80),
        ("A100-SXM4-40GB", A100_40),
        ("NVIDIA A100 80GB PCIe", A100_80),
        ("a100-pcie", A100_80),
        ("t4", T4),
        ("Tesla T4", T4),
        ("T4 16GB", T4),
        ("v100-16gb", V100),
        ("RTX-6000", ADA),
        ("RTX 6000 Ada", ADA),
        ("A6000", A6000),
        ("rtx a6000", A6000),
        ("RTX PRO 6000", PRO),
        ("MI300X", MI300X),
        ("mi300x-oam", MI300X),
        ("AMD Instinct MI300X", MI300X),
        ("Max 1550", MAX),
        ("A100-MIG-1g.5gb", MIG),
        ("M2 Pro", M2_PRO),
        ("v4", TPU),
        ("TPU-V4", TPU),
        ("b580", B580),
        ("arc-b580", B580),
        ("A100-80G", device("A100-80G", memory=80)),
        ("A100", device("A100-80G")),
        ("Apple-Silicon", device("Apple-Silicon")),
        ("Intel-GAUDI", device("Intel-GAUDI")),
        ("odd one", device("Odd-One")),
        ("GPU", device("gpu")),
    ],
)
def test_a_device_matches_these_types(wanted: str, of: Device) -> None:
    assert matches(wanted, of)


@pytest.mark.parametrize(
    ("wanted", "of"),
    [
        ("4080", RTX_4080_SUPER),
        ("4080", LAPTOP),
        ("4080 super", LAPTOP),
        ("3090", RTX_3090_TI),
        ("4090", RTX_3090_TI),
        ("A100", MIG),
        ("A100-80G", A100_40),
        ("A100-40G", A100_80),
        ("A100-PCIE", A100_40),
        ("A100-40G", device("A100")),
        ("A10", A100_40),
        ("A1000", A100_40),
        ("T4", device(None, "Tesla T4")),
        ("6000", PRO),
        ("6000 Ada", A6000),
        ("MI300A", MI300X),
        ("M2", M2_PRO),
        ("NVIDIA", RTX_4090),
        ("GPU", RTX_4090),
        ("80GB", A100_80),
        ("V5P", TPU),
    ],
)
def test_a_device_does_not_match_these_types(wanted: str, of: Device) -> None:
    assert not matches(wanted, of)


TYPES = ["A100", "GeForce-RTX-4080-SUPER", "GeForce-RTX-4090", "V100", "T4"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["4080"], ["GeForce-RTX-4080-SUPER"]),
        (["A1000"], ["A100"]),
        (["v10"], ["V100"]),
        (["GeForce-RTX-4070"], ["GeForce-RTX-4090", "GeForce-RTX-4080-SUPER"]),
        (["TPU-V4"], []),
        (["A10", "V10"], ["A100", "V100"]),
        ([], []),
    ],
)
def test_near_types_are_suggested(wanted: list[str], found: list[str]) -> None:
    assert near(wanted, TYPES)[: len(found) or None] == found


def test_no_more_than_three_types_are_suggested() -> None:
    assert len(near(["A100"], [f"A100{each}" for each in "abcdef"])) == 3
