"""Lets old outputs of a notebook keep no actors alive.

IPython keeps the values that cells showed in ``Out``, ``_`` and their like. A handle among them
would keep its actor, and the devices of the actor, for as long as the kernel runs. So after one
more cell a `PastHandle` takes its place: it works like the handle as long as the actor lives for
another reason.

A cell that waits for devices which only such a handle holds would wait for ever. So while a cell
runs and something waits for devices, a thread lets go of the handles that nobody can use any more:
those among the outputs of earlier cells, in the frames of the last error, and in garbage.

A cell in the background gives a handle of its job at once, and its value when it is over. The value
then takes the place of the job's handle, as in the front end.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from gpunb.api.actor_handle import ActorHandle
from gpunb.api.actor_type import ActorType
from gpunb.exceptions import ActorDiedError, GpunbError
from gpunb.notebook.shell import NotebookShell
from gpunb.protocol import backend
from gpunb.scheduler.tasks import ActorId

_LAST = ("_", "__", "___")
_MOST = 1000
"""Elements of a list or dict that are looked at."""

_PERIOD = 0.3
"""Seconds that a cell runs before the first check for such a wait, and between two checks."""

_AGAIN = 5.0
"""Seconds until the second let-go in one cell. The pause doubles each time, because collecting
garbage takes time and a queue may be long for other reasons."""


class PastHandle:
    """Takes the place of a handle in an old output. It does not keep the actor."""

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


class OldOutputs:
    """Lets go of handles in old outputs of one shell, after each cell and while a cell waits."""

    def __init__(self, shell: NotebookShell) -> None:
        self._shell = shell
        self._late: dict[int, tuple[int, Callable[[Any], object]]] = {}
        """By the number of an output that came late: the cell until whose end it stays, and the
        function to call with the value that replaces it."""
        self._runs = threading.Event()
        self._thread: threading.Thread | None = None
        shell.ip.events.register("pre_run_cell", self._begins)
        shell.ip.events.register("post_run_cell", self._ends)
        backend.LET_GO.append(self.let_go)

    def let_go(self) -> None:
        """Let go of all handles that the running cell cannot use."""
        self._weaken(self._shell.ip.execution_count)
        for frame in _frames_of_the_last_error():
            # A debugger finds no variables in that frame any more.
            with contextlib.suppress(RuntimeError):
                frame.clear()
        gc.collect()

    def put_late(self, number: int, value: Any, let_go: Callable[[Any], object]) -> None:
        """Replace an output by a value; call `let_go` with the value that replaces this later."""
        _replace(self._shell, number, value)
        if past_of(value, "") is not value:
            self._late[number] = self._shell.number + 1, let_go

    def _begins(self, _: Any) -> None:
        if backend.existing() is None:
            return
        self._runs.set()
        if self._thread is None:
            thread = threading.Thread(target=self._look, name="gpunb-handles", daemon=True)
            thread.start()
            self._thread = thread

    def _ends(self, result: Any) -> None:
        self._runs.clear()
        if backend.existing() is not None and result.execution_count is not None:
            self._weaken(result.execution_count)

    def _look(self) -> None:
        last, then, pause = 0, 0.0, _AGAIN
        while True:
            self._runs.wait()
            time.sleep(_PERIOD)
            number, now = self._shell.ip.execution_count, time.monotonic()
            again = number != last or now > then + pause
            if again and self._runs.is_set() and _waits():
                pause = 2 * pause if number == last else _AGAIN
                last, then = number, now
                self.let_go()

    def _weaken(self, before: int) -> None:
        """Let go of the handles that cells before the one of this number showed."""
        outputs = self._shell.user_ns.get("_oh", {})
        for number in [each for each in list(outputs) if each < before]:
            until, let_go = self._late.get(number, (0, None))
            if until >= before:
                continue
            self._late.pop(number, None)
            value = outputs[number]
            past = past_of(value, f"Out[{number}]")
            if past is value:
                continue
            _replace(self._shell, number, past, last=True)
            if let_go is not None:
                let_go(past)


def _waits() -> bool:
    """Whether something waits for devices of this session."""
    try:
        current = backend.existing()
        return current is not None and bool(current.ask("unmet"))
    except (GpunbError, ValueError):  # the session is over, or does not know
        return False


def _frames_of_the_last_error() -> Iterator[FrameType]:
    """The frames of the last error that have a handle among their variables."""
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


def _replace(shell: NotebookShell, number: int, value: Any, *, last: bool = False) -> None:
    """Replace an output by another value; with `last`, in ``_`` and its like as well."""
    ip = shell.ip
    outputs = shell.user_ns.get("_oh", {})
    before, outputs[number] = outputs[number], value
    for name in (f"_{number}", *(_LAST if last else ())):
        for space in (shell.user_ns, getattr(ip, "user_ns_hidden", {})):
            if space.get(name) is before:
                space[name] = value
        if last and getattr(ip.displayhook, name, None) is before:
            setattr(ip.displayhook, name, value)
    # The shell keeps the result of the last cell until the next one has run.
    result = getattr(ip, "last_execution_result", None) if last else None
    if result is not None and result.result is before:
        result.result = value


def past_of(value: Any, where: str) -> Any:
    """The value with past handles in place of handles; the value itself if it has none."""
    kind = type(value)
    if kind is ActorHandle:
        return PastHandle(value._gpunb_id, value._gpunb_type, where)  # noqa: SLF001
    if kind in (list, tuple) and any(type(each) is ActorHandle for each in value[:_MOST]):
        return kind(past_of(each, where) for each in value)
    few = kind is dict and len(value) <= _MOST
    if few and any(type(each) is ActorHandle for each in value.values()):
        return {name: past_of(each, where) for name, each in value.items()}
    return value
