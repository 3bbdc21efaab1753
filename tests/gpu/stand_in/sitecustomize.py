"""Changes PyTorch and ctypes, once they are imported, for the stand-in GPU."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import Any


class _Hook(importlib.abc.MetaPathFinder):
    """Calls `after` with the module, once it is imported."""

    def __init__(self, name: str, after: str) -> None:
        self.name = name
        self.after = after

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            importlib.import_module(self.after).install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path[:0] = [_Hook("torch", "on_card"), _Hook("ctypes", "driver")]
