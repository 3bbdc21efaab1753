"""Workers that a zygote forks: the kernel's side of `worker.zygote`.

There are two zygotes. The first is a new interpreter. It forks workers from the start, and it forks
the second zygote, which imports the preload. When tasks import packages, there are others, which
import these too: see `import_zygotes`.

1. A request to a zygote that has not started or does not read waits in its `Link`, in order.
2. When the second zygote reports the end of its preload, it gets all new requests, and the pool
   replaces its standbys. Those with imports of tasks come before it, except for workers that must
   be `bare`.
3. When a zygote dies, the system kills its workers, but no zygote reports their ends.
   `lost_workers` does.
4. The zygotes that a zygote forked die with it. Their links report that earlier or later, when new
   ones may have started; so each report is compared with the present ones.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpunb.processes import launcher
from gpunb.processes.generation import Generation, close_all
from gpunb.processes.import_zygotes import ImportZygotes
from gpunb.processes.launcher import Launched
from gpunb.processes.lost_workers import LostWorkers
from gpunb.processes.pool import WorkerPool
from gpunb.processes.worker_process import WorkerProcess
from gpunb.processes.zygote_link import Answer
from gpunb.processes.zygotes import Zygotes
from gpunb.protocol.zygote import Imports
from gpunb.system import limits, process_control
from gpunb.system.loop import Loop

RESTARTS = 5
"""Deaths of zygotes within `WINDOW` seconds after which no new one is started for so long."""

WINDOW = 30.0
_END_WAIT = 3.0

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds until a step that lacked resources is tried again; doubled each time."""

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals that end a worker whose libraries do not survive a fork."""


class ForkSource:
    """Starts the zygote, has it preload, forks through it, and replaces it when it dies."""

    def __init__(
        self,
        loop: Loop,
        pool: WorkerPool,
        preload: Sequence[str],
        launched: Launched | None = None,
        inherited: int | None = None,
        *,
        own_preload: Sequence[str] = (),
        follow: int = 0,
    ) -> None:
        """All processes inherit the descriptor `inherited`. No report names `own_preload`. A zygote
        with modules that tasks have imported may have `follow` bytes; 0 preloads none of these."""
        self._inherited = inherited
        self._loop = loop
        self._pool = pool
        self._requested = frozenset(preload)
        modules = (*own_preload, *preload)
        self._zygotes = Zygotes(loop, modules, self._on_answer, self._on_link_end)
        self._imports = ImportZygotes(loop, pool, self._zygotes, self._start_bare, follow)
        self.follows = follow > 0
        self._process: Any = None
        self._deaths: list[float] = []
        self._failed_preloads = 0
        self._lost = LostWorkers(loop, pool)
        self._problems: dict[str, str] = {}
        self._notes: list[str] = []
        self._closed = False
        self._asked: dict[str, str | None] | None = None
        self._start_first(launched)

    @property
    def notes(self) -> list[str]:
        """Texts on problems with new processes."""
        problems = self._problems.values()
        texts = [*self._notes, *self._imports.notes, *problems, *self._zygotes.notes]
        return list(dict.fromkeys(texts))

    def held_up(self, process: WorkerProcess) -> str | None:
        """Return why a process has not started, or gets no signal; None if nothing is known."""
        generation = process.origin
        if not isinstance(generation, Generation):
            return None
        known = generation.held_up(process)
        if known is None and not process.ready:
            return next(iter(self._problems.values()), None)
        return known

    # ----------------------------------------------------------------------------------- zygotes

    def _start_first(self, launched: Launched | None = None) -> None:
        """Start the first zygote, and through it the second. Requests to the first one wait in its
        link until it has started."""
        first = self._zygotes.first = self._zygotes.new()
        if self._inherited is not None:
            first.link.ask(("keep",), [self._inherited], lent=True)
        self._zygotes.environment = launched.environment if launched else dict(os.environ)

        def start() -> None:
            nonlocal launched
            launched = launched or launcher.zygote()
            self._process = launched.process
            first.pid = launched.process.pid
            first.link.connect(launched.sock)
            self._start_second()

        self._try(start, "the process that forks workers cannot be started")

    def _start_second(self) -> None:
        first = self._zygotes.first

        def start() -> None:
            if first is not None and first is self._zygotes.first:
                self._zygotes.second = self._zygotes.fork(first)

        self._try(start, "the preload cannot be imported")

    def _try(self, action: Callable[[], None], what: str, pause: float = _FIRST_PAUSE) -> None:
        """Call `action` now, and again later while it lacks resources. `what` is the text on the
        problem."""
        if self._closed:
            return
        try:
            action()
        except OSError as error:
            self._problems[what] = f"{what}, which is tried again: {limits.explain(error)}"
            longer = min(2 * pause, _LONGEST_PAUSE)
            self._loop.after(pause, functools.partial(self._try, action, what, longer))
        else:
            self._problems.pop(what, None)

    # ------------------------------------------------------------------------------- for the pool

    @property
    def followed(self) -> Imports | None:
        """What new processes have because tasks have imported it."""
        last = self._imports.last
        return last.imports if last is not None else None

    @property
    def preloaded(self) -> dict[str, str | None] | None:
        """The problem of each module that was asked for, None if it is preloaded; with them the
        packages that tasks have imported. None before the preload."""
        if self._asked is None:
            return None
        followed = self.followed
        names = [each.partition(".")[0] for each in followed.modules] if followed else []
        return {**dict.fromkeys(names), **self._asked}

    def follow(self, imports: Imports) -> None:
        """Preload what a worker has imported."""
        if self.follows:
            self._imports.imported(imports)

    def import_first(self, imports: Imports) -> bool:
        """Preload what a task needs, unless new workers have it. Return whether the worker of the
        task should `wait` for that."""
        second = self._zygotes.second
        if not self.follows or second is None:
            return False
        there = second.modules if second.preloaded else self._requested
        missing = tuple(each for each in imports.modules if each not in there)
        return bool(missing) and self._imports.needed(imports._replace(modules=missing))

    def start(
        self,
        process: WorkerProcess,
        descriptors: Sequence[int],
        *,
        bare: bool = False,
        wait: bool = False,
    ) -> None:
        if wait and self._imports.hold(process, descriptors):
            return
        first, second = self._zygotes.first, self._zygotes.second
        with_preload = second if second is not None and second.preloaded else None
        generation = (not bare and self._imports.last) or with_preload or first
        if generation is None:
            close_all(descriptors)
            self._pool.gone_later(process, "no zygote could be started; see gpunb doctor")
        else:
            self._zygotes.start(generation, process, descriptors)

    def _start_bare(self, process: WorkerProcess, descriptors: Sequence[int]) -> None:
        self.start(process, descriptors, bare=True)

    def signal(self, process: WorkerProcess, number: int) -> None:
        if not self._imports.signal_held(process, number):
            self._zygotes.signal(process, number)

    def close(self) -> None:
        """End the zygotes; they end the workers and the children of these."""
        self._closed = True
        self._zygotes.close()
        self._lost.close()
        if self._process is not None and not self._reaped():
            process_control.kill(self._process.pid)
            self._reaped()

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        self._zygotes.forked()
        self._lost.forked()
        process, self._process = self._process, None
        if process is not None:
            launcher.forked(process)

    def _reaped(self) -> bool:
        """Wait a while for the end of the first zygote; return whether it came. Not with `join`,
        which waits for all processes that have inherited loky's pipe."""
        deadline = time.monotonic() + _END_WAIT
        while self._process.exitcode is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    # ------------------------------------------------------------------------------------ answers

    def _on_answer(self, generation: Generation, answer: Answer) -> None:
        match answer:
            case ("pong",):
                generation.signalled.clear()
            case ("exited", token, status):
                self._on_worker_end(generation, token, process_control.describe_status(status))
            case ("forked", token, pid):
                self._zygotes.note_forked(generation, token, pid)
            case ("delayed", token, why):
                generation.delayed[token] = f"a worker waits to be forked: {why}"
            case ("failed", token, why):
                self._on_worker_end(generation, token, f"it could not be started: {why}")
            case ("loaded", names, changed, *texts):
                generation.note_loaded(names, changed, texts)
            case ("preloaded", _, unsafe, package) if self._imports.is_importing(generation):
                self._imports.succeed(unsafe, package)
            case ("preloaded", problems, unsafe, _):
                self._preloaded(generation, problems, unsafe)

    def _on_worker_end(self, generation: Generation, token: Any, reason: str) -> None:
        generation.delayed.pop(token, None)
        generation.signalled.discard(token)
        process = generation.processes.pop(token, None)
        if process is not None:
            if generation.imports and any(each in reason for each in _CRASHES):
                self._imports.stop(f"a worker that had it crashed: {reason}")
            self._pool.gone(process, reason)
        self._zygotes.end_if_replaced(generation)

    def _preloaded(
        self, generation: Generation, problems: dict[str, str | None], unsafe: str | None
    ) -> None:
        self._asked = {name: each for name, each in problems.items() if name in self._requested}
        for name, problem in problems.items():
            if problem:
                self._notes.append(f"preload: {name} could not be imported: {problem}")
        if unsafe:
            self._notes.append(f"preload: not used, workers import for themselves: {unsafe}")
            self._zygotes.forget(generation)
            self._zygotes.second = None
            return
        generation.preloaded = True
        generation.link.ask(("prepare",))
        self._pool.renew()

    # --------------------------------------------------------------------------------------- ends

    def _on_link_end(self, generation: Generation, gone: bool) -> None:
        """Handle the end of a zygote, or end a zygote that has sent an invalid message: its other
        messages cannot be trusted."""
        if gone:
            self._on_death(generation, "it was killed when its zygote died")
            return
        reason = f"the process that forks workers (pid {generation.pid}) sent what is no message"
        self._notes.append(f"{reason}, and was replaced")
        if generation is self._zygotes.first:
            process_control.kill(self._process.pid)
        else:
            self._zygotes.kill(generation)
        self._on_death(generation, f"{reason}, and was ended with its workers")

    def _on_death(self, generation: Generation, reason: str) -> None:
        """Replace a zygote that has died, and watch the ends of the workers that die with it."""
        zygotes = self._zygotes
        zygotes.forget(generation)
        lost, generation.processes = list(generation.processes.values()), {}
        if generation is zygotes.second:
            zygotes.second = None
            self._failed_preloads += not generation.preloaded
            if self._failed_preloads > 1:  # the first zygote forks all workers, then
                self._notes.append("preload: not used, the process that imported it died twice")
            elif self._may_restart(self._restart_second):
                self._start_second()
        elif generation is zygotes.first:
            zygotes.first = zygotes.second = None
            self._reaped()
            if self._may_restart(self._restart_first):
                self._start_first()
        self._imports.on_death(generation)
        self._pool.renew()  # its standbys have died, too
        for process in lost:
            self._lost.end(process, reason)

    def _may_restart(self, later: Callable[[], None]) -> bool:
        """Return whether to start another zygote now. After too many deaths call `later` when
        `WINDOW` is over; until then tasks fail at once, with the reason."""
        now = time.monotonic()
        self._deaths = [each for each in self._deaths if each > now - WINDOW] + [now]
        if len(self._deaths) <= RESTARTS:
            return True
        self._notes.append(
            f"{len(self._deaths)} zygotes died within {WINDOW:g} s: the next one is tried then"
        )
        self._loop.after(WINDOW, later)
        return False

    def _restart_first(self) -> None:
        if self._zygotes.first is None and not self._closed:
            self._start_first()
            self._pool.renew()

    def _restart_second(self) -> None:
        if self._zygotes.first is not None and self._zygotes.second is None:
            self._start_second()
