"""What PyTorch leaves out of its own pickles: gradients, hooks, graphs, the wrappers of an
optimizer's steps, and the classes of parametrized modules.

Without a gradient, the optimizer's next step would do nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from gpunb.data.serialize import pickler
from gpunb.data.serialize.identities import has_identity
from gpunb.data.serialize.parts import parts

LEFT_OUT = ("grad", "_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of a leaf that PyTorch's own reducer leaves out."""


def with_left_out(tensor: Any, reduced: Any) -> Any:
    """Add what PyTorch's own reducer leaves out to what a leaf is reduced to."""
    more = {name: getattr(tensor, name, None) for name in LEFT_OUT}
    more = {name: value for name, value in more.items() if value is not None}
    if not more:
        return reduced
    whole = tensor.__reduce_ex__(pickler.PROTOCOL) if reduced is NotImplemented else reduced
    return (*whole[:2], more, None, None, _set_more) if len(whole) == 2 else reduced


def _set_more(tensor: Any, more: dict[str, Any]) -> None:
    for name, value in more.items():
        setattr(tensor, name, value)


_TENSOR, _OPTIMIZER, _HOOKS = "Tensor", "optim.Optimizer", "hooks"
_KEPT = (_TENSOR, "nn.Module", _OPTIMIZER, "optim.lr_scheduler.LRScheduler")
"""Classes of PyTorch whose instances stay the same objects; see `identities`."""


class Kept(dict[type, str]):
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


def is_kept(obj: Any, kind: str) -> bool:
    """Whether an object of a class with the kind stays the same object. Of dicts these are the ones
    of PyTorch's hooks, by their numbers: handles refer to them weakly."""
    if kind != _HOOKS:
        return True
    if not obj:
        return has_identity(obj)  # its hooks were removed
    number, hook = next(iter(obj.items()))
    return type(number) is int and callable(hook)


def identified(obj: Any, kind: str, reduced: Any) -> Any:
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
