"""Trials: parameters, states, metrics and the rules that stop them. No task, clock or file."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpunb.api.reports import as_plain, is_scalar, metrics_of
from gpunb.engine.job_log import Log
from gpunb.scheduler.markup import escaped

MOST = 1_000_000
"""Trials of one sweep at most. A grid with more is a mistake, and would fill the memory."""

WAITS = ("queued", "running")

_LONGEST = 60
"""Characters of a value that is shown."""

_LONGEST_TITLE = 100
"""Characters of the name of a trial's task."""

_SHORT = 6
"""Items of a list that is shown in the name of a trial's task."""


@dataclass(slots=True, eq=False)
class Trial:
    """One trial of a sweep.

    Attributes:
        number: its place in the sweep, from 0.
        params: its parameters by name.
        state: ``"queued"``, ``"running"``, ``"done"``, ``"stopped"`` (by a rule or a pruner),
            ``"failed"`` or ``"cancelled"``.
        value: the value that the function returned; None before.
        metrics: the numbers and texts of `value`, after those of the last report.
        reports: the intermediate values, in order.
        error: the error of a trial that failed.
        seconds: how long it ran; None if it is not known.
        devices: such as ``"GPU 1"``; empty if it has none.
        resumed: whether the result is from the sweep's file.
        log: its output.
    """

    number: int
    params: dict[str, Any]
    state: str = "queued"
    value: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None
    seconds: float | None = None
    devices: str = ""
    resumed: bool = False
    log: Log = field(default_factory=Log)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state not in WAITS

    @property
    def reason(self) -> str:
        """The first line of its error; empty without an error."""
        if self.error is None:
            return ""
        cause = getattr(self.error, "cause", None) or self.error
        return f"{type(cause).__name__}: {cause}".splitlines()[0]

    def title(self, name: str) -> str:
        """The name of its task: that of the function or the cell, and the parameters in short."""
        params = [f"{each}={_brief(value)}" for each, value in self.params.items()]
        text = escaped(" ".join([name, *(params or [f"trial {self.number}"])]))
        return text if len(text) <= _LONGEST_TITLE else f"{text[: _LONGEST_TITLE - 3]}..."

    def reported(self, metrics: Mapping[str, Any]) -> None:
        """Take intermediate values."""
        self.reports.append(dict(metrics))
        self.metrics.update(metrics)

    def ended(self, state: str, value: Any = None, error: BaseException | None = None) -> None:
        """Take the end of the trial."""
        self.state, self.value, self.error = state, value, error
        self.metrics.update(metrics_of(value))

    def logs(self) -> str:
        """The text that it has printed."""
        return self.log.text()

    def row(self) -> dict[str, Any]:
        """The trial as a row of `Sweep.table`."""
        params = {name: as_plain(each) for name, each in self.params.items()}
        row = {"trial": self.number, **params, **self.metrics}
        more = (("state", self.state), ("seconds", self.seconds), ("devices", self.devices))
        for name, value in (*more, ("error", self.reason)):
            row.setdefault(name, value)
        return row

    def __repr__(self) -> str:
        end = self.reason or ", ".join(f"{n}={shown(v)}" for n, v in self.metrics.items())
        params = ", ".join(f"{name}={shown(each)}" for name, each in self.params.items())
        return f"<Trial {self.number} {params}: {self.state}{end and ', '}{end}>"


def shown(value: Any) -> str:
    """A short text for a parameter or a metric."""
    value = as_plain(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        text = " ".join((value if isinstance(value, str) else repr(value)).split())
    except Exception:  # the value is the user's
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _brief(value: Any) -> str:
    """A number, a text or a short list of these; of another value only the type, because its text
    may be long to make."""
    value = as_plain(value)
    parts = value if isinstance(value, (list, tuple)) else [value]
    plain = len(parts) <= _SHORT and all(map(is_scalar, parts))
    return shown(value) if plain else f"<{type(value).__name__}>"


def expanded(params: Any) -> list[dict[str, Any]]:
    """The parameters of each trial: all combinations of a dict of lists, or a list of dicts.

    Raises:
        TypeError, ValueError: `params` is neither, is empty, or asks for more than `MOST` trials.
    """
    if not isinstance(params, Mapping):
        if isinstance(params, (str, bytes)) or not isinstance(params, Iterable):
            raise TypeError(
                "a sweep takes a dict with a list of values for each parameter, or a list of "
                f"dicts, not {params!r:.60}"
            )
        trials = list(itertools.islice(params, MOST + 1))
        for each in trials:
            if not isinstance(each, Mapping):
                raise TypeError(f"each trial of a list must be a dict, not {each!r:.60}")
            _check_names(each)
        _check_number(len(trials))
        return [dict(each) for each in trials]
    _check_names(params)
    lists = {}
    for name, values in params.items():
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise TypeError(
                f"the values of {name!r} must be a list, not {values!r:.60}: for one value write "
                f"{{{name!r}: [{values!r:.60}]}}"
            )
        lists[name] = list(itertools.islice(values, MOST + 1))
        if not lists[name]:
            raise ValueError(f"the list of values of {name!r} is empty")
    _check_number(math.prod(map(len, lists.values())) if lists else 0)
    return [dict(zip(lists, each, strict=True)) for each in itertools.product(*lists.values())]


def _check_names(params: Mapping[Any, Any]) -> None:
    for name in params:
        if not isinstance(name, str):
            raise TypeError(f"the name of a parameter must be a text, not {name!r:.60}")


def _check_number(count: int) -> None:
    if not count:
        raise ValueError("a sweep needs at least one trial, and the parameters give none")
    if count > MOST:
        raise ValueError(f"the parameters give {count:,} trials, and {MOST:,} is the limit")


def check_mode(mode: str) -> None:
    """Raise ValueError unless this is a direction of a metric."""
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r} must be 'min' or 'max'")


def number_of(trial: Trial, metric: str) -> float | None:
    """A metric of a trial that has ended well; None if it is no number, or NaN."""
    value = trial.metrics.get(metric) if trial.state in ("done", "stopped") else None
    if isinstance(value, str) or value is None or math.isnan(value):
        return None
    return float(value)


def best(trials: Iterable[Trial], metric: str, mode: str) -> Trial:
    """The trial with the lowest (``"min"``) or highest (``"max"``) metric, the first one on ties.

    Raises:
        ValueError: no trial has the metric, or `mode` is neither.
    """
    check_mode(mode)
    trials = list(trials)
    found = [(number, each) for each in trials if (number := number_of(each, metric)) is not None]
    if not found:
        names = sorted({name for each in trials for name in each.metrics})
        there = f"the trials have {', '.join(names)}" if names else "no trial has any metric yet"
        raise ValueError(f"no trial that has ended has a number {metric!r}: {there}")
    sign = 1 if mode == "min" else -1
    return min(found, key=lambda pair: sign * pair[0])[1]


class MedianStoppingRule:
    """Stop a trial whose best report is worse than the median of the other trials.

    The best value of the trial so far is compared with the running averages of the other trials
    after as many reports.

    Args:
        metric: name of the reported value.
        mode: ``"min"`` if lower is better, else ``"max"``.
        grace_period: reports of a trial before the rule may stop it.
        min_samples_required: other trials that must have as many reports.
    """

    def __init__(
        self,
        metric: str,
        mode: str = "min",
        *,
        grace_period: int = 5,
        min_samples_required: int = 3,
    ) -> None:
        check_mode(mode)
        for name, value in (
            ("grace_period", grace_period),
            ("min_samples_required", min_samples_required),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")
        self.metric, self.mode = metric, mode
        self.grace_period, self.min_samples_required = grace_period, min_samples_required
        self._averages: dict[Trial, list[float]] = {}

    def __call__(self, trial: Trial, trials: Sequence[Trial]) -> bool:
        """Whether to stop `trial`, which has just reported, one of `trials`."""
        step = len(self._averages_of(trial))
        if step < self.grace_period:
            return False
        others = [
            averages[step - 1]
            for each in trials
            if each is not trial and len(averages := self._averages_of(each)) >= step
        ]
        if len(others) < self.min_samples_required:
            return False
        mine = [self._signed(each) for each in trial.reports if self.metric in each]
        return min(mine) > statistics.median(others)

    def _averages_of(self, trial: Trial) -> list[float]:
        """The running averages of the metric, after each report that has it."""
        averages = self._averages.setdefault(trial, [])
        if len(averages) == len(trial.reports):
            return averages
        values = [self._signed(each) for each in trial.reports if self.metric in each]
        total = averages[-1] * len(averages) if averages else 0.0
        for value in values[len(averages) :]:
            total += value
            averages.append(total / (len(averages) + 1))
        return averages

    def _signed(self, report: Mapping[str, Any]) -> float:
        """The value as one where lower is better; a value that is no number is the worst."""
        value = report[self.metric]
        if not is_scalar(value) or isinstance(value, str) or value is None or math.isnan(value):
            return math.inf
        return float(value) if self.mode == "min" else -float(value)
