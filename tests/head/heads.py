"""Head processes for tests, of which nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpunb.system import runtime_dir
from tests.sessions import ROOT, marked
from tests.waiting import eventually

FAMILY = "GPUNB_TEST_HEAD"
MACHINE = ["--simulate", "2xA100:40GiB", "--num-cpus", "2", "--preload", "numpy"]


def start(name: str = "lab", *options: str) -> dict[str, Any]:
    """A head process, as the command starts it."""
    variables = dict(os.environ)
    variables |= {"PYTHONPATH": str(ROOT), FAMILY: f"{name}-{time.time_ns()}"}
    command = [sys.executable, "-m", "gpunb", "start", "--head", "--json", "--name", name]
    done = subprocess.run(
        [*command, *(options or MACHINE)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), FAMILY: variables[FAMILY]}


def end(facts: dict[str, Any]) -> None:
    """Kill a head process, if it is still there, and wait until nothing of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(facts["pid"], signal.SIGKILL)
    ended(facts)


def ended(facts: dict[str, Any]) -> None:
    """Wait until a head process and all that it started is gone."""
    mark = f"{FAMILY}={facts[FAMILY]}".encode()

    def left() -> list[int]:
        found = []
        for pid in marked():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    eventually(lambda: not left(), "all of the head process is gone")


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime folder of the module's own."""
    path = tmp_path_factory.mktemp("head") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(runtime_dir.VARIABLE, str(path))
        patch.delenv("GPUNB_ADDRESS", raising=False)
        yield path


@pytest.fixture(scope="module")
def head(own_folder: Path) -> Iterator[dict[str, Any]]:
    """A head process that tests share."""
    facts = start()
    yield facts
    end(facts)
