"""Pickles tensors on a device as host memory, on the way from a worker to the notebook.

Their libraries would make them on a device again at the receiver, and so make a CUDA context in the
notebook's process. No library is imported here: without a loaded library there are no tensors.

The storage of a plain PyTorch tensor, on a device or not, becomes an out-of-band buffer, so it is
not copied into the stream and back. Tensors that share a storage still share it at the receiver, as
with `torch.save`. But a small part of a large storage is sent alone, unless the same stream has the
whole storage already.
"""

from __future__ import annotations

import bisect
import functools
import importlib
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from gpunb.data.serialize import pickler
from gpunb.data.serialize.identities import has_identity, note_mapped
from gpunb.data.serialize.parts import parts
from gpunb.scheduler.resources import size_text

__all__ = ["LEFT_OUT", "Moved", "moving", "staying", "with_graph"]

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
        self._kept = _Kept()
        self._keeps = pickler.keeps_identities()

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors here, and other objects as cloudpickle does."""
        reduced = self._tensors.reduce(obj)
        if self._keeps and (kind := self._kept[type(obj)]) and (kind != _HOOKS or _has_hooks(obj)):
            return _identified(obj, kind, reduced)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


class Tensors:
    """The tensors of one stream."""

    def __init__(self, moved: Moved) -> None:
        self.moved = moved
        self.storages: dict[int, _Storage] = {}
        self.whole: list[tuple[int, int]] = []
        """The addresses of storages on the host that are sent whole, in order, with their keys."""
        self.arrays: dict[tuple[int, int], Any] = {}
        """Arrays of numpy on the host, by address and bytes."""
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
    if torch is not None and (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return _reduce_array
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
    leaf = getattr(tensor, "is_leaf", False)
    if not leaf:
        pickler.note_graph()
    plain = type(tensor) in (torch.Tensor, _parameter(torch)) and leaf
    more = {name: getattr(tensor, name, None) for name in LEFT_OUT} if plain else {}
    more = {name: value for name, value in more.items() if value is not None}
    if not more:
        return reduced
    whole = tensor.__reduce_ex__(pickler.PROTOCOL) if reduced is NotImplemented else reduced
    return (*whole[:2], more, None, None, _set_more) if len(whole) == 2 else reduced


LEFT_OUT = ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
"""What PyTorch's own reducer leaves out. Without the gradient, the optimizer's next step would do
nothing."""


_TENSOR, _OPTIMIZER, _HOOKS = "Tensor", "optim.Optimizer", "hooks"
_KEPT = (_TENSOR, "nn.Module", _OPTIMIZER, "optim.lr_scheduler.LRScheduler")
"""Classes of PyTorch whose instances stay the same objects; see `identities`."""


class _Kept(dict[type, str]):
    """The class of `_KEPT` that a class is or inherits from, `_HOOKS` for dicts that may be
    PyTorch's hooks; empty for others."""

    def __missing__(self, kind: type) -> str:
        torch = sys.modules.get("torch")
        self[kind] = _HOOKS if kind is OrderedDict else ""
        for name in _KEPT if torch is not None else ():
            found = torch
            for part in name.split("."):
                found = getattr(found, part, None)
            if isinstance(found, type) and issubclass(kind, found):
                self[kind] = name
        return self[kind]


def _has_hooks(obj: OrderedDict[Any, Any]) -> bool:
    """Whether this is a dict of PyTorch's hooks, by their numbers. Handles refer to it weakly."""
    if not obj:
        return has_identity(obj)  # its hooks were removed
    number, hook = next(iter(obj.items()))
    return type(number) is int and callable(hook)


def _identified(obj: Any, kind: str, reduced: Any) -> Any:
    """Add the identity of an object to what it is reduced to."""
    if reduced is NotImplemented and kind == "nn.Module" and _is_parametrized(obj):
        reduced = _reduce_parametrized(obj)
    elif reduced is NotImplemented:
        reduced = obj.__reduce_ex__(pickler.PROTOCOL)
    if not isinstance(reduced, tuple):
        return reduced
    if kind == _TENSOR:
        if reduced[-1] is not _set_more:
            return pickler.with_identity(obj, reduced, LEFT_OUT)
        without = tuple(name for name in LEFT_OUT if name not in reduced[2])
        return pickler.with_identity(obj, reduced, without)
    if kind == _OPTIMIZER and len(reduced) > 2:
        state = {**_more_of(obj, reduced[2]), **reduced[2], **_tracking(obj)}
        reduced = *reduced[:2], state, *reduced[3:]
    return pickler.with_identity(obj, reduced)


def _more_of(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer that PyTorch leaves out of its state: hooks, and those
    of classes that inherit from it, as a wrapper of another optimizer has."""
    tracked = ("step", "_opt_called", "_zero_grad_profile_name")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in state and name not in tracked and not name.startswith("_warned")
    }


def _tracking(optimizer: Any) -> dict[str, Any]:
    """Return the attributes by which a scheduler follows the steps of its optimizer. PyTorch leaves
    them out of the optimizer's state, and warns of a step that was overridden."""
    step = vars(optimizer).get("step")
    if not hasattr(step, "_wrapped_by_lr_sched"):
        return {}
    tracked = functools.partial(_step, optimizer)
    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001
    return {"step": tracked, "_opt_called": getattr(optimizer, "_opt_called", False)}


def _step(optimizer: Any, *arguments: Any, **named: Any) -> Any:
    optimizer._opt_called = True  # noqa: SLF001 - as PyTorch's own function
    return type(optimizer).step(optimizer, *arguments, **named)


def _is_parametrized(module: Any) -> bool:
    kind = type(module)
    return kind.__module__ == _PARAMETRIZE and kind.__name__.startswith("Parametrized")


_PARAMETRIZE = "torch.nn.utils.parametrize"


def _reduce_parametrized(module: Any) -> Any:
    """Reduce a module that has a class of its own, with a property for each tensor that is computed
    from others. PyTorch does not pickle it."""
    names = tuple(vars(module)["_modules"]["parametrizations"])
    return _parametrized, (type(module).__base__, names), dict(vars(module))


def _parametrized(kind: Any, names: tuple[str, ...]) -> Any:
    parametrize = importlib.import_module(_PARAMETRIZE)
    made = kind.__new__(kind)
    vars(made).update(_parameters={}, _buffers={}, _modules={})
    parametrize._inject_new_class(made)  # noqa: SLF001 - PyTorch's own way, which is not public
    for name in names:
        parametrize._inject_property(made, name)  # noqa: SLF001
    return made


def _reduce_generator(tensors: Tensors, generator: Any) -> Any:
    if generator.device.type in _HOST:
        return NotImplemented
    tensors.moved.note(0, generator=True)
    return _generator, (generator.initial_seed(),)


def _reduce_array(tensors: Tensors, array: Any) -> Any:
    """Reduce an array that has the memory of a tensor of the stream to a view of that."""
    start, size = array.ctypes.data, array.nbytes
    flags = array.flags
    if not size or array.dtype.hasobject or not (flags.c_contiguous and flags.writeable):
        return NotImplemented
    at = bisect.bisect(tensors.whole, (start + 1,)) - 1
    if at >= 0:
        address, key = tensors.whole[at]
        known = tensors.storages[key]
        if start - address <= known.storage.nbytes() - size:
            return _array, (known, array.dtype, start - address, array.shape)
    tensors.arrays[start, size] = array
    return NotImplemented


def _array(storage: Any, dtype: Any, start: int, shape: tuple[int, ...]) -> Any:
    numpy, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return numpy.ndarray(shape, dtype, whole, start)


def _generator(seed: int) -> Any:
    return importlib.import_module("torch").Generator().manual_seed(seed)


def _set_more(tensor: Any, more: dict[str, Any]) -> None:
    for name, value in more.items():
        setattr(tensor, name, value)


def _parameter(torch: Any) -> Any:
    return getattr(getattr(torch, "nn", None), "Parameter", ())


def _without_gradient(tensors: Tensors, tensor: Any) -> Any:
    torch = sys.modules["torch"]
    where = tensor.device.type
    has_storage = hasattr(tensor, "untyped_storage")
    if has_storage and where != "meta":
        if _is_plain(torch, tensor):
            return _reduce_storage_view(tensors, tensor)
        if type(tensor) is _parameter(torch) and not vars(tensor):
            data = tensor.data
            if _is_plain(torch, data):
                _, (*view, _) = _reduce_storage_view(tensors, data)
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
            if not on_device:
                bisect.insort(tensors.whole, (storage.data_ptr(), storage._cdata))  # noqa: SLF001
                known.array = tensors.arrays.get((storage.data_ptr(), storage.nbytes()))
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
    # A tensor of a graph comes without it. As a leaf, its backward() would do nothing.
    return _tensor, (known, tensor.dtype, place, tensor.requires_grad and tensor.is_leaf)


def with_graph(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the values with tensors whose graph can still be followed backward."""
    tensors = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensors is None:
        return ()
    graphs: dict[str, Any] = {}
    for part, (name, *_) in parts(values, exact=False):
        if isinstance(part, tensors) and part.grad_fn is not None:
            graphs.setdefault(name, part.grad_fn)
    return tuple(name for name, each in sorted(graphs.items()) if not _is_used(each))


_MOST_NODES = 100


def _is_used(graph: Any) -> bool:
    """Whether a graph was followed backward: then PyTorch has let the tensors in it go."""
    todo: list[Any] = [graph]
    seen: set[Any] = set()
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [each for each, _ in node.next_functions]
        try:
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)
        except RuntimeError:
            return True
    return False


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
