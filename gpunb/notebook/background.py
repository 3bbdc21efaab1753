"""Cells in the background: their handles, and the binding of their names between other cells."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

from gpunb.api.refs import check_timeout, until_ready
from gpunb.engine.job_log import Log
from gpunb.exceptions import GetTimeoutError
from gpunb.notebook import foreground
from gpunb.notebook import shell as notebook_shell
from gpunb.notebook.adopted_jobs import Fetched, adopt
from gpunb.notebook.background_cell import BackgroundCell
from gpunb.notebook.background_output import BufferedOutput, InCell, replay
from gpunb.notebook.bind import Home
from gpunb.notebook.capture import CellRequest
from gpunb.notebook.cell import HandedIn, conclude, hand_in, lines_of, short
from gpunb.notebook.job_card import Card, Cards, bundle_of
from gpunb.notebook.output import Foreground
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.stale_handles import OldOutputs
from gpunb.protocol import backend
from gpunb.protocol.backend import Outcome, SharedBackend
from gpunb.system.signals import HEARTBEAT


class JobHandle:
    """The handle of a cell in the background.

    When the cell is done, its names are bound in the notebook between other cells. A name that the
    notebook bound anew or changed meanwhile stays. ``await job``, `wait` and `result` wait for the
    end of the cell.
    """

    def __init__(self, jobs: Jobs, cell: BackgroundCell) -> None:
        self.id = cell.id
        """The number of the job, as in ``#7``."""
        self.name = cell.name
        self.number = cell.number
        """The number of the cell, as in ``In[3]``."""
        self._jobs = jobs
        self._cell = cell

    @property
    def peak(self) -> int:
        """The most memory that its process had, in bytes; 0 before its end."""
        return self._cell.peak

    @property
    def lost(self) -> bool:
        """Whether its session was shut down, while it goes on in the head process."""
        return self._cell.lost

    @property
    def state(self) -> str:
        """``"queued"``, ``"running"``, ``"done"``, ``"failed"`` or ``"cancelled"``."""
        return self._cell.state

    @property
    def names(self) -> dict[str, Any]:
        """The values that it bound, by name, once it is done: of names that the notebook has not
        bound anew since, and of names that stayed because the notebook had changed them before."""
        cell, space = self._cell, self._jobs.shell.user_ns
        bound = {n: space[n] for n, was in cell.bound.items() if n in space and id(space[n]) == was}
        return {**bound, **cell.unbound}

    def done(self) -> bool:
        """Whether it is over."""
        return self._cell.over.is_set()

    def wait(self, timeout: float | None = None) -> JobHandle:
        """Wait until it is over, at most `timeout` seconds, and bind its names.

        Raises:
            GetTimeoutError: the time is over; the cell goes on.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._cell.over.wait(_until(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                raise GetTimeoutError(f"{self!r} was not over after {timeout:g} s; it goes on")
            self._jobs.follow(self._cell)
        self._jobs.bind(self._cell)
        return self

    @property
    def result(self) -> Any:
        """The value of its last expression. Waits for the end of the cell, and raises its error."""
        self.wait()
        if self._cell.error is not None:
            self._jobs.report(self._cell)
            raise self._cell.error
        return self._cell.last

    def cancel(self, *, force: bool = False) -> None:
        """Interrupt it, or take it out of the queue; with `force`, end its process at once."""
        handed = self._cell.handed
        if self.done() or handed is None:
            return
        if force:
            handed.kill()
        else:
            handed.backend.cancel(handed.obj, False, True)

    def logs(self) -> str:
        """The text that it has printed."""
        return self.log.text()

    @property
    def log(self) -> Log:
        """Its whole output."""
        return self._cell.sink.log

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        handed = self._cell.handed
        if not self.done() and handed is not None:
            await until_ready(handed.obj)
        return self.result

    def __repr__(self) -> str:
        return repr(self._cell)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {**bundle_of(*self._cell.describe()), "text/plain": repr(self)}


def _until(deadline: float | None) -> float:
    return HEARTBEAT if deadline is None else min(HEARTBEAT, max(0.0, deadline - time.monotonic()))


class Jobs:
    """The background cells of one notebook. Its methods are for the main thread."""

    def __init__(self, shell: NotebookShell) -> None:
        self.shell = shell
        self._cells: dict[int, BackgroundCell] = {}
        self._handles: dict[int, JobHandle] = {}
        self._ended: list[BackgroundCell] = []
        self._failed: list[BackgroundCell] = []
        self._reported: set[int] = set()
        self._running: tuple[Any, str] | None = None
        self._binding = threading.RLock()
        self._cards = Cards()

    def register(self) -> None:
        """Bind names between the cells of the shell from now on."""
        self.shell.ip.events.register("pre_run_cell", self._before_cell)
        self.shell.ip.events.register("post_run_cell", self._after_cell)

    def unregister(self) -> None:
        """Bind no names between cells any more. Cells that run go on."""
        self.shell.ip.events.unregister("pre_run_cell", self._before_cell)
        self.shell.ip.events.unregister("post_run_cell", self._after_cell)

    @property
    def busy(self) -> bool:
        """Whether a cell is running."""
        return self._running is not None

    def start(self, request: CellRequest) -> JobHandle:
        """Submit a cell and return at once.

        Raises:
            UsageError, InfeasibleRequestError: the cell cannot run.
        """
        folds = request.folds(self.shell)
        sink = BufferedOutput(folds) if self.shell.kernel is None else InCell(self.shell, folds)
        handed = hand_in(self.shell, request, sink, late=True)
        cell = BackgroundCell(handed, sink)
        job = self._add(cell)
        if isinstance(sink, InCell):
            card = Card(cell.describe, sink)
            card.display(self.shell)
            self._cards.add(cell.id, card)
        handed.backend.notify(handed.obj, lambda: self._over(cell))
        return job

    def run_first(self, request: CellRequest) -> tuple[JobHandle, BaseException | None]:
        """Submit a cell and run it to its end, as in the foreground; return what it raised.

        Raises:
            UsageError, InfeasibleRequestError: the cell cannot run.
        """
        begun: list[BackgroundCell] = []

        def on_begin(handed: HandedIn, sink: Foreground) -> None:
            begun.append(BackgroundCell(handed, sink))
            self._add(begun[0])

        try:
            home, error = foreground.bring(self.shell, replace(request, apart=True), on_begin)
        except BaseException as failure:
            for cell in begun:
                cell.conclude(None, failure)
            raise
        begun[0].conclude(home, error)
        return self.handle(begun[0]), error

    def unsettled(self) -> list[BackgroundCell]:
        """The cells that are not over, or whose end the notebook does not know yet."""
        news = {*map(id, self._ended), *map(id, self._failed)}
        return [each for each in self._cells.values() if not each.over.is_set() or id(each) in news]

    def get(self, ident: int) -> BackgroundCell | None:
        """The cell with that number, if this notebook knows it."""
        return self._cells.get(ident)

    def find(self, ident: int) -> BackgroundCell:
        """The cell with that number, of this notebook or of another kernel of the head process.
        The numbers of the head process that is attached go before those of earlier sessions.

        Raises:
            ValueError: there is no such cell.
            ObjectLostError: it is another kernel's, and its result is not kept any more.
        """
        cell, current = self._cells.get(ident), backend.existing()
        known = cell is not None and not cell.lost
        if isinstance(current, SharedBackend) and not (known and cell and cell.is_of(current)):
            try:
                return self._adopted(current, ident)
            except ValueError:
                if not known:
                    raise
        if cell is None:
            raise ValueError(f"#{ident} is no background cell of this notebook")
        return cell

    def _adopted(self, head: SharedBackend, ident: int) -> BackgroundCell:
        """The cell of another kernel of the head process."""
        handed, sink, past = adopt(self.shell, head, ident)
        cell = BackgroundCell(handed, sink)
        self._add(cell)
        if past is not None:
            cell.end(past)
        else:
            handed.backend.notify(handed.obj, cell.end)
        return cell

    def handle(self, cell: BackgroundCell) -> JobHandle:
        """The user's handle of a cell."""
        return self._handles[cell.id]

    def follow(self, cell: BackgroundCell) -> None:
        """Show the new output of another kernel's cell, in the cell that waits for it."""
        if isinstance(cell.sink, Fetched) and self.shell.shows:
            replay(self.shell, cell.sink.news())

    def report(self, cell: BackgroundCell) -> bool:
        """Note that the user sees the error of a cell; return whether that is the first time in the
        running cell."""
        if cell in self._failed:
            self._failed.remove(cell)
        before = cell.id in self._reported
        self._reported.add(cell.id)
        return not before

    def bind(self, cell: BackgroundCell) -> None:
        """Bind the names of a cell that is over, unless that was done."""
        with self._binding:
            handed, outcome = cell.handed, cell.outcome
            if handed is None or outcome is None:
                return
            home: Home | None = None
            error: BaseException | None = None
            if isinstance(outcome, Outcome):
                home, error = conclude(handed, outcome, warn=partial(cell.sink.text, "stderr"))
                self._follow_on(cell, home)
            else:
                error = short(outcome)
            cell.settle(home, error)
            arrived = home is not None or (isinstance(outcome, Outcome) and outcome.failed)
            if arrived and isinstance(handed.backend, SharedBackend):
                handed.backend.brought_home(cell.id)
            self.put_out(cell.id)
            if cell in self._ended:
                self._ended.remove(cell)
            self._show_end(cell, cell.summary(home))

    def put_out(self, ident: int) -> None:
        """Make the value of a cell its output, in place of the handle. The handle stays if only it
        has some of the values, or if the cell is another notebook's."""
        cell = self._cells[ident]
        replaced = cell.shown and not cell.unbound and not isinstance(cell.sink, Fetched)
        outputs = self.shell.user_ns.get("_oh", {})
        if replaced and outputs.get(cell.number) is self.handle(cell):
            self.shell.part(OldOutputs).put_late(
                cell.number, cell.last, partial(setattr, cell, "last")
            )

    def _add(self, cell: BackgroundCell) -> JobHandle:
        self._cells[cell.id] = cell
        job = self._handles[cell.id] = JobHandle(self, cell)
        return job

    def _show_end(self, cell: BackgroundCell, text: str) -> None:
        """Show how a cell ended, where its output is shown."""
        error, sink = cell.error, cell.sink
        assert not isinstance(sink, Foreground)
        if error is not None and cell.state == "failed":
            content = {"ename": type(error).__name__, "evalue": str(error)}
            sink.error({**content, "traceback": lines_of(error)})
        if isinstance(sink, InCell):
            self._cards.end(cell.id, text)
            if cell.state == "failed":
                self._failed.append(cell)
            return
        if isinstance(sink, Fetched):
            self.follow(cell)
            if not self.shell.shows:
                return
            if cell.shown:  # the value is that of the cell that waits
                self.shell.set_output(cell.last)
        else:
            replay(self.shell, sink.log, sink.folds)
        sys.stderr.write(f"gpunb: {text}\n")

    # ------------------------------------------------------------------------------- between cells

    def _over(self, cell: BackgroundCell) -> None:
        """Take the end of a cell; on the engine's thread."""
        self._ended.append(cell)
        cell.end()
        loop = getattr(self.shell.kernel, "io_loop", None)
        if loop is not None:
            loop.add_callback(self._while_idle)

    def _while_idle(self) -> None:
        if not self.busy:
            self._bind_all()

    def _before_cell(self, info: Any = None) -> None:
        request = self.shell.request()
        if self._running is not None and self._running[0] is request:
            return  # a cell within that cell
        self._bind_all()
        self._running = request, info.raw_cell
        self._reported.clear()
        for cell in list(self._failed):
            self.report(cell)
            text = f"{type(cell.error).__name__}: {cell.error}".splitlines()[0]
            sys.stderr.write(
                f"gpunb: the background cell #{cell.id} {cell.name} has failed: {text} "
                f"(%gpu logs {cell.id} shows it again)\n"
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
        for cell in list(self._ended):
            if cell.over.is_set():
                self.bind(cell)

    def _follow_on(self, cell: BackgroundCell, home: Home | None) -> None:
        """Take the names that a cell has bound as unchanged for the cells submitted after it."""
        if home is None:
            return
        names = {*home.values, *home.result.deleted} - set(home.unbound)
        for other in self._cells.values():
            handed = other.handed
            if other.id > cell.id and handed is not None and handed.shipment.since is not None:
                for name in names:
                    handed.shipment.since.now(name)


def get_job(ident: int) -> JobHandle:
    """As `gpunb.get_job`."""
    if isinstance(ident, bool) or not isinstance(ident, int):
        raise TypeError(f"get_job takes the number of a job, such as 7, not {ident!r}")
    jobs = notebook_shell.current().part(Jobs)
    return jobs.handle(jobs.find(ident))
