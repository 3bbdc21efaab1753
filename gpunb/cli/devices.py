"""``gpunb devices``: the devices that a session would use."""

from __future__ import annotations

import argparse
import json
from typing import Any

from gpunb import accelerators
from gpunb.cli.output import print_text
from gpunb.scheduler.resources import Device, size_text

_FACTS = ("id", "key", "name", "type", "memory", "vendor", "logical")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also what was looked for and is not here"
    )


def run(options: argparse.Namespace) -> int:
    detected = accelerators.detect()
    if options.json:
        facts = {
            "devices": [_facts(each) for each in detected.devices],
            "notes": list(detected.notes),
            "absent": list(detected.absent),
        }
        print(json.dumps(facts, indent=2))
        return 0
    for device in detected.devices:
        print_text(f"{described(device)}, {device.key}")
    if not detected.devices:
        print("no GPUs")
    for note in detected.notes:
        print_text(f"note: {note}")
    for line in detected.absent if options.verbose else ():
        print_text(f"not here: {line}")
    return 0


def described(device: Device) -> str:
    """A description of a device: ``"GPU 0: NVIDIA A100-SXM4-40GB, A100, 40 GiB"``."""
    memory = size_text(device.memory) if device.memory else "memory unknown"
    kind = device.type or ("logical" if device.logical else "type unknown")
    return f"{device.resource} {device.id}: {device.name}, {kind}, {memory}"


def _facts(device: Device) -> dict[str, Any]:
    return {name: getattr(device, name) for name in _FACTS}
