"""Starts the local runtime: first the zygote, which boots while the rest is imported here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpunb import linux
from gpunb.core.resources import Machine
from gpunb.workers import launching

if TYPE_CHECKING:
    from gpunb.runtime.local import Local


settled: Callable[[Machine, Sequence[str]], object] | None = None
"""Is told what there is, and what there is to say of it, before what takes its time."""


def start(machine: Machine, *, method: str = "fork", **settings: Any) -> Local:
    """The backend for this process."""
    linux.check()
    launched = launching.zygote() if method == "fork" else None
    if settled is not None:
        settled(machine, settings.get("notes", ()))
    from gpunb.runtime.local import Local

    return Local(machine, method=method, launched=launched, **settings)
