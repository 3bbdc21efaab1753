"""How many threads numerical libraries may use in a worker.

Workers that share a machine should not each start a thread for every core. Libraries that are
loaded later read it from the environment; those that the zygote has loaded must be told.

OpenBLAS starts its threads when it is told a number, and would first start the number it was
loaded with: so the zygote loads it with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_OPENBLAS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_OPENMP = ("omp_set_num_threads",)

_blas: list[Callable[[int], object]] = []
_openmp: list[Callable[[int], object]] = []


@contextlib.contextmanager
def single() -> Iterator[None]:
    """While libraries are imported that may load OpenBLAS: with one thread, unless the user has
    said how many."""
    if any(name in os.environ for name in VARIABLES):
        yield
        return
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]


def find() -> None:
    """Look for the libraries that are loaded now. In the zygote, as it takes a millisecond."""
    paths = _loaded()
    _blas[:] = _setters([each for each in paths if "openblas" in os.path.basename(each)], _OPENBLAS)
    _openmp[:] = _setters([each for each in paths if "omp" in os.path.basename(each)], _OPENMP)


def obey(environment: Mapping[str, str | None]) -> None:
    """Tell the loaded libraries what the environment asks for."""
    text = environment.get(VARIABLES[0])
    if not text or not text.isdigit() or int(text) < 1:
        return
    count = int(text)
    for setter in (*_openmp, *(_blas if count > 1 else ())):
        setter(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)


def _setters(paths: list[str], names: tuple[str, ...]) -> list[Callable[[int], object]]:
    found = []
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for name in names:
            if hasattr(library, name):
                setter = getattr(library, name)
                setter.argtypes, setter.restype = [ctypes.c_int], None
                found.append(setter)
                break
    return found


def _loaded() -> list[str]:
    """Paths of the shared libraries of this process."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.rstrip("\n").partition("/")[2] for line in maps if ".so" in line}
    except OSError:
        return []
    return sorted(f"/{path}" for path in paths)
