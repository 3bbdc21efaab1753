"""The settings of an engine: the checked arguments of `init`, and what was found for them."""

from __future__ import annotations

from dataclasses import dataclass

from gpunb.scheduler.resources import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How an engine is started.

    Attributes:
        machine: the devices, CPUs and custom resources of the session.
        method: ``"fork"`` or ``"spawn"``, the way in which workers start.
        preload: modules that the user wants imported before workers are forked.
        own_preload: modules of gpunb that are imported before these.
        follow: bytes that a process with the preloaded modules that tasks have imported may have;
            0 preloads none of these.
        vendors: the vendors with hardware in this machine.
        notes: sentences for the user.
        object_memory: the limit of results and `put` values together, in bytes.
        spill: the folder for objects beyond that limit; None refuses them.
        share: ``"warn"``, ``"kill"`` or ``"off"``, for tasks beyond their share of a device.
        caps: whether frameworks are told to keep to a task's share.
        park_after: seconds after which idle actors are parked; None for never.
        prepare: keys of the devices on which a prepared worker waits for a task.
    """

    machine: Machine
    method: str = "fork"
    preload: tuple[str, ...] = ()
    own_preload: tuple[str, ...] = ()
    follow: int = 0
    vendors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    object_memory: int
    spill: str | None = None
    share: str = "warn"
    caps: bool = True
    park_after: float | None = None
    prepare: tuple[str, ...] = ()
