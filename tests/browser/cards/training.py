"""What the cells of the pictures run. The memory of a process is a number in a file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

VARIABLE = "GPUNB_PICTURES"
"""Environment variable: the folder of the files, `PID-DEVICE` and `step`, the seconds of a step."""

GIB = 2**30


def train(width: int) -> float:
    """Use as much memory as a model of this width."""
    device, folder = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0], Path(os.environ[VARIABLE])
    step = float((folder / "step").read_text())
    size = (4 + 3 * width.bit_length() % 16) * GIB
    for each in tqdm(range(100)):
        part = min(1, (1 + each) / 20)
        (folder / f"{os.getpid()}-{device}").write_text(str(round(part * size)))
        time.sleep(step)
    return 1 / width


def used(device: int) -> Iterator[tuple[int, int]]:
    """The living processes on a device, each with its bytes."""
    for each in Path(os.environ[VARIABLE]).iterdir():
        pid, _, place = each.name.partition("-")
        if place == str(device) and Path(f"/proc/{pid}/exe").exists():
            with contextlib.suppress(ValueError):
                yield int(pid), int(each.read_text())
