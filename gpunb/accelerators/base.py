"""What an accelerator plug-in is: one class that lists devices, pins ids and measures use.

A plug-in subclasses `Accelerator`, gives it a `name` and the `variable` that limits which devices
a process sees, and writes `devices`. The rest has defaults. Three rules keep it safe:

1. Look, never compute: a plug-in runs in the notebook's kernel and must not start a device
   runtime (a CUDA context, for example) there. Management libraries such as NVML are fine.
2. Import the vendor's library inside the methods: most machines do not have it.
3. A reading that the device does not give is None, never a guess.

`gpunb.accelerators.testing` holds the tests that every plug-in should pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from gpunb.core.resources import GPU, Device


class DetectionError(RuntimeError):
    """A vendor's library is there but does not answer: the text says why, and what to do."""


class Process(NamedTuple):
    """A process that uses a device: its id in the host's numbering, and its bytes if known."""

    pid: int
    memory: int | None


@dataclass(frozen=True, slots=True)
class Usage:
    """One device at one moment. None stands for whatever the device does not tell.

    Attributes:
        memory_used: bytes in use by all processes.
        memory_total: bytes on the device.
        utilization: percent of the last sampling period in which the device was busy, 0 to 100.
        temperature: degrees Celsius.
        processes: who uses the device, by pid; empty if nobody does.
    """

    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    temperature: int | None = None
    processes: tuple[Process, ...] | None = None


class Lost(str):
    """What is wrong with a device that nothing can run on any more, as a text."""

    __slots__ = ()


class Accelerator(ABC):
    """The devices of one vendor. A new object is made for each use, without arguments.

    Attributes:
        name: the plug-in's name, which its devices carry as `Device.vendor`.
        resource: the resource that its devices count as.
        whole: its devices are given out as wholes only, never in parts.
        counts: how many of its devices one process may have; empty for any number.
        variable: the environment variable that limits which devices a process sees; None if the
            vendor has none.
        nothing: the value of `variable` that hides every device.
        constants: further environment variables of a process that is pinned.
        notes: what the last `devices()` has to tell the user: why it found nothing, or which
            device it left out.
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

        The visibility variable is not applied here. Where there is nothing to find, the list is
        empty and `notes` says why.

        Raises:
            DetectionError: the vendor's library is there but fails.
        """

    def environment(self, ids: Sequence[int | str]) -> dict[str, str]:
        """What a process that may see just these devices has in its environment.

        The ids are those of the devices, or their `Device.pin` where they have one. An empty list
        hides every device of this vendor.
        """
        if self.variable is None:
            return {}
        return {self.variable: ",".join(map(str, ids)) or self.nothing, **self.constants}

    def ids_in(self, value: str) -> str:
        """The value of `variable` as ids with commas between them, where the vendor writes them
        in another way."""
        return value

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        """The use of these devices now, by device key. Never raises: what fails is unknown."""
        return {device.key: Usage() for device in devices}

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        """What is wrong with these devices, by device key; None for those that are fine, or that
        do not tell. A device that cannot be used any more has a `Lost`. Never raises."""
        return {device.key: None for device in devices}

    def polling(self) -> AbstractContextManager[object]:
        """Keep the vendor's library open, so that calling `usage` again and again stays cheap."""
        return nullcontext()


def rank(id: int | str) -> tuple[bool, int, str]:
    """Sort key of device ids: numbers first, ascending, then UUIDs and MIG ids."""
    return (True, 0, id) if isinstance(id, str) else (False, id, "")


def in_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Devices by ascending id."""
    return tuple(sorted(devices, key=lambda device: rank(device.id)))
