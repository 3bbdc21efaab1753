"""Operators that a notebook has defined with `torch.library.custom_op`, as their parts."""

from __future__ import annotations

import importlib
from typing import Any

from gpunb.data.serialize.pickler import closure_of

__all__ = ["made_of", "operator", "reduce_operator"]

_MODULE = "torch._library.custom_ops"

_kept: dict[str, Any] = {}
"""The operators that have come: PyTorch forgets one that nobody refers to."""


def made_of(operator: Any) -> dict[str, Any]:
    """Return the schema of an operator, and the functions that were registered for it."""
    parts = vars(operator)
    return {
        "schema": parts["_schema"],
        "tags": parts["_tags"],
        "function": parts["_init_fn"],
        "kernels": {device: _given(each) for device, each in parts["_backend_fns"].items()},
        "fake": _given(parts["_abstract_fn"]),
        "autograd": (parts["_backward_fn"], parts["_setup_context_fn"]),
        "vmap": _given(parts["_vmap_fn"]),
    }


def _given(function: Any) -> Any:
    """Return the user's function within the one that PyTorch has made of it."""
    return dict(closure_of(function)).get("fn", function) if function is not None else None


def operator(name: str, parts: dict[str, Any]) -> Any:
    """Return this process's operator of a name, made of these parts unless it is known."""
    operators: Any = importlib.import_module(_MODULE)
    known = operators.OPDEFS.get(name)
    if known is not None and _codes(made_of(known)) == _codes(parts):
        return known
    space, _, own = name.partition("::")
    made = operators.CustomOpDef(space, own, parts["schema"], parts["function"], parts["tags"])
    for device, function in parts["kernels"].items():
        made.register_kernel(device)(function)
    if parts["fake"] is not None:
        made.register_fake(parts["fake"])
    backward, context = parts["autograd"]
    if backward is not None:
        made.register_autograd(backward, setup_context=context)
    if parts["vmap"] is not None:
        made.register_vmap(parts["vmap"])
    _kept[name] = made
    return made


def _codes(parts: Any) -> Any:
    """Return parts of an operator with the code of each function in place of it, to compare."""
    if isinstance(parts, dict):
        return {name: _codes(each) for name, each in parts.items()}
    if isinstance(parts, (list, tuple)):
        return [_codes(each) for each in parts]
    return getattr(parts, "__code__", parts)


def reduce_operator(it: Any) -> Any:
    """Reduce an operator to its name and its parts."""
    return operator, (it._qualname, made_of(it))  # noqa: SLF001
