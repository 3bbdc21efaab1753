"""Looking at what the system, and the vendors' tools, say of devices, without touching any.

Files of sysfs and device nodes come first: reading them needs no library and cannot hang. A
vendor's tool or library is asked in a process of its own, with a time limit, because some hang or
crash where a driver is not well.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

ROOT = Path("/")
"""Where the system's files are; tests put a recorded machine there."""

PATIENCE = 5.0
"""Seconds for a vendor's tool to answer."""

MARK = "gpunb:"

# Processes that could not even be killed, because a driver holds them: kept, or Python complains.
_stuck: list[subprocess.Popen[str]] = []


class ProbeError(Exception):
    """A vendor's tool or library does not answer: the text says which, and how it failed."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device on the PCI bus: its address ("0000:c1:00.0"), and the ids of vendor, product and
    kind as sysfs writes them ("0x1002")."""

    address: str
    vendor: str
    device: str
    kind: str
    subsystem: str | None
    driver: str | None


def read(path: str | Path) -> str | None:
    """The text of a small file without the spaces around it; None if it cannot be read."""
    try:
        return (ROOT / str(path).lstrip("/")).read_text(errors="replace").strip()
    except OSError:
        return None


def number(text: str | None) -> int | None:
    """A whole number, decimal or after 0x; None for anything else."""
    with suppress(TypeError, ValueError):
        return int(text or "", 0)
    return None


def listed(pattern: str) -> list[str]:
    """The paths that fit, as the system names them, in the order of the numbers in them."""
    found = [f"/{each.relative_to(ROOT)}" for each in ROOT.glob(pattern.lstrip("/"))]
    return sorted(found, key=natural)


def natural(text: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts npu2 before npu10."""
    return [
        (each.isdigit(), int(each) if each.isdigit() else 0, each)
        for each in re.split(r"(\d+)", text)
    ]


def pci(vendor: str, devices: Iterable[str] = (), kinds: Iterable[str] = ()) -> list[PciDevice]:
    """Devices of a vendor by their address; of some products or kinds, if any are named.

    A kind is the beginning of the class: "0x0302" for a 3D controller, "0x12" for an accelerator.
    """
    found = []
    devices, kinds = tuple(devices), tuple(kinds)
    for path in listed("/sys/bus/pci/devices/*"):
        if read(f"{path}/vendor") != vendor:
            continue
        device, kind = read(f"{path}/device") or "", read(f"{path}/class") or ""
        if (devices and device not in devices) or (kinds and not kind.startswith(kinds)):
            continue
        driver = ROOT / f"{path}/driver".lstrip("/")
        found.append(
            PciDevice(
                address=path.rpartition("/")[2],
                vendor=vendor,
                device=device,
                kind=kind,
                subsystem=read(f"{path}/subsystem_device"),
                driver=os.path.basename(os.readlink(driver)) if driver.is_symlink() else None,
            )
        )
    return found


def has(tool: str) -> bool:
    """Whether the tool is installed."""
    import shutil

    return shutil.which(tool) is not None


def ask(*command: str, patience: float | None = None) -> str:
    """What a vendor's tool prints.

    Raises:
        ProbeError: it is missing, fails, or does not answer in time.
    """
    tool = command[0]
    if not has(tool):
        raise ProbeError(f"{tool} is not installed")
    return _output(tool, command, PATIENCE if patience is None else patience)


def ask_json(*command: str) -> Any:
    """As `ask`, for a tool that prints JSON."""
    import json

    text = ask(*command)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProbeError(f"{' '.join(command)} printed no JSON ({error})") from None


def ask_python(library: str, code: str) -> Any:
    """What Python code returns as `found` that asks a vendor's library, in a process of its own.

    Raises:
        ProbeError: the library is missing, fails, crashes or does not answer in time.
    """
    import json

    program = f"{code}\nimport json\nprint({MARK!r} + json.dumps(found))"
    # A library may print lines of its own.
    text = _output(library, (sys.executable, "-c", program), PATIENCE)
    answers = [line for line in text.splitlines() if line.startswith(MARK)]
    if not answers:
        raise ProbeError(f"{library} did not answer")
    return json.loads(answers[-1].removeprefix(MARK))


def _output(name: str, command: Sequence[str], patience: float) -> str:
    import subprocess

    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ProbeError(f"{name} does not start: {error.strerror}") from None
    try:
        out, problem = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        _end(process)
        raise ProbeError(f"{name} did not answer within {patience:g} s") from None
    if process.returncode < 0:
        crash = signal.Signals(-process.returncode).name
        raise ProbeError(f"{name} crashed ({crash})")
    if process.returncode:
        lines = (problem or out).strip().splitlines()
        said = lines[-1].strip() if lines else "it said nothing"
        raise ProbeError(f"{name} failed with status {process.returncode}: {said}")
    return out


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it with all its children; one that a driver holds is left behind."""
    import subprocess

    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        _stuck.append(process)
