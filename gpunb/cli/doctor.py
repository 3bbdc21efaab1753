"""``gpunb doctor``: checks what works on this machine, and prints what to do about the rest."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpunb import accelerators
from gpunb.cli.checks import Check, Finding, Place, frameworks, hardware, jupyter, sessions, system
from gpunb.cli.checks import note as to_note
from gpunb.cli.output import print_text

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
    sessions.broken,
    sessions.leases,
    sessions.orphans,
    jupyter.packages,
    jupyter.extensions,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu-report",
        metavar="FILE",
        type=Path,
        help="try gpunb on the NVIDIA GPU of this machine for some minutes, and write a report",
    )


def run(options: argparse.Namespace) -> int:
    if options.gpu_report is not None:
        from gpunb.cli import gpu_report  # it begins a session

        return gpu_report.write(options.gpu_report)
    findings = list(examine(Place(detected=accelerators.detect()), CHECKS))
    if options.json:
        print(json.dumps([facts(each) for each in findings], indent=2))
    else:
        for each in findings:
            for line in lines(each):
                print_text(line)
    return 1 if any(each.level == "problem" for each in findings) else 0


def examine(place: Place, checks: Iterable[Check]) -> Iterator[Finding]:
    """The findings of all checks. An exception in a check becomes a finding."""
    for check in checks:
        try:
            yield from check(place)
        except Exception as error:  # noqa: BLE001 - strange machines are why the doctor is run
            yield to_note(check.__name__, f"could not be looked at: {error!r}")


def facts(finding: Finding) -> dict[str, object]:
    name, level, text, cure = finding
    ok = level != "problem"
    return {"ok": ok, "name": name, "level": level, "says": text, "cure": cure}


def lines(finding: Finding) -> Iterator[str]:
    """The lines of a finding."""
    yield f"{finding.level:7}  {finding.name}: {finding.text}"
    if finding.cure:
        yield f"         -> {finding.cure}"
