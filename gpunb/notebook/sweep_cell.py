"""Sweeps of cells: ``%%gpu --sweep`` runs the cell once for each combination of values."""

from __future__ import annotations

import ast
import keyword
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpunb import live
from gpunb.api.refs import ObjectRef, value_of
from gpunb.data import serialize
from gpunb.notebook.bind import load_result
from gpunb.notebook.capture import CellRequest, meaning
from gpunb.notebook.cell import hand_in, short
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.shipment import Shipment
from gpunb.notebook.widgets import blocking
from gpunb.protocol.backend import Outcome
from gpunb.protocol.sink import Sink
from gpunb.sweeps import start
from gpunb.sweeps.identity import fingerprint
from gpunb.sweeps.sweep import Sweep
from gpunb.sweeps.trials import Trial, expanded
from gpunb.system.signals import UNDIVIDED
from gpunb.worker.cell.cell_types import LAST


def trials_of(texts: Sequence[str], names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of the names of each trial, after ``--sweep``; `names` are the notebook's.

    Raises:
        ValueError, TypeError: no such names or values.
    """
    params: Any = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if equals:
            if name in params:
                raise ValueError(f"--sweep {name}= is there twice: write all values in one")
            params[name] = _literals(values)
        elif len(texts) > 1:
            raise ValueError(
                f"--sweep {text} must be the only --sweep, or have the form NAME=VALUES"
            )
        elif text not in names:
            raise ValueError(
                f"--sweep {text}: the notebook has no such name (or write NAME=VALUES)"
            )
        else:
            params = names[text]
    trials = expanded(params)
    for name in dict.fromkeys(name for each in trials for name in each):
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(f"--sweep: {name!r} is not a name")
    return trials


def _literals(text: str) -> list[Any]:
    """The values of ``0.1,0.3`` or ``adam,sgd``: what is no Python literal is a text."""
    try:
        return list(ast.literal_eval(f"[{text}]"))
    except (ValueError, SyntaxError):
        return [_literal(each.strip()) for each in text.split(",")]


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class _CellWork:
    """The cell of a sweep. The value of a trial has the names after --out, else it is the value of
    the last expression."""

    def __init__(self, shell: NotebookShell, request: CellRequest) -> None:
        self.name = request.options.name or f"In[{shell.number}]"
        self._shell = shell
        self._request = replace(request, outputs=request.outputs or (), apart=True)
        self._shipments: dict[Trial, Shipment] = {}

    def submit(self, trial: Trial, sink: Sink) -> ObjectRef[Any]:
        options = replace(self._request.options, name=trial.title(self.name))
        request = replace(self._request, given=trial.params, options=options)
        with UNDIVIDED:  # the backend counts a reference
            handed = hand_in(self._shell, request, sink)
            self._shipments[trial] = handed.shipment
            return ObjectRef(handed.obj, held=True)

    def value(self, trial: Trial, outcome: Outcome) -> Any:
        shipment, space = self._shipments.pop(trial), self._shell.user_ns
        if outcome.failed:
            return value_of(outcome)
        result, values = load_result(space, outcome.payload, shipment)
        if result.failure is not None:
            raise serialize.load_failure(result.failure, namespace=space)
        if not self._request.outputs:
            return values.get(LAST)
        return {name: values[name] for name in self._request.outputs if name in values}


def run(
    shell: NotebookShell,
    request: CellRequest,
    trials: Sequence[Mapping[str, Any]],
    *,
    fresh: bool = False,
    background: bool = False,
) -> None:
    """Run a cell once for each trial, and bind the sweep to the notebook's name ``sweep``.

    The sweep is shown, and waited for unless it is in the background. A Stop cancels it.

    Raises:
        UsageError, InfeasibleRequestError: the cell cannot run.
        ValueError, GpunbError, OSError: the file of the sweep cannot be used.
    """
    late = shell.kernel is not None and not shell.headless()
    sweep = None
    try:
        sweep = _begin(shell, request, trials, fresh)
        if late:
            live.show_sweep(sweep)
        if not background or not late:
            with blocking():
                sweep.wait()
        if not late:
            live.show_sweep(sweep)
    except KeyboardInterrupt:
        if sweep is None:
            text = "the sweep was stopped while its trials were submitted; none goes on"
            raise short(KeyboardInterrupt(text)) from None
        if background and late:
            raise
        raise short(sweep.stopped()) from None


def _begin(
    shell: NotebookShell, request: CellRequest, trials: Sequence[Mapping[str, Any]], fresh: bool
) -> Sweep:
    given = dict.fromkeys(name for each in trials for name in each)
    sweep = start.begin(
        _CellWork(shell, request),
        trials,
        identity=lambda: fingerprint(meaning(shell, replace(request, given=given)), "the cell"),
        name=request.options.name,
        fresh=fresh,
    )
    shell.ip.push({"sweep": sweep})
    return sweep
