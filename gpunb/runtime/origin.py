"""Who this session is, for people who look at the machine: process, user and notebook."""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
import time
from typing import Any

_KERNEL = re.compile(r"kernel-([^/\s]+)\.json")


def about() -> dict[str, Any]:
    """What other sessions are told of this one."""
    return {
        "pid": os.getpid(),
        "user": user(),
        "notebook": notebook(),
        "kernel": kernel(),
        "since": time.time(),
        "python": platform.python_version(),
    }


def user() -> str:
    """The name of the user, or his number if he has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def kernel() -> str | None:
    """The id of this kernel at its Jupyter server; None if this is none."""
    found = _KERNEL.search(" ".join(sys.argv))
    return found.group(1) if found else None


def notebook() -> str | None:
    """The path of the notebook, or of the program, that this process runs; None if unknown.

    The Jupyter server names it to the kernel in JPY_SESSION_NAME, and VS Code in a variable of
    the notebook.
    """
    name = _of_the_editor() or os.environ.get("JPY_SESSION_NAME")
    if name:
        return _absolute(name)
    main = sys.modules.get("__main__")
    path: str | None = getattr(main, "__file__", None)
    if not path or "ipykernel" in path:  # the kernel's launcher says nothing of the notebook
        return None
    return os.path.abspath(path)


def _of_the_editor() -> str | None:
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    names: dict[str, object] = getattr(shell, "user_ns", {})
    name = names.get("__vsc_ipynb_file__")
    return name if isinstance(name, str) and name else None


def _absolute(name: str) -> str:
    """The path, if there is such a file; servers may name a notebook by something else."""
    path = os.path.abspath(name)
    return path if os.path.exists(path) else name
