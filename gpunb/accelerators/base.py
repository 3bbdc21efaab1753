"""`Accelerator`: the base class of plug-ins, which list devices, pin ids and measure use.

A plug-in subclasses `Accelerator`, gives it a `name` and the `variable` that limits which devices
a process sees, and writes `devices`. The rest has defaults. Three rules keep it safe:

1. Read, never compute: a plug-in runs in the notebook's kernel, and must not start a device
   runtime there, such as a CUDA context. Management libraries such as NVML are fine.
2. Import the vendor's library inside the methods: most machines do not have it.
3. A value that the device does not report is None, never a guess.

`gpunb.accelerators.testing` holds the tests that every plug-in should pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from gpunb.scheduler.resources import GPU, Device


class DetectionError(RuntimeError):
    """A vendor's library is installed but fails. The text has the reason, and what to do."""


class Process(NamedTuple):
    """A process on a device: its pid on the host, and its bytes of memory; None if unknown."""

    pid: int
    memory: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of one device at one moment. None stands for values that the device does not report.

    Attributes:
        memory_used: bytes in use by all processes.
        memory_total: bytes on the device.
        utilization: percent of the last sampling period in which the device was busy, 0 to 100.
        temperature: degrees Celsius.
        processes: the processes that use the device; empty if none does.
        power: watts.
    """

    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    processes: tuple[Process, ...] | None = None
    power: int | None = None


class Lost(str):
    """The reason why a device cannot be used any more, a text."""

    __slots__ = ()


class Accelerator(ABC):
    """The devices of one vendor. Each use makes a new object, without arguments.

    Attributes:
        name: name of the plug-in, and `Device.vendor` of its devices.
        resource: name of the resource that a task asks for to get its devices.
        whole: whether a task can get whole devices only, not parts.
        counts: the numbers of devices that one process may have; empty for any number.
        variable: the environment variable that limits which devices a process sees; None if the
            vendor has none.
        nothing: the value of `variable` that hides every device.
        constants: further environment variables of a pinned process.
        notes: texts for the user after `devices()`: why it found nothing, or which device it left
            out.
    """

    name: ClassVar[str]
    resource: ClassVar[str] = GPU
    whole: ClassVar[bool] = False
    counts: ClassVar[tuple[int, ...]] = ()
    variable: ClassVar[str | None] = None
    nothing: ClassVar[str] = ""
    constants: ClassVar[Mapping[str, str]] = MappingProxyType({})
    notes: Sequence[str] = ()

    @abstractmethod
    def devices(self) -> Sequence[Device]:
        """The devices of this machine, in the order in which `variable` counts them.

        The visibility variable is not applied here. Without devices the list is empty and
        `notes` has the reason.

        Raises:
            DetectionError: the vendor's library is installed but fails.
        """

    def environment(self, ids: Sequence[int | str]) -> dict[str, str]:
        """The environment variables of a process that sees only these devices.

        Args:
            ids: `Device.pin` of each device, or its id. An empty list hides every device of this
                vendor.
        """
        if self.variable is None:
            return {}
        return {self.variable: ",".join(map(str, ids)) or self.nothing, **self.constants}

    def ids_in(self, value: str) -> str:
        """The value of `variable` as ids with commas between them. Vendors with another way to
        write the value override this method."""
        return value

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        """The use of these devices now, by device key. Never raises: an error makes it unknown."""
        return {device.key: Usage() for device in devices}

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        """The fault of each device, by device key: None if the device has none or reports none, a
        `Lost` if the device cannot be used any more. Never raises."""
        return {device.key: None for device in devices}

    def polling(self) -> AbstractContextManager[object]:
        """Keep the vendor's library open, so that many calls of `usage` are cheap."""
        return nullcontext()


def rank(id: int | str) -> tuple[bool, int, str]:
    """Sort key of device ids: numbers first, ascending, then UUIDs and MIG ids."""
    return (True, 0, id) if isinstance(id, str) else (False, id, "")


def in_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Devices by ascending id."""
    return tuple(sorted(devices, key=lambda device: rank(device.id)))
