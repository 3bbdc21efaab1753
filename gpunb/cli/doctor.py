"""``gpunb doctor``: what works here, what does not, and what to do."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator

from gpunb import accelerators
from gpunb.cli.checks import Check, Finding, Place, frameworks, hardware, jupyter, sessions, system
from gpunb.cli.checks import note as to_note

CHECKS: tuple[Check, ...] = (
    system.python,
    system.processes,
    system.start_method,
    system.limits,
    system.container,
    system.wsl,
    hardware.gpus,
    hardware.absent,
    hardware.driver,
    hardware.permissions,
    hardware.visibility,
    hardware.outsiders,
    frameworks.frameworks,
    frameworks.preload,
    sessions.runtime,
    sessions.leases,
    sessions.orphans,
    jupyter.packages,
    jupyter.extensions,
)


def run(options: argparse.Namespace) -> int:
    found = list(examine(Place(found=accelerators.detect()), CHECKS))
    if options.json:
        print(json.dumps([facts(each) for each in found], indent=2))
    else:
        for each in found:
            for line in lines(each):
                print(line)
    return 1 if any(each.level == "problem" for each in found) else 0


def examine(place: Place, checks: Iterable[Check]) -> Iterator[Finding]:
    """What all checks find. One that fails itself says so, and the others go on."""
    for check in checks:
        try:
            yield from check(place)
        except Exception as error:  # noqa: BLE001 - a strange machine is what this is for
            yield to_note(check.__name__, f"could not be looked at: {error!r}")


def facts(finding: Finding) -> dict[str, object]:
    return {"ok": finding.level != "problem", **finding._asdict()}


def lines(finding: Finding) -> Iterator[str]:
    """A finding in words."""
    yield f"{finding.level:7}  {finding.name}: {finding.says}"
    if finding.cure:
        yield f"         -> {finding.cure}"
