"""The errors of `ray.exceptions`: those of gpunb, and types that nothing raises for the others."""

from __future__ import annotations

from gpunb import exceptions


def __getattr__(name: str) -> type[BaseException]:
    if name.startswith("__"):
        raise AttributeError(name)
    found = getattr(exceptions, name, None)
    return globals().setdefault(name, found or type(name, (exceptions.GpunbError,), {}))
