"""Trials of an Optuna study, which stays in the kernel while the objective runs in workers."""

from __future__ import annotations

import json
from typing import Any

from gpunb.api.study_trial import StudyTrial
from gpunb.sweeps.trials import Trial

_METHODS = frozenset(
    "suggest_float suggest_int suggest_categorical report should_prune set_user_attr".split()
)


class StudySource:
    """The trials of a study. Its methods are called on the sweep's thread."""

    def __init__(self, study: Any, count: int) -> None:
        for method in ("ask", "tell"):
            if not callable(getattr(study, method, None)):
                raise TypeError(f"study={study!r:.60} must be an Optuna study")
        self._study, self._left = study, count
        self._asked: dict[Trial, Any] = {}

    def next(self, number: int) -> Trial | None:
        """Ask the study for a trial; None after the last one."""
        if not self._left:
            return None
        self._left -= 1
        asked, trial = self._study.ask(), Trial(number, {})
        self._asked[trial] = asked
        return trial

    def arguments(self, trial: Trial) -> tuple[StudyTrial]:
        """The arguments of the objective."""
        return (StudyTrial(self._asked[trial].number),)

    def answer(self, trial: Trial, prompt: str) -> str:
        """The study's answer to a question of `StudyTrial`.

        Raises:
            whatever Optuna raises.
        """
        method, arguments, options = json.loads(prompt)["study"]
        if method not in _METHODS:
            raise ValueError(f"a trial of a study has no method {method!r}")
        asked = self._asked[trial]
        value = getattr(asked, method)(*arguments, **options)
        trial.params = dict(asked.params)
        if method == "report":
            trial.reported({"value": arguments[0]})
        return json.dumps(value)

    def ended(self, trial: Trial) -> None:
        """Tell the study how a trial has ended; one without a number as its value has failed."""
        import optuna

        asked, states = self._asked.pop(trial), optuna.trial.TrialState
        if isinstance(getattr(trial.error, "cause", None), optuna.TrialPruned):
            trial.ended("stopped")
            self._study.tell(asked, state=states.PRUNED)
            return
        if trial.state == "done":
            values = trial.value if isinstance(trial.value, (list, tuple)) else [trial.value]
            try:
                self._study.tell(asked, [float(each) for each in values], state=states.COMPLETE)
                return
            except (TypeError, ValueError) as error:
                text = f"the objective returned {trial.value!r:.60}: {error}"
                trial.ended("failed", trial.value, ValueError(text))
        self._study.tell(asked, state=states.FAIL)
