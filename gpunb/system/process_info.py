"""Facts about this process that other sessions and people are shown: user, notebook, Python."""

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
    """Return the facts about this session that other sessions may read."""
    return {
        "pid": os.getpid(),
        "user": user(),
        "notebook": notebook(),
        "kernel": kernel(),
        "since": time.time(),
        "python": platform.python_version(),
    }


def user() -> str:
    """Return the name of the user, or the user id if there is no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def kernel() -> str | None:
    """Return the id of this kernel at its Jupyter server; None if this is no such kernel."""
    match = _KERNEL.search(" ".join(sys.argv))
    return match.group(1) if match else None


def notebook() -> str | None:
    """Return the path of the notebook or program that this process runs; None if unknown.

    The Jupyter server passes it in JPY_SESSION_NAME, VS Code in a variable of the notebook.
    """
    name = _from_editor() or os.environ.get("JPY_SESSION_NAME")
    if name:
        # Servers may pass a name that is no path.
        path = os.path.abspath(name)
        return path if os.path.exists(path) else name
    main = sys.modules.get("__main__")
    program: str | None = getattr(main, "__file__", None)
    if not program or "ipykernel" in program:  # the launcher of the kernel
        return None
    return os.path.abspath(program)


def _from_editor() -> str | None:
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    names: dict[str, object] = getattr(shell, "user_ns", {})
    name = names.get("__vsc_ipynb_file__")
    return name if isinstance(name, str) and name else None
