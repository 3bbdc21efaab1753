"""The options of tasks, actors and calls: read once, checked at once, passed on whole.

The decorators, `.options()` and the magics all read into these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from gpunb.scheduler.groups import Strategy
from gpunb.scheduler.markup import escaped
from gpunb.scheduler.option_values import (
    check_name,
    check_namespace,
    check_retry,
    check_returns,
    check_switches,
    environment_of,
    groups_of,
    or_default,
    priority_of,
    seconds_of,
    whole_number,
)
from gpunb.scheduler.resources import (
    UNIT,
    Demand,
    parse_amount,
    parse_gpus,
    parse_resources,
    parse_size,
    parse_types,
    type_resource,
)
from gpunb.scheduler.tasks import ActorSpec, AutoShare, TaskSpec
from gpunb.scheduler.unknown_option import unknown_option

DEFAULT_RETRIES = 3

AUTO = "auto"
"""The value of `num_gpus` or `gpu_memory` for a share that comes from earlier runs."""

ASYNC_CONCURRENCY = 1000
"""Default of `max_concurrency` for a class with methods that are coroutines."""

STRATEGIES = ("DEFAULT", "SPREAD")
"""Values of `scheduling_strategy` that mean the same on one machine."""


@dataclass(frozen=True, slots=True)
class Resources:
    """The options of both functions and classes, as the user wrote them; None if not given.

    Their meanings are those of `gpunb.remote`.
    """

    num_cpus: float | None = None
    num_gpus: float | str | None = None
    gpu_memory: int | float | str | None = None
    resources: Mapping[str, float] | None = None
    accelerator_type: str | Sequence[str] | None = None
    memory: int | float | str | None = None
    name: str | None = None
    runtime_env: Mapping[str, Any] | None = None
    caps: bool | None = None
    min_memory: int | float | str | None = None
    ray: Mapping[str, Any] | None = None
    scheduling_strategy: str | Strategy | None = None
    priority: int | None = None

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """These options with changes, checked.

        Raises:
            ValueError: an unknown option or a bad value.
            TypeError: a value of a wrong type.
        """
        _check_known(changes, [each.name for each in fields(self)], type(self))
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
        check_name(self.name, "name")
        environment_of(self.runtime_env)
        priority_of(self.priority)
        if self.caps is not None:
            check_switches(caps=self.caps)
        if self.ray is not None and not isinstance(self.ray, Mapping):
            raise TypeError(f"ray must be a dict of options for Ray, not {self.ray!r}")
        strategy = self.scheduling_strategy
        if not isinstance(strategy, Strategy) and strategy not in (None, *STRATEGIES):
            raise ValueError(
                f"scheduling_strategy={strategy!r} must be 'DEFAULT' or 'SPREAD', which mean the "
                "same on one machine, or a PlacementGroupSchedulingStrategy of "
                "gpunb.util.scheduling_strategies; on a Ray cluster pass on ray={...}"
            )

    def of_ray(self) -> Mapping[str, Any] | None:
        """The options for Ray, where the task runs there."""
        if not isinstance(self.scheduling_strategy, str):
            return self.ray
        return {"scheduling_strategy": self.scheduling_strategy, **(self.ray or {})}

    def demand(self) -> Demand:
        """The resources that these options ask for.

        Raises:
            ValueError, TypeError: as `updated`.
        """
        gpus = _units(self.num_gpus) if self.num_gpus is not None else 0
        memory = _bytes(self.gpu_memory) if self.gpu_memory is not None else 0
        if gpus and memory:
            raise ValueError(
                f"num_gpus={self.num_gpus!r} and gpu_memory={self.gpu_memory!r} exclude each "
                "other: ask for a share or for an amount of memory"
            )
        if self.auto is not None:
            gpus, memory = UNIT, 0
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
        # As in Ray, a type may also be written as a resource, of any amount.
        named = [kind for name in resources if (kind := type_resource(name))]
        types = parse_types(self.accelerator_type) or parse_types(named)
        demand = Demand(
            gpus=gpus,
            gpu_memory=memory,
            cpus=cpus,
            resources=tuple(
                sorted(each for each in resources.items() if not type_resource(each[0]))
            ),
            types=types,
            min_memory=least,
        )
        strategy = self.scheduling_strategy
        return strategy.place(demand) if isinstance(strategy, Strategy) else demand

    @property
    def auto(self) -> AutoShare | None:
        """How earlier runs choose the share, if they do."""
        by_memory = self.gpu_memory == AUTO
        return AutoShare(by_memory) if by_memory or self.num_gpus == AUTO else None

    def check_not_auto(self) -> None:
        """Raises ValueError if earlier runs choose the share."""
        if self.auto is not None:
            raise ValueError(
                "the share 'auto' is for functions and cells, each compared with its own earlier "
                "runs: an actor, a session of cells or an executor needs a number such as 0.5 or "
                "an amount of memory such as '10GiB'"
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
    ranks: int | None = None
    isolate: bool | None = None
    retry_oom: bool | None = None

    def check(self) -> None:
        Resources.check(self)
        if self.retry_oom is not None:
            check_switches(retry_oom=self.retry_oom)
        self.spec("check")
        self._check_ranks()
        check_returns(self.num_returns)
        check_retry(self.retry_exceptions)

    def _check_ranks(self) -> None:
        whole_number(self.ranks, "ranks", 1)
        if self.isolate is not None:
            check_switches(isolate=self.isolate)
            if self.isolate and self.ranks is None:
                raise ValueError("isolate=True is for several ranks: add ranks=")
        if self.ranks is None:
            return
        refused = {
            "the share 'auto'": (self.auto is not None, "say how much each rank gets"),
            "retry_oom=True": (bool(self.retry_oom), "say how much each rank gets"),
            f"num_returns={self.num_returns!r}": (
                self.num_returns not in (None, 1),
                "the one result is the list of the ranks' results",
            ),
            f"max_calls={self.max_calls}": (
                self.max_calls not in (None, 1),
                "each rank gets a fresh process",
            ),
        }
        for what, (given, why) in refused.items():
            if given:
                raise ValueError(f"{what} does not go with ranks={self.ranks}: {why}")

    def spec(self, default_name: str, function: str = "") -> TaskSpec:
        """The part of the options that the scheduler needs, for all tasks with these options.

        Raises:
            ValueError, TypeError: as `updated`.
        """
        demand = self.demand()
        max_calls = whole_number(self.max_calls, "max_calls", 0)
        return TaskSpec(
            name=self.name or escaped(default_name),
            demand=demand,
            function=function,
            # By default each task with a device gets a fresh process.
            max_calls=int(demand.wants_device) if max_calls is None else max_calls,
            max_retries=or_default(
                whole_number(self.max_retries, "max_retries", -1), DEFAULT_RETRIES
            ),
            timeout=seconds_of(self.timeout),
            environment=environment_of(self.runtime_env),
            caps=self.caps is not False,
            ray=self.of_ray(),
            capturable=self.scheduling_strategy is None,
            auto=self.auto,
            grow=bool(self.retry_oom) or self.auto is not None,
            priority=priority_of(self.priority),
        )


@dataclass(frozen=True, slots=True)
class ActorOptions(Resources):
    """The options of a class; `name` is the name by which its actor is found."""

    max_restarts: int | None = None
    max_task_retries: int | None = None
    max_concurrency: int | None = None
    max_pending_calls: int | None = None
    lifetime: str | None = None
    get_if_exists: bool = False
    namespace: str | None = None
    concurrency_groups: Mapping[str, int] | None = None

    def check(self) -> None:
        Resources.check(self)
        self.check_not_auto()
        self.rules()
        check_namespace(self.namespace)
        if self.name == "":
            raise ValueError("name='' is no name: leave it out for an actor without one")
        whole_number(self.max_task_retries, "max_task_retries", -1)
        if self.max_pending_calls == 0:
            raise ValueError("max_pending_calls=0 would refuse every call: use -1 for no limit")
        whole_number(self.max_pending_calls, "max_pending_calls", -1)
        if self.lifetime not in (None, "detached", "non_detached"):
            raise ValueError(
                f"lifetime={self.lifetime!r} must be 'detached', 'non_detached' or None"
            )
        check_switches(get_if_exists=self.get_if_exists)
        if self.get_if_exists and self.name is None:
            raise ValueError("get_if_exists=True needs the name of the actor: add name=...")

    def rules(self, *, concurrent: bool = False) -> ActorSpec:
        """The part that the scheduler needs; `concurrent` if methods are coroutines."""
        most = whole_number(self.max_concurrency, "max_concurrency", 1)
        groups = groups_of(self.concurrency_groups)
        return ActorSpec(
            max_restarts=or_default(whole_number(self.max_restarts, "max_restarts", -1), 0),
            max_concurrency=or_default(most, ASYNC_CONCURRENCY if concurrent else 1),
            threads=not concurrent and (or_default(most, 1) > 1 or bool(groups)),
            groups=groups,
        )

    def spec(self, class_name: str) -> TaskSpec:
        """The part of the options that the scheduler needs for the constructor."""
        return TaskSpec(
            name=escaped(class_name),
            demand=self.demand(),
            max_calls=1,
            environment=environment_of(self.runtime_env),
            caps=self.caps is not False,
            ray=self.of_ray(),
            capturable=self.scheduling_strategy is None,
            priority=priority_of(self.priority),
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
    concurrency_group: str | None = None

    def updated(self, changes: Mapping[str, Any]) -> MethodOptions:
        """As `Resources.updated`."""
        _check_known(changes, [each.name for each in fields(self)], MethodOptions)
        options = replace(self, **changes)
        check_returns(options.num_returns)
        check_retry(options.retry_exceptions)
        check_name(options.name, "name")
        check_name(options.concurrency_group, "concurrency_group")
        seconds_of(options.timeout)
        whole_number(options.max_task_retries, "max_task_retries", -1)
        return options

    def spec(self, default_name: str, function: str, max_task_retries: int) -> TaskSpec:
        """The part of the options that the scheduler needs; `max_task_retries` is the class's."""
        retries = max_task_retries if self.max_task_retries is None else self.max_task_retries
        return TaskSpec(
            name=self.name or escaped(default_name),
            function=function,
            max_retries=retries,
            timeout=seconds_of(self.timeout),
            group=self.concurrency_group or "",
        )


def _units(gpus: float | str) -> int:
    return UNIT if gpus == AUTO else parse_gpus(gpus)  # type: ignore[arg-type] # refuses texts


def _bytes(memory: float | str) -> int:
    return 1 if memory == AUTO else parse_size(memory, "gpu_memory")


def check_either(changes: Mapping[str, Any]) -> None:
    """Check options before it is known whether they are for a function or a class.

    Raises:
        ValueError, TypeError: as `Resources.updated`, if neither may have them.
    """
    functions, classes = ([each.name for each in fields(kind)] for kind in (Options, ActorOptions))
    known = [*functions, *(name for name in classes if name not in functions)]
    _check_known(changes, known, Resources)
    mine = [name for name in changes if name not in classes]
    others = [name for name in changes if name not in functions]
    if mine and others:
        raise ValueError(
            f"{mine[0]!r} is an option of functions and {others[0]!r} one of classes: nothing can "
            "have both"
        )
    (ActorOptions() if others else Options()).updated(changes)


def _check_known(names: Iterable[str], known: Sequence[str], kind: type) -> None:
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        own = _OWNERS.get(kind, "functions or classes")
        others = {what: [each.name for each in fields(owner)] for owner, what in _OWNERS.items()}
        others.pop(own, None)
        raise ValueError(unknown_option(unknown, own, known, others))


_OWNERS = {Options: "functions", ActorOptions: "classes", MethodOptions: "methods"}
