"""Handles among a notebook's outputs: of actors in old ones, and of cells that are over.

IPython keeps what cells showed in ``Out``, ``_`` and their like. A handle that nothing else refers
to would keep its actor, and its devices, for as long as the kernel runs. So one cell later only a
note of it is kept there: it works like the handle as long as the actor lives for another reason.

A cell in the background gives a handle at once, and its value when it is over. Then that is its
output, as it is what the front end shows there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from gpunb import backend
from gpunb.actor import ActorHandle, ActorType
from gpunb.core.tasks import ActorId
from gpunb.exceptions import ActorDiedError

_LAST = ("_", "__", "___")
_MOST = 1000
"""Elements of a list or dict that are looked at."""


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


class PastHandle:
    """What is left of a handle among old outputs. It does not keep the actor."""

    def __init__(self, actor: ActorId, kind: ActorType, where: str) -> None:
        self._gpunb_id = actor
        self._gpunb_type = kind
        self._gpunb_where = where

    def __getattr__(self, name: str) -> Any:
        kind = self.__dict__.get("_gpunb_type")
        if kind is None or name not in kind.methods:
            raise AttributeError(f"this past handle of an actor has no method {name!r}")
        current = backend.existing()
        if current is None or current.ask("actor", self._gpunb_id) is None:
            raise ActorDiedError(
                f"{kind.name} #{self._gpunb_id} has ended: only {self._gpunb_where} referred to "
                "it, and an old output does not keep an actor; assign the handle to a name"
            )
        return getattr(ActorHandle(self._gpunb_id, kind), name)

    def __repr__(self) -> str:
        name, ident = self._gpunb_type.name, self._gpunb_id
        return f"<past handle of {name} #{ident}, which does not keep it>"


def install(shell: Any) -> None:
    """Look through the outputs of a shell after each of its cells."""
    if shell not in _watched:
        _watched.add(shell)
        shell.events.register("post_run_cell", lambda result: weaken(shell, result))


def weaken(shell: Any, result: Any) -> None:
    """Let go of the handles that cells before this one showed."""
    if backend.existing() is None or result.execution_count is None:
        return
    outputs = shell.user_ns.get("_oh", {})
    for number in [each for each in outputs if each < result.execution_count]:
        since, let_go = _late.get((id(shell), number), (0, None))
        if since >= result.execution_count:
            continue
        _late.pop((id(shell), number), None)
        value = outputs[number]
        past = past_of(value, f"Out[{number}]")
        if past is value:
            continue
        replace(shell, number, past, last=True)
        if let_go is not None:
            let_go(past)


_late: dict[tuple[int, int], tuple[int, Callable[[Any], object]]] = {}
"""By shell and number of an output that came late: the cell until whose end it is kept, and what to
call when it is not any more."""


def put_late(shell: Any, number: int, value: Any, let_go: Callable[[Any], object]) -> None:
    """Put a value in the place of an output. What is left of it later is handed to `let_go`."""
    replace(shell, number, value)
    if past_of(value, "") is not value:
        _late[id(shell), number] = shell.displayhook.prompt_count + 1, let_go


def replace(shell: Any, number: int, value: Any, *, last: bool = False) -> None:
    """Put another value in the place of an output, also where it is still the `last` one or one of
    those before it."""
    outputs = shell.user_ns.get("_oh", {})
    before, outputs[number] = outputs[number], value
    for name in (f"_{number}", *(_LAST if last else ())):
        for space in (shell.user_ns, getattr(shell, "user_ns_hidden", {})):
            if space.get(name) is before:
                space[name] = value
        if last and getattr(shell.displayhook, name, None) is before:
            setattr(shell.displayhook, name, value)


def past_of(value: Any, where: str) -> Any:
    """The same without handles: itself if there are none in it."""
    kind = type(value)
    if kind is ActorHandle:
        return PastHandle(value._gpunb_id, value._gpunb_type, where)  # noqa: SLF001
    if kind in (list, tuple) and any(type(each) is ActorHandle for each in value[:_MOST]):
        return kind(past_of(each, where) for each in value)
    few = kind is dict and len(value) <= _MOST
    if few and any(type(each) is ActorHandle for each in value.values()):
        return {name: past_of(each, where) for name, each in value.items()}
    return value
