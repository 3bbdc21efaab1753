"""What the frameworks in this process say of the device memory that they have.

A device does not always tell what a process has of it: in a container, or where it is shared in
other ways. Nothing is imported for this, and no context is made.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpunb import backend

_LIBRARIES = ("torch", "jax", "cupy")
_OF_TORCH = ("cuda", "xpu", "npu", "musa")
"""The parts of PyTorch, and of what vendors add to it, that count memory in the same way; AMD's is
the first."""

_MOST_CAUSES = 8


class Memory(NamedTuple):
    """Bytes of one of this process's devices, now and at most."""

    now: int
    peak: int


_devices: tuple[int | str, ...] = ()


def begin(devices: Sequence[int | str]) -> None:
    """The devices that this process was given, by id, in the order in which it sees them."""
    global _devices
    _devices = tuple(devices)


def measured() -> dict[int, Memory]:
    """By position among the devices; empty where no framework has used any."""
    if not _devices or not any(name in sys.modules for name in _LIBRARIES):
        return {}
    found: dict[int, Memory] = {}
    for read in (_torch, _jax, _cupy):
        try:
            for position, memory in read():
                before = found.get(position, Memory(0, 0))
                sums = Memory(before.now + memory.now, before.peak + memory.peak)
                found[position] = sums
        except Exception:  # a framework that is half loaded, or of another version
            continue
    return {position: each for position, each in found.items() if position < len(_devices)}


def _torch() -> list[tuple[int, Memory]]:
    torch: Any = sys.modules.get("torch")
    for name in _OF_TORCH:
        part = getattr(torch, name, None)
        if part is not None and part.is_initialized():
            return [
                (at, Memory(part.memory_reserved(at), part.max_memory_reserved(at)))
                for at in range(part.device_count())
            ]
    apple = getattr(getattr(torch, "backends", None), "mps", None)
    if apple is not None and apple.is_available():
        now = torch.mps.driver_allocated_memory()  # nobody notes the peak
        return [(0, Memory(now, now))]
    return []


def _jax() -> list[tuple[int, Memory]]:
    jax = sys.modules.get("jax")
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if jax is None or bridge is None or not bridge.backends_are_initialized():
        return []
    found = []
    for at, device in enumerate(each for each in jax.local_devices() if each.platform != "cpu"):
        stats = device.memory_stats() or {}
        now = stats.get("bytes_in_use", 0)
        found.append((at, Memory(now, stats.get("peak_bytes_in_use", now))))
    return found


def _cupy() -> list[tuple[int, Memory]]:
    cupy: Any = sys.modules.get("cupy")
    if cupy is None:
        return []
    total = cupy.get_default_memory_pool().total_bytes()  # of the current device
    return [(cupy.cuda.runtime.getDevice(), Memory(total, total))] if total else []


class Reporter:
    """Says now and then what `measured` finds, while the device itself cannot tell."""

    def __init__(self, period: float, tell: Callable[[dict[int, Memory]], None]) -> None:
        self._period = period
        self._tell = tell
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpunb-memory", daemon=True).start()

    def _run(self) -> None:
        before: dict[int, Memory] = {}
        while not self._stop.wait(self._period):
            found = measured()
            if found != before:
                before = found
                try:
                    self._tell(found)
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


_HEAD = "The memory of the devices when this was raised:"


def is_short(error: BaseException) -> bool:
    """Whether an error, or what it came of, says that a device has too little memory."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo and len(seen) < _MOST_CAUSES:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if _says_short(each):
            return True
        todo += [each.__cause__, each.__context__]
    return False


def _says_short(error: BaseException) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if names & _TYPES:
        return True
    if not isinstance(error, RuntimeError | MemoryError) and "XlaRuntimeError" not in str(names):
        return False
    text = str(error)[:4000]
    return any(each in text for each in _TEXTS)


_TYPES = {
    "torch.OutOfMemoryError",
    "torch.cuda.OutOfMemoryError",
    "cupy.cuda.memory.OutOfMemoryError",
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError",
}

_TEXTS = (
    "CUDA out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "NPU out of memory",
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "RESOURCE_EXHAUSTED",
    "out_of_memory: CUDA error",
    "Maximum pool size exceeded",
)
