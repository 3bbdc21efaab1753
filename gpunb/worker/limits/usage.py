"""Asks the frameworks of this process how much device memory they have.

A device does not always tell what a process has of it: in a container, or where it is shared in
other ways. Nothing is imported for this, and no context is made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gpunb.exceptions import TaskError
from gpunb.protocol import backend

_LIBRARIES = ("torch", "jax", "cupy")
_OF_TORCH = ("cuda", "xpu", "npu", "musa")
"""The parts of PyTorch, and of what vendors add to it, that count memory in the same way; AMD's is
the first."""

_MOST_CAUSES = 8


class ProcessMemory(NamedTuple):
    """Bytes of one of this process's devices, now and at most."""

    now: int
    peak: int


_devices: tuple[int | str, ...] = ()


def begin(devices: Sequence[int | str]) -> None:
    """The devices that this process was given, by id, in the order in which it sees them."""
    global _devices
    _devices = tuple(devices)


def measured() -> dict[int, ProcessMemory]:
    """By position among the devices; empty where no framework has used any."""
    if not _devices or not any(name in sys.modules for name in _LIBRARIES):
        return {}
    found: dict[int, ProcessMemory] = {}
    for read in (_torch, _jax, _cupy):
        try:
            for position, memory in read():
                before = found.get(position, ProcessMemory(0, 0))
                sums = ProcessMemory(before.now + memory.now, before.peak + memory.peak)
                found[position] = sums
        except Exception:  # a framework that is half loaded, or of another version
            continue
    return {position: each for position, each in found.items() if position < len(_devices)}


def _torch() -> list[tuple[int, ProcessMemory]]:
    torch: Any = sys.modules.get("torch")
    for name in _OF_TORCH:
        part = getattr(torch, name, None)
        if part is not None and part.is_initialized():
            return [
                (at, ProcessMemory(part.memory_reserved(at), part.max_memory_reserved(at)))
                for at in range(part.device_count())
            ]
    apple = getattr(getattr(torch, "backends", None), "mps", None)
    if apple is not None and apple.is_available():
        now = torch.mps.driver_allocated_memory()  # PyTorch does not record the peak
        return [(0, ProcessMemory(now, now))]
    return []


def _jax() -> list[tuple[int, ProcessMemory]]:
    jax = sys.modules.get("jax")
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if jax is None or bridge is None or not bridge.backends_are_initialized():
        return []
    found = []
    for at, device in enumerate(each for each in jax.local_devices() if each.platform != "cpu"):
        stats = device.memory_stats() or {}
        now = stats.get("bytes_in_use", 0)
        found.append((at, ProcessMemory(now, stats.get("peak_bytes_in_use", now))))
    return found


def _cupy() -> list[tuple[int, ProcessMemory]]:
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return []
    total = cupy.get_default_memory_pool().total_bytes()  # of the current device
    return [(cupy.cuda.runtime.getDevice(), ProcessMemory(total, total))] if total else []


class Reporter:
    """Says now and then what `measured` finds, while the device itself cannot tell."""

    def __init__(self, period: float, send: Callable[[dict[int, ProcessMemory]], None]) -> None:
        self._period = period
        self._send = send
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpunb-memory", daemon=True).start()

    def _run(self) -> None:
        before: dict[int, ProcessMemory] = {}
        while not self._stop.wait(self._period):
            found = measured()
            if found != before:
                before = found
                try:
                    self._send(found)
                except Exception:  # the kernel is gone
                    return


# ------------------------------------------------------------------------------ out of memory


def explain(error: BaseException | None) -> None:
    """Add to an error for want of device memory who has how much of it."""
    try:
        if not _devices or error is None or not is_short(error):
            return
        if any(_HEAD in each for each in getattr(error, "__notes__", ())):
            return
        table = backend.current().ask("memory", tuple(measured().items()))
        if table:
            error.add_note(f"{_HEAD}\n{table}")
    except Exception:  # the error itself is what matters
        return


_short = False


def ended_with(error: BaseException) -> None:
    """Note the error with which the task ends; the error of another task is not its own."""
    global _short
    own = not any(isinstance(each, TaskError) for each in _chain(error))
    _short = bool(_devices) and own and is_short(error)


def took_short() -> bool:
    """Whether the task that ends now ran out of device memory; asked once for each task."""
    global _short
    short, _short = _short, False
    return short


_HEAD = "The memory of the devices when this was raised:"


def is_short(error: BaseException) -> bool:
    """Whether an error, or what it came of, says that a device has too little memory."""
    return any(map(_is_short, _chain(error)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors that led to it."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo and len(seen) < _MOST_CAUSES:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions


def _is_short(error: BaseException) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if names & _TYPES:
        return True
    text = str(error)[:4000]
    if any(each in text for each in _DRIVERS):
        return True
    if not isinstance(error, RuntimeError | MemoryError) and "XlaRuntimeError" not in str(names):
        return False
    return any(each in text for each in _TEXTS)


_TYPES = {
    "torch.OutOfMemoryError",
    "torch.cuda.OutOfMemoryError",
    "cupy.cuda.memory.OutOfMemoryError",
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError",
}

_DRIVERS = ("cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory")
"""The drivers' own names of the error, in errors of any type."""

_TEXTS = (
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "NPU out of memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "RESOURCE_EXHAUSTED",
    "out_of_memory: CUDA error",
    "Maximum pool size exceeded",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
