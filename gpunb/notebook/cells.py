"""A cell between the notebook and its worker: handed in, and brought to its end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gpunb import backend, serialize, session
from gpunb.backend import Backend, Call, ObjectId, Outcome
from gpunb.core.options import MethodOptions, Options
from gpunb.core.resources import devices_text
from gpunb.exceptions import (
    ActorDiedError,
    GpunbError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from gpunb.notebook.arriving import Home, incoming
from gpunb.notebook.output import Place, place_of
from gpunb.notebook.sessions import CellSession
from gpunb.notebook.shipping import Shipment, outgoing
from gpunb.refs import value_of
from gpunb.runtime.output import Sink
from gpunb.workers.ending import Ending
from gpunb.workers.shell import holds_group


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for with a cell: its text, the line before it, and the options of that line.

    `inputs` and `outputs` are names to ship and to bring home, and no others; None for what the
    cell reads and binds. The value of an `expression` is for whoever asked, and not shown. What has
    more than `largest` bytes comes home only if `outputs` names it.
    """

    source: str
    first_line: str
    options: Options
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    session: CellSession | None = None
    expression: bool = False
    largest: int = 0
    local: Mapping[str, Any] | None = None


class Placed(Sink, Protocol):
    """A sink that knows its cell."""

    place: Place | None


@dataclass(frozen=True, slots=True, eq=False)
class HandedIn:
    """A cell that waits or runs. `obj` is what it makes; its reference is held here. Of the names
    in `presumed` a session is taken to have a newer value than the notebook."""

    shell: Any
    request: Request
    backend: Backend
    obj: ObjectId
    name: str
    number: int
    shipment: Shipment
    presumed: frozenset[str] = frozenset()

    def kill(self) -> None:
        """End its process, and a session's with it."""
        host = self.request.session
        if host is not None:
            host.stop()
        else:
            self.backend.cancel(self.obj, force=True, recursive=True)

    def give_up(self) -> None:
        """End it as nobody waits for it any more; a session goes on."""
        self.backend.cancel(self.obj, force=self.request.session is None, recursive=True)


def hand_in(shell: Any, request: Request, sink: Placed, *, late: bool = False) -> HandedIn:
    """Hand a cell in to be run; `late` if the notebook goes on meanwhile.

    Raises:
        UsageError, InfeasibleRequestError: it cannot be.
        Exception: with the lines that a SyntaxError of the cell has.
    """
    session.current()
    number = shell.displayhook.prompt_count
    sink.place = place_of(shell)
    name = request.options.name or f"In[{number}]"
    host = request.session
    try:
        arguments, shipment = outgoing(
            shell,
            request.source,
            request.first_line,
            number,
            inputs=request.inputs,
            outputs=request.outputs,
            held=host.held if host is not None else None,
            late=late,
            expression=request.expression,
            largest=request.largest,
            local=request.local,
        )
    except SyntaxError as error:
        lines = shell.SyntaxTB.structured_traceback(type(error), error, [])
        raise dressed(error, lines) from None
    try:
        if host is None:
            spec, actor = request.options.spec(name, "cell"), 0
        else:
            actor = host.actor
            spec = MethodOptions(timeout=request.options.timeout).spec(name, "cell", 0)
        call = Call(spec, b"", arguments, kind="cell", sink=sink, actor=actor)
        current = backend.current()
        (obj,) = current.submit(call)
    except GpunbError as error:
        raise short(error) from None
    presumed = host.held.sent(shell.user_ns, shipment) if host is not None else frozenset()
    return HandedIn(shell, request, current, obj, name, number, shipment, presumed)


def conclude(
    handed: HandedIn,
    outcome: Outcome,
    *,
    interrupted: bool = False,
    waited_for: bool = False,
    note: Callable[[str], object] | None = None,
) -> tuple[Home | None, BaseException | None]:
    """Bind what came home; on the main thread.

    Args:
        interrupted: somebody pressed Stop.
        waited_for: the notebook waits for it, so whoever cancels it presses Stop.
        note: is told what there is to say; by default that goes to standard error.

    Returns:
        What came home, if anything did, and what to raise, if it failed: what the cell raised,
        with the traceback that IPython made in the worker.
    """
    host = handed.request.session
    if outcome.failed:
        if host is not None:
            host.held.forget(handed.shipment.sent | handed.presumed)
        return None, _failure(handed, outcome, interrupted, waited_for)
    try:
        home = incoming(handed.shell, outcome.payload, handed.shipment, note or sys.stderr.write)
    except GpunbError as error:
        return None, short(error)
    if host is not None:
        host.held.came_home(handed.shell.user_ns, home, handed.presumed)
    if home.ending.failure is None:
        return home, None
    raised = _raised(handed, home.ending)
    seconds = handed.request.options.timeout
    if isinstance(raised, KeyboardInterrupt) and not interrupted and seconds:
        if not _ran_for(handed, seconds):
            return home, raised
        text = f"{handed.name} ran longer than its timeout of {seconds:g} s and was stopped"
        raised = short(TimeoutError(_with(text, _left(handed))))
    return home, raised


def _ran_for(handed: HandedIn, seconds: float) -> bool:
    """Whether it ran that long, as far as that is known."""
    return bool(_facts(handed).get("seconds", seconds) > seconds - 0.01)


def _share(handed: HandedIn) -> str:
    """What is said of its part of devices once its process is gone; nothing if it had none."""
    devices = _facts(handed).get("devices")
    if not devices:
        return ""
    return f"its share of {devices_text(devices, shares=False)} is free again"


def _left(handed: HandedIn) -> str:
    """What is said of where a cell ran that was ended."""
    host, share = handed.request.session, _share(handed)
    if host is None:
        return share
    if host.facts is not None:
        return f"the session {host.name!r} goes on"
    gone = f"the session {host.name!r} is gone, with all that was in it"
    return f"{gone}, and {share}" if share else gone


def _with(text: str, more: str) -> str:
    """An error's text, and more at the end of its first line."""
    first, end, rest = text.partition("\n")
    return f"{first}; {more}{end}{rest}" if more else text


def _facts(handed: HandedIn) -> dict[str, Any]:
    """What is known of it; nothing where nobody remembers."""
    facts: dict[str, Any] = handed.backend.ask("job", handed.obj[0]) or {}
    return facts


def _failure(
    handed: HandedIn, outcome: Outcome, interrupted: bool, waited_for: bool
) -> BaseException:
    """What to raise for a cell whose worker brought no ending home."""
    name, host = handed.name, handed.request.session
    try:
        value_of(outcome)
    except (TaskCancelledError, ActorDiedError) as error:
        if interrupted or (waited_for and isinstance(error, TaskCancelledError)):
            text = _stopped(handed, queues=isinstance(error, TaskCancelledError))
            return dressed(KeyboardInterrupt(text), [f"KeyboardInterrupt: {text}"])
        if host is None or isinstance(error, TaskCancelledError):
            return short(error)
        reason = str(error).partition(" is gone: ")[2] or str(error)
        return short(
            ActorDiedError(
                f"{name}: {_left(handed)}: {reason}; "
                f"the next cell with --session {host.name} starts it anew"
            )
        )
    except TaskError as error:
        if isinstance(error.cause, TimeoutError):
            return short(TimeoutError(_with(str(error.cause), _left(handed))))
        return dressed(error, str(error).splitlines())
    except (WorkerCrashedError, OutOfMemoryError) as error:
        return short(type(error)(_with(str(error), _share(handed))))
    except GpunbError as error:
        return short(error)
    raise AssertionError("an outcome that failed has an error")


def _stopped(handed: HandedIn, *, queues: bool) -> str:
    """What is said of a cell that somebody stopped and that brought no ending home; `queues` if it
    may not have begun."""
    facts, left = _facts(handed), _left(handed)
    if queues and facts and not facts["pid"] and not facts["devices"]:
        return _with(f"{handed.name} was taken out of the queue before it ran", left)
    if handed.request.session is None:
        left = f"its worker is gone, and {left}" if left else "its worker is gone"
    return _with(f"{handed.name} was stopped", left)


def _raised(handed: HandedIn, ending: Ending) -> BaseException:
    """The cell's own error, of its own type, with the lines that IPython made of it."""
    assert ending.failure is not None
    error = serialize.load_failure(ending.failure, namespace=handed.shell.user_ns)
    lines = list(map(serialize.with_sources, ending.traceback)) or str(error).splitlines()
    if isinstance(error.cause, SystemExit) and handed.request.session is None:
        share = _share(handed)
        ends = f"{handed.name} ended with sys.exit, and its worker with it"
        lines.append(f"{ends}; {share}" if share else ends)
    return dressed(error.cause or error, lines)


def short(error: BaseException) -> BaseException:
    """Shown as one sentence: where in gpunb it was raised tells the user nothing."""
    return dressed(error, [f"{type(error).__name__}: {error}"])


def dressed(error: BaseException, lines: list[str]) -> BaseException:
    """The error, shown by IPython as these lines and nothing else."""
    if isinstance(error, (SyntaxError, SystemExit)) or holds_group(error):
        # IPython has displays of its own for these, which the worker's shell has shown already.
        error = type(type(error).__name__, (Exception,), {})(str(error))
    try:
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    except AttributeError:  # an exception with slots
        return dressed(GpunbError("\n".join(lines)), lines)
    error.__traceback__ = None
    return error


def lines_of(error: BaseException) -> list[str]:
    """The lines with which an error that `conclude` raised is shown."""
    render: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    return render() if render is not None else [f"{type(error).__name__}: {error}"]
