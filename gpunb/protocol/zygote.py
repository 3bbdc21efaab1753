"""The messages between the kernel and a zygote: tuples of builtin types.

Requests:

- ``("fork", token)`` with the worker's descriptors
- ``("preload", number)`` with the control socket of a zygote of the second generation, and a file
  in memory that holds a `Preload`
- ``("signal", token, number)``
- ``("ping",)``
- ``("keep",)`` with a descriptor that the zygote, and all that it forks from then on, have open as
  long as they live

Answers:

- ``("forked", token, pid)``
- ``("exited", token, status)``
- ``("preloaded", {module: problem or None}, why it must not be used or None, package)``, where
  `package` is the one among the imports of tasks that is the reason, or empty
- ``("failed", token, reason)``
- ``("pong",)``
- ``("delayed", token, reason)`` when the system has no room for another process: the fork is tried
  again until there is some
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

SECOND = "zygote"
"""With its number, the token of a zygote of the second generation."""


class Imports(NamedTuple):
    """What tasks have imported.

    Attributes:
        modules: names; what a module imports comes before it.
        changed: environment variables that have changed while the tasks ran, and their values
            afterwards; None for a removed one.
        environment: all variables with which these tasks began, except those of their workers.
        path: their `sys.path`.
        installed: when something was last installed in each folder of packages of this path.
    """

    modules: tuple[str, ...]
    changed: dict[str, str | None]
    environment: dict[str, str]
    path: list[str]
    installed: list[int]

    def fits(
        self, environment: Mapping[str, str], path: Sequence[str], installed: Sequence[int]
    ) -> bool:
        """Whether a process with these would import the same. Each variable may also have the value
        that the imports give it: the kernel has it once it has imported such a package itself."""
        if (list(path), installed) != (self.path, self.installed):
            return False
        differing = dict(environment.items() ^ self.environment.items())
        return all(
            name in self.changed
            and environment.get(name) in (self.changed[name], self.environment.get(name))
            for name in differing
        )


class Preload(NamedTuple):
    """What a zygote of the second generation imports: modules that were asked for, and the fields
    of `Imports`. With these it may have `most` bytes of memory."""

    modules: tuple[str, ...]
    imports: tuple[Any, ...] | None = None
    most: int = 0
