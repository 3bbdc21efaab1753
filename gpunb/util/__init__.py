"""What Ray has under ``ray.util``, for programs that look for it there."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpunb.util import accelerators

__all__ = ["accelerators"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"gpunb.util.{name}")
    raise AttributeError(
        f"module 'gpunb.util' has no attribute {name!r}: of what ray.util has, there is only "
        f"{', '.join(__all__)} here"
    )


def __dir__() -> list[str]:
    return [*__all__]
