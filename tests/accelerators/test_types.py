import re

import pytest

import gpunb.accelerators
from gpunb.accelerators import nvidia_type, types


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
        ("NVIDIA_L40S", "L40S"),
        ("NVIDIA_A100", "A100"),
        ("NVIDIA_A100_40G", "A100-40G"),
        ("NVIDIA_A100_80G", "A100-80G"),
        ("NVIDIA_H100", "H100"),
        ("NVIDIA_H200", "H200"),
        ("NVIDIA_H20", "H20"),
        ("NVIDIA_B200", "B200"),
        ("NVIDIA_B300", "B300"),
        ("NVIDIA_GB200", "GB200"),
        ("NVIDIA_GB300", "GB300"),
        ("NVIDIA_RTX_PRO_6000", "RTX-PRO-6000"),
        ("INTEL_MAX_1550", "Intel-GPU-Max-1550"),
        ("INTEL_MAX_1100", "Intel-GPU-Max-1100"),
        ("INTEL_GAUDI", "Intel-GAUDI"),
        ("AMD_INSTINCT_MI100", "AMD-Instinct-MI100"),
        ("AMD_INSTINCT_MI210", "AMD-Instinct-MI210"),
        ("AMD_INSTINCT_MI250", "AMD-Instinct-MI250X-MI250"),
        ("AMD_INSTINCT_MI250x", "AMD-Instinct-MI250X"),
        ("AMD_INSTINCT_MI300A", "AMD-Instinct-MI300A"),
        ("AMD_INSTINCT_MI300x", "AMD-Instinct-MI300X-OAM"),
        ("AMD_INSTINCT_MI300x_HF", "AMD-Instinct-MI300X-HF"),
        ("AMD_INSTINCT_MI308x", "AMD-Instinct-MI308X"),
        ("AMD_INSTINCT_MI325x", "AMD-Instinct-MI325X-OAM"),
        ("AMD_INSTINCT_MI350x", "AMD-Instinct-MI350X-OAM"),
        ("AMD_INSTINCT_MI355x", "AMD-Instinct-MI355X-OAM"),
        ("AMD_RADEON_R9_200_HD_7900", "AMD-Radeon-R9-200-HD-7900"),
        ("AMD_RADEON_HD_7900", "AMD-Radeon-HD-7900"),
        ("AWS_NEURON_CORE", "aws-neuron-core"),
        ("GOOGLE_TPU_V2", "TPU-V2"),
        ("GOOGLE_TPU_V3", "TPU-V3"),
        ("GOOGLE_TPU_V4", "TPU-V4"),
        ("GOOGLE_TPU_V5P", "TPU-V5P"),
        ("GOOGLE_TPU_V5LITEPOD", "TPU-V5LITEPOD"),
        ("GOOGLE_TPU_V6E", "TPU-V6E"),
        ("GOOGLE_TPU_V7X", "TPU-V7X"),
        ("HUAWEI_NPU_910B", "Ascend910B"),
        ("HUAWEI_NPU_910B4", "Ascend910B4"),
        ("METAX_C500", "MXC500"),
        ("METAX_C550", "MXC550"),
        ("FURIOSA_RNGD", "FURIOSA_RNGD"),
        ("MOBILINT_ARIES", "MOBILINT_ARIES"),
        ("MOBILINT_REGULUS", "MOBILINT_REGULUS"),
        ("APPLE_M1", "M1"),
        ("APPLE_M1_PRO", "M1-Pro"),
        ("APPLE_M1_MAX", "M1-Max"),
        ("APPLE_M1_ULTRA", "M1-Ultra"),
        ("APPLE_M2", "M2"),
        ("APPLE_M2_PRO", "M2-Pro"),
        ("APPLE_M2_MAX", "M2-Max"),
        ("APPLE_M2_ULTRA", "M2-Ultra"),
        ("APPLE_M3", "M3"),
        ("APPLE_M3_PRO", "M3-Pro"),
        ("APPLE_M3_MAX", "M3-Max"),
        ("APPLE_SILICON", "Apple-Silicon"),
    ],
)
def test_a_constant(name, value):
    assert getattr(types, name) == value
    assert getattr(gpunb.accelerators, name) == value
    assert types.CONSTANTS[name] == value


def test_nothing_else_is_a_constant():
    ours = [name for name in types.CONSTANTS if re.match("NVIDIA_(GEFORCE|RTX|TITAN)", name)]
    ours += [f"NVIDIA_{name}" for name in "A10 A16 A30 A40 L40 A800 H800 GH200".split()]
    assert len(set(ours) - {"NVIDIA_RTX_PRO_6000"}) + 62 == len(types.CONSTANTS)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 4070 Ti SUPER",
        "NVIDIA GeForce GTX 1660 SUPER",
        "NVIDIA GeForce RTX 2060",
        "NVIDIA RTX A6000",
        "NVIDIA RTX 6000 Ada Generation",
        "NVIDIA RTX PRO 4500 Blackwell",
        "NVIDIA TITAN RTX",
        "NVIDIA A10",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
    ],
)
def test_what_ray_has_no_name_for_is_detected_as_our_constant(name):
    assert nvidia_type(name) in types.CONSTANTS.values()
    assert all(type(value) is str for value in types.CONSTANTS.values())


def test_constants_are_listed_and_imported_like_other_names():
    from gpunb.accelerators import NVIDIA_H200

    assert NVIDIA_H200 == "H200"
    assert {"NVIDIA_H200", "detect"} <= set(dir(gpunb.accelerators))


@pytest.mark.parametrize("module", [types, gpunb.accelerators])
def test_an_old_name_warns_where_it_is_written(module):
    with pytest.warns(DeprecationWarning, match="use NVIDIA_A100") as caught:
        assert module.NVIDIA_TESLA_A100 == "A100"
    assert caught[0].filename == __file__


@pytest.mark.parametrize("module", [types, gpunb.accelerators])
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError) as caught:
        module.NVIDIA_VOODOO  # noqa: B018
    assert str(caught.value) == f"module {module.__name__!r} has no attribute 'NVIDIA_VOODOO'"


@pytest.mark.parametrize(
    ("name", "type"),
    [
        # Data centre
        ("Tesla K80", "K80"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100"),
        # Workstation: the Ada and the Turing card of the same number share a type.
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000"),
        ("Quadro RTX 6000", "RTX-6000"),
        ("Quadro RTX 8000", "RTX-8000"),
        ("Quadro P6000", "P6000"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA T1000 8GB", "T1000"),
        # Consumer: with the word NVIDIA before it, the line's name stays; without, it is taken
        # for the brand, and "Ti" is lost. Ray has the same types.
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
        ("NVIDIA GeForce RTX 2080 Ti", "GeForce-RTX-2080-Ti"),
        ("GeForce RTX 2080 Ti", "RTX-2080"),
        ("GeForce GTX 1080 Ti", "GTX-1080"),
        ("NVIDIA GeForce GTX TITAN X", "GeForce-GTX-TITAN-X"),
        ("NVIDIA TITAN V", "TITAN-V"),
        ("TITAN V", "TITAN-V"),
        ("TITAN RTX", "TITAN-RTX"),
        ("TITAN Xp", "TITAN-Xp"),
        ("NVIDIA CMP 170HX", "CMP-170HX"),
        # Virtual: the letter of a vGPU profile may look like a part of the model, as in Ray.
        ("GRID K520", "K520"),
        ("GRID T4-16Q", "T4"),
        ("GRID V100D-8Q", "V100D"),
        ("GRID RTX6000-8Q", "RTX6000"),
        ("NVIDIA A40-48Q", "A40"),
        # Drivers of 2020 left the brand out; Ray then takes the whole name.
        ("A100-SXM4-40GB", "A100-SXM4-40GB"),
        # Nothing that looks like a model
        ("NVIDIA Graphics Device", "Graphics-Device"),
        ("NVIDIA DGX Display", "DGX-Display"),
        ("Orin (nvgpu)", "Orin-(nvgpu)"),
        ("NVIDIA Thor", "Thor"),
        ("NVIDIA-branded A100", "NVIDIA-branded-A100"),
        ("Tesla 7 x", "Tesla-7-x"),
        ("NVIDIA", "NVIDIA"),
        ("", None),
        ("  ", None),
    ],
)
def test_the_type_of_a_product_name(name, type):
    assert nvidia_type(name) == type
