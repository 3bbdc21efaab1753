"""Reads facts about devices from files of the system and from vendors' tools, without using them.

Plug-ins read files of sysfs and device nodes first: that needs no library and cannot hang. A
vendor's tool or library runs in a process of its own, with a time limit, because some hang or crash
with a faulty driver.
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
"""The root of the system's files. Tests set a folder with a recorded machine."""

PATIENCE = 5.0
"""Seconds to wait for a vendor's tool."""

MARK = "gpunb:"

# Processes that a driver keeps from ending after a kill; without a reference Python would warn.
_stuck: list[subprocess.Popen[str]] = []


class ProbeError(Exception):
    """A vendor's tool or library is missing, failed or timed out. The text names it."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device on the PCI bus: its address, such as "0000:c1:00.0", and the ids of vendor, product
    and class in the form of sysfs, such as "0x1002"."""

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
    """The paths that match a pattern, sorted by the numbers in them."""
    found = [f"/{each.relative_to(ROOT)}" for each in ROOT.glob(pattern.lstrip("/"))]
    return sorted(found, key=natural)


def natural(text: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts npu2 before npu10."""
    return [
        (each.isdigit(), int(each) if each.isdigit() else 0, each)
        for each in re.split(r"(\d+)", text)
    ]


def pci(vendor: str, devices: Iterable[str] = (), kinds: Iterable[str] = ()) -> list[PciDevice]:
    """The PCI devices of a vendor, in the order of their addresses.

    Args:
        vendor: id of the vendor, such as "0x1002".
        devices: ids of products; empty for all.
        kinds: first characters of classes, such as "0x0302" for 3D controllers or "0x12" for
            accelerators; empty for all.
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
    """The text that a vendor's tool prints.

    Args:
        patience: seconds to wait; default: PATIENCE.

    Raises:
        ProbeError: the tool is missing, fails or times out.
    """
    tool = command[0]
    if not has(tool):
        raise ProbeError(f"{tool} is not installed")
    return _output(tool, command, PATIENCE if patience is None else patience)


def ask_json(*command: str) -> Any:
    """The parsed JSON that a vendor's tool prints; as `ask`."""
    import json

    text = ask(*command)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProbeError(f"{' '.join(command)} printed no JSON ({error})") from None


def ask_python(library: str, code: str) -> Any:
    """The value of the variable `found` after Python code ran in a process of its own.

    Args:
        library: name of the vendor's library that the code uses, for errors.

    Raises:
        ProbeError: the library is missing, fails, crashes or times out.
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
        last = lines[-1].strip() if lines else "it said nothing"
        raise ProbeError(f"{name} failed with status {process.returncode}: {last}")
    return out


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and its children. One that a driver keeps from ending is left behind."""
    import subprocess

    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.communicate(timeout=1)
    except subprocess.TimeoutExpired:
        _stuck.append(process)
