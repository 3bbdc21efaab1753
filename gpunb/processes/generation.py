"""One zygote, as the kernel sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpunb.processes.worker_process import WorkerProcess
from gpunb.processes.zygote_link import Link
from gpunb.protocol.zygote import Imports

MOST_ANCESTORS = 3
"""Zygotes with imports of tasks that are kept only because others were forked by them."""


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors of a process that was not started."""
    for each in descriptors:
        os.close(each)


class Generation:
    """One zygote: the link to it, and the processes that it forked."""

    def __init__(
        self, number: int, imports: Imports | None = None, parent: Generation | None = None
    ) -> None:
        """`imports` of tasks are preloaded in this zygote, which `parent` forks."""
        self.number = number
        self.imports = imports
        self.parent = parent
        self.link: Link
        self.pid: int | None = None
        self.processes: dict[int, WorkerProcess] = {}
        self.preloaded = False
        self.replaced = False
        self.modules: set[str] = set()
        """Modules of installed packages that are loaded in this zygote."""
        self.printed = ["", ""]
        """The text that its imports have written to standard output and to standard error."""
        self.since = time.monotonic()
        self.held: dict[int, tuple[WorkerProcess, Sequence[int]]] = {}
        """Processes that are forked when this zygote has imported, with their descriptors."""
        self.delayed: dict[int, str] = {}
        """For each process that waits to be forked, the reason."""
        self.signalled: set[int] = set()
        """Processes that got signals after the last ping that the zygote has answered."""

    @property
    def has_many_ancestors(self) -> bool:
        """Whether so many zygotes are kept only because this one lives that it should be replaced
        by one that needs none of them."""
        return sum(each.imports is not None for each in self.ancestors()) >= MOST_ANCESTORS

    def note_loaded(
        self, modules: Iterable[str], changed: Mapping[str, str | None], texts: Iterable[str]
    ) -> None:
        """Note what the zygote has imported, the environment variables that this has changed, and
        the text that it has written."""
        self.modules.update(modules)
        self.printed = [a + b for a, b in zip(self.printed, texts, strict=True)]
        if self.imports is not None:
            self.imports = self.imports._replace(changed={**self.imports.changed, **changed})

    def note_preloaded(self) -> Imports:
        """Return what its processes have, beside the modules that were asked for."""
        assert self.imports is not None
        modules = tuple(dict.fromkeys((*self.imports.modules, *self.modules)))
        self.imports = self.imports._replace(modules=modules)
        return self.imports

    def close_held(self) -> None:
        """Close the descriptors of the processes that wait for this zygote."""
        while self.held:
            close_all(self.held.popitem()[1][1])

    def ancestors(self) -> Iterator[Generation]:
        """Yield the zygotes that must live for this one to live."""
        parent = self.parent
        while parent is not None:
            yield parent
            parent = parent.parent

    def held_up(self, process: WorkerProcess) -> str | None:
        """Return why a process has not started, or gets no signal; None if nothing is known."""
        if process.ready and process.token not in self.signalled:
            return None
        if process.token in self.held:
            seconds = time.monotonic() - self.since
            return f"what it imports is imported first, for {seconds:.0f} s now"
        return self.delayed.get(process.token) or self.why_silent()

    def why_silent(self) -> str | None:
        """Return a text if the zygote does not answer; else None."""
        seconds = self.link.silent_seconds()
        if seconds is None:
            return None
        return (
            f"the process that forks workers (pid {self.pid}) has not answered for {seconds:.0f} "
            f"s: it may be stopped, and goes on after `kill -CONT {self.pid}`"
        )
