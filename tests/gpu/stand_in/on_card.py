"""PyTorch on the stand-in GPU: tensors on "cuda" are on the host, and their bytes are counted.

Only the functions that make tensors count bytes. Nothing is given back before the process ends, as
with the caching allocator. A large block is one number, repeated, and takes no memory of the host.
"""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace
from typing import Any

import card_memory as memory

_MAKERS = "arange empty eye full ones rand randn zeros".split()
_LARGE = 2**24


def install(torch: Any) -> None:  # noqa: C901 - one case for each function of PyTorch
    """Change the module."""
    cuda = torch.cuda
    pool = _Pool(torch)

    class OnCard(torch.Tensor):
        """A tensor that claims to be on the device."""

        @property
        def device(self) -> Any:
            return torch.device("cuda", 0)

        @property
        def is_cuda(self) -> bool:
            return True

        def cpu(self, *_: Any, **__: Any) -> Any:
            return self.detach().as_subclass(torch.Tensor).clone()

        def fill_(self, value: Any) -> Any:
            return super().fill_(value) if self.is_contiguous() else self

    def on_card(tensor: Any) -> Any:
        pool.take(tensor.numel() * tensor.element_size())
        return tensor.as_subclass(OnCard)

    def making(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, device: Any = None, **options: Any) -> Any:
            if device is None or torch.device(device).type != "cuda":
                return make(*args, **options, **({"device": device} if device else {}))
            large = len(args) == 1 and isinstance(args[0], int) and args[0] > _LARGE
            if large and make.__name__ != "arange":
                return on_card(make(1, **options).expand(args[0]))
            return on_card(make(*args, **options))

        return made

    for name in _MAKERS:
        setattr(torch, name, making(getattr(torch, name)))
    torch.Generator = _generators(torch.Generator)
    to = torch.Tensor.to

    def moved(tensor: Any, *args: Any, **options: Any) -> Any:
        if args and str(args[0]).startswith("cuda"):
            return tensor if isinstance(tensor, OnCard) else on_card(tensor.detach().clone())
        return to(tensor, *args, **options)

    torch.Tensor.to = moved
    torch.Tensor.cuda = lambda tensor: moved(tensor, "cuda")
    cuda._queued_calls[:] = []
    for name in ("memory_reserved", "memory_allocated"):
        setattr(cuda, name, lambda *_: pool.taken)
        setattr(cuda, f"max_{name}", lambda *_: pool.taken)
    cuda.is_available = lambda: bool(cuda.device_count())
    cuda.device_count = lambda: int(bool(os.environ.get("CUDA_VISIBLE_DEVICES", "0")))
    cuda.is_initialized = lambda: pool.initialized
    cuda.init = cuda._lazy_init = pool.init
    cuda.synchronize = lambda *_: None
    cuda.empty_cache = lambda: None
    cuda.mem_get_info = lambda *_: (memory.TOTAL - sum(memory.used().values()), memory.TOTAL)
    cuda.set_per_process_memory_fraction = pool.limit
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name=memory.NAME, total_memory=memory.TOTAL, uuid=memory.UUID.removeprefix("GPU-")
    )


def _generators(plain: Any) -> Any:
    """PyTorch's class of generators, with those that claim to be of the device."""

    class OnCard(plain):  # type: ignore[misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            on_card = str(device).startswith("cuda")
            return super().__new__(cls) if on_card else plain(device)

        @property
        def device(self) -> Any:
            return sys.modules["torch"].device("cuda", 0)

    return OnCard


class _Pool:
    """The bytes that this process has on the device."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._limit = memory.TOTAL
        self.initialized = False
        self.taken = 0

    def init(self) -> None:
        if not self.initialized:
            self.initialized = True
            if by_mps := os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"):  # "0=512M"
                self._limit = int(by_mps[2:-1]) * 2**20
            memory.take(memory.CONTEXT)
            for call, _ in self._torch.cuda._queued_calls:
                call()

    def limit(self, fraction: float, device: Any = None) -> None:
        self._limit = int(fraction * memory.TOTAL)

    def take(self, nbytes: int) -> None:
        """Note a new block.

        Raises:
            OutOfMemoryError: it is beyond the limit, or the device has no room for it.
        """
        self.init()
        others = sum(size for pid, size in memory.used().items() if pid != os.getpid())
        free = min(self._limit, memory.TOTAL - others - memory.CONTEXT) - self.taken
        if nbytes > free:
            raise self._torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / memory.GIB:.2f} GiB."
            )
        self.taken += nbytes
        memory.take(memory.CONTEXT + self.taken)
