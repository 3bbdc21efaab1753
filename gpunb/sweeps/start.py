"""`gpunb.sweep`: starts a sweep of a function."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunb.api.calls import is_generator
from gpunb.api.executor import room
from gpunb.api.refs import ObjectRef, value_of
from gpunb.api.remote_function import RemoteFunction
from gpunb.api.reports import stream
from gpunb.protocol import sink
from gpunb.protocol.backend import Outcome
from gpunb.scheduler.options import Options
from gpunb.sweeps.identity import fingerprint, keys
from gpunb.sweeps.storage import Storage, path_of
from gpunb.sweeps.sweep import Sweep
from gpunb.sweeps.trials import Trial, expanded
from gpunb.sweeps.work import Rule, Work


def sweep(
    function: Callable[..., Any] | RemoteFunction[..., Any],
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    name: str | None = None,
    storage: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    stop: Rule | None = None,
    study: Any = None,
    trials: int | None = None,
    max_concurrent_trials: int | None = None,
    **options: Any,
) -> Sweep:
    """Run a function with many parameters, each trial as a task. Returns at once.

        sweep = gpunb.sweep(train, {"rate": [0.1, 0.3], "width": [32, 64]}, num_gpus=0.25)

    As many trials run at the same time as fit on the machine. A trial that fails, fails alone. A
    generator function, or one that calls `gpunb.report`, also gives intermediate values.

    Args:
        function: a function of the parameters; with `study`, a function of an Optuna trial.
        params: a dict with a list of values for each parameter, for all combinations; or a list of
            dicts, one for each trial.
        name: keeps the results in ``.gpunb/NAME.sqlite`` beside the notebook. The next sweep with
            the name, function and parameters runs what is missing or has failed.
        storage: path of that file, instead.
        fresh: whether to delete the results in that file first.
        stop: called with a trial and the list of all trials after each report of the trial; True
            ends the trial. `gpunb.sweeps.MedianStoppingRule` makes such functions.
        study: an Optuna study, which chooses the parameters, in place of `params`.
        trials: number of trials of the study.
        max_concurrent_trials: number of trials that are submitted at the same time; default: all,
            with a study as many as fit.
        options: options of `gpunb.remote` for each trial.

    Raises:
        ValueError, TypeError: bad parameters or options.
        InfeasibleRequestError: this machine can never give what a trial asks for.
        GpunbError: another sweep writes to the file.
    """
    work = _FunctionWork(function, options)
    if max_concurrent_trials is not None:
        _check_count(max_concurrent_trials, "max_concurrent_trials")
    if stop is not None and not callable(stop):
        raise TypeError(f"stop={stop!r:.60} must be a function of a trial and the list of trials")
    if study is not None:
        from gpunb.sweeps.study import StudySource

        if params is not None or name is not None or storage is not None or fresh or stop:
            raise ValueError(
                "a study chooses parameters, keeps results and prunes by itself: params, name, "
                "storage, fresh and stop do not go with study= (for results on disk: "
                "optuna.create_study(storage=..., load_if_exists=True))"
            )
        source = StudySource(study, _check_count(trials, "trials"))
        work.arguments = source.arguments
        most = max_concurrent_trials or max(1, room(work.options))
        return Sweep(work, [], source=source, most=most, place=_place())
    if params is None or trials is not None:
        raise TypeError("sweep takes params=, or study= and trials=")
    combinations = expanded(params)
    return begin(
        work,
        combinations,
        identity=lambda: fingerprint(work.original, f"the function {work.name}"),
        name=name,
        storage=storage,
        fresh=fresh,
        stop=stop,
        most=max_concurrent_trials,
    )


def begin(
    work: Work,
    combinations: Sequence[Mapping[str, Any]],
    *,
    identity: Callable[[], str],
    name: str | None = None,
    storage: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    stop: Rule | None = None,
    most: int | None = None,
) -> Sweep:
    """Start a sweep with these parameters of each trial; `identity` returns the fingerprint of the
    code."""
    trials = [Trial(number, dict(each)) for number, each in enumerate(combinations)]
    if name is None and storage is None:
        if fresh:
            raise ValueError("fresh=True deletes the results in a file, and there is no name=")
        return Sweep(work, trials, stop=stop, most=most, place=_place())
    path, function = path_of(name, storage), identity()
    known = dict(zip(keys(function, combinations), trials, strict=True))
    file = Storage(path, function, fresh=fresh)
    try:
        file.load(known)
        for note in file.notes:
            sys.stderr.write(f"gpunb: {note}\n")
        own = {trial: key for key, trial in known.items()}
        return Sweep(work, trials, storage=file, keys=own, stop=stop, most=most, place=_place())
    except BaseException:
        file.close()
        raise


class _FunctionWork:
    """The function of a sweep, and its options.

    Attributes:
        arguments: makes the positional arguments of a trial.
    """

    arguments: Callable[[Trial], tuple[Any, ...]] | None = None

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        given = Options()
        if isinstance(function, RemoteFunction):
            given, function = function._options, function.__wrapped__  # noqa: SLF001 - the user's own options
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"sweep takes a function, not {function!r:.60}")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function!r:.60} is async: a trial must be a plain function")
        if options.get("num_returns") is not None:
            raise ValueError("num_returns is not for a sweep: a trial has one result")
        given = given.updated({**options, "num_returns": None})
        if given.ranks is not None:
            raise ValueError(
                f"ranks={given.ranks} does not go with a sweep: a trial runs in one process"
            )
        self.options = dataclasses.asdict(given)
        self.original = function
        if is_generator(function):
            function = functools.update_wrapper(functools.partial(stream, function), function)
        self.function: RemoteFunction[..., Any] = RemoteFunction(function, given)
        self.name = self.function.__name__

    def submit(self, trial: Trial, console: sink.Sink) -> ObjectRef[Any]:
        args = self.arguments(trial) if self.arguments is not None else ()
        ref: ObjectRef[Any] = self.function.submit_with(
            console, args, trial.params, trial.title(self.name)
        )
        return ref

    def value(self, trial: Trial, outcome: Outcome) -> Any:
        return value_of(outcome)


def _check_count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")
    return value


def _place() -> sink.Place | None:
    """The notebook's cell that starts the sweep."""
    return sink.sink("").place
