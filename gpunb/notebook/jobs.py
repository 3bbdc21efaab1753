"""Cells in the background: handles to them, and their names bound between other cells."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from typing import Any

from gpunb.backend import Outcome
from gpunb.exceptions import GetTimeoutError, GpunbError
from gpunb.notebook import handles, running
from gpunb.notebook.arriving import Home
from gpunb.notebook.card import Card, Cards, facts_text, summary
from gpunb.notebook.cells import HandedIn, Request, conclude, hand_in, lines_of, short
from gpunb.notebook.late import InCell, Kept, replay
from gpunb.notebook.log import Log
from gpunb.notebook.output import Foreground, request_of
from gpunb.refs import HEARTBEAT, check_timeout, there


class Job:
    """A cell in the background.

    Its names are bound in the notebook when it is done: between other cells, and never over one
    that was bound anew or changed meanwhile. ``await job``, `wait` and `result` wait for it.
    """

    def __init__(self, jobs: Jobs, handed: HandedIn, sink: InCell | Kept | Foreground) -> None:
        self.id = handed.obj[0]
        """Its number, as in ``#7``."""
        self.name = handed.name
        self.number = handed.number
        """The cell's, as in ``In[3]``."""
        self.peak = 0
        """Bytes of memory that its process had at most; once it is done."""
        self._jobs = jobs
        self._handed: HandedIn | None = handed
        self._backend = handed.backend
        self._sink = sink
        self._finished = threading.Event()
        self._outcome: Outcome | GpunbError | None = None
        self._past: dict[str, Any] = {}
        self._bound: dict[str, int] = {}
        self._unbound: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._last: Any = None
        self._shown = False

    @property
    def state(self) -> str:
        """``"queued"``, ``"running"``, ``"done"``, ``"failed"`` or ``"cancelled"``."""
        return str(self._facts["state"])

    @property
    def names(self) -> dict[str, Any]:
        """What it bound, by name, once it is done: as it stands in the notebook, unless that has
        bound the name anew since; and what was left alone there because it had done so before."""
        space = self._jobs.space
        bound = {
            n: space[n] for n, was in self._bound.items() if n in space and id(space[n]) == was
        }
        return {**bound, **self._unbound}

    def done(self) -> bool:
        """Whether it is over."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Job:
        """Wait until it is over, at most `timeout` seconds, and bind its names.

        Raises:
            GetTimeoutError: not in time; it goes on.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._finished.wait(_until(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                raise GetTimeoutError(f"{self!r} was not over after {timeout:g} s; it goes on")
        self._jobs.bind(self)
        return self

    @property
    def result(self) -> Any:
        """The value of its last expression; waits for it, and raises what it raised."""
        self.wait()
        if self._error is not None:
            self._jobs.told(self)
            raise self._error
        return self._last

    def cancel(self, *, force: bool = False) -> None:
        """Interrupt it, or remove it if it waits; with `force`, end its process at once."""
        handed = self._handed
        if self.done() or handed is None:
            return
        if force:
            handed.kill()
        else:
            self._backend.cancel(handed.obj, False, True)

    def logs(self) -> str:
        """All that it has printed."""
        return self.log.text()

    @property
    def log(self) -> Log:
        """All that it has shown."""
        return self._sink.log

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        handed = self._handed
        if not self.done() and handed is not None:
            await there(handed.obj)
        return self.result

    @property
    def _facts(self) -> dict[str, Any]:
        """What the runtime knows of it, or did."""
        facts = self._past or self._backend.ask("job", self.id) or {}
        facts = {"name": self.name, "state": "queued", "gpus": [], "seconds": 0.0, **facts}
        over, failed = self.done(), self._error is not None or getattr(self._sink, "failed", False)
        if facts["state"] in (("queued", "running", "done") if over else ("done",)):
            facts["state"] = "failed" if failed else "done"
        return facts

    def _why(self) -> str | None:
        handed = self._handed
        try:
            why: str | None = self._backend.ask("why", self.id)
        except GpunbError:  # it is over, with all else
            return None
        if why is not None and handed is not None and (host := handed.request.session) is not None:
            return why.replace(f"actor #{host.actor}", f"the session {host.name!r}")
        return why

    def _end(self) -> None:
        """It is over: take what it made, and what is known of it, before anybody forgets."""
        assert self._handed is not None
        self._past = self._backend.ask("job", self.id) or {}
        try:
            self._outcome = self._backend.fetch([self._handed.obj], 0)[0]
        except GpunbError as error:
            self._outcome = error
        if not isinstance(self._outcome, Outcome) and not getattr(self._sink, "failed", False):
            self._error = short(self._outcome)
        self._finished.set()

    def _take(self, home: Home | None, error: BaseException | None) -> None:
        """This is what became of it; nothing that it was given is needed any more."""
        self._error = error
        if home is not None:
            self.peak, self._last = home.ending.peak, home.last
            self._shown = home.ending.shown
            self._unbound = {name: home.values[name] for name in home.unbound}
            self._bound = {n: id(each) for n, each in home.values.items() if n not in self._unbound}
        if self._handed is not None:
            self._backend.drop(self._handed.obj)
        self._handed = self._outcome = None

    def _keep(self, last: Any) -> None:
        """This is left of its value."""
        self._last = last

    def __repr__(self) -> str:
        return f"<Job {facts_text(self.id, self._facts)}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {**Card(self).bundle(), "text/plain": repr(self)}


def _until(deadline: float | None) -> float:
    return HEARTBEAT if deadline is None else min(HEARTBEAT, max(0.0, deadline - time.monotonic()))


class Jobs:
    """The background cells of one notebook. Its methods are for the main thread."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._jobs: dict[int, Job] = {}
        self._ended: list[Job] = []
        self._failed: list[Job] = []
        self._reported: set[int] = set()
        self._running: tuple[Any, str] | None = None
        self._binding = threading.RLock()
        self._cards = Cards()

    def register(self) -> None:
        """Look after the cells of the shell."""
        self._shell.events.register("pre_run_cell", self._before_cell)
        self._shell.events.register("post_run_cell", self._after_cell)

    def unregister(self) -> None:
        """Do not look after them any more. What runs goes on."""
        self._shell.events.unregister("pre_run_cell", self._before_cell)
        self._shell.events.unregister("post_run_cell", self._after_cell)

    @property
    def space(self) -> dict[str, Any]:
        """The names of the notebook."""
        space: dict[str, Any] = self._shell.user_ns
        return space

    @property
    def busy(self) -> bool:
        """Whether a cell is running."""
        return self._running is not None

    def start(self, request: Request) -> Job:
        """Hand a cell in and return at once.

        Raises:
            UsageError, InfeasibleRequestError: it cannot be.
        """
        sink = InCell(self._shell) if hasattr(self._shell, "kernel") else Kept()
        handed = hand_in(self._shell, request, sink, late=True)
        job = self._jobs[handed.obj[0]] = Job(self, handed, sink)
        if isinstance(sink, InCell):
            card = Card(job, sink)
            card.display(self._shell)
            self._cards.add(card)
        handed.backend.notify(handed.obj, lambda: self._over(job))
        return job

    def run_first(self, request: Request) -> tuple[Job, BaseException | None]:
        """As `start`, but run it to its end as a cell in the foreground; what it raised.

        Raises:
            UsageError, InfeasibleRequestError: it cannot be handed in.
        """
        made: list[Job] = []

        def begun(handed: HandedIn, sink: Foreground) -> None:
            job = self._jobs[handed.obj[0]] = Job(self, handed, sink)
            handed.backend.notify(handed.obj, job._end)  # noqa: SLF001 - handle and book are one
            made.append(job)

        home, error = running.bring(self._shell, request, begun)
        (job,) = made
        job._handed = None  # noqa: SLF001 - it was let go already
        job._take(home, error)  # noqa: SLF001
        return job, error

    def unsettled(self) -> list[Job]:
        """Those that are not over, or of whose end the notebook does not know yet."""
        news = {*map(id, self._ended), *map(id, self._failed)}
        return [job for job in self._jobs.values() if not job.done() or id(job) in news]

    def get(self, ident: int) -> Job | None:
        """The one of that number."""
        return self._jobs.get(ident)

    def told(self, job: Job) -> bool:
        """Somebody sees that it failed; whether nobody was told in this cell before."""
        if job in self._failed:
            self._failed.remove(job)
        before = job.id in self._reported
        self._reported.add(job.id)
        return not before

    def bind(self, job: Job) -> None:
        """Bind the names of a job that is over, unless they are."""
        with self._binding:
            handed, outcome = job._handed, job._outcome  # noqa: SLF001
            if handed is None or outcome is None:
                return
            home: Home | None = None
            error: BaseException | None = None
            if isinstance(outcome, Outcome):
                home, error = conclude(handed, outcome, note=self._note(job))
                self._follow_on(job, home)
            else:
                error = short(outcome)
            job._take(home, error)  # noqa: SLF001
            self.put_out(job)
            if job in self._ended:
                self._ended.remove(job)
            text, sink = summary(job, home), job._sink  # noqa: SLF001
            assert not isinstance(sink, Foreground)
            if error is not None and job.state == "failed":
                content = {"ename": type(error).__name__, "evalue": str(error)}
                sink.error({**content, "traceback": lines_of(error)})
            if isinstance(sink, InCell):
                self._cards.end(job, text)
                if job.state == "failed":
                    self._failed.append(job)
            else:
                replay(self._shell, job.log)
                sys.stderr.write(f"gpunb: {text}\n")

    def put_out(self, job: Job) -> None:
        """Its value is the output of its cell, in place of the handle; unless what it bound can
        only be had from that."""
        outputs = self.space.get("_oh", {})
        last, unbound = job._last, job._unbound  # noqa: SLF001
        if job._shown and not unbound and outputs.get(job.number) is job:  # noqa: SLF001
            handles.put_late(self._shell, job.number, last, job._keep)  # noqa: SLF001

    # ------------------------------------------------------------------------------- between cells

    def _over(self, job: Job) -> None:
        """On the runtime's thread: a job is over."""
        self._ended.append(job)
        job._end()  # noqa: SLF001
        loop = getattr(getattr(self._shell, "kernel", None), "io_loop", None)
        if loop is not None:
            loop.add_callback(self._while_idle)

    def _while_idle(self) -> None:
        if not self.busy:
            self._bind_all()

    def _before_cell(self, info: Any = None) -> None:
        asked = request_of(self._shell) if hasattr(self._shell, "kernel") else None
        if self._running is not None and asked is not None and self._running[0] is asked:
            return  # a cell within that cell
        self._bind_all()
        self._running = asked, info.raw_cell
        self._reported.clear()
        for job in list(self._failed):
            self.told(job)
            error = job._error  # noqa: SLF001
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            sys.stderr.write(
                f"gpunb: the background cell #{job.id} {job.name} has failed: {text} "
                f"(%gpu logs {job.id} shows it again)\n"
            )

    def _after_cell(self, result: Any = None) -> None:
        if self._running is None:
            return
        info = getattr(result, "info", None)
        if info is not None and info.raw_cell != self._running[1]:
            return  # a cell within that cell
        self._running = None
        self._bind_all()

    def _bind_all(self) -> None:
        for job in list(self._ended):
            if job.done():
                self.bind(job)

    def _follow_on(self, job: Job, home: Home | None) -> None:
        """What a cell has bound is not new to those that were handed in after it."""
        if home is None:
            return
        names = {*home.values, *home.ending.deleted} - set(home.unbound)
        for other in self._jobs.values():
            handed = other._handed  # noqa: SLF001
            if other.id > job.id and handed is not None and handed.shipment.since is not None:
                for name in names:
                    handed.shipment.since.now(name)

    def _note(self, job: Job) -> Any:
        return lambda text: job._sink.text("stderr", text)  # noqa: SLF001


_jobs: dict[int, Jobs] = {}


def of(shell: Any) -> Jobs:
    """The background cells of a shell."""
    found = _jobs.get(id(shell))
    if found is None:
        found = _jobs[id(shell)] = Jobs(shell)
    return found
