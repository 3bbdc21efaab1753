"""Takes the place of libcuda.so.1: contexts on the stand-in GPU, which take memory there."""

from __future__ import annotations

import os
from typing import Any

import card_memory as memory

FAILS = "GPUNB_STAND_IN_FAILS"
"""Environment variable: the name of a function that fails."""

UNKNOWN = 999


class Driver:
    """The functions that gpunb calls; others succeed too."""

    def __init__(self) -> None:
        self.parked = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*_: Any) -> int:
            if name == os.environ.get(FAILS):
                return UNKNOWN
            if name == "cuDevicePrimaryCtxRetain":
                memory.take(memory.CONTEXT)
            elif name == "cuCheckpointProcessCheckpoint":
                self.parked = memory.used().get(os.getpid(), 0)
                memory.take(0)
            elif name == "cuCheckpointProcessRestore":
                memory.take(self.parked)
            return 0

        return call


def install(module: Any) -> None:
    """Let the module `ctypes` load the stand-in."""
    real, found = module.CDLL, Driver()

    def load(name: str | None, *args: Any, **options: Any) -> Any:
        return found if name == "libcuda.so.1" else real(name, *args, **options)

    module.CDLL = load
