"""Limits the threads of numerical libraries in a worker.

Workers that share a machine should not each start a thread for every core. Libraries that are
loaded later read it from the environment; those that the zygote has loaded must be told.

OpenBLAS starts its threads in its function that sets their number, and they wait busily for 20 ms.
Most tasks never need them, so a worker avoids that:

1. The zygote loads OpenBLAS with one thread, or that function would first start all others.
2. OpenBLAS stops its threads before a fork. Its next call that needs threads starts as many as its
   variable `blas_num_threads` says. So a worker that has made no such call writes the variables.
3. Where these variables cannot be seen, or threads run already, the worker calls the function.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpunb.protocol.messages import THREAD_VARIABLES

_OPENBLAS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
_OPENBLAS_CONFIG = ("scipy_openblas_get_config64_", "openblas_get_config64_", "openblas_get_config")
_OPENMP = ("omp_set_num_threads",)

_blas: list[Callable[[int], object]] = []
_openmp: list[Callable[[int], object]] = []
_last_count: int | None = None


@contextlib.contextmanager
def single() -> Iterator[None]:
    """While libraries are imported that may load OpenBLAS: with one thread, unless the user has
    said how many."""
    if any(name in os.environ for name in THREAD_VARIABLES):
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
    blas = _libraries(each for each in paths if "openblas" in os.path.basename(each))
    openmp = _libraries(each for each in paths if "omp" in os.path.basename(each))
    _blas[:] = [_openblas(each, set_) for each in blas if (set_ := _function(each, _OPENBLAS))]
    _openmp[:] = [set_ for each in openmp if (set_ := _function(each, _OPENMP))]


def obey(environment: Mapping[str, str | None]) -> None:
    """Tell the loaded libraries what the environment asks for."""
    global _last_count
    text = environment.get(THREAD_VARIABLES[0])
    if not text or not text.isdigit() or int(text) < 1:
        return
    count = int(text)
    changed, _last_count = _last_count is not None and _last_count != count, count
    if changed:
        find()  # earlier tasks may have loaded more, which have read another number
    for setter in (*_openmp, *(_blas if count > 1 or changed else ())):
        setter(count)
    torch, limits = sys.modules.get("torch"), sys.modules.get("threadpoolctl")
    if torch is not None:
        torch.set_num_threads(count)
    if changed and limits is not None:
        limits.threadpool_limits(count)  # it knows more libraries


def _libraries(paths: Iterable[str]) -> Iterator[ctypes.CDLL]:
    for path in paths:
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(path)


def _function(library: ctypes.CDLL, names: tuple[str, ...]) -> Any:
    """Return the library's first function of these names, or None."""
    return next((getattr(library, name) for name in names if hasattr(library, name)), None)


def _openblas(library: ctypes.CDLL, setter: Callable[[int], object]) -> Callable[[int], object]:
    """Return a function that sets the number of threads, and starts none before they are needed."""
    config = _function(library, _OPENBLAS_CONFIG)
    try:
        running = ctypes.c_int.in_dll(library, "blas_server_avail")
        numbers = [
            ctypes.c_int.in_dll(library, name) for name in ("blas_num_threads", "blas_cpu_number")
        ]
        config.restype = ctypes.c_char_p
        most = int(config().partition(b"MAX_THREADS=")[2].split()[0])
    except (ValueError, AttributeError, IndexError):  # this build hides them
        return setter

    def set_number(count: int) -> None:
        if running.value:
            setter(count)
        else:
            for each in numbers:
                each.value = min(count, most)

    return set_number


def _loaded() -> list[str]:
    """Paths of the shared libraries of this process."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.rstrip("\n").partition("/")[2] for line in maps if ".so" in line}
    except OSError:
        return []
    return sorted(f"/{path}" for path in paths)
