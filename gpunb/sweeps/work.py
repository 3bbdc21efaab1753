"""What a sweep needs of others: the code that its trials run, and where trials come from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpunb.api.refs import ObjectRef
from gpunb.data.serialize import Payload
from gpunb.protocol.backend import Outcome
from gpunb.protocol.sink import REPORT, Place, Sink, SweepInfo
from gpunb.sweeps.trials import Trial

_SHOWN = frozenset(
    {"display_data", "update_display_data", "clear_output", "execute_result", "error", "failed"}
)

Rule = Callable[[Trial, Sequence[Trial]], bool]
"""Tells after a report of the trial whether to stop it; the list has all trials."""


_NUMBERS = itertools.count(1)


class Work(Protocol):
    """The code that the trials of a sweep run.

    Attributes:
        name: of the function or the cell.
    """

    name: str

    def submit(self, trial: Trial, sink: Sink) -> ObjectRef[Any]:
        """Submit a trial."""

    def value(self, trial: Trial, outcome: Outcome) -> Any:
        """The value of a trial; raises its error."""


def sweep_info(work: Work, trials: Sequence[Trial]) -> SweepInfo:
    """Return a number for a new sweep, its name, and the number of trials that are not over."""
    return next(_NUMBERS), work.name, sum(not each.over for each in trials)


class Source(Protocol):
    """Where trials come from, if they are not known beforehand."""

    def next(self, number: int) -> Trial | None:
        """The next trial, or None if there are no more."""

    def ended(self, trial: Trial) -> None:
        """Take the end of a trial; may turn it into a failure."""

    def answer(self, trial: Trial, prompt: str) -> str:
        """The answer to a question of a running trial."""


class TrialSink(Sink):
    """Keeps the output of a trial, and passes its reports and questions to the sweep's thread."""

    asks = True

    def __init__(
        self, trial: Trial, post: Callable[..., None], place: Place | None, sweep: SweepInfo
    ) -> None:
        self.log, self.place, self.sweep = trial.log, place, sweep
        self._trial, self._post = trial, post

    def stop_sweep(self) -> None:
        self._post("cancel")

    def text(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind == REPORT:
            self._post("report", self._trial, content["metrics"])
        elif kind in _SHOWN:
            self.failed = self.failed or kind == "failed"
            self.log.add(("show", kind, content))

    def ask(self, prompt: str | None, password: bool, answer: Callable[..., None]) -> None:
        if prompt is None or not prompt.startswith("{"):
            answer(None, NotImplementedError("a trial of a sweep cannot ask its user"))
        else:
            self._post("question", self._trial, (prompt, answer))
