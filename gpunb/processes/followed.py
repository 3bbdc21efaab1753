"""Decides when the modules that tasks import are preloaded for later tasks.

Each such preload takes a new zygote, which imports in the background. So the first one comes a
moment after the first report, and the next ones after longer and longer pauses.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from gpunb.protocol.zygote import Imports
from gpunb.system.loop import Loop

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
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
    """Collects what tasks have imported, and starts the preloads. On the loop's thread."""

    def __init__(self, loop: Loop, start: Callable[[Imports], None]) -> None:
        """`start` begins the preload; `followed`, `refuse`, `stop` or `lost` tells how it ended."""
        self._loop = loop
        self._start = start
        self._pause = FIRST_PAUSE
        self._wanted: Imports | None = None
        self._given: Imports | None = None
        self._busy = False
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
        known = self._wanted
        if known is not None and known.fits(*found[2:]):
            modules = tuple(dict.fromkeys((*known.modules, *found.modules)))
            found = known._replace(modules=modules, changed={**known.changed, **found.changed})
        self._wanted = found
        self._begin_soon()

    def _next(self) -> Imports | None:
        """Return the imports for a new preload; None if there is no need of one."""
        wanted, given = self._wanted, self._given
        if wanted is None or self._stopped is not None:
            return None
        chosen = (each for each in wanted.modules if each.partition(".")[0] not in self._refused)
        wanted = wanted._replace(modules=tuple(chosen))
        known = given is not None and given.fits(*wanted[2:])
        missing = set(wanted.modules).difference(given.modules if given and known else ())
        return wanted if missing else None

    def _begin_soon(self) -> None:
        if not self._busy and self._next() is not None:
            self._busy = True
            self._loop.after(self._pause, self._begin)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _begin(self) -> None:
        imports = self._next()
        if imports is None:
            self._busy = False
        else:
            self._given = imports
            self._start(imports)

    def followed(self) -> None:
        """Note that new workers have the modules of the last preload."""
        self._busy = False
        self._begin_soon()

    def refuse(self, package: str, why: str) -> None:
        """Leave a package out, and preload the others."""
        self._refused[package] = why
        self.lost()
        self._begin_soon()

    def stop(self, why: str) -> None:
        """Preload nothing more."""
        self._stopped = self._stopped or why
        self._busy = False

    def lost(self) -> None:
        """Note that the modules of the last preload are gone; later reports bring them back."""
        self._given, self._busy = None, False
