"""The handle of a cell in the background."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from gpunb.backend import Outcome
from gpunb.exceptions import GetTimeoutError, GpunbError
from gpunb.notebook.card import Card, facts_text
from gpunb.notebook.cells import HandedIn, short
from gpunb.notebook.output import Foreground
from gpunb.refs import check_timeout, there
from gpunb.runtime.log import Log
from gpunb.signals import HEARTBEAT

if TYPE_CHECKING:
    from gpunb.notebook.arriving import Home
    from gpunb.notebook.found import Fetched
    from gpunb.notebook.jobs import Jobs
    from gpunb.notebook.late import InCell, Kept


class Job:
    """A cell in the background.

    Its names are bound in the notebook when it is done: between other cells, and never over one
    that was bound anew or changed meanwhile. ``await job``, `wait` and `result` wait for it.
    """

    def __init__(
        self, jobs: Jobs, handed: HandedIn, sink: InCell | Kept | Foreground | Fetched
    ) -> None:
        self.id = handed.obj[0]
        """Its number, as in ``#7``."""
        self.name = handed.name
        self.number = handed.number
        """The cell's, as in ``In[3]``."""
        self.peak = 0
        """Bytes of memory that its process had at most; once it is done."""
        self.lost = False
        """Whether its session was shut down, and it goes on in the head process."""
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
            self._jobs.follow(self)
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
        facts = {"name": self.name, "state": "queued", "devices": [], "seconds": 0.0, **facts}
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
        try:
            self._past = self._backend.ask("job", self.id) or self._past
            self._outcome = self._backend.fetch([self._handed.obj], 0)[0]
        except GpunbError as error:
            self._outcome = error
            if getattr(self._backend, "left", False):
                self.lost = True
                self._outcome = GpunbError(
                    f"this session was shut down, and #{self.id} {self.name} goes on in the head "
                    f"process: attach to it again, and gpunb.get_job({self.id}) has it"
                )
        if not isinstance(self._outcome, Outcome) and not getattr(self._sink, "failed", False):
            self._error = short(self._outcome)
        self._finished.set()

    def _conclude(self, home: Home | None, error: BaseException | None) -> None:
        """Somebody waited for it, let go of its outcome, and this became of it."""
        with contextlib.suppress(GpunbError):
            self._past = self._backend.ask("job", self.id) or self._past
        self._handed = None
        self._take(home, error)
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
