"""Resources: what a machine has (`Machine`), a task asks for (`Demand`) and gets (`Allocation`).

Two rules hold everywhere below this module: amounts are integers, with `UNIT` of them to one
whole device or CPU, so that sums are exact; and devices are known by their stable `key`. Floats
and device indices exist only at the border, in the functions that read what a user wrote.
"""

from __future__ import annotations

import functools
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from gpunb.scheduler.frozen import frozen

UNIT = 10_000
"""Integer units in one whole device, CPU or custom resource."""

GPU = "GPU"
"""The resource of most devices, for `num_gpus`."""

TYPE_PREFIX = "accelerator_type:"

_BYTES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _BYTES[_letter] = _BYTES[f"{_letter}IB"] = 1024**_power
    _BYTES[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*\Z")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator device, real or logical.

    Attributes:
        key: stable identity, the UUID where the device has one.
        id: as users see it and as the visibility variable holds it; a str only for UUIDs and MIG
            slices.
        name: the marketing name the driver reports.
        type: the accelerator type a task may ask for, such as ``"A100"``; None if unknown.
        memory: bytes on the device; None if unknown (logical devices).
        vendor: name of the accelerator plug-in that pins and measures it.
        logical: True if there is no hardware.
        capability: CUDA's compute capability ("8.0") or the architecture ("gfx942"); None if
            unknown.
        pin: text for the visibility variable where the id would be ambiguous; None for the id.
        part_of: the key of the card of a slice; None for a whole card.
        resource: the resource it counts as: ``"GPU"`` for `num_gpus`, another name for
            ``resources={name: number}``.
        whole: True if it is never given out in parts.
        counts: the allowed numbers of such devices in one process; empty for any number.
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
    """The resources of a machine, in units. At most `most` units of GPUs are given out at once."""

    devices: tuple[Device, ...] = ()
    cpus: int = 0
    resources: tuple[tuple[str, int], ...] = ()
    most: int | None = None

    def totals(self) -> dict[str, float]:
        """All resources by name, as `cluster_resources()` shows them: 1.0 is one device or CPU."""
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
class Within:
    """The bundle of a placement group.

    Attributes:
        group: the id of the group.
        bundle: the index of the bundle; -1 for any bundle with room.
        capture: whether the tasks that a task in the bundle submits run in the group, too.
    """

    group: int
    bundle: int = -1
    capture: bool = False

    def __str__(self) -> str:
        group = f"placement group #{self.group}"
        return group if self.bundle < 0 else f"bundle {self.bundle} of {group}"


class _Hashed:
    """Room for a hash beside the fields of a dataclass, so that it is neither compared nor sent."""

    __slots__ = ("_hash",)


@dataclass(frozen=True, slots=True)
class Demand(_Hashed):
    """The resources that one task asks for. Equal demands wait in one line.

    Attributes:
        gpus: units of device; below `UNIT` a part of one device, else a multiple of `UNIT`.
        gpu_memory: bytes of one device, instead of `gpus`; 0 if not asked.
        cpus: units of CPU.
        resources: custom resources, sorted by name, in units.
        types: accepted accelerator types in order of preference; empty for any.
        min_memory: least total memory of each device in bytes; 0 for any.
        within: the bundle that must have room for it; None for the machine.
        devices: keys of the only devices to take; empty for any.
    """

    gpus: int = 0
    gpu_memory: int = 0
    cpus: int = 0
    resources: tuple[tuple[str, int], ...] = ()
    types: tuple[str, ...] = ()
    min_memory: int = 0
    within: Within | None = None
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        amounts = self.gpus, self.gpu_memory, self.cpus, self.min_memory
        if min(amounts) < 0 or any(units < 0 for _, units in self.resources):
            raise ValueError(f"{self!r} asks for less than nothing")
        if self.gpus > UNIT and self.gpus % UNIT:
            raise ValueError(f"{self.gpus / UNIT:g} GPUs are neither whole ones nor a part of one")

    def __hash__(self) -> int:
        """Without the fields that seldom differ, and computed once: each task looks its demand up
        several times. The hash of a text is another one in each process, so it does not travel."""
        try:
            return self._hash  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            group = self.within and self.within.group
            found = hash((self.gpus, self.gpu_memory, self.cpus, self.resources, self.types, group))
            object.__setattr__(self, "_hash", found)
            return found

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
        text = ", ".join(parts) or "nothing"
        return text if self.within is None else f"{text} in {self.within}"


@dataclass(frozen=True, slots=True)
class Gang(Demand):
    """The demand of a placement group: the bundles, which are placed together or not at all."""

    bundles: tuple[Demand, ...] = ()

    @classmethod
    def of(cls, bundles: Iterable[Demand]) -> Self:
        """Return the demand for all these bundles together."""
        bundles = tuple(bundles)
        return cls(cpus=sum(each.cpus for each in bundles), bundles=bundles)

    def __str__(self) -> str:
        counts: dict[Demand, int] = {}
        for each in self.bundles:
            counts[each] = counts.get(each, 0) + 1
        return " + ".join(f"{count} x [{each}]" for each, count in counts.items())


Shares: TypeAlias = tuple[tuple[str, int], ...]
"""(device key, units) pairs in device order"""


@frozen
class Allocation:
    """The resources of one worker: shares of devices, CPUs and custom resources.

    Attributes:
        within: the bundle from which they are taken; None for the machine.
        bundles: the parts of the allocation of a `Gang`, one for each of its bundles.
    """

    shares: Shares = ()
    cpus: int = 0
    resources: tuple[tuple[str, int], ...] = ()
    within: Within | None = None
    bundles: tuple[Allocation, ...] = ()


@functools.lru_cache(maxsize=64)
def of_cpus(cpus: int) -> Allocation:
    """The allocation of CPUs only, which most tasks have: the same object for the same number."""
    return Allocation((), cpus)


def amount(units: int) -> str:
    """Units as a decimal number: ``5000`` is ``"0.5"``, ``20000`` is ``"2"``."""
    return f"{units / UNIT:.4f}".rstrip("0").rstrip(".")


def merged(devices: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Return triples of resource, id and share with one triple for each device, which has the sum
    of its shares."""
    found: dict[tuple[str, Any], float] = {}
    for kind, ident, share in devices:
        found[kind, ident] = round(found.get((kind, ident), 0.0) + share, 4)
    return [[*device, share] for device, share in found.items()]


def devices_text(devices: Iterable[Sequence[Any]], *, shares: bool = True) -> str:
    """Triples of resource, id and share in words: ``"GPU 0 (0.5), NPU 1 (1)"``, or without shares
    ``"GPU 0, 1, NPU 1"``."""
    if shares:
        return ", ".join(f"{kind} {ident} ({share:g})" for kind, ident, share in devices)
    kinds: dict[str, list[str]] = {}
    for kind, ident, _ in devices:
        kinds.setdefault(kind, []).append(str(ident))
    return ", ".join(f"{kind} {', '.join(ids)}" for kind, ids in kinds.items())


def size_text(size: float) -> str:
    """Bytes in words, for example ``"40 GiB"``."""
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
        value = float(str(value))  # a float32 of 0.1 is not the float64 of 0.1
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
    """The value as a float; infinite for whole numbers that are too large."""
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
