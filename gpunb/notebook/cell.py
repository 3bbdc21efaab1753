"""Submits a cell to its worker, and takes its result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpunb.api.refs import value_of
from gpunb.api.session import current as current_session
from gpunb.data import serialize
from gpunb.exceptions import (
    ActorDiedError,
    GpunbError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from gpunb.notebook import registration_hint
from gpunb.notebook.bind import Home, bind_result
from gpunb.notebook.capture import CellRequest, pack_cell
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.shipment import Shipment
from gpunb.protocol import backend
from gpunb.protocol.backend import Backend, Call, ObjectId, Outcome
from gpunb.protocol.ranks import coordinated
from gpunb.protocol.same_code import digest_of_cell, with_code
from gpunb.protocol.sink import Sink
from gpunb.scheduler.options import MethodOptions
from gpunb.scheduler.resources import devices_text
from gpunb.worker.cell.cell_types import CellResult
from gpunb.worker.cell.shell import holds_group


@dataclass(frozen=True, slots=True, eq=False)
class HandedIn:
    """A cell that waits or runs.

    Attributes:
        obj: id of its result. This object holds the reference to the result.
        number: execution count of the cell.
        presumed: names whose newer value the session is presumed to have.
    """

    shell: NotebookShell
    request: CellRequest
    backend: Backend
    obj: ObjectId
    name: str
    number: int
    shipment: Shipment
    presumed: frozenset[str] = frozenset()

    def kill(self) -> None:
        """End its process, and with that its session."""
        session = self.request.session
        if session is not None:
            session.stop()
        else:
            self.backend.cancel(self.obj, force=True, recursive=True)

    def give_up(self) -> None:
        """End the cell, for which nobody waits any more; its session goes on."""
        self.backend.cancel(self.obj, force=self.request.session is None, recursive=True)


def hand_in(
    shell: NotebookShell, request: CellRequest, sink: Sink, *, late: bool = False
) -> HandedIn:
    """Submit a cell; `late` if the notebook goes on meanwhile.

    Raises:
        UsageError, InfeasibleRequestError: the cell cannot run.
        Exception: with the lines that a SyntaxError of the cell has.
    """
    current_session()
    number, session = shell.number, request.session
    sink.place = shell.place()
    name = request.options.name or f"In[{number}]"
    try:
        arguments, shipment = pack_cell(shell, request, number, late=late)
    except SyntaxError as error:
        lines = shell.ip.SyntaxTB.structured_traceback(type(error), error, [])
        raise dressed(error, lines) from None
    try:
        if session is None:
            spec, actor = request.options.spec(name, "cell"), 0
            if spec.auto is not None:
                spec = with_code(spec, digest_of_cell(shipment.python))
        else:
            actor = session.actor
            spec = MethodOptions(timeout=request.options.timeout).spec(name, "cell", 0)
        kind = type(shell.ip)
        call = Call(
            spec,
            b"",
            arguments,
            kind="cell",
            sink=sink,
            actor=actor,
            imports=shipment.needs,
            shell=(kind.__module__, kind.__name__),
        )
        if request.ranks is not None:
            call = coordinated(call, request.ranks)
        current = backend.current()
        (obj,) = current.submit(call)
    except GpunbError as error:
        raise short(error) from None
    presumed: frozenset[str] = frozenset()
    if session is not None:
        presumed = session.held.sent(shell.user_ns, shipment.sent, shipment.binds or ())
    return HandedIn(shell, request, current, obj, name, number, shipment, presumed)


def conclude(
    handed: HandedIn,
    outcome: Outcome,
    *,
    interrupted: bool = False,
    waited_for: bool = False,
    warn: Callable[[str], object] | None = None,
) -> tuple[Home | None, BaseException | None]:
    """Bind the values of a cell that is over; on the main thread.

    Args:
        interrupted: whether the user pressed Stop.
        waited_for: whether the notebook waits for the cell, so that a cancel counts as a Stop.
        warn: called with each text for the user; by default that goes to standard error.

    Returns:
        The values, if the worker sent any; and the error to raise, if the cell failed: the error
        of the cell, with the traceback that IPython made in the worker.
    """
    session = handed.request.session
    if outcome.failed:
        if session is not None:
            session.held.forget(handed.shipment.sent | handed.presumed)
        return None, _failure(handed, outcome, interrupted, waited_for)
    try:
        name, warn = session.name if session is not None else None, warn or sys.stderr.write
        home = bind_result(handed.shell, outcome.payload, handed.shipment, warn, name)
    except GpunbError as error:
        return None, short(error)
    if session is not None:
        names, unbound = handed.shell.user_ns, set(home.unbound)
        session.held.came_home(names, home.in_worker, handed.presumed, unbound)
    if home.result.failure is not None:
        return home, _raised(handed, home.result, interrupted)
    asked = handed.request.outputs or ()
    missing = [f"--out {name}: {why}" for name, why in home.left_behind if name in asked]
    return home, short(TypeError("; ".join(missing))) if missing else None


def _ran_for(handed: HandedIn, seconds: float) -> bool:
    """Whether the cell ran that long; True if nobody knows."""
    return bool(_facts(handed).get("seconds", seconds) > seconds - 0.01)


def _share(handed: HandedIn) -> str:
    """A text on the devices of a cell whose process is gone; empty if it had none."""
    devices = _facts(handed).get("devices")
    if not devices:
        return ""
    return f"its share of {devices_text(devices, shares=False)} is free again"


def _left(handed: HandedIn) -> str:
    """A text on the session or the devices of a cell that was ended."""
    host, share = handed.request.session, _share(handed)
    if host is None:
        return share
    if host.facts is not None:
        return f"the session {host.name!r} goes on"
    gone = f"the session {host.name!r} is gone, with all that was in it"
    return f"{gone}, and {share}" if share else gone


def _with(text: str, more: str) -> str:
    """The text of an error with `more` at the end of its first line."""
    first, end, rest = text.partition("\n")
    return f"{first}; {more}{end}{rest}" if more else text


def _facts(handed: HandedIn) -> dict[str, Any]:
    """The engine's record of the cell; empty if there is none any more."""
    facts: dict[str, Any] = handed.backend.ask("job", handed.obj[0]) or {}
    return facts


def _failure(
    handed: HandedIn, outcome: Outcome, interrupted: bool, waited_for: bool
) -> BaseException:
    """The error to raise for a cell whose worker sent no `CellResult`."""
    name, host = handed.name, handed.request.session
    try:
        value_of(outcome)
    except (TaskCancelledError, ActorDiedError) as error:
        if interrupted or (waited_for and isinstance(error, TaskCancelledError)):
            text = _stopped(handed, queues=isinstance(error, TaskCancelledError))
            return dressed(KeyboardInterrupt(text), [f"KeyboardInterrupt: {text}"])
        if host is None or isinstance(error, TaskCancelledError):
            return short(error)
        text = _named(handed.shell, str(error))
        reason = text.partition(" is gone: ")[2] or text
        anew = f"the next cell with --session {host.name} starts it anew"
        return short(ActorDiedError(_with(f"{name}: {_left(handed)}: {reason}", anew)))
    except TaskError as error:
        if isinstance(error.cause, TimeoutError):
            return short(TimeoutError(_with(str(error.cause), _left(handed))))
        if isinstance(error.cause, GpunbError):  # the cell did not begin
            return short(error.cause)
        return dressed(error, str(error).splitlines())
    except (WorkerCrashedError, OutOfMemoryError) as error:
        return short(type(error)(_with(_named(handed.shell, str(error)), _share(handed))))
    except GpunbError as error:
        return short(error)
    raise AssertionError("an outcome that failed has an error")


def _named(shell: NotebookShell, text: str) -> str:
    """The text with ``Cell In[3]`` in place of the file names of cells."""
    for name, number in shell.cell_files.items():
        text = text.replace(f'File "{name}"', f"Cell In[{number}]")
    return text


def _stopped(handed: HandedIn, *, queues: bool) -> str:
    """A text on a cell that was stopped and sent no result; `queues` if it may not have begun."""
    facts, left = _facts(handed), _left(handed)
    if queues and facts and not facts["pid"] and not facts["devices"]:
        return _with(f"{handed.name} was taken out of the queue before it ran", left)
    if handed.request.session is None:
        left = f"its worker is gone, and {left}" if left else "its worker is gone"
    return _with(f"{handed.name} was stopped", left)


def _raised(handed: HandedIn, result: CellResult, interrupted: bool) -> BaseException:
    """The cell's own error, of its own type, with the lines that IPython made of it; or the end of
    its time."""
    assert result.failure is not None
    error = serialize.load_failure(result.failure, namespace=handed.shell.user_ns)
    lines = list(map(serialize.with_sources, result.traceback)) or str(error).splitlines()
    if isinstance(error.cause, SystemExit) and handed.request.session is None:
        share = _share(handed)
        ends = f"{handed.name} ended with sys.exit, and its worker with it"
        lines.append(f"{ends}; {share}" if share else ends)
    if (text := registration_hint.hint(handed.shell, handed.number, lines)) is not None:
        lines.append(text)
    raised, seconds = dressed(error.cause or error, lines), handed.request.options.timeout
    timed = isinstance(raised, KeyboardInterrupt) and not interrupted
    if timed and seconds and _ran_for(handed, seconds):
        text = f"{handed.name} ran longer than its timeout of {seconds:g} s and was stopped"
        return short(TimeoutError(_with(text, _left(handed))))
    return raised


def short(error: BaseException) -> BaseException:
    """The error, shown as one line, as frames of gpunb tell the user nothing."""
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
