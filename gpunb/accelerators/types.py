"""The accelerator types that tasks may ask for, as constants with Ray's names and values.

A type is a plain text, so a type without a constant works too. `gpunb.scheduler.type_match` accepts
other ways to write a type. `nvidia_type` gives the type of an NVIDIA device.
"""

from __future__ import annotations

import re
import warnings

NVIDIA_TESLA_V100 = "V100"
NVIDIA_TESLA_P100 = "P100"
NVIDIA_TESLA_T4 = "T4"
NVIDIA_TESLA_P4 = "P4"
NVIDIA_TESLA_K80 = "K80"
NVIDIA_TESLA_A10G = "A10G"
NVIDIA_L4 = "L4"
NVIDIA_L40S = "L40S"
NVIDIA_A100 = "A100"
NVIDIA_H100 = "H100"
NVIDIA_H200 = "H200"
NVIDIA_H20 = "H20"
NVIDIA_B200 = "B200"
NVIDIA_B300 = "B300"
NVIDIA_GB200 = "GB200"
NVIDIA_GB300 = "GB300"
NVIDIA_RTX_PRO_6000 = "RTX-PRO-6000"

# Ray has no names for these. The values are the types that detection gives such devices.
NVIDIA_GEFORCE_GTX_1080_TI = "GeForce-GTX-1080-Ti"
NVIDIA_GEFORCE_GTX_1650 = "GeForce-GTX-1650"
NVIDIA_GEFORCE_GTX_1660 = "GeForce-GTX-1660"
NVIDIA_GEFORCE_GTX_1660_TI = "GeForce-GTX-1660-Ti"
NVIDIA_GEFORCE_GTX_1660_SUPER = "GeForce-GTX-1660-SUPER"
NVIDIA_GEFORCE_RTX_2060 = "GeForce-RTX-2060"
NVIDIA_GEFORCE_RTX_2060_SUPER = "GeForce-RTX-2060-SUPER"
NVIDIA_GEFORCE_RTX_2070 = "GeForce-RTX-2070"
NVIDIA_GEFORCE_RTX_2070_SUPER = "GeForce-RTX-2070-SUPER"
NVIDIA_GEFORCE_RTX_2080 = "GeForce-RTX-2080"
NVIDIA_GEFORCE_RTX_2080_SUPER = "GeForce-RTX-2080-SUPER"
NVIDIA_GEFORCE_RTX_2080_TI = "GeForce-RTX-2080-Ti"
NVIDIA_GEFORCE_RTX_3050 = "GeForce-RTX-3050"
NVIDIA_GEFORCE_RTX_3060 = "GeForce-RTX-3060"
NVIDIA_GEFORCE_RTX_3060_TI = "GeForce-RTX-3060-Ti"
NVIDIA_GEFORCE_RTX_3070 = "GeForce-RTX-3070"
NVIDIA_GEFORCE_RTX_3070_TI = "GeForce-RTX-3070-Ti"
NVIDIA_GEFORCE_RTX_3080 = "GeForce-RTX-3080"
NVIDIA_GEFORCE_RTX_3080_TI = "GeForce-RTX-3080-Ti"
NVIDIA_GEFORCE_RTX_3090 = "GeForce-RTX-3090"
NVIDIA_GEFORCE_RTX_3090_TI = "GeForce-RTX-3090-Ti"
NVIDIA_GEFORCE_RTX_4060 = "GeForce-RTX-4060"
NVIDIA_GEFORCE_RTX_4060_TI = "GeForce-RTX-4060-Ti"
NVIDIA_GEFORCE_RTX_4070 = "GeForce-RTX-4070"
NVIDIA_GEFORCE_RTX_4070_SUPER = "GeForce-RTX-4070-SUPER"
NVIDIA_GEFORCE_RTX_4070_TI = "GeForce-RTX-4070-Ti"
NVIDIA_GEFORCE_RTX_4070_TI_SUPER = "GeForce-RTX-4070-Ti-SUPER"
NVIDIA_GEFORCE_RTX_4080 = "GeForce-RTX-4080"
NVIDIA_GEFORCE_RTX_4080_SUPER = "GeForce-RTX-4080-SUPER"
NVIDIA_GEFORCE_RTX_4090 = "GeForce-RTX-4090"
NVIDIA_GEFORCE_RTX_5050 = "GeForce-RTX-5050"
NVIDIA_GEFORCE_RTX_5060 = "GeForce-RTX-5060"
NVIDIA_GEFORCE_RTX_5060_TI = "GeForce-RTX-5060-Ti"
NVIDIA_GEFORCE_RTX_5070 = "GeForce-RTX-5070"
NVIDIA_GEFORCE_RTX_5070_TI = "GeForce-RTX-5070-Ti"
NVIDIA_GEFORCE_RTX_5080 = "GeForce-RTX-5080"
NVIDIA_GEFORCE_RTX_5090 = "GeForce-RTX-5090"
NVIDIA_RTX_A4000 = "RTX-A4000"
NVIDIA_RTX_A5000 = "RTX-A5000"
NVIDIA_RTX_A6000 = "RTX-A6000"
NVIDIA_RTX_4000 = "RTX-4000"
NVIDIA_RTX_5000 = "RTX-5000"
NVIDIA_RTX_6000 = "RTX-6000"
NVIDIA_RTX_PRO_4000 = "RTX-PRO-4000"
NVIDIA_RTX_PRO_4500 = "RTX-PRO-4500"
NVIDIA_RTX_PRO_5000 = "RTX-PRO-5000"
NVIDIA_TITAN_RTX = "TITAN-RTX"
NVIDIA_A10 = "A10"
NVIDIA_A16 = "A16"
NVIDIA_A30 = "A30"
NVIDIA_A40 = "A40"
NVIDIA_L40 = "L40"
NVIDIA_A800 = "A800"
NVIDIA_H800 = "H800"
NVIDIA_GH200 = "GH200"

# Detection gives no device these types. An A100 of that size satisfies a request for one.
NVIDIA_A100_40G = "A100-40G"
NVIDIA_A100_80G = "A100-80G"

INTEL_MAX_1550 = "Intel-GPU-Max-1550"
INTEL_MAX_1100 = "Intel-GPU-Max-1100"
INTEL_GAUDI = "Intel-GAUDI"

AMD_INSTINCT_MI100 = "AMD-Instinct-MI100"
AMD_INSTINCT_MI210 = "AMD-Instinct-MI210"
AMD_INSTINCT_MI250 = "AMD-Instinct-MI250X-MI250"
AMD_INSTINCT_MI250x = "AMD-Instinct-MI250X"
AMD_INSTINCT_MI300A = "AMD-Instinct-MI300A"
AMD_INSTINCT_MI300x = "AMD-Instinct-MI300X-OAM"
AMD_INSTINCT_MI300x_HF = "AMD-Instinct-MI300X-HF"
AMD_INSTINCT_MI308x = "AMD-Instinct-MI308X"
AMD_INSTINCT_MI325x = "AMD-Instinct-MI325X-OAM"
AMD_INSTINCT_MI350x = "AMD-Instinct-MI350X-OAM"
AMD_INSTINCT_MI355x = "AMD-Instinct-MI355X-OAM"
AMD_RADEON_R9_200_HD_7900 = "AMD-Radeon-R9-200-HD-7900"
AMD_RADEON_HD_7900 = "AMD-Radeon-HD-7900"

AWS_NEURON_CORE = "aws-neuron-core"

GOOGLE_TPU_V2 = "TPU-V2"
GOOGLE_TPU_V3 = "TPU-V3"
GOOGLE_TPU_V4 = "TPU-V4"
GOOGLE_TPU_V5P = "TPU-V5P"
GOOGLE_TPU_V5LITEPOD = "TPU-V5LITEPOD"
GOOGLE_TPU_V6E = "TPU-V6E"
GOOGLE_TPU_V7X = "TPU-V7X"

HUAWEI_NPU_910B = "Ascend910B"
HUAWEI_NPU_910B4 = "Ascend910B4"

METAX_C500 = "MXC500"
METAX_C550 = "MXC550"

FURIOSA_RNGD = "FURIOSA_RNGD"

MOBILINT_ARIES = "MOBILINT_ARIES"
MOBILINT_REGULUS = "MOBILINT_REGULUS"

APPLE_M1 = "M1"
APPLE_M1_PRO = "M1-Pro"
APPLE_M1_MAX = "M1-Max"
APPLE_M1_ULTRA = "M1-Ultra"
APPLE_M2 = "M2"
APPLE_M2_PRO = "M2-Pro"
APPLE_M2_MAX = "M2-Max"
APPLE_M2_ULTRA = "M2-Ultra"
APPLE_M3 = "M3"
APPLE_M3_PRO = "M3-Pro"
APPLE_M3_MAX = "M3-Max"
APPLE_SILICON = "Apple-Silicon"

CONSTANTS: dict[str, str] = {
    name: value for name, value in list(vars().items()) if re.match("[A-Z]", name)
}
"""Every constant above, by name."""

DEPRECATED = {"NVIDIA_TESLA_A100": "NVIDIA_A100"}
"""Old names of constants, and the names to use instead."""


def constant(name: str, module: str) -> str:
    """The constant of that name, for a module's `__getattr__`. Warns of a deprecated name.

    Raises:
        AttributeError: no constant has the name.
    """
    if name in DEPRECATED:
        # 1 is this function, 2 the module's `__getattr__`, 3 the line that wrote the name.
        text = f"{name} is deprecated: use {DEPRECATED[name]}"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        name = DEPRECATED[name]
    if name not in CONSTANTS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return CONSTANTS[name]


def __getattr__(name: str) -> str:
    return constant(name, __name__)


def nvidia_type(name: str) -> str | None:
    """The accelerator type of an NVIDIA device with this product name; None for an empty name.

    The first word is the brand (Tesla, NVIDIA, Quadro, ...). After it, words of capitals only
    (RTX, PRO) and then the capitals and digits that begin the next word make the type, provided
    that those hold a digit: "NVIDIA A100-SXM4-40GB" is A100, "NVIDIA RTX PRO 6000 Blackwell" is
    RTX-PRO-6000. Any other name is the type itself, without "NVIDIA" and with hyphens for
    spaces: "NVIDIA GeForce RTX 5090" is GeForce-RTX-5090.
    """
    words = name.split()
    model: list[str] = []
    if words and re.fullmatch(r"\w+", words[0]):
        for word in words[1:]:
            if re.fullmatch("[A-Z]+", word):
                model.append(word)
                continue
            start = re.match("[A-Z0-9]*", word)
            kind = "-".join([*model, start[0] if start else ""])
            if re.search("[0-9]", kind) and len(kind) > 1:
                return kind
            break
    rest = words[1:] if words[:1] == ["NVIDIA"] and words[1:] else words
    return "-".join(rest) or None
