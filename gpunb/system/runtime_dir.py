"""The runtime folder of a user: control sockets, the ledger of leases, and head processes.

`kernels/` has the control socket of each running session, `leases/` the ledger of leases, and
`heads/` a socket, a log and a lock for each head process.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gpunb.exceptions import GpunbError

VARIABLE = "GPUNB_RUNTIME_DIR"
KERNELS = "kernels"
LEASES = "leases"
HEADS = "heads"


def runtime_folder() -> Path:
    """Return the runtime folder, which only its user can enter; make it if it is missing.

    Raises:
        GpunbError: the folder belongs to another user, others may enter it, or it cannot be made.
    """
    path = chosen()
    _private(path)
    for name in (KERNELS, LEASES, HEADS):
        _private(path / name)
    return path


def chosen() -> Path:
    """Return the path of the runtime folder: GPUNB_RUNTIME_DIR, else ``/tmp/gpunb-<uid>``.

    Not below XDG_RUNTIME_DIR: some processes of a user do not have that variable, and the folder
    is removed at the user's logout while other processes still run.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    return Path(f"/tmp/gpunb-{os.getuid()}")


def _private(path: Path) -> None:
    """Make the folder, or check that only this user can enter it."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise GpunbError(
            f"the folder {path}, where gpunb's sessions meet, cannot be made: {error.strerror}. "
            f"Set {VARIABLE} to a folder of your own"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        problem = "is no folder"
    elif status.st_uid != os.getuid():
        problem = f"belongs to another user (uid {status.st_uid})"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        problem = f"may be entered by others (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise GpunbError(
        f"the folder {path}, where gpunb's sessions meet, {problem}. Remove it or `chmod 700` it, "
        f"or set {VARIABLE} to a folder of your own"
    )
