"""Pickles PyTorch's tensors as views of their storages.

The storage of a plain tensor, on a device or not, becomes an out-of-band buffer, so it is not
copied into the stream and back. Tensors that share a storage still share it at the receiver, as
with `torch.save`, and so do arrays of NumPy that have the memory of a tensor. But a small part of a
large storage is sent alone, unless the same stream has the whole storage already.
"""

from __future__ import annotations

import bisect
import importlib
import pickle
import sys
from typing import Any, Protocol

from gpunb.data.serialize import pickler
from gpunb.data.serialize.identities import note_mapped
from gpunb.data.serialize.left_out import with_left_out

_HOST = frozenset({"cpu", "meta"})
"""PyTorch's device types for host memory, and "meta" for tensors without data."""

_LARGE = 1 << 20
"""A storage of so many bytes is sent only for tensors that use at least half of it."""


class Counting(Protocol):
    """Is told what is moved from a device."""

    def note(self, nbytes: int, *, generator: bool = False) -> None:
        """Count one moved tensor, or one generator of random numbers."""


class Storages:
    """The storages of one stream.

    Attributes:
        moved: is told which tensors are moved from a device.
        known: by PyTorch's identity, which is equal for all views of a storage.
        whole: the addresses of storages on the host that are sent whole, in order, with their keys.
        arrays: arrays of NumPy on the host, by address and bytes.
    """

    def __init__(self, moved: Counting) -> None:
        self.moved = moved
        self.known: dict[int, _Storage] = {}
        self.whole: list[tuple[int, int]] = []
        self.arrays: dict[tuple[int, int], Any] = {}

    def reduce_host(self, host: Any, nbytes: int) -> Any:
        """Count a moved tensor, and reduce its copy on the host."""
        self.moved.note(nbytes)
        return host.__reduce_ex__(pickler.PROTOCOL)


def reduce_tensor(storages: Storages, tensor: Any) -> Any:
    """Return what a tensor is reduced to; NotImplemented for what its own reducer says."""
    reduced = _without_gradient(storages, tensor)
    torch = sys.modules["torch"]
    leaf = getattr(tensor, "is_leaf", False)
    if not leaf:
        pickler.note_graph()
    plain = type(tensor) in (torch.Tensor, _parameter(torch)) and leaf
    return with_left_out(tensor, reduced) if plain else reduced


def _parameter(torch: Any) -> Any:
    return getattr(getattr(torch, "nn", None), "Parameter", ())


def _without_gradient(storages: Storages, tensor: Any) -> Any:
    torch = sys.modules["torch"]
    where = tensor.device.type
    has_storage = hasattr(tensor, "untyped_storage")
    if has_storage and where != "meta":
        if _is_plain(torch, tensor):
            return _reduce_storage_view(storages, tensor)
        if type(tensor) is _parameter(torch) and not vars(tensor):
            data = tensor.data
            if _is_plain(torch, data):
                _, (*view, _) = _reduce_storage_view(storages, data)
                return _new_parameter, (*view, tensor.requires_grad)
    if where in _HOST or issubclass(type(tensor), _parameter(torch)):
        return NotImplemented  # a parameter is pickled as its data, which is a plain tensor
    host = tensor.detach().cpu()
    if has_storage:
        host.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        vars(host).update(vars(tensor))
        if _is_plain(torch, host):
            # PyTorch's own reducer writes the address of the data, so that equal data would give
            # different bytes each time.
            storages.moved.note(host.nbytes)
            return _reduce_storage_view(storages, host)
    return storages.reduce_host(host, _nbytes(host))


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
        or vars(tensor)
    )


def _reduce_storage_view(storages: Storages, tensor: Any) -> Any:
    storage = tensor.untyped_storage()
    known = storages.known.get(storage._cdata)  # noqa: SLF001 - equal for all views of the storage
    on_device = storage.device.type not in _HOST
    layout, start = tensor, tensor.storage_offset()
    if known is None:
        part = tensor.numel() * tensor.element_size()
        if storage.nbytes() < _LARGE or 2 * part >= storage.nbytes():
            known = _Storage(storage.cpu() if on_device else storage, storage)
            if not on_device:
                bisect.insort(storages.whole, (storage.data_ptr(), storage._cdata))  # noqa: SLF001
                known.array = storages.arrays.get((storage.data_ptr(), storage.nbytes()))
            storages.known[storage._cdata] = known  # noqa: SLF001
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
        storages.moved.note(moved)
    place = start, tuple(layout.size()), layout.stride()
    # A tensor of a graph comes without it. As a leaf, its backward() would do nothing.
    return _tensor, (known, tensor.dtype, place, tensor.requires_grad and tensor.is_leaf)


class _Storage:
    """Stands in the stream for a storage on the host, or for a `part` (start, bytes) of it. Keeps
    `source` alive, so that no other storage gets its identity.

    Attributes:
        array: an array of numpy that came before it in the stream, and has its memory; or None.
    """

    def __init__(
        self, storage: Any, source: Any = None, part: tuple[int, int] | None = None
    ) -> None:
        self.storage = storage
        self.source = source
        self.part = part
        self.array: Any = None

    def __reduce__(self) -> Any:
        start, size = self.part or (0, self.storage.nbytes())
        if not size:
            return _storage, (b"",)
        if self.array is not None:
            return _storage_of, (self.array,)
        ctypes = importlib.import_module("ctypes")  # imported here to keep `import gpunb` fast
        memory = (ctypes.c_ubyte * size).from_address(self.storage.data_ptr() + start)
        # Either attribute keeps the storage alive; `reuse` looks at the name.
        setattr(memory, "owner" if self.storage is self.source else "passing", self.storage)
        return _storage, (pickle.PickleBuffer(memoryview(memory).cast("B")),)


def _storage_of(array: Any) -> Any:
    flat = array.reshape(-1).view("u1")
    return importlib.import_module("torch").from_numpy(flat).untyped_storage()


def _storage(memory: Any) -> Any:
    torch = importlib.import_module("torch")
    if not len(memory):
        return torch.UntypedStorage(0)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if len(memory) < _LARGE:  # PyTorch cannot resize a storage in memory of others
        return tensor.clone().untyped_storage()
    storage = tensor.untyped_storage()
    note_mapped(storage, memory)
    return storage


def _new_parameter(storage: Any, dtype: Any, place: tuple[Any, ...], requires_grad: bool) -> Any:
    data = _tensor(storage, dtype, place, requires_grad=False)
    return importlib.import_module("torch").nn.Parameter(data, requires_grad)


def _tensor(storage: Any, dtype: Any, place: tuple[Any, ...], requires_grad: bool) -> Any:
    torch = importlib.import_module("torch")
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)
    return tensor.requires_grad_() if requires_grad else tensor


def reduce_array(storages: Storages, array: Any) -> Any:
    """Reduce an array that has the memory of a tensor of the stream to a view of that."""
    start, size = array.ctypes.data, array.nbytes
    flags = array.flags
    if not size or array.dtype.hasobject or not (flags.c_contiguous and flags.writeable):
        return NotImplemented
    at = bisect.bisect(storages.whole, (start + 1,)) - 1
    if at >= 0:
        address, key = storages.whole[at]
        known = storages.known[key]
        if start - address <= known.storage.nbytes() - size:
            return _array, (known, array.dtype, start - address, array.shape)
    storages.arrays[start, size] = array
    return NotImplemented


def _array(storage: Any, dtype: Any, start: int, shape: tuple[int, ...]) -> Any:
    numpy, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return numpy.ndarray(shape, dtype, whole, start)


def reduce_generator(storages: Storages, generator: Any) -> Any:
    """Reduce a generator of a device to one of the host with its seed."""
    if generator.device.type in _HOST:
        return NotImplemented
    storages.moved.note(0, generator=True)
    return _generator, (generator.initial_seed(),)


def _generator(seed: int) -> Any:
    return importlib.import_module("torch").Generator().manual_seed(seed)
