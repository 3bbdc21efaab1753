"""Decides when the modules that tasks import are preloaded for later tasks.

Each such preload takes a new zygote. Modules that a task needs at its begin are imported at once,
and the task waits for the zygote instead of importing by itself. Modules that a task has imported
are preloaded in the background: the first time a moment after the first report, and the next times
after longer and longer pauses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from gpunb.protocol.zygote import Imports
from gpunb.system.loop import Loop

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 60.0
"""Seconds until a preload begins; doubled each time."""


def installed(path: list[str]) -> list[int]:
    """Return when something was last installed in each folder of packages in a path, in ns."""
    times = []
    for each in path:
        if each.endswith(("site-packages", "dist-packages")):
            with contextlib.suppress(OSError):
                times.append(os.stat(each).st_mtime_ns)
    return times


class Follower:
    """Collects what tasks have imported or need, and starts the preloads. On the loop's thread."""

    def __init__(self, loop: Loop, start: Callable[[Imports, bool], None]) -> None:
        """`start` begins a preload, for which a task waits or not, and ends an earlier one that is
        not ready; `followed`, `refuse`, `stop` or `lost` tells how it ended."""
        self._loop = loop
        self._start = start
        self._pause = FIRST_PAUSE
        self._wanted: Imports | None = None
        self._ready: Imports | None = None
        self._given: Imports | None = None
        self._pausing = False
        self._busy = False
        self._awaited = False
        self._refused: dict[str, str] = {}
        self._stopped: str | None = None

    @property
    def notes(self) -> list[str]:
        """Texts on modules that are not preloaded although tasks import them."""
        notes = [
            f"preload: each task imports {name} by itself: {why}"
            for name, why in self._refused.items()
        ]
        if self._stopped is not None:
            notes.append(f"preload: what tasks import is preloaded no longer: {self._stopped}")
        return notes

    def imported(self, found: Imports) -> None:
        """Preload these modules soon. With another environment or path than those before, or after
        an installation, they replace them: a package may have read it, or be another."""
        self._want(found)
        self._begin_soon()

    def needed(self, found: Imports) -> bool:
        """Preload these modules now, for a task that is about to start. Return whether the task
        should wait for the preload: not if workers have the modules already, or if other tasks wait
        for a preload without them."""
        if self._stopped is not None or not self._missing(found, self._ready):
            return False
        if not self._busy or self._missing(found, self._given):
            if self._awaited:
                return False
            self._want(found)
            self._begin(awaited=True)
        self._awaited = self._busy
        return self._busy

    def _want(self, found: Imports) -> None:
        known = self._wanted
        if known is not None and found.joins(known):
            modules = tuple(dict.fromkeys((*known.modules, *found.modules)))
            changed = {**known.changed, **found.changed}
            shell = found.shell if any(found.shell) else known.shell
            found = known._replace(modules=modules, changed=changed, shell=shell)
        self._wanted = found

    def _missing(self, wanted: Imports | None, there: Imports | None) -> Imports | None:
        """Return the wanted imports if some of their modules are not there; else None. Those that
        were refused do not count."""
        if wanted is None or self._stopped is not None:
            return None
        chosen = (each for each in wanted.modules if each.partition(".")[0] not in self._refused)
        wanted = wanted._replace(modules=tuple(chosen))
        known = there is not None and wanted.joins(there)
        missing = set(wanted.modules).difference(there.modules if there and known else ())
        return wanted if missing else None

    def _begin_soon(self) -> None:
        if self._busy or self._pausing or not self._missing(self._wanted, self._given):
            return

        def begin() -> None:
            self._pausing = False
            if not self._busy:
                self._begin()

        self._pausing = True
        self._loop.after(self._pause, begin)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _begin(self, *, awaited: bool = False) -> None:
        imports = self._missing(self._wanted, self._given)
        if imports is not None:
            self._given, self._busy = imports, True
            self._start(imports, awaited)

    def followed(self, imports: Imports) -> None:
        """Note what new workers have since the last preload."""
        self._ready = self._given = imports
        if self._wanted is not None and imports.joins(self._wanted):
            self._want(imports)
        self._ended()
        self._begin_soon()

    def renew(self) -> None:
        """Preload everything once more, soon."""
        self._given = None
        self._begin_soon()

    def refuse(self, package: str, why: str) -> None:
        """Leave a package out, and preload the others."""
        self._refused[package] = why
        self._given = self._ready
        self._ended()
        self._begin_soon()

    def stop(self, why: str) -> None:
        """Preload nothing more."""
        self._stopped = self._stopped or why
        self._ended()

    def lost(self) -> None:
        """Note that the modules of all preloads are gone; later reports bring them back."""
        self._given = self._ready = None
        self._ended()

    def _ended(self) -> None:
        self._busy = self._awaited = False
