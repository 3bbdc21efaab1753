"""The environment that lets a worker see its devices and no others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gpunb.accelerators.base import Accelerator, rank
from gpunb.accelerators.registry import find, revision
from gpunb.accelerators.simulated import Logical
from gpunb.core.resources import GPU, Device


def pin_environment(
    devices: Sequence[Device],
    vendors: Sequence[str] = (),
    *,
    expose_on_zero: bool = False,
) -> dict[str, str]:
    """Environment variables of a worker that may use just these devices.

    Args:
        devices: what the worker holds, in any order; the ids in a variable ascend.
        vendors: the plug-ins with hardware on this machine (`Detection.vendors`): the worker sees
            none of their devices besides its own.
        expose_on_zero: without devices, set nothing, so that the worker sees what the kernel
            sees; otherwise it sees none, and CUDA_VISIBLE_DEVICES is empty on any machine, also
            for a worker that has devices of other kinds than GPUs.

    Returns:
        A dict of the caller's own. It is remembered for the next call, which takes about 1 us.

    Raises:
        LookupError: no plug-in has the name of a device's vendor.
    """
    ids = tuple([(device.vendor, device.id, device.pin) for device in devices])
    return _environment(ids, tuple(vendors), expose_on_zero, revision()).copy()


@lru_cache(maxsize=4096)
def _environment(
    ids: tuple[tuple[str, int | str, str | None], ...],
    vendors: tuple[str, ...],
    expose_on_zero: bool,
    _revision: int,
) -> dict[str, str]:
    if not ids and expose_on_zero:
        return {}
    # By variable, not by vendor: logical devices share the variable of the real ones.
    groups: dict[str, tuple[dict[str, Accelerator], list[tuple[int | str, str | None]]]] = {}
    held = [vendor for vendor, *_ in ids]
    without = not any(find(vendor).resource == GPU for vendor in held)
    for vendor in (*vendors, *held, *((Logical.name,) if without else ())):
        accelerator = find(vendor)()
        plugins, _ = groups.setdefault(accelerator.variable or vendor, ({}, []))
        plugins[vendor] = accelerator
    for vendor, id, pin in ids:
        groups[find(vendor).variable or vendor][1].append((id, pin))
    environment: dict[str, str] = {}
    for plugins, group in groups.values():
        group.sort(key=lambda each: rank(each[0]))
        for accelerator in plugins.values():
            environment |= accelerator.environment(
                [id if pin is None else pin for id, pin in group]
            )
    return environment
