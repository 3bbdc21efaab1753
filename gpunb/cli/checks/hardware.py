"""Checks drivers, devices, their permissions, and the variables that hide them."""

from __future__ import annotations

import glob
import grp
import os
import re
from collections.abc import Iterator

from gpunb import accelerators
from gpunb.cli.checks import Finding, Place, note, ok, problem

VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ONEAPI_DEVICE_SELECTOR",
)
_NODES = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/render*")


def gpus(place: Place) -> Iterator[Finding]:
    notes = "; ".join(place.detected.notes)
    text = f"{place.gpus} found" + (f"; {notes}" if notes else "")
    if place.gpus:
        yield ok("GPUs", text)
        return
    yield problem(
        "GPUs",
        text,
        "see the lines below; until then gpunb.init(num_gpus=2) makes logical ones, for trying "
        "things out",
    )


def absent(place: Place) -> Iterator[Finding]:
    """The reasons why vendors have no devices here."""
    lines = place.detected.absent
    if place.gpus and lines:
        yield ok("other devices", f"{len(lines)} other vendors have none here: gpunb devices -v")
        return
    for line in lines:
        yield note("not here", line)


def driver(place: Place) -> Iterator[Finding]:
    """NVIDIA's kernel module, and its library."""
    text = place.text("/proc/driver/nvidia/version")
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text or "")
    loaded = version.group(1) if version else None
    answer, error = _nvml()
    if loaded is None and answer is None:
        if place.path("/sys/module/nvidia").exists() or _on_the_bus(place):
            text = f"an NVIDIA GPU is there, and no driver that runs ({error})"
            yield problem("NVIDIA driver", text, "install or load it: sudo modprobe nvidia")
        return
    if answer is None:
        yield problem(
            "NVML",
            f"the kernel module is {loaded}, and its library fails: {error}",
            "after an update of the driver, restart the machine; in a container, start it with "
            "access to GPUs",
        )
    else:
        also = f" (kernel module {loaded})" if loaded not in (None, answer) else ""
        yield ok("NVIDIA driver", f"{answer}{also}, NVML answers")


def _nvml() -> tuple[str | None, str]:
    """The version of the driver from NVML, or None and the error."""
    try:
        import pynvml
    except ImportError as error:
        return None, f"the package nvidia-ml-py does not load: {error}"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - NVML has one exception class for each code
        return None, str(error)
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version), ""
    except Exception as error:  # noqa: BLE001
        return None, str(error)
    finally:
        pynvml.nvmlShutdown()


def _on_the_bus(place: Place) -> bool:
    """Whether a display controller of NVIDIA is on the PCI bus."""
    for each in place.path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor = (each / "vendor").read_text().strip()
            kind = (each / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def permissions(place: Place) -> Iterator[Finding]:
    """Whether this user may open the devices."""
    nodes = sorted(each for pattern in _NODES for each in glob.glob(str(place.path(pattern))))
    closed = [each for each in nodes if not os.access(each, os.R_OK | os.W_OK)]
    if not nodes:
        return
    if not closed:
        yield ok("permissions", f"{len(nodes)} device files, all of which you may open")
        return
    names = ", ".join("/" + os.path.relpath(each, place.root) for each in closed[:4])
    groups = sorted({group for each in closed if (group := _group(each)) not in (None, "root")})
    cure = "have them opened to you: by udev rules, or by the container's or batch system's options"
    if groups:
        cure = f"sudo usermod -aG {','.join(map(str, groups))} $USER, and log in again"
    yield problem("permissions", f"you may not open {names}", cure)


def _group(path: str) -> str | None:
    try:
        return grp.getgrgid(os.stat(path).st_gid).gr_name
    except (OSError, KeyError):
        return None


def visibility(place: Place) -> Iterator[Finding]:
    """The variables that say which devices a process sees."""
    variables = {name: place.environ[name] for name in VISIBILITY if name in place.environ}
    if not variables:
        yield ok("visible devices", "no variable hides any")
    for name, value in variables.items():
        if value.strip() in ("", "-1", "none", "void", "NoDevFiles"):
            yield problem(name, f"{value!r}: hides all devices", f"unset {name}")
        else:
            yield ok(name, f"{value!r}: only these devices are used")
    order = place.environ.get("CUDA_DEVICE_ORDER")
    if order not in (None, "", "PCI_BUS_ID"):
        yield note(
            "CUDA_DEVICE_ORDER",
            f"{order!r}: other programs number the devices in another way than gpunb does",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def outsiders(place: Place) -> Iterator[Finding]:
    """Devices that are nearly full before anything is run on them."""
    usage = accelerators.measure(place.detected.devices)
    for device in place.detected.devices:
        figures = usage[device.key]
        used, total = figures.memory_used, figures.memory_total
        if used is not None and total and used > 0.9 * total:
            yield note(
                f"{device.resource} {device.id}",
                f"{used * 100 // total} % of its memory are in use",
                "`gpunb status` says by whom",
            )
