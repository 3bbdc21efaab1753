"""The messages between the kernel and a zygote: tuples of builtin types.

Requests:

- ``("fork", token)`` with the worker's descriptors
- ``("preload", number)`` with the control socket of a zygote of the second generation, and a file
  in memory that holds a `Preload`
- ``("signal", token, number)``
- ``("prepare",)`` to do what the loaded libraries do when they are first used
- ``("ping",)``
- ``("keep",)`` with a descriptor that the zygote, and all that it forks from then on, have open as
  long as they live

Answers:

- ``("forked", token, pid)``
- ``("exited", token, status)``
- ``("loaded", modules, {variable: value or None}, out, err)`` before ``preloaded``, once or several
  times: modules of installed packages that are loaded, environment variables that the imports have
  changed, and the text that the imports have written to the standard streams
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
    """What tasks have imported, or need.

    Attributes:
        modules: names; what a module imports comes before it.
        changed: environment variables that have changed while the tasks ran or the modules were
            imported, and their values afterwards; None for a removed one.
        environment: all variables with which these tasks began, except those of their workers.
        path: their `sys.path`.
        installed: when something was last installed in each folder of packages of this path.
        shell: module and name of the class of the notebook's shell, if cells import the modules;
            else empty.
    """

    modules: tuple[str, ...]
    changed: dict[str, str | None]
    environment: dict[str, str]
    path: list[str]
    installed: list[int]
    shell: tuple[str, str] = ("", "")

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

    def joins(self, other: Imports) -> bool:
        """Whether these may be imported in one process with the others."""
        return other.fits(self.environment, self.path, self.installed)


class Preload(NamedTuple):
    """What a zygote of the second generation imports.

    Attributes:
        modules: modules that were asked for.
        imports: the fields of `Imports`.
        most: bytes of memory that the process may have with the imports of tasks.
        onto: whether the process that forks the zygote has modules of such imports already, and so
            the environment and the path for them.
    """

    modules: tuple[str, ...]
    imports: tuple[Any, ...] | None = None
    most: int = 0
    onto: bool = False
