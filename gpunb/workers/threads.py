"""How many threads numerical libraries may use in a worker.

Workers that share a machine should not each start a thread for every core. Libraries that are
loaded later read it from the environment; those that the zygote has loaded must be told.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)

_found: list[Callable[[int], object]] = []


def find() -> None:
    """Look for the libraries that are loaded now. In the zygote, as it takes a millisecond."""
    _found.clear()
    for path in _loaded("openblas"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in _SETTERS:
            if hasattr(library, name):
                setter = getattr(library, name)
                setter.argtypes, setter.restype = [ctypes.c_int], None
                _found.append(setter)
                break


def obey(environment: Mapping[str, str | None]) -> None:
    """Tell the loaded libraries what the environment asks for."""
    text = environment.get(VARIABLES[0])
    if not text or not text.isdigit() or int(text) < 1:
        return
    count = int(text)
    for setter in _found:
        setter(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def _loaded(part: str) -> list[str]:
    """Paths of the shared libraries of this process that have `part` in their names."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.rstrip("\n").partition("/")[2] for line in maps if ".so" in line}
    except OSError:
        return []
    return sorted(f"/{path}" for path in paths if part in os.path.basename(path))
