"""The record of a background cell: its state, its output, and its result once it is over."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, TypeAlias

from gpunb.exceptions import GpunbError
from gpunb.notebook.adopted_jobs import Fetched
from gpunb.notebook.background_output import BufferedOutput, InCell
from gpunb.notebook.bind import Home
from gpunb.notebook.cell import HandedIn, short
from gpunb.notebook.job_card import facts_text, on_devices, seconds
from gpunb.notebook.output import Foreground
from gpunb.protocol.backend import Outcome, SharedBackend
from gpunb.scheduler.markup import escaped
from gpunb.scheduler.resources import size_text

JobSink: TypeAlias = InCell | BufferedOutput | Foreground | Fetched


class BackgroundCell:
    """A background cell, as the notebook knows it."""

    def __init__(self, handed: HandedIn, sink: JobSink) -> None:
        self.id = handed.obj[0]  # number of its job, as in #7
        self.name = handed.name
        self.number = handed.number  # execution count, as in In[3]
        self.sink = sink
        self.backend = handed.backend
        self.handed: HandedIn | None = handed  # None once its names are bound
        self.outcome: Outcome | GpunbError | None = None  # from its end until its names are bound
        self.over = threading.Event()
        self.error: BaseException | None = None
        self.last: Any = None  # value of its last expression, if `shown`
        self.shown = False
        self.bound: dict[str, int] = {}  # identities of the values bound in the notebook
        self.unbound: dict[str, Any] = {}  # values of names that the notebook bound anew
        self.peak = 0  # the most memory that its process had, in bytes
        self.lost = False  # its session was shut down, and it goes on in the head process
        self._past: dict[str, Any] = {}  # the last facts of the engine

    def is_of(self, head: SharedBackend) -> bool:
        """Whether it was handed in to this head process, in this session or an earlier one."""
        return getattr(self.backend, "pid", None) == head.pid

    @property
    def facts(self) -> dict[str, Any]:
        """The engine's record of the job, or the last one that the engine had."""
        facts = self._past or self.backend.ask("job", self.id) or {}
        facts = {"name": self.name, "state": "queued", "devices": [], "seconds": 0.0, **facts}
        over, failed = self.over.is_set(), self.error is not None or self.sink.failed
        if facts["state"] in (("queued", "running", "done") if over else ("done",)):
            facts["state"] = "failed" if failed else "done"
        return facts

    @property
    def state(self) -> str:
        """``"queued"``, ``"running"``, ``"done"``, ``"failed"`` or ``"cancelled"``."""
        return str(self.facts["state"])

    def __repr__(self) -> str:
        return f"<Job {facts_text(self.id, self.facts)}>"

    def why(self) -> str | None:
        """Why it waits; None if it does not."""
        try:
            why: str | None = self.backend.ask("why", self.id)
        except GpunbError:  # the session is over
            return None
        session = self.handed.request.session if self.handed is not None else None
        if why is not None and session is not None:
            return why.replace(f"actor #{session.actor}", f"the session {session.name!r}")
        return why

    def describe(self) -> tuple[str, str]:
        """Its state, and the text of its card."""
        facts = self.facts
        text = facts_text(self.id, facts, exact=False)
        if facts["state"] == "queued" and (why := self.why()):
            text += f": {escaped(why)}"
        return str(facts["state"]), text

    def summary(self, home: Home | None) -> str:
        """Its end in one line; `home` is what it has brought home."""
        facts = self.facts
        took, on = seconds(facts["seconds"]), on_devices(facts)
        text = escaped(f"#{self.id} {facts['name']} {facts['state']} after {took}{on}")
        if facts.get("hint"):
            text += f", {facts['hint']}"
        elif facts.get("peak"):
            text += f", peak {size_text(facts['peak'])} of GPU memory"
        elif self.peak:
            text += f", peak {size_text(self.peak)}"
        if home is None:
            return text
        bound = sorted(home.values.keys() - set(home.unbound))
        if bound:
            text += f"; bound {', '.join(bound)}"
        if home.unbound:
            text += f"; changed here meanwhile, so left alone: {', '.join(home.unbound)}"
            text += f" (Out[{self.number}].names has this cell's)"
        return text

    def end(self, past: dict[str, Any] | None = None) -> None:
        """Fetch its result and its last facts, before the engine forgets them; `past` are the last
        facts of a cell that was over before."""
        assert self.handed is not None
        self._past = past or self._past
        try:
            self._past = self.backend.ask("job", self.id) or self._past
            self.outcome = self.backend.fetch([self.handed.obj], 0)[0]
        except GpunbError as error:
            self.outcome = error
            if getattr(self.backend, "left", False):
                self.lost = True
                self.outcome = GpunbError(
                    f"this session was shut down, and #{self.id} {self.name} goes on in the head "
                    f"process: attach to it again, and gpunb.get_job({self.id}) has it"
                )
        if not isinstance(self.outcome, Outcome) and not self.sink.failed:
            self.error = short(self.outcome)
        self.over.set()

    def conclude(self, home: Home | None, error: BaseException | None) -> None:
        """Take the values and the error of a cell that has run in the foreground."""
        with contextlib.suppress(GpunbError):
            self._past = self.backend.ask("job", self.id) or self._past
        self.handed = None
        self.settle(home, error)
        self.over.set()

    def settle(self, home: Home | None, error: BaseException | None) -> None:
        """Take the values and the error of the cell; drop what it was given."""
        self.error = error
        if home is not None:
            self.peak, self.last, self.shown = home.result.peak, home.last, home.result.shown
            self.unbound = {name: home.values[name] for name in home.unbound}
            self.bound = {n: id(each) for n, each in home.values.items() if n not in self.unbound}
        if self.handed is not None:
            self.backend.drop(self.handed.obj)
        self.handed = self.outcome = None
