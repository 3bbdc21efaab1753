"""Starts the local runtime: first the zygote, which boots while the rest is imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpunb.engine.settings import EngineSettings
from gpunb.processes import launcher
from gpunb.scheduler.resources import Machine
from gpunb.system import limits, linux

if TYPE_CHECKING:
    from gpunb.accelerators.mps import Mps
    from gpunb.engine.backend import EngineBackend


settled: Callable[[Machine, Sequence[str]], object] | None = None
"""Called with the machine and the notes about it as soon as they are known, before the slow part
of the start."""


def start(settings: EngineSettings, mps: Mps | None = None) -> EngineBackend:
    """The backend for this process.

    Raises:
        GpunbError: there can be none here, or the system has no room for it.
    """
    linux.check()
    launched = None
    try:
        with limits.explained("a session cannot be started"):
            launched = launcher.zygote() if settings.method == "fork" else None
            if settled is not None:
                settled(settings.machine, settings.notes)
            from gpunb.engine.backend import EngineBackend

            return EngineBackend(settings, launched, mps)
    except Exception:
        if launched is not None:
            launcher.end(launched)
        raise
