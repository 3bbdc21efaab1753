"""Finds the devices of this machine, pins processes to some of them, and measures their use.

`detect`, `pin_environment` and `measure` work over all vendors. Each vendor has a plug-in, a
subclass of `Accelerator`, which `register` or an entry point adds. The
accelerator types are constants here, with Ray's names: ``gpunb.accelerators.NVIDIA_TESLA_V100``.
"""

from __future__ import annotations

from gpunb.accelerators import probing
from gpunb.accelerators import types as _types
from gpunb.accelerators.base import Accelerator, DetectionError, Lost, Process, Usage
from gpunb.accelerators.detection import Detection, ailing, detect, measure
from gpunb.accelerators.pinning import pin_environment
from gpunb.accelerators.registry import find, register, registered
from gpunb.accelerators.simulated import Simulated, parse_simulate
from gpunb.accelerators.types import nvidia_type
from gpunb.accelerators.visibility import declared, take, visible
from gpunb.scheduler.resources import Device

__all__ = [
    "Accelerator",
    "Detection",
    "DetectionError",
    "Device",
    "Lost",
    "Process",
    "Simulated",
    "Usage",
    "ailing",
    "declared",
    "detect",
    "find",
    "measure",
    "nvidia_type",
    "parse_simulate",
    "pin_environment",
    "probing",
    "register",
    "registered",
    "take",
    "visible",
]


def __getattr__(name: str) -> str:
    return _types.constant(name, __name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *_types.CONSTANTS])
