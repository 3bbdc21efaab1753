"""Handles among a notebook's outputs: of actors in old ones, and of cells that are over.

IPython keeps what cells showed in ``Out``, ``_`` and their like. A handle that nothing else refers
to would keep its actor, and its devices, for as long as the kernel runs. So one cell later only a
note of it is kept there: it works like the handle as long as the actor lives for another reason.

Nor should anybody wait for what such a handle holds: while a cell runs and something waits for
devices, the outputs before that cell are looked through at once, the frames that the last error has
kept, and the garbage.

A cell in the background gives a handle at once, and its value when it is over. Then that is its
output, as it is what the front end shows there.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from gpunb import backend
from gpunb.actor import ActorHandle, ActorType
from gpunb.core.tasks import ActorId
from gpunb.exceptions import ActorDiedError, GpunbError

_LAST = ("_", "__", "___")
_MOST = 1000
"""Elements of a list or dict that are looked at."""

_PERIOD = 0.3
"""Seconds that a cell runs before somebody looks whether it waits for what nobody can use, and
between two looks."""

_AGAIN = 5.0
"""Seconds until handles are let go once more in the same cell; from then on twice as many."""


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
    """Look through the outputs of a shell after each of its cells, and while something waits."""
    if shell not in _watched:
        _watched.add(shell)
        watch = _Watch(shell)
        shell.events.register("pre_run_cell", watch.begins)
        shell.events.register("post_run_cell", watch.ends)
        backend.LET_GO.append(watch.let_go)


class _Watch:
    """Lets go of handles that nobody can use any more."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._runs = threading.Event()
        self._thread: threading.Thread | None = None

    def begins(self, info: Any) -> None:
        """A cell runs."""
        if backend.existing() is None:
            return
        self._runs.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="gpunb-handles", daemon=True)
            self._thread.start()

    def ends(self, result: Any) -> None:
        """A cell is over."""
        self._runs.clear()
        if backend.existing() is not None and result.execution_count is not None:
            weaken(self._shell, result.execution_count)

    def let_go(self) -> None:
        """Let go of all that the running cell cannot mean."""
        weaken(self._shell, self._shell.execution_count)
        for frame in _frames_of_the_last_error():
            # Of the variables of that frame, a debugger finds nothing any more.
            with contextlib.suppress(RuntimeError):
                frame.clear()
        gc.collect()

    def _look(self) -> None:
        last, then, pause = 0, 0.0, _AGAIN
        while True:
            self._runs.wait()
            time.sleep(_PERIOD)
            number, now = self._shell.execution_count, time.monotonic()
            again = number != last or now > then + pause
            if again and self._runs.is_set() and _waits():
                # To collect garbage takes its time, and a queue may be long for other reasons.
                pause = 2 * pause if number == last else _AGAIN
                last, then = number, now
                self.let_go()


def _waits() -> bool:
    """Whether something waits for devices of this session."""
    try:
        current = backend.existing()
        return current is not None and bool(current.ask("unmet"))
    except (GpunbError, ValueError):  # it is over, or another's to know
        return False


def _frames_of_the_last_error() -> Iterator[FrameType]:
    """Those that have a handle among their variables."""
    error: BaseException | None = getattr(sys, "last_value", None)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            known = frame.f_locals
            if known is not frame.f_globals and any(
                type(each) is ActorHandle for each in list(known.values())
            ):
                yield frame
        error = error.__cause__ or error.__context__


def weaken(shell: Any, before: int) -> None:
    """Let go of the handles that cells before the one of this number showed."""
    outputs = shell.user_ns.get("_oh", {})
    for number in [each for each in list(outputs) if each < before]:
        since, let_go = _late.get((id(shell), number), (0, None))
        if since >= before:
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
    # The shell keeps what the last cell came to until the next one has run.
    kept = getattr(shell, "last_execution_result", None) if last else None
    if kept is not None and kept.result is before:
        kept.result = value


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
