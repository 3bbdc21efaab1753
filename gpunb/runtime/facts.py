"""What the runtime knows, as plain values for whoever asks."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from gpunb.core.snapshot import available, snapshot, why
from gpunb.core.tasks import TaskId

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver


class Facts:
    """Answers questions; on the loop's thread, but for what says otherwise."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def tell(self, what: str, *arguments: Any) -> Any:
        """Facts as plain values; on the loop's thread."""
        if what == "total":
            return self._driver.scheduler.machine.totals()
        if what == "available":
            return available(self._driver.scheduler)
        if what == "status":
            return self._status()
        if what == "job":
            return self.job(*arguments)
        if what == "actor":
            actor = self._driver.actors.get(*arguments)
            return actor.facts() if actor is not None else None
        if what == "log":
            (ident,) = arguments
            job = self._driver.jobs.get(ident) or self._driver.past.get(ident)
            return job.log if job is not None else None
        if what == "why":
            return why(self._driver.scheduler, *arguments)
        if what == "notes":
            return list(self._driver.source.notes) if self._driver.source is not None else []
        raise ValueError(f"nobody knows {what!r}")

    def _status(self) -> dict[str, Any]:
        driver = self._driver
        facts = snapshot(driver.scheduler, time.monotonic()).as_dict()
        for job in facts["running"]:
            job["pid"] = driver.jobs[job["id"]].pid if job["id"] in driver.jobs else None
        recent = list(itertools.islice(reversed(driver.past.values()), 50))
        facts["finished"] = [each.facts() for each in recent]
        facts["objects"] = driver.store.facts()
        facts["object_memory"] = driver.store.memory.facts()
        for each in facts["actors"]:
            actor = driver.actors.get(each["id"])
            known = actor.facts() if actor is not None else {}
            each.update({name: known.get(name) for name in ("pid", "class", "name")})
        facts["preload"] = getattr(driver.source, "preloaded", None)
        facts["notes"] = self.tell("notes")
        return facts

    def job(self, ident: TaskId) -> dict[str, Any] | None:
        """A job as plain values, from any thread; None if it is not known any more."""
        job = self._driver.jobs.get(ident) or self._driver.past.get(ident)
        return job.facts() if job is not None else None
