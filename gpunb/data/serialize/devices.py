"""Pickles tensors on a device as host memory, on the way from a worker to the notebook.

Their libraries would make them on a device again at the receiver, and so make a CUDA context in the
notebook's process. No library is imported here: without a loaded library there are no tensors.

The storage of a plain PyTorch tensor, on a device or not, becomes an out-of-band buffer, so it is
not copied into the stream and back. Tensors that share a storage still share it at the receiver, as
with `torch.save`. But a small part of a large storage is sent alone, unless the same stream has the
whole storage already.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gpunb.data.serialize import pickler
from gpunb.scheduler.resources import size_text

__all__ = ["Moved", "moving", "staying"]

_LIBRARIES = ("torch", "jax", "cupy")
_HOST = frozenset({"cpu", "meta"})
"""PyTorch's device types for host memory, and "meta" for tensors without data."""

_LARGE = 1 << 20
"""A storage of so many bytes is sent only for tensors that use at least half of it."""

_Reducer = Callable[["Tensors", Any], Any]


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

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors here, and other objects as cloudpickle does."""
        reduced = self._tensors.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class Tensors:
    """The tensors of one stream."""

    def __init__(self, moved: Moved) -> None:
        self.moved = moved
        self.storages: dict[int, _Storage] = {}
        self._reducers: dict[type, _Reducer | None] = {}

    def reduce(self, obj: Any) -> Any:
        """Return the reduced tensor for `reducer_override`; NotImplemented for other objects."""
        kind = type(obj)
        if kind not in self._reducers:
            self._reducers[kind] = _reducer(obj)
        reduce = self._reducers[kind]
        return NotImplemented if reduce is None else reduce(self, obj)

    def reduce_host(self, host: Any, nbytes: int) -> Any:
        """Count a moved tensor, and reduce its copy on the host."""
        self.moved.note(nbytes)
        return host.__reduce_ex__(pickler.PROTOCOL)


def _reducer(obj: Any) -> _Reducer | None:
    """Return the reducer for objects of this type; None if they are no tensors."""
    kind = type(obj)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return _reduce_torch
    if torch is not None and issubclass(kind, getattr(torch, "Generator", ())):
        return _reduce_generator
    if jax is not None and isinstance(obj, getattr(jax, "Array", ())):
        return _reduce_jax
    if "cupy" in sys.modules and any(_is_of_package(each, "cupy") for each in kind.__mro__):
        return _reduce_cupy if callable(getattr(kind, "get", None)) else None
    return None


def _is_of_package(kind: type, name: str) -> bool:
    return str(kind.__module__).partition(".")[0] in (name, f"{name}x")


def _reduce_cupy(tensors: Tensors, array: Any) -> Any:
    return tensors.reduce_host(array.get(), array.nbytes if hasattr(array, "nbytes") else 0)


def _reduce_jax(tensors: Tensors, array: Any) -> Any:
    if all(device.platform == "cpu" for device in array.devices()):
        return NotImplemented
    numpy = sys.modules["numpy"]  # JAX needs it
    return tensors.reduce_host(numpy.asarray(array), array.nbytes)


# ---------------------------------------------------------------------------------------- PyTorch


def _reduce_torch(tensors: Tensors, tensor: Any) -> Any:
    reduced = _without_gradient(tensors, tensor)
    torch = sys.modules["torch"]
    plain = type(tensor) in (torch.Tensor, _parameter(torch)) and getattr(tensor, "is_leaf", False)
    gradient = tensor.grad if plain else None
    if gradient is None:
        return reduced
    # PyTorch's own reducer leaves the gradient out: the optimizer's next step would do nothing.
    whole = tensor.__reduce_ex__(pickler.PROTOCOL) if reduced is NotImplemented else reduced
    return (*whole[:2], gradient, None, None, _set_gradient) if len(whole) == 2 else reduced


def _reduce_generator(tensors: Tensors, generator: Any) -> Any:
    if generator.device.type in _HOST:
        return NotImplemented
    tensors.moved.note(0, generator=True)
    return _generator, (generator.initial_seed(),)


def _generator(seed: int) -> Any:
    return importlib.import_module("torch").Generator().manual_seed(seed)


def _set_gradient(tensor: Any, gradient: Any) -> None:
    tensor.grad = gradient


def _parameter(torch: Any) -> Any:
    return getattr(getattr(torch, "nn", None), "Parameter", ())


def _without_gradient(tensors: Tensors, tensor: Any) -> Any:
    torch = sys.modules["torch"]
    where = tensor.device.type
    has_storage = hasattr(tensor, "untyped_storage")
    if has_storage and where != "meta" and _is_plain(torch, tensor):
        return _reduce_storage_view(tensors, tensor)
    if where in _HOST or issubclass(type(tensor), _parameter(torch)):
        return NotImplemented  # a parameter is pickled as its data, which is a plain tensor
    host = tensor.detach().cpu()
    if has_storage:
        host.requires_grad_(tensor.requires_grad)
        vars(host).update(vars(tensor))
        if _is_plain(torch, host):
            # PyTorch's own reducer writes the address of the data, so that equal data would give
            # different bytes each time.
            tensors.moved.note(host.nbytes)
            return _reduce_storage_view(tensors, host)
    return tensors.reduce_host(host, _nbytes(host))


def _nbytes(tensor: Any) -> int:
    if getattr(tensor, "is_sparse", False):  # it has no `nbytes`
        return int(tensor._indices().nbytes + tensor._values().nbytes)  # noqa: SLF001
    return int(getattr(tensor, "nbytes", 0))


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Whether the tensor is a view of its storage, and nothing else."""
    return type(tensor) is torch.Tensor and not (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks  # noqa: SLF001 - as PyTorch's own `__reduce_ex__`
        or vars(tensor)
    )


def _reduce_storage_view(tensors: Tensors, tensor: Any) -> Any:
    storage = tensor.untyped_storage()
    known = tensors.storages.get(storage._cdata)  # noqa: SLF001 - equal for all views of the storage
    on_device = storage.device.type not in _HOST
    layout, start = tensor, tensor.storage_offset()
    if known is None:
        part = tensor.numel() * tensor.element_size()
        if storage.nbytes() < _LARGE or 2 * part >= storage.nbytes():
            known = _Storage(storage.cpu() if on_device else storage, storage)
            tensors.storages[storage._cdata] = known  # noqa: SLF001
            moved = storage.nbytes()
        elif on_device or not tensor.is_contiguous():
            layout = tensor.detach().cpu() if on_device else tensor.detach().clone()
            known, start, moved = _Storage(layout.untyped_storage()), layout.storage_offset(), part
        else:
            begin = start * tensor.element_size()
            known, start, moved = _Storage(storage, storage, (begin, part)), 0, part
    else:
        moved = 0
    if on_device:
        tensors.moved.note(moved)
    place = start, tuple(layout.size()), layout.stride()
    return _tensor, (known, tensor.dtype, place, tensor.requires_grad)


class _Storage:
    """Stands in the stream for a storage on the host, or for a `part` (start, bytes) of it. Keeps
    `source` alive, so that no other storage gets its identity."""

    def __init__(
        self, storage: Any, source: Any = None, part: tuple[int, int] | None = None
    ) -> None:
        self.storage = storage
        self.source = source
        self.part = part

    def __reduce__(self) -> Any:
        start, size = self.part or (0, self.storage.nbytes())
        if not size:
            return _storage, (b"",)
        ctypes = importlib.import_module("ctypes")  # imported here to keep `import gpunb` fast
        memory = (ctypes.c_ubyte * size).from_address(self.storage.data_ptr() + start)
        # Either attribute keeps the storage alive; `reuse` looks at the name.
        setattr(memory, "owner" if self.storage is self.source else "passing", self.storage)
        return _storage, (pickle.PickleBuffer(memoryview(memory).cast("B")),)


def _storage(memory: Any) -> Any:
    torch = importlib.import_module("torch")
    if not len(memory):
        return torch.UntypedStorage(0)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _tensor(storage: Any, dtype: Any, place: tuple[Any, ...], requires_grad: bool) -> Any:
    torch = importlib.import_module("torch")
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)
    return tensor.requires_grad_() if requires_grad else tensor
