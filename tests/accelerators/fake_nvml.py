"""A stand-in for `pynvml`, with the machine it reports made up from `Card`s.

It does what NVML documents and what pynvml adds: its errors are pynvml's own classes, every call
before nvmlInit or after the last nvmlShutdown fails, nvmlInit and nvmlShutdown count, handles die
with the library, and whatever a card does not say is Not Supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30


@dataclass
class Card:
    """One GPU. `raises` and `answers` are by function name, and go before the other fields. It is
    in MIG mode if it has `slices`; None stands for a place without one."""

    name: str | bytes = "NVIDIA A100-SXM4-40GB"
    uuid: str | bytes = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    pci: tuple[int, int, int] = (0, 0x07, 0)
    total: int = 40 * GIB
    used: int = 0
    reserved: int = 512 * 2**20
    busy: int = 0
    celsius: int = 35
    milliwatts: int = 71_400
    compute: dict[int, int | None] = field(default_factory=dict)
    graphics: dict[int, int | None] = field(default_factory=dict)
    unreachable: int | None = None
    raises: dict[str, int] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    slices: tuple[Card | None, ...] | None = None


@dataclass(eq=False)
class _Handle:
    card: Card
    session: int


class FakeNvml(ModuleType):
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVMLError = pynvml.NVMLError
    NVMLLibraryMismatchError = pynvml.NVMLLibraryMismatchError
    nvmlMemory_v2: int | None = pynvml.nvmlMemory_v2  # noqa: N815 - pynvml's name

    def __init__(self, *cards: Card, init: int | None = None, count: int | None = None) -> None:
        """`init` and `count` are codes of the errors that nvmlInit and the count raise."""
        super().__init__("pynvml")
        self.cards = cards
        self.init_error = init
        self.count_error = count
        self.opened = 0
        self.inits = 0
        self.session = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.inits += 1
        _raise(self.init_error)
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._check()
        self.opened -= 1
        self.session += self.opened == 0

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check()
        _raise(self.count_error)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:  # noqa: N802
        self._check()
        card = self.cards[index]
        _raise(card.unreachable)
        return _Handle(card, self.session)

    def __getattr__(self, function: str) -> Callable[..., Any]:
        if not function.startswith("nvmlDevice"):
            raise AttributeError(function)

        def call(handle: _Handle, *arguments: Any) -> Any:
            self._check()
            assert handle.session == self.session, "a handle from before nvmlShutdown"
            _raise(handle.card.raises.get(function))
            if function in handle.card.answers:
                return handle.card.answers[function]
            if function == "nvmlDeviceGetMigDeviceHandleByIndex":
                part = (handle.card.slices or ())[arguments[0]]
                _raise(pynvml.NVML_ERROR_NOT_FOUND if part is None else None)
                return _Handle(part, self.session)
            return _reading(handle.card, function, arguments)

        return call

    def _check(self) -> None:
        _raise(None if self.opened else pynvml.NVML_ERROR_UNINITIALIZED)


def _reading(  # noqa: C901 - one case for each function of NVML
    card: Card, function: str, arguments: tuple[Any, ...]
) -> Any:
    match function.removeprefix("nvmlDeviceGet"):
        case "Name":
            return card.name
        case "UUID":
            return card.uuid
        case "PciInfo":
            domain, bus, device = card.pci
            return SimpleNamespace(domain=domain, bus=bus, device=device)
        case "MemoryInfo" if arguments in ((), (None,)):  # the first version counts the reserve in
            return SimpleNamespace(total=card.total, used=card.used + card.reserved)
        case "MemoryInfo":
            return SimpleNamespace(total=card.total, used=card.used, reserved=card.reserved)
        case "UtilizationRates":
            return SimpleNamespace(gpu=card.busy, memory=0)
        case "Temperature":
            return card.celsius
        case "PowerUsage":
            return card.milliwatts
        case "ComputeRunningProcesses":
            return running(card.compute)
        case "GraphicsRunningProcesses":
            return running(card.graphics)
        case "MigMode" if card.slices is not None:
            return [1, 1]
        case "MaxMigDeviceCount" if card.slices is not None:
            return len(card.slices)
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def running(memory: dict[int, int | None]) -> list[SimpleNamespace]:
    """A list of processes as NVML returns it, from bytes by pid."""
    return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in memory.items()]


def _raise(code: int | None) -> None:
    if code is not None:
        raise pynvml.NVMLError(code)
