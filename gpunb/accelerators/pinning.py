"""Makes the environment variables that show a worker its devices and no others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gpunb.accelerators.base import Accelerator, rank
from gpunb.accelerators.registry import find, revision
from gpunb.accelerators.simulated import Logical
from gpunb.scheduler.resources import GPU, Device


def pin_environment(
    devices: Sequence[Device],
    vendors: Sequence[str] = (),
    *,
    expose_on_zero: bool = False,
    ordered: bool = False,
) -> dict[str, str]:
    """Environment variables of a worker that may use only these devices.

    Args:
        devices: the worker's devices, in any order; the ids in a variable ascend, unless `ordered`
            keeps this order.
        vendors: names of the plug-ins with hardware on this machine (`Detection.vendors`). The
            variables hide all their devices except the worker's own.
        expose_on_zero: whether a worker without devices gets no variables, and so sees the same
            devices as the kernel. If False it sees none, and CUDA_VISIBLE_DEVICES is empty on any
            machine, also for a worker with devices of other kinds than GPUs.

    Returns:
        A new dict. Its content is cached: the next call takes about 1 us.

    Raises:
        LookupError: no plug-in has the name of a device's vendor.
    """
    ids = tuple([(device.vendor, device.id, device.pin) for device in devices])
    return _environment(ids, tuple(vendors), expose_on_zero, ordered, revision()).copy()


@lru_cache(maxsize=4096)
def _environment(
    ids: tuple[tuple[str, int | str, str | None], ...],
    vendors: tuple[str, ...],
    expose_on_zero: bool,
    ordered: bool,
    _revision: int,
) -> dict[str, str]:
    if not ids and expose_on_zero:
        return {}
    # By variable, not by vendor: logical devices use the same variable as real ones.
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
        if not ordered:
            group.sort(key=lambda each: rank(each[0]))
        for accelerator in plugins.values():
            environment |= accelerator.environment(
                [id if pin is None else pin for id, pin in group]
            )
    return environment
