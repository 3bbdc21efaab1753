"""The memory of the stand-in GPU: one file for each process, which holds its bytes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VARIABLE = "GPUNB_STAND_IN"
"""Environment variable: the folder of these files. Without it there is no stand-in."""

GIB = 2**30
NAME, UUID, TOTAL = "NVIDIA H200", "GPU-5747a2d1-0000-4000-8000-5741ad1a0001", 141 * GIB
CONTEXT = 400 * 2**20


def folder() -> Path:
    return Path(os.environ[VARIABLE])


def take(nbytes: int) -> None:
    """Note that this process now has so many bytes of the device."""
    path = folder() / str(os.getpid())
    new = path.with_suffix(".new")
    new.write_text(str(nbytes))
    new.replace(path)


def used() -> dict[int, int]:
    """The bytes of each living process."""
    found: dict[int, int] = {}
    for each in folder().iterdir():
        if each.name.isdigit() and _alive(each.name):
            with contextlib.suppress(FileNotFoundError):
                found[int(each.name)] = int(each.read_text())
    return found


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
