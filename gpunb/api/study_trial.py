"""An Optuna trial as the objective of a sweep sees it, in its worker.

The objective asks the study for each value through the kernel, as a cell asks its user. So Optuna
need not be imported where the objective runs.
"""

from __future__ import annotations

import json
from typing import Any

from gpunb.api.reports import as_plain
from gpunb.protocol import backend


class StudyTrial:
    """An Optuna trial, as the objective sees it in its worker.

    Attributes:
        number: its number in the study.
        params: the values that were suggested so far.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.params: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A value between `low` and `high`; see Optuna."""
        return float(self._suggest("suggest_float", name, low, high, step=step, log=log))

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """A whole number between `low` and `high`; see Optuna."""
        return int(self._suggest("suggest_int", name, low, high, step=step, log=log))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """One of the choices, each None, a bool, a number or a text; see Optuna."""
        return self._suggest("suggest_categorical", name, list(choices))

    def report(self, value: Any, step: int) -> None:
        """Report an intermediate value."""
        self._ask("report", as_plain(value), step)

    def should_prune(self) -> bool:
        """Whether the objective should raise `optuna.TrialPruned`."""
        return bool(self._ask("should_prune"))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep a value with the trial in the study."""
        self._ask("set_user_attr", key, as_plain(value))

    def _suggest(self, method: str, name: str, *arguments: Any, **options: Any) -> Any:
        self.params[name] = value = self._ask(method, name, *arguments, **options)
        return value

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        call = [method, [as_plain(each) for each in arguments], options]
        try:
            prompt = json.dumps({"study": call})
        except TypeError as error:
            raise TypeError(f"{method} takes None, bools, numbers and texts: {error}") from None
        client: Any = backend.current()
        return json.loads(client.question(prompt))
