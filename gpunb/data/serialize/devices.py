"""Pickles tensors on a device as host memory, on the way from a worker to the notebook.

Their libraries would make them on a device again at the receiver, and so make a CUDA context in the
notebook's process. No library is imported here: without a loaded library there are no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gpunb.data.serialize import left_out, pickler, storages
from gpunb.data.serialize.storages import Storages
from gpunb.scheduler.resources import size_text

__all__ = ["Moved", "moving", "staying"]

_LIBRARIES = ("torch", "jax", "cupy")

_Reducer = Callable[[Storages, Any], Any]


def moving() -> Moved | None:
    """Return a context that moves tensors to the host and counts them; None if no library of
    tensors is loaded."""
    return Moved() if any(name in sys.modules for name in _LIBRARIES) else None


def staying() -> Staying | None:
    """Return a context in which tensors on devices cannot be pickled; None as for `moving`."""
    return Staying() if any(name in sys.modules for name in _LIBRARIES) else None


class Moved:
    """A context in which this thread pickles tensors and arrays of devices as host memory.

    Attributes:
        count: tensors and arrays that were moved.
        nbytes: bytes of device memory that were copied.
        generators: generators of random numbers that were moved.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self.generators = 0

    def __enter__(self) -> Moved:
        self._outer = pickler.set_moving(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType
    ) -> None:
        pickler.set_moving(self._outer)

    def note(self, nbytes: int, *, generator: bool = False) -> None:
        """Count one moved tensor, or one generator of random numbers."""
        if generator:
            self.generators += 1
        else:
            self.count += 1
            self.nbytes += nbytes

    def pickler(self, pieces: list[Any], buffers: list[memoryview] | None) -> Pickler:
        """Return the pickler that replaces `pickler.StreamPickler`."""
        return Pickler(pieces, buffers, self)

    def __str__(self) -> str:
        """A note for the user; empty if nothing was moved."""
        parts = []
        if self.count:
            tensors = f"{self.count} tensor{'s' if self.count != 1 else ''}"
            parts.append(
                f"moved {tensors} ({size_text(self.nbytes)}) from the device to host memory"
            )
        if self.generators:
            parts.append(
                "a torch.Generator of the device came home as one of the host, which begins again "
                "from the same seed"
            )
        return "; ".join(parts)


class Staying(Moved):
    """A context in which tensors on a device cannot be pickled in this thread. It is for the
    notebook's own process, whose tensors belong to no leased share."""

    def note(self, nbytes: int, *, generator: bool = False) -> None:
        raise TypeError(
            f"it is on a device ({size_text(nbytes)}) in the notebook's own process, and a cell "
            "has devices of its own: send a copy on the host (x = x.cpu()), or make it in a GPU "
            "cell"
        )


class Pickler(pickler.StreamPickler):
    """Pickles tensors and arrays of devices as host memory."""

    def __init__(self, pieces: list[Any], buffers: list[memoryview] | None, moved: Moved) -> None:
        super().__init__(pieces, buffers)
        self._tensors = Tensors(moved)
        self._kept = left_out.Kept()
        self._keeps = pickler.keeps_identities()

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors here, and other objects as cloudpickle does."""
        reduced = self._tensors.reduce(obj)
        if self._keeps and (kind := self._kept[type(obj)]) and left_out.is_kept(obj, kind):
            return left_out.identified(obj, kind, reduced)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class Tensors:
    """The tensors of one stream."""

    def __init__(self, moved: Moved) -> None:
        self._storages = Storages(moved)
        self._reducers: dict[type, _Reducer | None] = {}

    def reduce(self, obj: Any) -> Any:
        """Return the reduced tensor for `reducer_override`; NotImplemented for other objects."""
        kind = type(obj)
        if kind not in self._reducers:
            self._reducers[kind] = _reducer(obj)
        reduce = self._reducers[kind]
        return NotImplemented if reduce is None else reduce(self._storages, obj)


def _reducer(obj: Any) -> _Reducer | None:
    """Return the reducer for objects of this type; None if they are no tensors."""
    kind = type(obj)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return storages.reduce_tensor
    if torch is not None and issubclass(kind, getattr(torch, "Generator", ())):
        return storages.reduce_generator
    if torch is not None and (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return storages.reduce_array
    if jax is not None and isinstance(obj, getattr(jax, "Array", ())):
        return _reduce_jax
    if "cupy" in sys.modules and any(_is_of_package(each, "cupy") for each in kind.__mro__):
        return _reduce_cupy if callable(getattr(kind, "get", None)) else None
    return None


def _is_of_package(kind: type, name: str) -> bool:
    return str(kind.__module__).partition(".")[0] in (name, f"{name}x")


def _reduce_cupy(tensors: Storages, array: Any) -> Any:
    return tensors.reduce_host(array.get(), array.nbytes if hasattr(array, "nbytes") else 0)


def _reduce_jax(tensors: Storages, array: Any) -> Any:
    if all(device.platform == "cpu" for device in array.devices()):
        return NotImplemented
    numpy = sys.modules["numpy"]  # JAX needs it
    return tensors.reduce_host(numpy.asarray(array), array.nbytes)
