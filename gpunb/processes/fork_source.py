"""Workers that a zygote forks: the kernel's side of `worker.zygote`.

There are two zygotes. The first is a new interpreter. It forks workers from the start, and it forks
the second zygote, which imports the preload. When tasks import packages, the second forks a third
one, which imports these too.

1. A request to a zygote that has not started or does not read waits in its `Link`, in order.
2. When the second zygote reports the end of its preload, it gets all new requests, and the pool
   replaces its standbys. Each process stays with the zygote that forked it: signals go to that
   zygote, and that zygote reports its end.
3. So does the third one (`_following`), except for workers that must be `bare`. When tasks import
   more, it forks another one (`_next`), which imports only that, and takes its place.
4. A process for a task that needs modules of `_next` is `held` until that has imported them. If it
   cannot, the process is forked without them.
5. A zygote that was replaced ends after its last process and the last zygote that it forked. To
   limit their number, after `MOST_ANCESTORS` of them the second one forks a zygote that imports
   everything, in the background.
6. When a zygote dies, the system kills its workers, but no zygote reports their ends.
   `lost_workers` does.
7. The zygotes that a zygote forked die with it. Their links report that earlier or later, when new
   ones may have started; so each report is compared with the present ones.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from gpunb.data import files
from gpunb.processes import launcher
from gpunb.processes.followed import Follower
from gpunb.processes.generation import Generation, close_all
from gpunb.processes.launcher import Launched
from gpunb.processes.lost_workers import LostWorkers
from gpunb.processes.pool import WorkerPool
from gpunb.processes.worker_process import WorkerProcess
from gpunb.processes.zygote_link import Answer, Link
from gpunb.protocol import plain
from gpunb.protocol.zygote import SECOND, Imports, Preload
from gpunb.system import limits, process_control
from gpunb.system.loop import Loop

RESTARTS = 5
"""Deaths of zygotes within `WINDOW` seconds after which no new one is started for so long."""

WINDOW = 30.0
_END_WAIT = 3.0

LONGEST_WAIT = 60.0
"""Seconds that a task waits for the imports that it needs; then it imports by itself."""

_PIPE = 1 << 16

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
        self._preload = (*own_preload, *preload)
        self._first: Generation | None = None
        self._second: Generation | None = None
        self._following: Generation | None = None
        self._next: Generation | None = None
        self._numbers = itertools.count(1)
        self._most = follow
        self.follows = follow > 0
        self._follower = Follower(loop, self._start_next)
        self._process: Any = None
        self._deaths: list[float] = []
        self._failed_preloads = 0
        self._generations: set[Generation] = set()
        self._lost = LostWorkers(loop, pool)
        self._problems: dict[str, str] = {}
        self._notes: list[str] = []
        self._closed = False
        self.environment: dict[str, str] = {}
        self._asked: dict[str, str | None] | None = None
        self._start_first(launched)

    @property
    def notes(self) -> list[str]:
        """Texts on problems with new processes."""
        silent = [each.why_silent() for each in self._generations]
        delayed = [why for each in self._generations for why in each.delayed.values()]
        texts = [*self._notes, *self._follower.notes, *self._problems.values(), *silent, *delayed]
        return list(dict.fromkeys(each for each in texts if each))

    def held_up(self, process: WorkerProcess) -> str | None:
        """Return why a process has not started, or gets no signal; None if nothing is known."""
        generation = process.origin
        if not isinstance(generation, Generation):
            return None
        if process.ready and process.token not in generation.signalled:
            return None
        known = generation.delayed.get(process.token) or generation.why_silent()
        if process.token in generation.held:
            seconds = time.monotonic() - generation.since
            known = f"what it imports is imported first, for {seconds:.0f} s now"
        if known is None and not process.ready:
            return next(iter(self._problems.values()), None)
        return known

    # ----------------------------------------------------------------------------------- zygotes

    def _start_first(self, launched: Launched | None = None) -> None:
        """Start the first zygote, and through it the second. Requests to the first one wait in its
        link until it has started."""
        first = self._first = self._new_generation()
        if self._inherited is not None:
            first.link.ask(("keep",), [self._inherited], lent=True)
        self.environment = launched.environment if launched else dict(os.environ)

        def start() -> None:
            nonlocal launched
            launched = launched or launcher.zygote()
            self._process = launched.process
            first.pid = launched.process.pid
            first.link.connect(launched.sock)
            self._start_second()

        self._try(start, "the process that forks workers cannot be started")

    def _start_second(self) -> None:
        first = self._first

        def start() -> None:
            if first is not None and first is self._first:
                self._second = self._fork_zygote(first)

        self._try(start, "the preload cannot be imported")

    def _start_next(self, imports: Imports, awaited: bool) -> None:
        """Start a zygote that preloads these, too, for which a task waits or not."""
        parent, before = self._second, self._following
        if parent is None or self._closed:
            self._follower.lost()
            return
        if self._next is not None:
            self._drop_next()
        if (
            before is not None
            and before.imports is not None
            and imports.joins(before.imports)
            and (awaited or not before.has_many_ancestors)
        ):
            parent = before
            imports = imports._replace(changed={**before.imports.changed, **imports.changed})
        try:
            self._next = self._fork_zygote(parent, imports)
        except OSError as error:
            self._follower.stop(limits.explain(error))

    def _fork_zygote(self, parent: Generation, imports: Imports | None = None) -> Generation:
        onto = parent.imports is not None
        modules = () if onto else self._preload
        if imports is not None:
            missing = tuple(each for each in imports.modules if each not in parent.modules)
            preload = Preload(modules, tuple(imports._replace(modules=missing)), self._most, onto)
        else:
            preload = Preload(modules)
        file = files.memory_file()
        generation = self._new_generation(imports, parent)
        generation.modules.update(parent.modules)
        try:
            files.write_all(file, iter([memoryview(plain.dumps(tuple(preload)))]))
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            generation.link.connect(ours)
        except BaseException:
            os.close(file)
            self._forget(generation)  # or its parent would never end
            raise
        parent.link.ask(("preload", generation.number), [theirs.detach(), file])
        return generation

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

    def _new_generation(
        self, imports: Imports | None = None, parent: Generation | None = None
    ) -> Generation:
        generation = Generation(next(self._numbers), imports, parent)
        generation.link = Link(
            self._loop,
            lambda answer: self._on_answer(generation, answer),
            lambda gone: self._on_link_end(generation, gone),
        )
        self._generations.add(generation)
        return generation

    # ------------------------------------------------------------------------------- for the pool

    @property
    def followed(self) -> Imports | None:
        """What new processes have because tasks have imported it."""
        return self._following.imports if self._following is not None else None

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
            self._follower.imported(imports)

    def import_first(self, imports: Imports) -> bool:
        """Preload what a task needs, unless new workers have it. Return whether the worker of the
        task should `wait` for that."""
        if not self.follows or self._second is None:
            return False
        there = self._second.modules if self._second.preloaded else self._requested
        missing = tuple(each for each in imports.modules if each not in there)
        return bool(missing) and self._follower.needed(imports._replace(modules=missing))

    def start(
        self,
        process: WorkerProcess,
        descriptors: Sequence[int],
        *,
        bare: bool = False,
        wait: bool = False,
    ) -> None:
        if wait and self._next is not None:
            self._hold(self._next, process, descriptors)
            return
        second = self._second if self._second and self._second.preloaded else None
        generation = (not bare and self._following) or second or self._first
        if generation is None:
            close_all(descriptors)
            self._pool.gone_later(process, "no zygote could be started; see gpunb doctor")
            return
        self._fork(generation, process, descriptors)

    def _fork(
        self, generation: Generation, process: WorkerProcess, descriptors: Sequence[int]
    ) -> None:
        generation.processes[process.token] = process
        process.origin = generation
        followed = generation.imports
        process.environment = followed.environment if followed else self.environment
        generation.link.ask(("fork", process.token), descriptors)

    def _hold(
        self, generation: Generation, process: WorkerProcess, descriptors: Sequence[int]
    ) -> None:
        """Let a process wait for a zygote that imports. Its setup must also fit without these
        imports, so it has the environment of the other zygotes."""
        process.origin = generation
        process.environment = self.environment
        generation.held[process.token] = process, descriptors
        self._loop.after(LONGEST_WAIT, functools.partial(self._let_go, generation, process))

    def _let_go(self, generation: Generation, process: WorkerProcess) -> None:
        """Fork a process that waits for a zygote without the modules of that zygote."""
        if process.token in generation.held:
            _, descriptors = generation.held.pop(process.token)
            self.start(process, descriptors, bare=True)

    def _let_all_go(self, generation: Generation) -> None:
        for process, _ in list(generation.held.values()):
            self._let_go(generation, process)

    def signal(self, process: WorkerProcess, number: int) -> None:
        generation = process.origin
        if isinstance(generation, Generation) and process.token in generation.held:
            if number == signal.SIGKILL:
                close_all(generation.held.pop(process.token)[1])
                reason = process_control.describe_status(number)
                self._pool.gone_later(process, reason or "it was killed")
                return
            self._let_go(generation, process)  # it need not wait to be interrupted
            generation = process.origin
        if isinstance(generation, Generation) and generation in self._generations:
            generation.signalled.add(process.token)
            generation.link.ask(("signal", process.token, int(number)))

    def close(self) -> None:
        """End the zygotes; they end the workers and the children of these."""
        self._closed = True
        for generation in list(self._generations):
            if generation.pid is not None:  # a stopped zygote could not end its workers
                process_control.kill(generation.pid, signal.SIGCONT)
            generation.close_held()
            self._forget(generation)
        self._lost.close()
        if self._process is not None and not self._reaped():
            process_control.kill(self._process.pid)
            self._reaped()

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        while self._generations:
            generation = self._generations.pop()
            generation.close_held()
            generation.link.forked()
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
                self._forked(generation, token, pid)
            case ("delayed", token, why):
                generation.delayed[token] = f"a worker waits to be forked: {why}"
            case ("failed", token, why):
                self._on_worker_end(generation, token, f"it could not be started: {why}")
            case ("loaded", names, changed, *texts):
                generation.note_loaded(names, changed, texts)
            case ("preloaded", _, unsafe, package) if generation is self._next:
                self._succeed(generation, unsafe, package)
            case ("preloaded", problems, unsafe, _):
                self._preloaded(generation, problems, unsafe)

    def _forked(self, generation: Generation, token: Any, pid: int) -> None:
        generation.delayed.pop(token, None)
        if token in generation.processes:
            generation.processes[token].pid = pid
        elif isinstance(token, tuple):
            for each in (self._second, self._next):
                if each is not None and token == (SECOND, each.number):
                    each.pid = pid

    def _on_worker_end(self, generation: Generation, token: Any, reason: str) -> None:
        generation.delayed.pop(token, None)
        generation.signalled.discard(token)
        process = generation.processes.pop(token, None)
        if process is not None:
            if generation.imports and any(each in reason for each in _CRASHES):
                self._stop_following(f"a worker that had it crashed: {reason}")
            self._pool.gone(process, reason)
        self._end_if_replaced(generation)

    def _preloaded(
        self, generation: Generation, problems: dict[str, str | None], unsafe: str | None
    ) -> None:
        self._asked = {name: each for name, each in problems.items() if name in self._requested}
        for name, problem in problems.items():
            if problem:
                self._notes.append(f"preload: {name} could not be imported: {problem}")
        if unsafe:
            self._notes.append(f"preload: not used, workers import for themselves: {unsafe}")
            self._forget(generation)
            self._second = None
            return
        generation.preloaded = True
        generation.link.ask(("prepare",))
        self._pool.renew()

    def _succeed(self, generation: Generation, unsafe: str | None, package: str) -> None:
        """Use a zygote with the imports of tasks, unless it is not safe."""
        if unsafe:
            self._drop_next()
            if package:
                self._follower.refuse(package, unsafe)
            else:
                self._follower.stop(unsafe)
            return
        before, self._following, self._next = self._following, generation, None
        self._follower.followed(generation.note_preloaded())
        if generation.has_many_ancestors:
            self._follower.renew()
        held, generation.held = list(generation.held.values()), {}
        for process, descriptors in held:
            for text, pipe in zip(generation.printed, descriptors[1:3], strict=True):
                _write(pipe, text)
            self._fork(generation, process, descriptors)
        generation.link.ask(("prepare",))  # before the standbys, after the tasks that wait
        self._pool.renew()
        self._replace(before)

    def _drop_next(self) -> None:
        """End the zygote that still imports."""
        dropped, self._next = self._next, None
        if dropped is not None:
            self._kill(dropped)
            self._forget(dropped)
            self._let_all_go(dropped)

    def _kill(self, generation: Generation) -> None:
        if generation.parent is not None:
            token = (SECOND, generation.number)
            generation.parent.link.ask(("signal", token, int(signal.SIGKILL)))

    def _stop_following(self, why: str) -> None:
        """Go back to the modules that were asked for."""
        self._follower.stop(why)
        before, self._following = self._following, None
        self._drop_next()
        if before is not None:
            self._pool.renew()
            self._replace(before)

    def _replace(self, generation: Generation | None) -> None:
        """Let a zygote end after its last process and the last zygote that it forked."""
        if generation is not None:
            generation.replaced = True
            self._end_if_replaced(generation)

    def _end_if_replaced(self, generation: Generation) -> None:
        kept = generation.processes or any(each.parent is generation for each in self._generations)
        if generation.replaced and not kept and generation in self._generations:
            self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        self._generations.discard(generation)
        generation.link.close()
        if generation.parent is not None:
            self._end_if_replaced(generation.parent)

    # --------------------------------------------------------------------------------------- ends

    def _on_link_end(self, generation: Generation, gone: bool) -> None:
        """Handle the end of a zygote, or end a zygote that has sent an invalid message: its other
        messages cannot be trusted."""
        if gone:
            self._on_death(generation, "it was killed when its zygote died")
            return
        reason = f"the process that forks workers (pid {generation.pid}) sent what is no message"
        self._notes.append(f"{reason}, and was replaced")
        if generation is self._first:
            process_control.kill(self._process.pid)
        else:
            self._kill(generation)
        self._on_death(generation, f"{reason}, and was ended with its workers")

    def _on_death(self, generation: Generation, reason: str) -> None:
        """Replace a zygote that has died, and watch the ends of the workers that die with it."""
        self._forget(generation)
        held = generation
        lost, generation.processes = list(generation.processes.values()), {}
        if generation is self._next:
            self._next = None
            if any(each.link.is_gone() for each in generation.ancestors()):
                self._follower.lost()
            else:
                self._follower.stop("the process that imported it died")
        elif generation is self._second:
            self._second = None
            self._failed_preloads += not generation.preloaded
            if self._failed_preloads > 1:  # the first zygote forks all workers, then
                self._notes.append("preload: not used, the process that imported it died twice")
            elif self._may_restart(self._restart_second):
                self._start_second()
        elif generation is self._following:
            self._following = None
            self._follower.lost()
        elif generation is self._first:
            held = self._next or generation
            self._first = self._second = self._following = self._next = None  # they die with it
            self._follower.lost()
            self._reaped()
            if self._may_restart(self._restart_first):
                self._start_first()
        self._let_all_go(held)
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
        if self._first is None and not self._closed:
            self._start_first()
            self._pool.renew()

    def _restart_second(self) -> None:
        if self._first is not None and self._second is None:
            self._start_second()


def _write(pipe: int, text: str) -> None:
    """Write into an empty pipe as much as it takes."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(OSError):
        os.write(pipe, text.encode()[:_PIPE])
    os.set_blocking(pipe, True)
