"""What there is (`Machine`), what is asked (`Demand`) and what is given (`Allocation`).

Two rules hold everywhere below this module: amounts are integers, with `UNIT` of them to one
whole device or CPU, so that sums are exact; and devices are known by their stable `key`. Floats
and device indices exist only at the border, in the functions that read what a user wrote.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

UNIT = 10_000
"""Integer units in one whole device, CPU or custom resource."""

GPU = "GPU"
"""The resource that most devices count as; it is asked for by `num_gpus`."""

TYPE_PREFIX = "accelerator_type:"

_BYTES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _BYTES[_letter] = _BYTES[f"{_letter}IB"] = 1024**_power
    _BYTES[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*\Z")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator device (or one that exists only in the books).

    Attributes:
        key: stable identity, the UUID where the device has one.
        id: what the user sees and what the visibility variable holds; a str only for UUIDs and
            MIG slices.
        name: the marketing name the driver reports.
        type: the accelerator type a task may ask for, such as ``"A100"``; None if unknown.
        memory: bytes on the device; None if unknown (logical devices).
        vendor: name of the accelerator plug-in that pins and measures it.
        logical: True if no hardware stands behind it.
        capability: what code it runs: CUDA's compute capability ("8.0"), or the architecture
            ("gfx942"); None if unknown.
        pin: what the visibility variable holds where the id would not be clear; None for the id.
        part_of: the key of the card that this is a slice of; None for a whole card.
        resource: what it counts as: ``"GPU"`` is asked for by `num_gpus`, any other by
            ``resources={name: number}``.
        whole: True if it is given out as a whole only, never in parts.
        counts: how many of them one process may have; empty for any number.
    """

    key: str
    id: int | str
    name: str
    type: str | None = None
    memory: int | None = None
    vendor: str = "logical"
    logical: bool = False
    capability: str | None = None
    pin: str | None = None
    part_of: str | None = None
    resource: str = GPU
    whole: bool = False
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that can be given out. Amounts are in units of 1/10,000.

    `most` are the units of GPUs that may be given out at once; None for all.
    """

    devices: tuple[Device, ...] = ()
    cpus: int = 0
    resources: tuple[tuple[str, int], ...] = ()
    most: int | None = None

    def totals(self) -> dict[str, float]:
        """The machine as `cluster_resources()` shows it: whole numbers are one device or CPU."""
        totals: dict[str, float] = {}
        if self.cpus:
            totals["CPU"] = self.cpus / UNIT
        for device in self.devices:
            totals[device.resource] = totals.get(device.resource, 0.0) + 1.0
        if self.most is not None and GPU in totals:
            totals[GPU] = min(totals[GPU], self.most / UNIT)
        for device in self.devices:
            if device.type:
                name = TYPE_PREFIX + device.type
                totals[name] = totals.get(name, 0.0) + 1.0
        totals.update({name: amount / UNIT for name, amount in self.resources if amount})
        return totals


@dataclass(frozen=True, slots=True)
class Demand:
    """What one task asks for. Equal demands wait in one queue.

    Attributes:
        gpus: units of device; below `UNIT` a part of one device, else a multiple of `UNIT`.
        gpu_memory: bytes of one device, instead of `gpus`; 0 if not asked.
        cpus: units of CPU.
        resources: custom resources, sorted by name, in units.
        types: accepted accelerator types in order of preference; empty for any.
        min_memory: bytes that each device must have altogether; 0 for any.
    """

    gpus: int = 0
    gpu_memory: int = 0
    cpus: int = 0
    resources: tuple[tuple[str, int], ...] = ()
    types: tuple[str, ...] = ()
    min_memory: int = 0

    @property
    def wants_device(self) -> bool:
        return bool(self.gpus or self.gpu_memory)

    def __str__(self) -> str:
        parts = []
        if self.gpus:
            parts.append(f"{amount(self.gpus)} GPU")
        if self.gpu_memory:
            parts.append(f"{size_text(self.gpu_memory)} of GPU memory")
        if self.types:
            parts.append("type " + " or ".join(self.types))
        if self.min_memory:
            parts.append(f"{size_text(self.min_memory)} or more on each")
        if self.cpus:
            parts.append(f"{amount(self.cpus)} CPU")
        parts.extend(f"{amount(value)} {name}" for name, value in self.resources)
        return ", ".join(parts) or "nothing"


Shares: TypeAlias = tuple[tuple[str, int], ...]
"""(device key, units) pairs in device order"""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What one worker holds: shares of devices, CPUs and custom resources."""

    shares: Shares = ()
    cpus: int = 0
    resources: tuple[tuple[str, int], ...] = ()


def amount(units: int) -> str:
    """Units as a person writes them: ``5000`` is ``"0.5"``, ``20000`` is ``"2"``."""
    return f"{units / UNIT:.4f}".rstrip("0").rstrip(".")


def devices_text(devices: Iterable[Sequence[Any]], *, shares: bool = True) -> str:
    """Devices, as triples of resource, id and share, the way a person reads them: such as
    ``"GPU 0 (0.5), NPU 1 (1)"``, or without shares ``"GPU 0, 1, NPU 1"``."""
    if shares:
        return ", ".join(f"{kind} {ident} ({share:g})" for kind, ident, share in devices)
    kinds: dict[str, list[str]] = {}
    for kind, ident, _ in devices:
        kinds.setdefault(kind, []).append(str(ident))
    return ", ".join(f"{kind} {', '.join(ids)}" for kind, ids in kinds.items())


def size_text(size: float) -> str:
    """Bytes as a person writes them, for example ``"40 GiB"``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def parse_size(value: float | str, name: str) -> int:
    """Bytes from a number of bytes or a text such as ``"10GiB"``, ``"512 MB"``, ``"1.5g"``.

    Raises:
        ValueError: negative, zero, not a number, or an unknown unit.
        TypeError: neither a number nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        raise TypeError(
            f"{name} must be a number of bytes or a text such as '10GiB', "
            f"not {value!r} of type {type(value).__name__}"
        )
    if isinstance(value, str):
        match = _SIZE.match(value)
        if not match or match[2].upper() not in _BYTES:
            raise ValueError(
                f"{name}={value!r} is not a size: write a number and a unit "
                "(B, KB, MB, GB, TB or KiB, MiB, GiB, TiB), such as '10GiB'"
            )
        size = float(match[1]) * _BYTES[match[2].upper()]
    else:
        size = _float(value)
    if not math.isfinite(size) or size < 1:
        raise ValueError(f"{name}={value!r} must be at least one byte")
    return int(size)


def parse_amount(value: float, name: str) -> int:
    """Units from a non-negative number with at most four decimal places.

    Raises:
        ValueError: negative, not finite, or finer than 0.0001.
        TypeError: not a number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, not {value!r} of type {type(value).__name__}")
    if not math.isfinite(_float(value)):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if hasattr(value, "dtype"):
        value = float(str(value))  # as it reads: a narrow 0.1 is another number in a wide one
    if value < 0:
        raise ValueError(f"{name}={value!r} must not be negative")
    units = round(value * UNIT)
    if value > 0 and (units == 0 or abs(units - value * UNIT) > 1e-6 * max(1.0, value)):
        raise ValueError(
            f"{name}={value!r} is finer than 0.0001, the smallest step: round it to four decimals"
        )
    return units


def type_resource(name: str) -> str | None:
    """The accelerator type that a resource name such as ``accelerator_type:A100`` stands for."""
    return name.removeprefix(TYPE_PREFIX) if name.startswith(TYPE_PREFIX) else None


def _float(value: float) -> float:
    """As a float; infinite where a whole number is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def parse_gpus(value: float, name: str = "num_gpus") -> int:
    """Units of device: a fraction in (0, 1) with four decimals, or a whole number >= 0.

    Raises:
        ValueError: as `parse_amount`, and for a number above 1 that is not whole.
        TypeError: not a number.
    """
    units = parse_amount(value, name)
    if units > UNIT and units % UNIT:
        raise ValueError(
            f"{name}={value!r} is above 1 and not whole: a share is a part of one device, so ask "
            f"for a fraction between 0 and 1 or for whole devices "
            f"({units // UNIT} or {units // UNIT + 1})"
        )
    return units


def parse_resources(value: Mapping[str, float] | None, name: str = "resources") -> dict[str, int]:
    """Custom resources by name, in units; those of amount 0 are left out.

    Raises:
        ValueError: ``CPU`` or ``GPU`` among the names, or a bad amount.
        TypeError: not a mapping of names to numbers.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict of names and amounts, not {value!r}")
    units = {}
    for key, each in value.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"{name} has the name {key!r}: names must be non-empty texts")
        if key in ("CPU", "GPU"):
            option = "num_cpus" if key == "CPU" else "num_gpus"
            raise ValueError(f"{name} must not hold {key!r}: use {option}= for it")
        asked = parse_amount(each, f"{name}[{key!r}]")
        if asked:
            units[key] = asked
    return units


def parse_types(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Accepted accelerator types in order of preference, each once.

    Raises:
        TypeError: neither a text nor a list of texts.
        ValueError: an empty text.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        types: tuple[str, ...] = (value,)
    elif isinstance(value, (list, tuple)):
        types = tuple(value)
    else:
        raise TypeError(f"accelerator_type must be a text or a list of texts, not {value!r}")
    for each in types:
        if not isinstance(each, str):
            raise TypeError(f"accelerator_type must hold texts, not {each!r}")
        if not each.strip():
            raise ValueError("accelerator_type must not be empty")
    return tuple(dict.fromkeys(types))
