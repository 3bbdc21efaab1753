"""The options of a task: read once, checked at once, passed on whole.

The decorator, `.options()` and the magics all read into `Options`.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gpunb.core.resources import (
    UNIT,
    Demand,
    parse_amount,
    parse_gpus,
    parse_resources,
    parse_size,
    parse_types,
)
from gpunb.core.tasks import TaskSpec

DEFAULT_RETRIES = 3


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, as it was written; None where nothing was said.

    The meanings are those of `gpunb.remote`.
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    gpu_memory: int | float | str | None = None
    resources: Mapping[str, float] | None = None
    accelerator_type: str | Sequence[str] | None = None
    memory: int | float | str | None = None
    name: str | None = None
    num_returns: int | None = None
    max_calls: int | None = None
    max_retries: int | None = None
    retry_exceptions: bool | Sequence[type[BaseException]] | None = None
    timeout: float | None = None
    runtime_env: Mapping[str, Any] | None = None

    def updated(self, changes: Mapping[str, Any]) -> Options:
        """These options with changes, checked.

        Raises:
            ValueError: an unknown option or a bad value.
            TypeError: a value of a wrong type.
        """
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown option {name!r}{hint} (known are {', '.join(known)})")
        options = replace(self, **changes)
        if "num_gpus" in changes and "gpu_memory" not in changes and changes["num_gpus"]:
            options = replace(options, gpu_memory=None)
        elif "gpu_memory" in changes and "num_gpus" not in changes and changes["gpu_memory"]:
            options = replace(options, num_gpus=None)
        options.spec("check")
        options.check_returns()
        options.check_retry()
        return options

    def demand(self) -> Demand:
        """What this asks of the machine.

        Raises:
            ValueError, TypeError: as `updated`.
        """
        gpus = parse_gpus(self.num_gpus) if self.num_gpus is not None else 0
        memory = parse_size(self.gpu_memory, "gpu_memory") if self.gpu_memory is not None else 0
        if gpus and memory:
            raise ValueError(
                f"num_gpus={self.num_gpus!r} and gpu_memory={self.gpu_memory!r} exclude each "
                "other: ask for a share or for an amount of memory"
            )
        if self.num_cpus is not None:
            cpus = parse_amount(self.num_cpus, "num_cpus")
        else:
            cpus = 0 if gpus or memory else UNIT
        if self.memory is not None:
            parse_size(self.memory, "memory")
        resources = parse_resources(self.resources)
        return Demand(
            gpus=gpus,
            gpu_memory=memory,
            cpus=cpus,
            resources=tuple(sorted((name, units) for name, units in resources.items() if units)),
            types=parse_types(self.accelerator_type),
        )

    def spec(self, default_name: str, function: str = "") -> TaskSpec:
        """What the scheduler needs to know of every task with these options.

        Raises:
            ValueError, TypeError: as `updated`.
        """
        demand = self.demand()
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(f"name must be a text, not {self.name!r}")
        max_calls = _whole(self.max_calls, "max_calls", 0)
        return TaskSpec(
            name=self.name or default_name,
            demand=demand,
            function=function,
            # A fresh process for each task that holds a device, wherever the device came from.
            max_calls=int(demand.wants_device) if max_calls is None else max_calls,
            max_retries=_or(_whole(self.max_retries, "max_retries", -1), DEFAULT_RETRIES),
            timeout=_seconds(self.timeout),
            environment=_environment(self.runtime_env),
        )

    @property
    def returns(self) -> int:
        return 1 if self.num_returns is None else self.num_returns

    def check_returns(self) -> None:
        if isinstance(self.num_returns, str):
            raise ValueError(
                f"num_returns={self.num_returns!r} is not a number of results: generators are "
                "not there yet"
            )
        _whole(self.num_returns, "num_returns", 0)

    def check_retry(self) -> None:
        retry = self.retry_exceptions
        if retry is None or isinstance(retry, bool):
            return
        if not isinstance(retry, (list, tuple)) or not all(
            isinstance(each, type) and issubclass(each, BaseException) for each in retry
        ):
            raise TypeError(
                f"retry_exceptions must be True, False or a list of exception types, not {retry!r}"
            )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _whole(value: object, name: str, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        allowed = "-1 (without limit), 0 or more" if least < 0 else f"{least} or more"
        raise ValueError(f"{name}={value!r} must be {allowed}")
    return int(value)


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, not {value!r}")
    seconds = float(value)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"timeout={value!r} must be a number of seconds above 0")
    return seconds


def _environment(value: object) -> tuple[tuple[str, str], ...]:
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise TypeError(f"runtime_env must be a dict, not {value!r}")
    unknown = sorted(set(value) - {"env_vars"})
    if unknown:
        raise ValueError(
            f"runtime_env has {', '.join(map(repr, unknown))}: only 'env_vars' is supported, "
            "because tasks run in the kernel's own environment"
        )
    pairs = value.get("env_vars") or {}
    if not isinstance(pairs, Mapping):
        raise TypeError(f"runtime_env['env_vars'] must be a dict, not {pairs!r}")
    for name, text in pairs.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"runtime_env['env_vars'] must hold texts, not {name!r}: {text!r}")
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(
                f"runtime_env['env_vars'] has {name!r}: {text!r}, which no environment can hold"
            )
    return tuple(sorted(pairs.items()))
