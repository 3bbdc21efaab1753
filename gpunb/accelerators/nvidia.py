"""NVIDIA devices, through the driver's management library (NVML).

NVML, never CUDA: NVML reads the driver's tables and makes no CUDA context, so the notebook's kernel
takes no device memory and can go on starting workers. Only the kernel opens NVML, never the process
that forks workers: an open library does not survive a fork. The methods import `pynvml`, so the
import of this module is fast.

Ids number the devices by PCI bus, as CUDA does under CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

from gpunb.accelerators import nvml_health, probing
from gpunb.accelerators.base import Accelerator, DetectionError, Process, Usage
from gpunb.accelerators.types import nvidia_type
from gpunb.scheduler.resources import Device

_NO_PACKAGE = (
    "NVIDIA devices cannot be looked for: the Python package nvidia-ml-py does not load ({}). "
    "Install it with: pip install nvidia-ml-py"
)
_NO_LIBRARY = (
    "no NVIDIA driver library (libnvidia-ml.so.1) found: this machine has no NVIDIA GPU, its "
    "driver is not installed, or this is a container that was started without access to GPUs "
    "(docker run --gpus all)"
)
_NO_DRIVER = (
    "an NVIDIA GPU is on the bus at {}, but its driver's library (libnvidia-ml.so.1) is not here: "
    "install the driver, or start the container with access to GPUs (docker run --gpus all)"
)
_NO_DEVICES = (
    "the NVIDIA driver works but shows no GPU: a container or batch job may have been started "
    "without access to one"
)
_MIG = (
    "NVIDIA device {} is in MIG mode and has no slices, so that nothing can run on it: make some "
    "with 'sudo nvidia-smi mig -cgi ... -C' (nvidia-smi mig -lgip lists the kinds), or end the "
    "mode with 'sudo nvidia-smi -i {} -mig 0'"
)
_ADVICE = {
    "NVMLError_DriverNotLoaded": "the kernel module is not running: load it with "
    "'sudo modprobe nvidia', or install a driver that fits the running kernel",
    "NVMLError_LibRmVersionMismatch": "the driver's library and its kernel module have different "
    "versions, most often after an update: restart the machine",
    "NVMLError_NoPermission": "this user may not open the devices: see who may with "
    "'ls -l /dev/nvidia*'; in a batch job, ask for a GPU",
    "NVMLError_OperatingSystem": "the operating system keeps this process from the devices: see "
    "'ls -l /dev/nvidia*' and the limits of the container",
    "NVMLError_GpuIsLost": "a GPU has dropped off the bus: restart the machine, and check its "
    "power and its seat",
    "NVMLError_ResetRequired": "a GPU has to be reset ('sudo nvidia-smi --gpu-reset'), or the "
    "machine restarted",
    "NVMLError_InsufficientPower": "a GPU's power cables are not attached properly",
    "NVMLError_FunctionNotFound": "the driver is too old for this version of nvidia-ml-py: update "
    "the driver",
}


class Nvidia(Accelerator):
    """NVIDIA GPUs. A card that is split by MIG is listed as its slices, each a device."""

    name: ClassVar[str] = "nvidia"
    variable: ClassVar[str | None] = "CUDA_VISIBLE_DEVICES"
    constants: ClassVar[Mapping[str, str]] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def devices(self) -> list[Device]:
        try:
            nvml = _Nvml()
        except ImportError as error:
            self.notes = (_NO_PACKAGE.format(error),)
            return []
        try:
            with nvml.opened():
                cards, notes = nvml.cards()
                devices, more = _devices(nvml, cards, clear=not notes)
                notes += more
        except nvml.errors as error:
            if type(error).__name__ == "NVMLError_LibraryNotFound":
                if on_bus := probing.pci("0x10de", kinds=("0x0300", "0x0302", "0x0380")):
                    raise DetectionError(_NO_DRIVER.format(on_bus[0].address)) from error
                self.notes = (_NO_LIBRARY,)
                return []
            raise DetectionError(f"the NVIDIA driver does not answer: {_advised(error)}") from error
        if notes and not devices:
            raise DetectionError("; ".join(notes))
        self.notes = tuple(notes) if devices else (_NO_DEVICES,)
        return devices

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        """As for any vendor. Inside a container too, pids are those of the host."""
        usage = super().usage(devices)
        with suppress(ImportError):
            nvml = _Nvml()
            with suppress(*nvml.errors), nvml.opened():
                cards = nvml.units()
                usage.update({card.key: nvml.usage(card) for card in cards if card.key in usage})
        return usage

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        """As for any vendor. A MIG slice has the health of its card."""
        health = super().health(devices)
        with suppress(ImportError):
            nvml = _Nvml()
            with suppress(*nvml.errors), nvml.opened():
                cards, left_out = nvml.cards()
                problems = {card.key: nvml.problem(card) for card in cards}
                gone = nvml_health.LOST if left_out else nvml_health.GONE
                listed = {card.key for card in nvml.units()}
                for device in devices:
                    problem = problems.get(device.part_of or device.key, gone)
                    health[device.key] = problem if device.key in listed else problem or gone
        return health

    def polling(self) -> AbstractContextManager[object]:
        # NVML counts how often it is opened. While this context holds it open, `usage` does not
        # wait for it to open, and an idle device does not power down between two calls.
        try:
            nvml = _Nvml()
        except ImportError:
            return nullcontext()
        return nvml.held_open()


@dataclass(frozen=True, slots=True)
class _Card:
    handle: Any
    key: str


class _Nvml:
    """NVML. Any reading may be missing: devices, drivers and versions of NVML differ."""

    def __init__(self) -> None:
        import pynvml

        self._module: Any = pynvml
        # Raised for functions that the driver's library lacks; not a subclass of NVMLError.
        mismatch = getattr(pynvml, "NVMLLibraryMismatchError", pynvml.NVMLError)
        self.errors: tuple[type[Exception], ...] = (pynvml.NVMLError, mismatch)
        # pynvml may be older than a function, and decodes texts from the device's firmware.
        self.unreadable = (*self.errors, AttributeError, UnicodeDecodeError)

    @contextmanager
    def opened(self) -> Iterator[None]:
        self._module.nvmlInit()
        try:
            yield
        finally:
            with suppress(*self.errors):
                self._module.nvmlShutdown()

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """As `opened`, but ignores errors: `usage` handles a library that does not open."""
        with ExitStack() as stack:
            with suppress(*self.errors):
                stack.enter_context(self.opened())
            yield

    def cards(self) -> tuple[list[_Card], list[str]]:
        """The cards that this process may use, by PCI bus, and the reasons why others are left out.

        Raises:
            NVMLError: NVML cannot count the devices.
        """
        found = []
        notes = []
        count = self._module.nvmlDeviceGetCount()
        for index in range(count):
            try:
                handle = self._module.nvmlDeviceGetHandleByIndex(index)
            except self.errors as error:
                # CUDA does not count such a device either, so the next device gets its id.
                notes.append(
                    f"NVIDIA device {index} of 0 to {count - 1} is left out: {_advised(error)}"
                )
                continue
            pci = self.read("nvmlDeviceGetPciInfo", handle)
            place = (pci.domain, pci.bus, pci.device) if pci else None
            fallback = "nvidia:" + (":".join(map(str, place)) if place else str(index))
            key = _text(self.read("nvmlDeviceGetUUID", handle)) or fallback
            found.append((place, _Card(handle, key)))
        if all(place for place, _ in found):
            found.sort(key=lambda pair: pair[0] or ())
        return [card for _, card in found], notes

    def read(self, function: str, *arguments: Any) -> Any:
        """The result of an NVML function; None if the driver, device or pynvml does not have it."""
        try:
            reading = getattr(self._module, function)(*arguments)
        except self.unreadable:
            return None
        return None if reading == "N/A" else reading

    def split(self, card: _Card) -> bool:
        """Whether the card is in MIG mode."""
        modes = self.read("nvmlDeviceGetMigMode", card.handle)
        return isinstance(modes, Sequence) and modes[0] == 1

    def slices(self, card: _Card) -> list[_Card]:
        """The MIG slices of the card, in NVML's order."""
        found = []
        for place in range(self.read("nvmlDeviceGetMaxMigDeviceCount", card.handle) or 0):
            handle = self.read("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, place)
            key = _text(self.read("nvmlDeviceGetUUID", handle)) if handle is not None else None
            if key:
                found.append(_Card(handle, key))
        return found

    def units(self) -> list[_Card]:
        """The cards, each followed by its slices."""
        return [
            each
            for card in self.cards()[0]
            for each in (card, *(self.slices(card) if self.split(card) else ()))
        ]

    def problem(self, card: _Card) -> str | None:
        def ask(function: str, *arguments: Any) -> Any:
            return getattr(self._module, function)(*arguments)

        return nvml_health.problem(ask, card.handle, self.unreadable)

    def memory(self, card: _Card) -> Any:
        """Total and used bytes; used without the driver's own part, if NVML has its version 2."""
        second = getattr(self._module, "nvmlMemory_v2", None)
        reading = self.read("nvmlDeviceGetMemoryInfo", card.handle, second) if second else None
        return reading or self.read("nvmlDeviceGetMemoryInfo", card.handle)

    def usage(self, card: _Card) -> Usage:
        memory = self.memory(card)
        milliwatts = _whole(self.read("nvmlDeviceGetPowerUsage", card.handle), 10**7)
        rates = self.read("nvmlDeviceGetUtilizationRates", card.handle)
        return Usage(
            memory_used=_whole(getattr(memory, "used", None)),
            memory_total=_whole(getattr(memory, "total", None)) or None,
            utilization=_whole(getattr(rates, "gpu", None), 100),
            temperature=self.temperature(card),
            processes=self.processes(card),
            power=None if milliwatts is None else round(milliwatts / 1000),
        )

    def temperature(self, card: _Card) -> int | None:
        sensor = getattr(self._module, "NVML_TEMPERATURE_GPU", 0)
        # The first function is deprecated; old drivers have only that one.
        for function in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"):
            reading = _whole(self.read(function, card.handle, sensor), 1000)
            if reading is not None:
                return reading
        return None

    def processes(self, card: _Card) -> tuple[Process, ...] | None:
        """The processes on the card, each once, even if it computes and draws; None if unknown."""
        computing = self.running("Compute", card)
        if computing is None:
            return None
        others = (self.running(kind, card) or () for kind in ("Graphics", "MPSCompute"))
        found: dict[int, int | None] = {}
        for each in chain(computing, *others):
            memory = _whole(each.usedGpuMemory)
            before = found.get(each.pid)
            found[each.pid] = memory if before is None else max(before, memory or 0)
        return tuple(Process(pid, found[pid]) for pid in sorted(found))

    def running(self, kind: str, card: _Card) -> Sequence[Any] | None:
        name = f"nvmlDeviceGet{kind}RunningProcesses"
        # A driver from before 2022 has only version 2 of the function.
        running: Sequence[Any] | None = self.read(name, card.handle)
        return self.read(f"{name}_v2", card.handle) if running is None else running


def _devices(nvml: _Nvml, cards: Sequence[_Card], *, clear: bool) -> tuple[list[Device], list[str]]:
    """The cards as devices, with the MIG slices in place of a card that is split, and notes.

    `clear`: whether NVML numbers the cards as CUDA does. It does not if it left out some, or if
    some are split; then `Device.pin` is the UUID.
    """
    split = [nvml.split(card) for card in cards]
    clear = clear and not any(split)
    devices: list[Device] = []
    notes: list[str] = []
    for id, (card, parts) in enumerate(zip(cards, split, strict=True)):
        whole = _device(nvml, id, card)
        if not parts:
            named = clear or not card.key.startswith("GPU-")
            devices.append(whole if named else replace(whole, pin=card.key))
            continue
        slices = nvml.slices(card)
        devices += [_slice(nvml, whole, each) for each in slices]
        if not slices:
            notes.append(_MIG.format(id, id))
    return devices, notes


def _device(nvml: _Nvml, id: int, card: _Card) -> Device:
    name = _text(nvml.read("nvmlDeviceGetName", card.handle))
    capability = nvml.read("nvmlDeviceGetCudaComputeCapability", card.handle)
    return Device(
        key=card.key,
        id=id,
        name=name or "NVIDIA GPU",
        type=nvidia_type(name or ""),
        # None for a device without memory of its own, which uses the machine's.
        memory=_whole(getattr(nvml.memory(card), "total", None)) or None,
        vendor=Nvidia.name,
        capability=".".join(map(str, capability)) if isinstance(capability, Sequence) else None,
    )


def _slice(nvml: _Nvml, card: Device, part: _Card) -> Device:
    """The device of a MIG slice, with a type such as "A100-MIG-1g.5gb" on a card of type "A100"."""
    name = _text(nvml.read("nvmlDeviceGetName", part.handle)) or f"{card.name} MIG"
    profile = name.partition(" MIG ")[2].strip().replace(" ", "-")
    kind = "-".join(filter(None, (card.type, "MIG", profile)))
    return replace(
        card,
        key=part.key,
        id=part.key,
        name=name,
        type=kind,
        memory=_whole(getattr(nvml.memory(part), "total", None)) or None,
        part_of=card.key,
        counts=(1,),  # CUDA uses only one slice in a process, even if it sees several
    )


def _text(value: object) -> str | None:
    """A text that NVML returned, as str or bytes; None for an empty one or "N/A"."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) and text not in ("", "N/A") else None


def _whole(value: object, limit: int = 2**63) -> int | None:
    """A number that NVML returned; None for "N/A", and for all-ones, which mean unknown."""
    return value if isinstance(value, int) and 0 <= value <= limit else None


def _advised(error: Exception) -> str:
    """The text of an NVML error, with what the user can do about it."""
    advice = _ADVICE.get(type(error).__name__, "run nvidia-smi to see whether the driver works")
    return f"{error} ({advice})"
