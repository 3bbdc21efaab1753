"""The options of tasks, actors and calls: read once, checked at once, passed on whole.

The decorators, `.options()` and the magics all read into these.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from gpunb.core.resources import (
    UNIT,
    Demand,
    parse_amount,
    parse_gpus,
    parse_resources,
    parse_size,
    parse_types,
    type_resource,
)
from gpunb.core.tasks import ActorSpec, TaskSpec

DEFAULT_RETRIES = 3

ASYNC_CONCURRENCY = 1000
"""Calls at once of an actor whose methods are coroutines, unless it says otherwise."""

PINNING = frozenset(
    {
        "ASCEND_RT_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "FURIOSA_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "HIP_VISIBLE_DEVICES",
        "NEURON_RT_VISIBLE_CORES",
        "QBRUNTIME_VISIBLE_DEVICES",
        "RBLN_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "TPU_CHIPS_PER_HOST_BOUNDS",
        "TPU_HOST_BOUNDS",
        "TPU_VISIBLE_CHIPS",
        "TT_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
        "ZE_FLAT_DEVICE_HIERARCHY",
    }
)
"""Variables by which a worker sees the devices that it was given, and no others."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What functions and classes may ask for alike, as it was written; None where nothing was said.

    The meanings are those of `gpunb.remote`.
    """

    num_cpus: float | None = None
    num_gpus: float | None = None
    gpu_memory: int | float | str | None = None
    resources: Mapping[str, float] | None = None
    accelerator_type: str | Sequence[str] | None = None
    memory: int | float | str | None = None
    name: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    caps: bool | None = None
    min_memory: int | float | str | None = None
    ray: Mapping[str, Any] | None = None

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """These options with changes, checked.

        Raises:
            ValueError: an unknown option or a bad value.
            TypeError: a value of a wrong type.
        """
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(_unknown(name, known, type(self)))
        options = replace(self, **changes)
        if "num_gpus" in changes and "gpu_memory" not in changes and changes["num_gpus"]:
            options = replace(options, gpu_memory=None)
        elif "gpu_memory" in changes and "num_gpus" not in changes and changes["gpu_memory"]:
            options = replace(options, num_gpus=None)
        options.check()
        return options

    def check(self) -> None:
        """Raises ValueError or TypeError, as `updated`."""
        self.demand()
        if isinstance(self.accelerator_type, Sequence) and not self.accelerator_type:
            raise ValueError(
                f"accelerator_type={self.accelerator_type!r} must not be empty: leave it out for "
                "a device of any type"
            )
        _text(self.name, "name")
        environment_of(self.runtime_env)
        if self.caps is not None:
            check_switches(caps=self.caps)
        if self.ray is not None and not isinstance(self.ray, Mapping):
            raise TypeError(f"ray must be a dict of options for Ray, not {self.ray!r}")

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
            cpus = 0 if gpus or memory else self._default_cpus()
        if self.memory is not None:
            parse_size(self.memory, "memory")
        least = parse_size(self.min_memory, "min_memory") if self.min_memory is not None else 0
        if least and not (gpus or memory):
            raise ValueError(
                f"min_memory={self.min_memory!r} says how large each device must be, and no device "
                "is asked for: add num_gpus=1, or ask for gpu_memory= instead"
            )
        resources = parse_resources(self.resources)
        # As in Ray, a type may also be written as a resource; it takes nothing of it.
        named = [kind for name in resources if (kind := type_resource(name))]
        types = parse_types(self.accelerator_type) or parse_types(named)
        return Demand(
            gpus=gpus,
            gpu_memory=memory,
            cpus=cpus,
            resources=tuple(
                sorted(each for each in resources.items() if not type_resource(each[0]))
            ),
            types=types,
            min_memory=least,
        )

    def _default_cpus(self) -> int:
        return UNIT


@dataclass(frozen=True, slots=True)
class Options(Resources):
    """The options of a function."""

    num_returns: int | str | None = None
    max_calls: int | None = None
    max_retries: int | None = None
    retry_exceptions: bool | Sequence[type[BaseException]] | None = None
    timeout: float | None = None

    def check(self) -> None:
        Resources.check(self)
        self.spec("check")
        check_returns(self.num_returns)
        check_retry(self.retry_exceptions)

    def spec(self, default_name: str, function: str = "") -> TaskSpec:
        """What the scheduler needs to know of every task with these options.

        Raises:
            ValueError, TypeError: as `updated`.
        """
        demand = self.demand()
        max_calls = _whole(self.max_calls, "max_calls", 0)
        return TaskSpec(
            name=self.name or default_name,
            demand=demand,
            function=function,
            # A fresh process for each task that holds a device, wherever the device came from.
            max_calls=int(demand.wants_device) if max_calls is None else max_calls,
            max_retries=_or(_whole(self.max_retries, "max_retries", -1), DEFAULT_RETRIES),
            timeout=_seconds(self.timeout),
            environment=environment_of(self.runtime_env),
            caps=self.caps is not False,
            ray=self.ray,
        )


@dataclass(frozen=True, slots=True)
class ActorOptions(Resources):
    """The options of a class; its actors are called by `name` if they have one."""

    max_restarts: int | None = None
    max_task_retries: int | None = None
    max_concurrency: int | None = None
    max_pending_calls: int | None = None
    lifetime: str | None = None
    get_if_exists: bool = False
    namespace: str | None = None

    def check(self) -> None:
        Resources.check(self)
        self.rules()
        _text(self.namespace, "namespace")
        if self.name == "":
            raise ValueError("name='' is no name: leave it out for an actor without one")
        _whole(self.max_task_retries, "max_task_retries", -1)
        if self.max_pending_calls == 0:
            raise ValueError("max_pending_calls=0 would refuse every call: use -1 for no limit")
        _whole(self.max_pending_calls, "max_pending_calls", -1)
        if self.lifetime not in (None, "detached", "non_detached"):
            raise ValueError(
                f"lifetime={self.lifetime!r} must be 'detached', 'non_detached' or None"
            )
        check_switches(get_if_exists=self.get_if_exists)
        if self.get_if_exists and self.name is None:
            raise ValueError("get_if_exists=True needs the name of the actor: add name=...")

    def rules(self, *, concurrent: bool = False) -> ActorSpec:
        """What the scheduler needs to know; `concurrent` if it has methods that are coroutines."""
        most = _whole(self.max_concurrency, "max_concurrency", 1)
        return ActorSpec(
            max_restarts=_or(_whole(self.max_restarts, "max_restarts", -1), 0),
            max_concurrency=_or(most, ASYNC_CONCURRENCY if concurrent else 1),
            threads=not concurrent and _or(most, 1) > 1,
        )

    def spec(self, class_name: str) -> TaskSpec:
        """What the scheduler needs to know of the constructor."""
        return TaskSpec(
            name=class_name,
            demand=self.demand(),
            max_calls=1,
            environment=environment_of(self.runtime_env),
            caps=self.caps is not False,
            ray=self.ray,
        )

    def _default_cpus(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """The options of a method."""

    num_returns: int | str | None = None
    max_task_retries: int | None = None
    retry_exceptions: bool | Sequence[type[BaseException]] | None = None
    timeout: float | None = None
    name: str | None = None

    def updated(self, changes: Mapping[str, Any]) -> MethodOptions:
        """As `Resources.updated`."""
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                raise ValueError(_unknown(name, known, MethodOptions))
        options = replace(self, **changes)
        check_returns(options.num_returns)
        check_retry(options.retry_exceptions)
        _text(options.name, "name")
        _seconds(options.timeout)
        _whole(options.max_task_retries, "max_task_retries", -1)
        return options

    def spec(self, default_name: str, function: str, max_task_retries: int) -> TaskSpec:
        """What the scheduler needs to know of a call; the retries are the class's own."""
        retries = max_task_retries if self.max_task_retries is None else self.max_task_retries
        return TaskSpec(
            name=self.name or default_name,
            function=function,
            max_retries=retries,
            timeout=_seconds(self.timeout),
        )


def check_either(changes: Mapping[str, Any]) -> None:
    """Check options of which nobody knows yet whether a function or a class has them.

    Raises:
        ValueError, TypeError: as `Resources.updated`, if neither may have them.
    """
    functions, classes = ([each.name for each in fields(kind)] for kind in (Options, ActorOptions))
    known = [*functions, *(name for name in classes if name not in functions)]
    for name in changes:
        if name not in known:
            raise ValueError(_unknown(name, known, Resources))
    mine = [name for name in changes if name not in classes]
    others = [name for name in changes if name not in functions]
    if mine and others:
        raise ValueError(
            f"{mine[0]!r} is an option of functions and {others[0]!r} one of classes: nothing can "
            "have both"
        )
    (ActorOptions() if others else Options()).updated(changes)


def _unknown(name: str, known: Sequence[str], kind: type) -> str:
    """What to say of an option that is none."""
    others = {Options: "functions", ActorOptions: "classes", MethodOptions: "methods"}
    own = others.get(kind, "functions or classes")
    text = f"unknown option {name!r}"
    owners = [
        what
        for other, what in others.items()
        if other is not kind and name in [each.name for each in fields(other)]
    ]
    near = difflib.get_close_matches(name, known, n=1)
    if owners:
        text += f", which is one of {' and '.join(owners)}, not of {own}"
    elif near:
        text += f"; did you mean {near[0]!r}?"
    return f"{text} (known are {', '.join(known)})"


def check_returns(returns: object) -> None:
    """Raises ValueError or TypeError unless it is a number of results, or a word for many."""
    if isinstance(returns, str):
        if returns not in ("streaming", "dynamic"):
            raise ValueError(
                f"num_returns={returns!r} must be a whole number, 'streaming' or 'dynamic'"
            )
        return
    _whole(returns, "num_returns", 0)


def check_retry(retry: object) -> None:
    """Raises TypeError unless it says after which exceptions to try again."""
    if retry is None or isinstance(retry, bool):
        return
    if not isinstance(retry, (list, tuple)) or not all(
        isinstance(each, type) and issubclass(each, BaseException) for each in retry
    ):
        raise TypeError(
            f"retry_exceptions must be True, False or a list of exception types, not {retry!r}"
        )


def check_switches(**switches: object) -> None:
    """Raises TypeError unless each is True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def _text(value: object, name: str) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a text, not {value!r}")


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


def environment_of(value: object) -> tuple[tuple[str, str], ...]:
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
        if name in PINNING:
            raise ValueError(
                f"runtime_env['env_vars'] has {name!r}: {text!r}, which no task can choose: the "
                "worker sees the devices that it was given. Say which by num_gpus, gpu_memory or "
                "accelerator_type. To limit a whole session, set it before gpunb.init"
            )
    return tuple(sorted(pairs.items()))
