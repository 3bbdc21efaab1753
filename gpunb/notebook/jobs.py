"""Cells in the background: their names bound between other cells."""

from __future__ import annotations

import sys
import threading
from typing import Any

from gpunb import backend
from gpunb.backend import Keeper, Outcome
from gpunb.notebook import handles, running
from gpunb.notebook.arriving import Home
from gpunb.notebook.card import Card, Cards, summary
from gpunb.notebook.cells import HandedIn, Request, conclude, hand_in, lines_of, short
from gpunb.notebook.found import Fetched, Program, adopt
from gpunb.notebook.job import Job
from gpunb.notebook.late import InCell, Kept, replay
from gpunb.notebook.output import Foreground, request_of


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
            made.append(job)

        try:
            home, error = running.bring(self._shell, request, begun)
        except BaseException as failure:
            for job in made:
                job._conclude(None, failure)  # noqa: SLF001 - handle and book are one
            raise
        (job,) = made
        job._conclude(home, error)  # noqa: SLF001
        return job, error

    def unsettled(self) -> list[Job]:
        """Those that are not over, or of whose end the notebook does not know yet."""
        news = {*map(id, self._ended), *map(id, self._failed)}
        return [job for job in self._jobs.values() if not job.done() or id(job) in news]

    def get(self, ident: int) -> Job | None:
        """The one of that number."""
        return self._jobs.get(ident)

    def find(self, ident: int) -> Job:
        """The one of that number, of this notebook or of another kernel of the head process.

        Raises:
            ValueError: there is no such cell.
            ObjectLostError: it is another kernel's, and what it made is not kept any more.
        """
        own, current = self._jobs.get(ident), backend.existing()
        if (own is None or own.lost) and isinstance(current, Keeper):
            handed, sink, past = adopt(self._shell, current, ident)
            own = self._jobs[ident] = Job(self, handed, sink)
            if past is not None:
                own._past = past  # noqa: SLF001
                own._end()  # noqa: SLF001
            else:
                current.notify(handed.obj, own._end)  # noqa: SLF001
        if own is None:
            raise ValueError(f"#{ident} is no background cell of this notebook")
        return own

    def follow(self, job: Job) -> None:
        """Show what one of another kernel has shown meanwhile; in the cell that waits for it."""
        if isinstance(job._sink, Fetched) and not isinstance(self._shell, Program):  # noqa: SLF001
            replay(self._shell, job._sink.news())  # noqa: SLF001

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
            told = home is not None or (isinstance(outcome, Outcome) and outcome.failed)
            if told and isinstance(handed.backend, Keeper):
                handed.backend.brought_home(job.id)
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
            elif isinstance(sink, Fetched):
                self.follow(job)
                self._show_last(job, text)
            else:
                replay(self._shell, job.log)
                sys.stderr.write(f"gpunb: {text}\n")

    def _show_last(self, job: Job, text: str) -> None:
        """In the cell that waits for one of another kernel, its value is that cell's."""
        if isinstance(self._shell, Program):
            return
        if job._shown:  # noqa: SLF001
            self._shell.displayhook.update_user_ns(job._last)  # noqa: SLF001
            self._shell.displayhook.fill_exec_result(job._last)  # noqa: SLF001
        sys.stderr.write(f"gpunb: {text}\n")

    def put_out(self, job: Job) -> None:
        """Its value is the output of its cell, in place of the handle; unless what it bound can
        only be had from that."""
        if isinstance(job._sink, Fetched):  # noqa: SLF001 - its cell is another notebook's
            return
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
