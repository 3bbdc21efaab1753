"""Compares the options of a session's process with those of later cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpunb.scheduler.option_values import environment_of
from gpunb.scheduler.options import ActorOptions, Options
from gpunb.scheduler.resources import Demand, amount, size_text, type_resource


def lasting(options: Options) -> ActorOptions:
    """The options of a cell that are for the process, not for the cell alone."""
    return ActorOptions(
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        gpu_memory=options.gpu_memory,
        accelerator_type=options.accelerator_type,
        min_memory=options.min_memory,
        resources=options.resources,
        runtime_env=options.runtime_env,
        caps=options.caps,
        priority=options.priority,
    )


def differences(  # noqa: C901 - each option is compared and written in its own way
    own: Options, new: Options, asked: bool
) -> Iterator[tuple[str, str]]:
    """The options of a session's process and those of a cell, as on the line, where they differ. An
    option that the cell does not name does not differ; `asked` if it names a share."""
    has, asks = lasting(own).demand(), lasting(new).demand()
    if asked and (has.gpus, has.gpu_memory) != (asks.gpus, asks.gpu_memory):
        yield _share(has), _share(asks)
    if asks.types and _names(has) != _names(asks):
        yield _option("--type", ",".join(has.types)), _option("--type", ",".join(asks.types))
    if asks.min_memory and has.min_memory != asks.min_memory:
        yield _size(has.min_memory), _size(asks.min_memory)
    mine, theirs = dict(has.resources), dict(asks.resources)
    for name in new.resources or ():
        if not type_resource(name) and mine.get(name, 0) != theirs.get(name, 0):
            yield _resource(name, mine.get(name, 0)), _resource(name, theirs.get(name, 0))
    if new.num_cpus is not None and has.cpus != asks.cpus:
        yield f"--cpus {amount(has.cpus)}", f"--cpus {amount(asks.cpus)}"
    if new.ranks is not None and own.ranks != new.ranks:
        yield _option("--ranks", str(own.ranks or "")), f"--ranks {new.ranks}"
    if new.isolate and not own.isolate:
        yield "no --isolate", "--isolate"
    if new.caps is False and own.caps is not False:
        yield "no --no-caps", "--no-caps"
    if new.priority is not None and (own.priority or 0) != new.priority:
        yield f"--priority {own.priority or 0}", f"--priority {new.priority}"
    variables = dict(environment_of(own.runtime_env))
    for name, value in environment_of(new.runtime_env):
        if name not in variables:
            yield f"no --env {name}", f"--env {name}={value}"
        elif variables[name] != value:
            yield f"--env {name}={variables[name]}", f"--env {name}={value}"


def again(own: Options, new: Options, asked: bool) -> Options:
    """The options with which an ended session starts again: its own, changed by those of the cell.

    Raises:
        ValueError: the two do not go together.
    """
    changes: dict[str, Any] = {
        name: value
        for name in (
            "num_cpus",
            "accelerator_type",
            "min_memory",
            "caps",
            "ranks",
            "isolate",
            "priority",
        )
        if (value := getattr(new, name)) is not None
    }
    if asked:
        changes.update(num_gpus=new.num_gpus, gpu_memory=new.gpu_memory)
    if new.resources:
        changes["resources"] = {**(own.resources or {}), **new.resources}
    if new.runtime_env:
        variables = environment_of(own.runtime_env) + environment_of(new.runtime_env)
        changes["runtime_env"] = {"env_vars": dict(variables)}
    options = replace(own, **changes)
    options.check()
    return options


def _share(demand: Demand) -> str:
    share = Demand(gpus=demand.gpus, gpu_memory=demand.gpu_memory)
    return str(share) if share.wants_device else "no GPU"


def _names(demand: Demand) -> list[str]:
    return [each.casefold() for each in demand.types]


def _size(size: int) -> str:
    return _option("--min-memory", size_text(size) if size else "")


def _resource(name: str, units: int) -> str:
    return f"--resource {name}={amount(units)}" if units else f"no --resource {name}"


def _option(name: str, value: str) -> str:
    return f"{name} {value}" if value else f"no {name}"
