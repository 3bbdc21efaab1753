"""What a kernel tells the workers of itself: where its mailbox is, and its surroundings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpunb.core.resources import UNIT
from gpunb.core.shares import pool
from gpunb.runtime.setup import EXPOSE
from gpunb.workers.messages import Setup


class Kit(NamedTuple):
    """What all calls of a kernel have in common, until its surroundings change.

    Attributes:
        changes: of the environment since Ray was joined; None for what is gone.
    """

    box: Any
    changes: Mapping[str, str | None]
    directory: str | None
    path: tuple[str, ...]
    argv: tuple[str, ...]


_VISIBLE = "CUDA_VISIBLE_DEVICES"

_BREAKPOINT = "PYTHONBREAKPOINT"

_OWN = ("RAY_", _VISIBLE, "CUDA_DEVICE_ORDER", "PYTHONPATH")
"""Variables that are Ray's to set."""


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """What the environment has become."""
    found: dict[str, str | None] = {
        name: value for name, value in now.items() if before.get(name) != value
    }
    found.update(dict.fromkeys(before.keys() - now.keys()))
    return {name: value for name, value in found.items() if not name.startswith(_OWN)}


def setup_of(kit: Kit, gpus: tuple[int | str, ...], units: int, cells: bool) -> tuple[Any, ...]:
    """The setup of a worker that Ray has started, and given these devices. Frameworks are told to
    keep to a share of so many units; of all they see, if there are none. In one for cells
    ``breakpoint()`` asks in the notebook, instead of waiting for Ray's debugger to be attached."""
    environment = dict(kit.changes)
    if cells and os.environ.get(_BREAKPOINT, "").startswith("ray."):
        environment.setdefault(_BREAKPOINT, None)
    if gpus:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if sorted(os.environ.get(_VISIBLE, "").split(",")) == sorted(map(str, gpus)):
            environment[_VISIBLE] = ",".join(map(str, gpus))  # the same in ascending order
    elif os.environ.get(EXPOSE) != "1" and kit.changes.get(EXPOSE) != "1":
        from gpunb.accelerators import pin_environment  # not what a task on a GPU waits for

        environment.update(pin_environment(()))
    directory = kit.directory if kit.directory and os.path.isdir(kit.directory) else None
    missing = [each for each in kit.path if each not in sys.path]
    path = [*(each for each in missing if not each or os.path.exists(each)), *sys.path]
    if set(kit.path) <= {*path}:  # the same machine, or one like it: in the same order
        path = [*kit.path, *(each for each in path if each not in kit.path)]
    cap = pool(units, None) if len(gpus) == 1 and 0 < units < UNIT else None
    return tuple(Setup(environment, gpus, directory, path, list(kit.argv), cap, 0.0))
