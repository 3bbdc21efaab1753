"""Which loaded modules are the user's own code, by their files."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import ModuleType

INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of installed packages."""

_NOT_FILES = frozenset({"__main__", "__mp_main__"})
_OURS = os.path.dirname(os.path.dirname(__file__))
_LIBRARY = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}
    | {os.path.join(_OURS, "")}
)


def users_file(name: str) -> str | None:
    """The file of a module, if it is Python code of the user's."""
    module = sys.modules.get(name)
    if name in _NOT_FILES or not issubclass(type(module), ModuleType):
        return None
    # Access to an attribute loads some modules.
    path = object.__getattribute__(module, "__dict__").get("__file__")
    if not isinstance(path, str) or not path.endswith(".py") or path.startswith(_LIBRARY):
        return None
    return None if any(each in path for each in INSTALLED) else path
