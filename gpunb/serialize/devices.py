"""Tensors on their way home from a worker: those on a device as host memory.

Their own libraries would make them on a device again wherever they arrive, and so bring a CUDA
context into the notebook's process. No library is imported for this: what is not loaded has made
no tensor.

Plain tensors of PyTorch, on the host too, leave their storage to `values` as a buffer, so it is
not copied into the stream and back. Tensors that share a storage still share it when they arrive,
as with `torch.save`; but of a large storage a small part travels alone, unless the whole has
travelled before it.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gpunb.core.resources import size_text
from gpunb.serialize import values

__all__ = ["Moved", "moving", "staying"]

_LIBRARIES = ("torch", "jax", "cupy")
_HOST = frozenset({"cpu", "meta"})
"""Device types of PyTorch that are none; tensors on "meta" have no data."""

_LARGE = 1 << 20
"""Bytes from which on a storage is not sent for the sake of less than half of it."""

_Reducer = Callable[["Tensors", Any], Any]


def moving() -> Moved | None:
    """What to count with what is moved to the host; None if no library is loaded that has
    devices."""
    return Moved() if any(name in sys.modules for name in _LIBRARIES) else None


def staying() -> Staying | None:
    """As `moving`, for what must not leave a device unasked."""
    return Staying() if any(name in sys.modules for name in _LIBRARIES) else None


class Moved:
    """While it is entered, what this thread pickles leaves devices, and is counted.

    Attributes:
        count: tensors and arrays.
        nbytes: of device memory that was copied.
    """

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0

    def __enter__(self) -> Moved:
        self._outer = values.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType
    ) -> None:
        values.enter(self._outer)

    def note(self, nbytes: int) -> None:
        """One more was moved."""
        self.count += 1
        self.nbytes += nbytes

    def pickler(self, pieces: list[Any], buffers: list[memoryview] | None) -> Pickler:
        """What pickles instead of `values.StreamPickler`."""
        return Pickler(pieces, buffers, self)

    def __str__(self) -> str:
        tensors = f"{self.count} tensor{'s' if self.count != 1 else ''}"
        return f"moved {tensors} ({size_text(self.nbytes)}) from the device to host memory"


class Staying(Moved):
    """While it is entered, what is on a device cannot be pickled in this thread: in a notebook's
    own process it belongs to nobody's share."""

    def note(self, nbytes: int) -> None:
        raise TypeError(
            f"it is on a device ({size_text(nbytes)}) in the notebook's own process, and a cell "
            "has devices of its own: send a copy on the host (x = x.cpu()), or make it in a GPU "
            "cell"
        )


class Pickler(values.StreamPickler):
    """Pickles tensors and arrays of devices as host memory."""

    def __init__(self, pieces: list[Any], buffers: list[memoryview] | None, moved: Moved) -> None:
        super().__init__(pieces, buffers)
        self._tensors = Tensors(moved)

    def reducer_override(self, obj: Any) -> Any:
        """As cloudpickle does, but for what is a tensor."""
        reduced = self._tensors.reduce(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class Tensors:
    """Those of one stream, and how they are pickled."""

    def __init__(self, moved: Moved) -> None:
        self.moved = moved
        self.storages: dict[int, _Storage] = {}
        self._reducers: dict[type, _Reducer | None] = {}

    def reduce(self, obj: Any) -> Any:
        """What `reducer_override` returns for a tensor; NotImplemented for anything else."""
        kind = type(obj)
        if kind not in self._reducers:
            self._reducers[kind] = _reducer(obj)
        reduce = self._reducers[kind]
        return NotImplemented if reduce is None else reduce(self, obj)

    def arrived(self, host: Any, nbytes: int) -> Any:
        """Count what was moved, and reduce what has become of it."""
        self.moved.note(nbytes)
        return host.__reduce_ex__(values.PROTOCOL)


def _reducer(obj: Any) -> _Reducer | None:
    """Who knows objects of this type."""
    kind = type(obj)
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and issubclass(kind, getattr(torch, "Tensor", ())):
        return _of_torch
    if jax is not None and isinstance(obj, getattr(jax, "Array", ())):
        return _of_jax
    if "cupy" in sys.modules and any(_of_package(each, "cupy") for each in kind.__mro__):
        return _of_cupy if callable(getattr(kind, "get", None)) else None
    return None


def _of_package(kind: type, name: str) -> bool:
    return str(kind.__module__).partition(".")[0] in (name, f"{name}x")


def _of_cupy(tensors: Tensors, array: Any) -> Any:
    return tensors.arrived(array.get(), array.nbytes if hasattr(array, "nbytes") else 0)


def _of_jax(tensors: Tensors, array: Any) -> Any:
    if all(device.platform == "cpu" for device in array.devices()):
        return NotImplemented
    numpy = sys.modules["numpy"]  # JAX needs it
    return tensors.arrived(numpy.asarray(array), array.nbytes)


# ---------------------------------------------------------------------------------------- PyTorch


def _of_torch(tensors: Tensors, tensor: Any) -> Any:
    torch = sys.modules["torch"]
    where = tensor.device.type
    has_storage = hasattr(tensor, "untyped_storage")
    if has_storage and where != "meta" and _is_plain(torch, tensor):
        return _of_storage(tensors, tensor)
    parameter = getattr(getattr(torch, "nn", None), "Parameter", ())
    if where in _HOST or issubclass(type(tensor), parameter):
        return NotImplemented  # a parameter is pickled as its data, which is a plain tensor
    host = tensor.detach().cpu()
    if has_storage:
        host.requires_grad_(tensor.requires_grad)
        vars(host).update(vars(tensor))
        if _is_plain(torch, host):
            # PyTorch's own way writes down where the data lay, which is elsewhere each time: it
            # would not be the same bytes for the same data.
            tensors.moved.note(host.nbytes)
            return _of_storage(tensors, host)
    return tensors.arrived(host, getattr(host, "nbytes", 0))


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Whether it is nothing but a view of its storage."""
    return type(tensor) is torch.Tensor and not (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks  # noqa: SLF001 - as PyTorch's own `__reduce_ex__`
        or vars(tensor)
    )


def _of_storage(tensors: Tensors, tensor: Any) -> Any:
    storage = tensor.untyped_storage()
    known = tensors.storages.get(storage._cdata)  # noqa: SLF001 - equal for all its views
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
        tensors.moved.count += 1
        tensors.moved.nbytes += moved
    place = start, tuple(layout.size()), layout.stride()
    return _tensor, (known, tensor.dtype, place, tensor.requires_grad)


class _Storage:
    """Stands in the stream for a storage on the host, or for so many bytes of it from a start.
    Keeps `source` alive, so that no other has its identity meanwhile."""

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
        ctypes = importlib.import_module("ctypes")  # not loaded by all who import this package
        memory = (ctypes.c_ubyte * size).from_address(self.storage.data_ptr() + start)
        # Either keeps it alive; `reuse` tells them apart.
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
