"""Cancels at every moment of a task's life end neither the kernel nor anything else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest

from tests.sessions import ROOT

pytestmark = pytest.mark.needs_ray

COUNT = int(os.environ.get("CANCELS") or 300)
SEED = int(os.environ.get("SEED") or 0)


@pytest.mark.timeout(0)  # that of the driver ends it
def test_cancels_at_every_moment_leave_the_kernel_alive() -> None:
    command = [sys.executable, "-m", "tests.ray.driver_cancels", str(COUNT), str(SEED)]
    driver = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300 + COUNT, check=False
    )
    assert driver.stdout.endswith(f"{COUNT} cancels\n"), driver.stdout + driver.stderr
    assert driver.returncode == 0


class Ready:
    """In place of Ray's reference to an object that is there."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def _on_completed(self, callback: Any) -> None:
        thread = threading.Thread(target=callback, args=(None,))
        thread.start()
        self.threads.append(thread.ident or 0)


@pytest.fixture
def cancelled_on(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads on which something was cancelled."""
    import ray

    found: list[int] = []

    def cancel(ref: Any, **options: Any) -> None:
        found.append(threading.get_ident())
        if ref == "none":
            raise TypeError("it is no task's")

    monkeypatch.setattr(ray, "cancel", cancel)
    return found


def test_a_task_is_cancelled_on_rays_own_thread(cancelled_on: list[int]) -> None:
    from gpunb.ray.cancelling import Canceller

    ready = Ready()
    canceller = Canceller(lambda: ready)
    for each in ("one", "none", "two"):
        canceller.cancel(each, force=False)
    assert cancelled_on == ready.threads
    assert threading.get_ident() not in cancelled_on


def test_from_that_thread_it_is_cancelled_at_once(cancelled_on: list[int]) -> None:
    from gpunb.ray.cancelling import Canceller

    canceller = Canceller(Ready)
    canceller._thread = threading.get_ident()
    canceller.cancel("one", force=False)
    assert cancelled_on == [threading.get_ident()]


def test_nothing_happens_once_the_cluster_is_gone(cancelled_on: list[int]) -> None:
    from gpunb.ray.cancelling import Canceller

    def ready() -> Any:
        raise ConnectionError("the cluster is gone")

    Canceller(ready).cancel("one", force=False)
    assert cancelled_on == []
