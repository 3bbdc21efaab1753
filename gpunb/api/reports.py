"""`report`: sends intermediate values from a trial to its sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gpunb.protocol import backend
from gpunb.protocol.sink import REPORT

SCALARS = (bool, int, float, str, type(None))


def report(**metrics: Any) -> None:
    """Send intermediate values of a trial, such as ``gpunb.report(loss=0.5)``, to its sweep.

    Outside of a sweep's trial it has no effect.

    Args:
        metrics: numbers or texts by name; a scalar of NumPy or a tensor with one element counts as
            its number.

    Raises:
        TypeError: a value is neither; or there is none.
    """
    if not metrics:
        raise TypeError("report takes values by name, such as gpunb.report(loss=0.5)")
    for name, value in metrics.items():
        if not is_scalar(plain := as_plain(value)):
            raise TypeError(
                f"report takes numbers and texts, and {name} is of type {type(value).__name__}"
            )
        metrics[name] = plain
    _send(metrics)


def stream(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a generator function and report each value that it yields. Returns the last one."""
    value = None
    for value in function(*args, **kwargs):
        _send(metrics_of(value))
    return value


def metrics_of(value: Any) -> dict[str, Any]:
    """The metrics in the value of a trial: the numbers and texts of a dict, or a number by the
    name ``"value"``."""
    items = value.items() if isinstance(value, Mapping) else [("value", value)]
    found = ((str(name), as_plain(each)) for name, each in items)
    return {name: each for name, each in found if is_scalar(each) and each is not None}


def is_scalar(value: object) -> bool:
    """Whether a value is a plain number, text, bool or None."""
    return type(value) in SCALARS


def as_plain(value: Any) -> Any:
    """The Python number of a scalar of NumPy, PyTorch and the like; another value as it is."""
    if type(value) in SCALARS:
        return value
    try:
        if hasattr(type(value), "item") and math.prod(value.shape) == 1:
            return value.item()
    except Exception:  # another kind of object
        return value
    for kind in SCALARS[:4]:
        if isinstance(value, kind):  # a subclass, such as an IntEnum
            return kind(value)
    return value


def _send(metrics: Mapping[str, Any]) -> None:
    show = getattr(backend.existing(), "show", None)
    if show is not None:  # a worker's backend
        show(REPORT, {"metrics": dict(metrics)})
