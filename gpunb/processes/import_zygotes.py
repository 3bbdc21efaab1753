"""The zygotes that have imported what tasks import.

New processes are forked by the last one that is ready. When tasks import more, that one forks
another, which imports only that and takes its place. A process for a task that needs modules of the
other is held until that one has imported them; if it cannot, the process is forked without them.

Each zygote lives until those that it forked have ended. To limit their number, after
`MOST_ANCESTORS` of them the zygote with the preload forks one that imports everything, in the
background.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Sequence

from gpunb.processes.followed import Follower
from gpunb.processes.generation import Generation, close_all
from gpunb.processes.pool import WorkerPool
from gpunb.processes.worker_process import WorkerProcess
from gpunb.processes.zygotes import Zygotes
from gpunb.protocol.zygote import Imports
from gpunb.system import limits, process_control
from gpunb.system.loop import Loop

LONGEST_WAIT = 60.0
"""Seconds that a task waits for the imports that it needs; then it imports by itself."""

_PIPE = 1 << 16


class ImportZygotes:
    """Starts these zygotes, and holds the processes that wait for one. On the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        pool: WorkerPool,
        zygotes: Zygotes,
        start_bare: Callable[[WorkerProcess, Sequence[int]], None],
        most: int,
    ) -> None:
        """`start_bare` forks a process without imports of tasks. A zygote may have `most` bytes."""
        self._loop = loop
        self._pool = pool
        self._zygotes = zygotes
        self._start_bare = start_bare
        self._most = most
        self._importing: Generation | None = None
        self._follower = Follower(loop, self._start)
        self.last: Generation | None = None
        """The one that forks new processes."""

    @property
    def notes(self) -> list[str]:
        """Texts on modules that are not preloaded although tasks import them."""
        return self._follower.notes

    def imported(self, imports: Imports) -> None:
        """Import what a worker has imported, soon."""
        self._follower.imported(imports)

    def needed(self, imports: Imports) -> bool:
        """Import what a task needs. Return whether the task should wait for that."""
        return self._follower.needed(imports)

    def is_importing(self, generation: Generation) -> bool:
        """Return whether this zygote has not yet imported what it should."""
        return generation is self._importing

    def _start(self, imports: Imports, awaited: bool) -> None:
        """Start a zygote that imports these, for which a task waits or not."""
        parent, last = self._zygotes.second, self.last
        if parent is None:
            self._follower.lost()
            return
        self._drop()
        if (
            last is not None
            and last.imports is not None
            and imports.joins(last.imports)
            and (awaited or not last.has_many_ancestors)
        ):
            parent = last
            imports = imports._replace(changed={**last.imports.changed, **imports.changed})
        try:
            self._importing = self._zygotes.fork(parent, imports, self._most)
        except OSError as error:
            self._follower.stop(limits.explain(error))

    def succeed(self, unsafe: str | None, package: str) -> None:
        """Use the zygote that has imported, unless it is not safe."""
        if unsafe:
            self._drop()
            if package:
                self._follower.refuse(package, unsafe)
            else:
                self._follower.stop(unsafe)
            return
        generation, self._importing = self._importing, None
        assert generation is not None
        before, self.last = self.last, generation
        self._follower.followed(generation.note_preloaded())
        if generation.has_many_ancestors:
            self._follower.renew()
        held, generation.held = list(generation.held.values()), {}
        for process, descriptors in held:
            for text, pipe in zip(generation.printed, descriptors[1:3], strict=True):
                _write(pipe, text)
            self._zygotes.start(generation, process, descriptors)
        generation.link.ask(("prepare",))  # before the standbys, after the tasks that wait
        self._pool.renew()
        self._zygotes.replace(before)

    def stop(self, why: str) -> None:
        """Go back to the modules that were asked for."""
        self._follower.stop(why)
        before, self.last = self.last, None
        self._drop()
        if before is not None:
            self._pool.renew()
            self._zygotes.replace(before)

    def _drop(self) -> None:
        """End the zygote that still imports."""
        dropped, self._importing = self._importing, None
        if dropped is not None:
            self._zygotes.kill(dropped)
            self._zygotes.forget(dropped)
            self._let_all_go(dropped)

    def on_death(self, dead: Generation) -> None:
        """Note the death of any zygote. Those that it forked die with it, but their links report
        that later, or have reported it before."""
        importing, last = self._importing, self.last
        if importing is not None and dead in (importing, *importing.ancestors()):
            self._importing = None
            if any(each.link.is_gone() for each in importing.ancestors()):
                self._follower.lost()
            else:
                self._follower.stop("the process that imported it died")
        if last is not None and dead in (last, *last.ancestors()):
            self.last = None
            self._follower.lost()
        if importing is not None and self._importing is None:
            self._let_all_go(importing)

    # ------------------------------------------------------------------------- processes that wait

    def hold(self, process: WorkerProcess, descriptors: Sequence[int]) -> bool:
        """Let a process wait for the zygote that imports; return False if there is none. The setup
        of the process must also fit without these imports, so it has the environment of the other
        zygotes."""
        generation = self._importing
        if generation is None:
            return False
        process.origin = generation
        process.environment = self._zygotes.environment
        generation.held[process.token] = process, descriptors
        self._loop.after(LONGEST_WAIT, functools.partial(self._let_go, generation, process))
        return True

    def signal_held(self, process: WorkerProcess, number: int) -> bool:
        """Handle a signal to a process that waits: SIGKILL ends it, others let it go. Return
        whether nothing is left to be signalled."""
        generation = process.origin
        if not isinstance(generation, Generation) or process.token not in generation.held:
            return False
        if number != signal.SIGKILL:
            self._let_go(generation, process)  # it need not wait to be interrupted
            return False
        close_all(generation.held.pop(process.token)[1])
        reason = process_control.describe_status(number)
        self._pool.gone_later(process, reason or "it was killed")
        return True

    def _let_go(self, generation: Generation, process: WorkerProcess) -> None:
        """Fork a process that waits for a zygote without the modules of that zygote."""
        if process.token in generation.held:
            self._start_bare(*generation.held.pop(process.token))

    def _let_all_go(self, generation: Generation) -> None:
        for process, _ in list(generation.held.values()):
            self._let_go(generation, process)


def _write(pipe: int, text: str) -> None:
    """Write into an empty pipe as much as it takes."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(OSError):
        os.write(pipe, text.encode()[:_PIPE])
    os.set_blocking(pipe, True)
