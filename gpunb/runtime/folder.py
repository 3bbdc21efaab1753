"""The folder in which the sessions of one user meet: `kernels/` has a socket for each that runs,
`leases/` says who holds what of which device, `heads/` has a socket, a log and a lock for each head
process.
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
    """The folder, which only its user can enter; made if it is not there.

    It is what GPUNB_RUNTIME_DIR names, else ``$XDG_RUNTIME_DIR/gpunb``, else
    ``/tmp/gpunb-<uid>``.

    Raises:
        GpunbError: it belongs to another user, others may enter it, or it cannot be made.
    """
    path = _chosen()
    _private(path)
    for name in (KERNELS, LEASES, HEADS):
        _private(path / name)
    return path


def _chosen() -> Path:
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    if (base := os.environ.get("XDG_RUNTIME_DIR")) and _is_ours(Path(base)):
        return Path(base) / "gpunb"
    return Path(f"/tmp/gpunb-{os.getuid()}")


def _is_ours(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and os.access(path, os.W_OK)


def _private(path: Path) -> None:
    """Make the folder, or see that it is ours alone."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise GpunbError(
            f"the folder {path}, where gpunb's sessions meet, cannot be made: {error.strerror}. "
            f"Set {VARIABLE} to a folder of your own"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        problem = "is no folder"
    elif found.st_uid != os.getuid():
        problem = f"belongs to another user (uid {found.st_uid})"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"may be entered by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise GpunbError(
        f"the folder {path}, where gpunb's sessions meet, {problem}. Remove it or `chmod 700` it, "
        f"or set {VARIABLE} to a folder of your own"
    )
