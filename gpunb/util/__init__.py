"""The parts of ``ray.util`` that gpunb has, under the same names."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import gpunb.api  # noqa: F401 - the first call may start a session
from gpunb.data import serialize
from gpunb.instead import missing
from gpunb.protocol import backend
from gpunb.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from gpunb.util import (
        accelerators,
        joblib,
        multiprocessing,
        queue,
        scheduling_strategies,
        state,
    )
    from gpunb.util.actor_pool import ActorPool

_MODULES = (
    "accelerators",
    "joblib",
    "multiprocessing",
    "queue",
    "scheduling_strategies",
    "state",
)

__all__ = [
    "ActorPool",
    "accelerators",
    "get_current_placement_group",
    "get_placement_group",
    "inspect_serializability",
    "joblib",
    "list_named_actors",
    "multiprocessing",
    "placement_group",
    "placement_group_table",
    "queue",
    "remove_placement_group",
    "scheduling_strategies",
    "state",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"gpunb.util.{name}")
    if name == "ActorPool":
        return importlib.import_module("gpunb.util.actor_pool").ActorPool
    raise missing(__name__, name, f" (of what ray.util has, there is {', '.join(__all__)})")


def __dir__() -> list[str]:
    return [*__all__]


def list_named_actors(all_namespaces: bool = False) -> list[Any]:
    """The names of the actors in the session's namespace; with `all_namespaces` those in all
    namespaces, as dicts with ``name`` and ``namespace``."""
    names: list[tuple[str, str]] = backend.current().ask("names")
    if all_namespaces:
        return [{"name": name, "namespace": space} for space, name in names]
    own = backend.namespace()
    return [name for space, name in names if space == own]


@dataclass(frozen=True, eq=False)
class FailureTuple:
    """A value that cannot be pickled, its name, and the object that contains it."""

    obj: Any
    name: str
    parent: Any


def inspect_serializability(
    base_obj: Any,
    name: str | None = None,
    depth: int = 3,  # noqa: ARG001 - the search for the part at fault has no limit of depth
    print_file: TextIO | None = None,
) -> tuple[bool, set[FailureTuple]]:
    """Whether a value can be pickled, and the values that cannot. Prints the reason.

    Args:
        base_obj: the value.
        name: name of the value in the text.
        print_file: file for the text; default: the standard output.
    """
    what = name or getattr(base_obj, "__name__", None) or type(base_obj).__name__
    try:
        serialize.dumps(base_obj, what=what)
    except TypeError as error:
        print(error, file=print_file or sys.stdout)
        return False, {FailureTuple(base_obj, what, None)}
    return True, set()
