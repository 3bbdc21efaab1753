"""Checks Python, the system, and the limits of a container or batch system."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator

from gpunb._version import __version__
from gpunb.cli.checks import Finding, Place, note, ok, problem
from gpunb.scheduler.resources import size_text
from gpunb.system import linux

_NEEDED = ("eventfd",)
_CGROUP = "/sys/fs/cgroup"
_HUGE = 1 << 60
_SMALL = 2 << 30


def python(place: Place) -> Iterator[Finding]:
    yield ok("python", f"{platform.python_version()} ({sys.executable}), gpunb {__version__}")


def processes(place: Place) -> Iterator[Finding]:
    """Whether workers can be forked."""
    name = "processes"
    missing = [each for each in _NEEDED if not hasattr(os, each)]
    if not sys.platform.startswith("linux"):
        cure = "use a Linux machine, or WSL 2 on Windows"
        yield problem(name, f"gpunb needs Linux for its workers, and this is {sys.platform}", cure)
    elif missing:
        lacks = ", ".join("os." + each for each in missing)
        cure = "use a Python that was built on a newer Linux"
        yield problem(name, f"this Python lacks {lacks}", cure)
    else:
        yield _pidfd(name)


def _pidfd(name: str) -> Finding:
    try:
        os.close(linux.pidfd_open(os.getpid()))
    except OSError as error:
        return problem(
            name,
            f"pidfd_open is not allowed ({error.strerror}): an old kernel, or a sandbox",
            "gpunb.init(start_method='spawn')",
        )
    return ok(name, f"Linux {platform.release()}, workers can be forked")


def start_method(place: Place) -> Iterator[Finding]:
    method = place.environ.get("GPUNB_START_METHOD")
    if method in (None, "", "fork"):
        yield ok("start method", "fork: workers are there in some milliseconds")
    elif method == "spawn":
        yield note(
            "start method",
            "spawn (GPUNB_START_METHOD): each worker takes a tenth of a second, and imports for "
            "itself",
            "unset GPUNB_START_METHOD where forking works",
        )
    else:
        cure = "unset it, or set it to fork or spawn"
        yield problem("start method", f"GPUNB_START_METHOD={method!r} is not known", cure)


def container(place: Place) -> Iterator[Finding]:
    """Containers see only the devices that they were given."""
    kind = _container(place)
    if kind is None:
        return
    text = f"this is a {kind}"
    if place.gpus:
        yield ok("container", f"{text}, and has GPUs")
        return
    cure = {
        "Kubernetes pod": "ask for one in the pod: resources: limits: nvidia.com/gpu: 1",
        "Podman container": "start it with --device nvidia.com/gpu=all",
        "Apptainer container": "start it with --nv (NVIDIA) or --rocm (AMD)",
    }.get(kind, "start it with --gpus all (NVIDIA), or --device /dev/kfd --device /dev/dri (AMD)")
    yield note("container", f"{text}, and sees no GPU", f"if the machine has any: {cure}")


def _container(place: Place) -> str | None:
    if place.environ.get("KUBERNETES_SERVICE_HOST") or "kubepods" in (
        place.text("/proc/1/cgroup") or ""
    ):
        return "Kubernetes pod"
    if place.path("/run/.containerenv").exists():
        return "Podman container"
    if place.environ.get("APPTAINER_CONTAINER") or place.environ.get("SINGULARITY_CONTAINER"):
        return "Apptainer container"
    if place.path("/.dockerenv").exists():
        return "Docker container"
    if re.search(r"docker|containerd|lxc", place.text("/proc/1/cgroup") or ""):
        return "container"
    return None


def wsl(place: Place) -> Iterator[Finding]:
    """Linux under Windows gets its driver from Windows."""
    if "microsoft" not in (place.text("/proc/version") or "").lower():
        return
    if not place.path("/dev/dxg").exists():
        yield problem(
            "WSL",
            "this is WSL without /dev/dxg: it passes no GPU on",
            "`wsl --update` on Windows, and WSL 2 for this distribution: "
            "`wsl --set-version NAME 2`",
        )
    elif not place.path("/usr/lib/wsl/lib/libnvidia-ml.so.1").exists():
        yield note(
            "WSL",
            "this is WSL 2, and Windows passes no NVIDIA driver on",
            "install NVIDIA's driver on Windows, and none in Linux",
        )
    else:
        yield ok("WSL", "WSL 2, with the NVIDIA driver of Windows")


def limits(place: Place) -> Iterator[Finding]:
    """The limits of this process's control group."""
    cpus, memory = _cpus(place), _memory(place)
    if cpus is not None:
        there = os.cpu_count() or 1
        text = f"{cpus:.3g} of the {there} CPUs of this machine, by the cgroup"
        if cpus < 1:
            yield note("CPU limit", text, "workers start slowly: ask for one CPU at least")
        else:
            yield ok("CPU limit", text)
    if memory is not None:
        text = f"{size_text(memory)} by the cgroup; whoever takes more is killed"
        if memory < _SMALL:
            yield note("memory limit", text, "frameworks for GPUs need some GiB: ask for more")
        else:
            yield ok("memory limit", text)
    if cpus is None and memory is None:
        yield ok("limits", f"none by a cgroup; {os.cpu_count()} CPUs")


def _cpus(place: Place) -> float | None:
    quota = period = None
    if (text := _cgroup(place, "cpu.max")) is not None:
        quota, _, period = text.partition(" ")
    else:
        quota = place.text(f"{_CGROUP}/cpu/cpu.cfs_quota_us")
        period = place.text(f"{_CGROUP}/cpu/cpu.cfs_period_us")
    try:
        cpus = int(quota or "max") / int(period or "100000")
    except ValueError:
        return None
    return cpus if cpus > 0 else None


def _memory(place: Place) -> int | None:
    text = _cgroup(place, "memory.max")
    text = text or place.text(f"{_CGROUP}/memory/memory.limit_in_bytes")
    if text is None or not text.isdigit() or int(text) > _HUGE:
        return None
    return int(text)


def _cgroup(place: Place, name: str) -> str | None:
    """A limit in cgroup v2, of this process's group or the nearest group above that has one."""
    own = (place.text("/proc/self/cgroup") or "").rpartition("0::")[2].splitlines()
    parts = own[0].strip("/").split("/") if own and own[0].strip("/") else []
    for length in range(len(parts), -1, -1):
        text = place.text("/".join([_CGROUP, *parts[:length], name]))
        if text is not None and not text.startswith("max"):
            return text
    return None
