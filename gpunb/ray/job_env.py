"""The environment of a kernel's calls: its mailbox, variables, folder and path."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpunb.engine.worker_setup import EXPOSE, without_left
from gpunb.protocol.messages import Setup
from gpunb.scheduler.resources import UNIT
from gpunb.scheduler.shares import pool


class JobEnv(NamedTuple):
    """Facts that all calls of a kernel share, until its surroundings change.

    Attributes:
        changes: of the environment since Ray was joined; None for what is gone.
    """

    mailbox: Any
    changes: Mapping[str, str | None]
    directory: str | None
    path: tuple[str, ...]
    argv: tuple[str, ...]


_VISIBLE = "CUDA_VISIBLE_DEVICES"

_BREAKPOINT = "PYTHONBREAKPOINT"

_OWN = ("RAY_", _VISIBLE, "CUDA_DEVICE_ORDER", "PYTHONPATH")
"""Variables that are Ray's to set."""


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that changed, with their new values; None for a variable that is gone."""
    changed: dict[str, str | None] = {
        name: value for name, value in now.items() if before.get(name) != value
    }
    changed.update(dict.fromkeys(before.keys() - now.keys()))
    return {name: value for name, value in changed.items() if not name.startswith(_OWN)}


def setup_of(env: JobEnv, gpus: tuple[int | str, ...], units: int, cells: bool) -> tuple[Any, ...]:
    """The setup of a worker that Ray has started, and given these devices. Frameworks are told to
    keep to a share of so many units; of all they see, if there are none. In one for cells
    ``breakpoint()`` asks in the notebook, instead of waiting for Ray's debugger to be attached."""
    environment = dict(env.changes)
    if cells and os.environ.get(_BREAKPOINT, "").startswith("ray."):
        environment.setdefault(_BREAKPOINT, None)
    if gpus:
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        if sorted(os.environ.get(_VISIBLE, "").split(",")) == sorted(map(str, gpus)):
            environment[_VISIBLE] = ",".join(map(str, gpus))  # the same in ascending order
    elif os.environ.get(EXPOSE) != "1" and env.changes.get(EXPOSE) != "1":
        from gpunb.accelerators import pin_environment  # not what a task on a GPU waits for

        environment.update(without_left(pin_environment(()), os.environ)[0])
    missing = [each for each in env.path if each not in sys.path]
    path = [*(each for each in missing if not each or os.path.exists(each)), *sys.path]
    if set(env.path) <= {*path}:  # the same machine, or one like it: in the same order
        path = [*env.path, *(each for each in path if each not in env.path)]
    cap = pool(units, None) if len(gpus) == 1 and 0 < units < UNIT else None
    return tuple(Setup(environment, gpus, env.directory, path, list(env.argv), cap, 0.0))


class Setups:
    """Makes the setup of each call, or takes that of the call before if it would be the same."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = ()
        self._last: tuple[Any, ...] = ()

    def of(
        self, env: JobEnv, gpus: tuple[int | str, ...], units: int, cells: bool
    ) -> tuple[Any, ...]:
        """As `setup_of`."""
        around = os.environ.get(_VISIBLE), os.environ.get(_BREAKPOINT), [*sys.path]
        made_of = env, gpus, units, cells, around
        # A folder of the path that is not here may come.
        if made_of != self._made_of or not {*env.path} <= {*sys.path}:
            self._made_of, self._last = made_of, setup_of(env, gpus, units, cells)
        return self._last
