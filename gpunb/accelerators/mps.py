"""Runs NVIDIA's Multi-Process Service (MPS) for one session.

With MPS, processes that share a device compute on it at the same time, each within limits that the
driver enforces. A guard (`mps_guard`) runs the control program, so that it ends with the session.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping

from gpunb.accelerators import mps_guard
from gpunb.exceptions import GpunbError
from gpunb.scheduler.resources import UNIT, Device
from gpunb.system.signals import Divisible

PROGRAM = "nvidia-cuda-mps-control"

_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_THREADS, _MEMORY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_DEFAULT = "/tmp/nvidia-mps"
_LONGEST = 80
"""The longest path of the folder: a socket in it has a longer path, at most 107 characters."""

_OLDEST = 7
"""The least compute capability with limits for each process (Volta)."""

_STOP = 15.0


class Mps:
    """A control program, which runs until `stop` or the end of this process."""

    def __init__(self, guard: subprocess.Popen[str], folder: str) -> None:
        self._guard = guard
        self._folder = folder

    def environment(self, device: Device, units: int) -> Mapping[str, str]:
        """Environment variables of a client: a process limited to its share of its only device."""
        if device.vendor != "nvidia":
            return {}
        variables = {
            _PIPES: self._folder,
            _LOGS: self._folder,
            _THREADS: str(max(1, math.ceil(100 * units / UNIT))),
        }
        if device.memory:
            variables[_MEMORY] = f"0={max(1, device.memory * units // UNIT // 2**20)}M"
        return variables

    def stop(self) -> None:
        """End the control program and its servers. Does nothing the second time."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            with contextlib.suppress(OSError):
                # A fork of this process may hold the pipe open too, so closing it is not enough.
                self._guard.stdin.write("end\n")
                self._guard.stdin.close()
        try:
            self._guard.wait(_STOP)
        except subprocess.TimeoutExpired:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
        if self._guard.stdout is not None:
            self._guard.stdout.close()


def start(devices: Iterable[Device], *, release: str | None = None) -> Mps:
    """Start MPS for processes on these devices.

    Raises:
        GpunbError: MPS cannot work here; the text has the reason.
    """
    program = _program(list(devices), os.uname().release if release is None else release)
    folder = tempfile.mkdtemp(prefix="gpunb-mps-")
    if len(folder) > _LONGEST:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="gpunb-mps-", dir="/tmp")
    environment = {
        name: value
        for name, value in os.environ.items()
        # The server must see all devices, or their numbers would change.
        if name not in ("CUDA_VISIBLE_DEVICES", _THREADS, _MEMORY)
    }
    environment |= {_PIPES: folder, _LOGS: folder, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", mps_guard.__file__, program, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # an interrupt of the notebook must not end it
    )
    mps = Mps(guard, folder)
    try:
        with Divisible():
            line = guard.stdout.readline().strip() if guard.stdout is not None else ""
        if line != mps_guard.READY:
            text = f"mps=True: {PROGRAM} could not be started: {line or 'it said nothing'}"
            raise GpunbError(text)
    except BaseException:
        mps.stop()
        raise
    return mps


def _program(devices: list[Device], release: str) -> str:
    """The path of the control program.

    Raises:
        GpunbError: MPS cannot work here.
    """
    reason = _reason(devices, release)
    program = shutil.which(PROGRAM)
    if reason is None and program is None:
        reason = (
            f"the program {PROGRAM} is not on PATH: it comes with the NVIDIA driver, in some "
            "distributions in a package of its own (nvidia-compute-utils)"
        )
    if reason is None and program is not None and mps_guard.send(program, "get_server_list", 10):
        where = os.environ.get(_PIPES, _DEFAULT)
        reason = (
            f"an MPS server runs already (its pipes are in {where}), and a device can have one "
            f"only: end it with 'echo quit | {PROGRAM}', or leave mps=True out to share it as it is"
        )
    if reason is not None or program is None:
        raise GpunbError(f"mps=True cannot work here: {reason}")
    return program


def _reason(devices: list[Device], release: str) -> str | None:
    """The reason why MPS cannot work with these devices; None if it can."""
    if not sys.platform.startswith("linux") or "microsoft" in release.lower():
        return "MPS is for Linux, and WSL does not have it"
    ours = [each for each in devices if each.vendor == "nvidia"]
    if not ours:
        return "this session has no NVIDIA GPU"
    for device in ours:
        if device.part_of is not None:
            return f"GPU {device.id} is a MIG slice, which has limits of its own already"
        major = (device.capability or "").partition(".")[0]
        if major.isdigit() and int(major) < _OLDEST:
            return (
                f"GPU {device.id} ({device.name}) has compute capability {device.capability}, and "
                f"limits for each process need {_OLDEST}.0 or newer"
            )
    return None
