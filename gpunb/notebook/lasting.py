"""What a session's process is started with, and what a later cell may say of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpunb.core.options import ActorOptions, Options, environment_of
from gpunb.core.resources import Demand, amount, size_text, type_resource


def lasting(options: Options) -> ActorOptions:
    """Of the options of a cell those that shape the process; the others are the cell's alone."""
    return ActorOptions(
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        gpu_memory=options.gpu_memory,
        accelerator_type=options.accelerator_type,
        min_memory=options.min_memory,
        resources=options.resources,
        runtime_env=options.runtime_env,
        caps=options.caps,
    )


def differences(own: Options, said: Options, asked: bool) -> list[tuple[str, str]]:
    """What the process of a session has, in the words of the line, and what a cell says instead.
    What a cell says nothing of is left as it is; `asked` if it said a share."""
    return list(_differences(own, said, asked))


def _differences(own: Options, said: Options, asked: bool) -> Iterator[tuple[str, str]]:
    has, asks = lasting(own).demand(), lasting(said).demand()
    if asked and (has.gpus, has.gpu_memory) != (asks.gpus, asks.gpu_memory):
        yield _share(has), _share(asks)
    if asks.types and _names(has) != _names(asks):
        yield _option("--type", ",".join(has.types)), _option("--type", ",".join(asks.types))
    if asks.min_memory and has.min_memory != asks.min_memory:
        yield _size(has.min_memory), _size(asks.min_memory)
    mine, theirs = dict(has.resources), dict(asks.resources)
    for name in said.resources or ():
        if not type_resource(name) and mine.get(name, 0) != theirs.get(name, 0):
            yield _resource(name, mine.get(name, 0)), _resource(name, theirs.get(name, 0))
    if said.num_cpus is not None and has.cpus != asks.cpus:
        yield f"--cpus {amount(has.cpus)}", f"--cpus {amount(asks.cpus)}"
    if said.caps is False and own.caps is not False:
        yield "no --no-caps", "--no-caps"
    variables = dict(environment_of(own.runtime_env))
    for name, value in environment_of(said.runtime_env):
        if name not in variables:
            yield f"no --env {name}", f"--env {name}={value}"
        elif variables[name] != value:
            yield f"--env {name}={variables[name]}", f"--env {name}={value}"


def again(own: Options, said: Options, asked: bool) -> Options:
    """With what a session starts again that has ended: as before, but for what the cell says.

    Raises:
        ValueError: the two do not go together.
    """
    changes: dict[str, Any] = {
        name: value
        for name in ("num_cpus", "accelerator_type", "min_memory", "caps")
        if (value := getattr(said, name)) is not None
    }
    if asked:
        changes.update(num_gpus=said.num_gpus, gpu_memory=said.gpu_memory)
    if said.resources:
        changes["resources"] = {**(own.resources or {}), **said.resources}
    if said.runtime_env:
        variables = environment_of(own.runtime_env) + environment_of(said.runtime_env)
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
