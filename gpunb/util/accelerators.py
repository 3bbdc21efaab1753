"""The accelerator types, as in `gpunb.accelerators`."""

from __future__ import annotations

from gpunb.accelerators import types


def __getattr__(name: str) -> str:
    value: str = getattr(types, name)
    return value


def __dir__() -> list[str]:
    return [name for name in dir(types) if name.isupper()]
