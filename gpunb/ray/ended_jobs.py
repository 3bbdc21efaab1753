"""Finds jobs that ended without a report of their worker."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ray

from gpunb.ray.jobs import RayActor, RayJob, RayJobs
from gpunb.ray.prewarm import Prewarmer
from gpunb.ray.transport import INTERRUPTED

LOOK = 0.5
"""Seconds between two looks for such jobs."""


class EndedJobs:
    """Looks for jobs that crashed, were cancelled in the queue, or were lost with their node."""

    def __init__(
        self, jobs: RayJobs, prewarmer: Prewarmer, is_over: Callable[[RayActor], object]
    ) -> None:
        """`is_over` notes the end of an actor that has ended."""
        self._is_over = is_over
        self._jobs = jobs
        self._prewarmer = prewarmer
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpunb-look", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._over.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread, once it was closed."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._over.wait(LOOK):
            try:
                self.look()
            except Exception:
                if self._over.is_set() or not ray.is_initialized():
                    return

    def look(self) -> None:
        """Note the end of all jobs, and of sessions with ranks, that have ended."""
        for owner in list(self._jobs.groups):
            if (session := self._jobs.actors.get(owner)) is not None:
                self._is_over(session)
        jobs = [job for job in list(self._jobs.open.values()) if job.ref is not None]
        if not jobs:
            return
        refs = list({job.ref: job for job in jobs})
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        there = set(ready)
        for job in jobs:
            if job.ref in there:
                if job.kind in INTERRUPTED or job.began is not None:
                    job.reported.wait(LOOK)  # the report may be on its way
                if not job.over:
                    self._jobs.end(job, _state(job))
                    job.reported.set()
                    self._prewarmer.over()


def _state(job: RayJob) -> str:
    try:
        value = ray.get(job.ref, timeout=1)
    except ray.exceptions.TaskCancelledError:
        return "cancelled"
    except Exception:
        return "failed"
    return "cancelled" if getattr(value, "cancelled", False) else "done"
