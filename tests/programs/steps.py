"""What a random program is made of: plain values, whose `repr` is what one types to run it again.

A program is a list of steps for the kernel. Each step that makes something names it; a later step
whose name is not there (because a step was dropped, or what it stands for never came to be) is
skipped.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

ENDLESS = 60.0
"""Seconds; a pause that long is over only because somebody ends it."""

PLANNED = "planned"
"""What an exception says that is part of a program, before its salt."""


def mix(*numbers: int) -> int:
    """One number for many, in their order."""
    return zlib.crc32(repr(numbers).encode())


@dataclass(frozen=True)
class Plan:
    """What a task or a call does.

    Attributes:
        salt: makes its result its own.
        pause: seconds that it sleeps.
        fault: ``"raise"``, or ``"kill"`` or ``"exit"`` for the process.
        fails: the attempts, from the first, that end so; the fault comes late if `late`.
        shape: of the result: ``"number"``, ``"large"``, ``"refs"`` to its children and a put, or
            ``"pair"`` of two results.
        children: the tasks that it submits.
        calls: the calls that it makes of each actor whose handle it has.
        own: the calls that it makes of an actor of its own, if there are any. A result of refs
            has its handle, too.
    """

    salt: int
    pause: float = 0.0
    fault: str = ""
    fails: int = 0
    late: bool = False
    shape: str = "number"
    children: tuple[Child, ...] = ()
    calls: int = 0
    own: int = 0

    @property
    def endless(self) -> bool:
        return self.pause >= ENDLESS


@dataclass(frozen=True)
class Child:
    """A task that a task submits.

    Attributes:
        use: ``"get"``, ``"wait"`` and get, ``"return"`` the ref, ``"drop"`` it, or ``"cancel"``
            or ``"force"`` its end.
        passes: whether it is handed the nested refs of its parent.
    """

    plan: Plan
    gpus: float = 0
    retries: int = 3
    use: str = "get"
    passes: bool = False


@dataclass(frozen=True)
class Put:
    """A value, in which there may be refs."""

    name: str
    salt: int
    large: bool = False
    holds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A call of a function. Of a pair, the second ref has the name with a prime.

    Attributes:
        reuse: whether its worker may serve others, where it asks for devices.
        args: refs at the top level of its arguments.
        nested: refs inside an argument, which it gets itself.
        handles: of actors that it calls.
    """

    name: str
    plan: Plan
    gpus: float = 0
    retries: int = 3
    timeout: float | None = None
    reuse: bool = False
    args: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    handles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generate:
    """A call of a generator function, which yields `count` values; `dynamic` gives them at once."""

    name: str
    plan: Plan
    count: int
    gpus: float = 0
    retries: int = 3
    dynamic: bool = False
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Take:
    """The next ref of a generator."""

    name: str
    source: str


@dataclass(frozen=True)
class Make:
    """An actor: ``"plain"``, ``"threads"`` or ``"async"``.

    Attributes:
        known: whether it has a name for `get_actor`.
        fails: whether its constructor raises.
    """

    name: str
    salt: int
    kind: str = "plain"
    gpus: float = 0
    restarts: int = 0
    retries: int = 0
    known: bool = False
    fails: bool = False
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A call of a method; what its plan does to the process it does to the actor."""

    name: str
    actor: str
    plan: Plan
    args: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leave:
    """A call with which an actor ends itself."""

    name: str
    actor: str


@dataclass(frozen=True)
class Find:
    """Another handle of an actor, by its name."""

    name: str
    actor: str


@dataclass(frozen=True)
class Get:
    name: str


@dataclass(frozen=True)
class Wait:
    names: tuple[str, ...]
    count: int
    timeout: float | None = None


@dataclass(frozen=True)
class Cancel:
    name: str
    force: bool = False
    recursive: bool = True


@dataclass(frozen=True)
class Interrupt:
    name: str


@dataclass(frozen=True)
class Strike:
    """SIGKILL for the process of a task or an actor, for a task after it was seen to run."""

    name: str


@dataclass(frozen=True)
class Kill:
    actor: str
    restart: bool = False


@dataclass(frozen=True)
class Drop:
    name: str


@dataclass(frozen=True)
class Pause:
    seconds: float


Step: TypeAlias = (
    Put
    | Task
    | Generate
    | Take
    | Make
    | Call
    | Leave
    | Find
    | Get
    | Wait
    | Cancel
    | Interrupt
    | Strike
    | Kill
    | Drop
    | Pause
)

Program: TypeAlias = list[Step]


def listing(program: Program) -> str:
    """The program as text that Python reads."""
    return "[\n" + "".join(f"    {_text(step)},\n" for step in program) + "]"


def _text(value: Any) -> str:
    """As `repr`, without what is by default as it is."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    if not is_dataclass(value):
        return repr(value)
    reported = [each for each in fields(value) if getattr(value, each.name) != each.default]
    inside = ", ".join(f"{each.name}={_text(getattr(value, each.name))}" for each in reported)
    return f"{type(value).__name__}({inside})"
