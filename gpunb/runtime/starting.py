"""Starts the local runtime: first the zygote, which boots while the rest is imported here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpunb.core.resources import Machine
from gpunb.exceptions import GpunbError
from gpunb.workers import launching

if TYPE_CHECKING:
    from gpunb.runtime.local import Local


def start(machine: Machine, *, method: str = "fork", **settings: Any) -> Local:
    """The backend for this process."""
    if sys.platform == "win32":
        raise GpunbError("gpunb runs on Linux; on Windows use it inside WSL")
    launched = launching.zygote() if method == "fork" else None
    from gpunb.runtime.local import Local

    return Local(machine, method=method, launched=launched, **settings)
