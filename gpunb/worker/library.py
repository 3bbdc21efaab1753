"""How a library keeps state for a whole process: functions that read it and set it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

State: TypeAlias = dict[str, Any]
"""By the names of settings; of a generator there is one, `STATE`."""

STATE = "state"


@dataclass(frozen=True, slots=True)
class Library:
    """The settings of a library, once `module` is loaded: functions that read them, set them and
    return their defaults.

    Attributes:
        random: whether they are the state of a random number generator.
        entries: returns the entries of a registry, which is a quick look: as long as these are the
            same, a registry with nothing of the notebook's has nothing of it.
    """

    module: str
    read: Callable[[Any], State]
    write: Callable[[Any, str, Any], object]
    default: Callable[[Any], State] = lambda _: {}
    random: bool = False
    entries: Callable[[Any], Any] | None = None


def of_notebook(thing: Any) -> bool:
    """Whether the notebook has defined a class or function."""
    return getattr(thing, "__module__", None) == "__main__"
