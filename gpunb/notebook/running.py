"""A cell in the foreground: hand it in, show what it shows, and end as it ended."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpunb import backend, serialize, session
from gpunb.backend import Call, ObjectId
from gpunb.core.options import Options
from gpunb.exceptions import GpunbError, TaskCancelledError, TaskError
from gpunb.notebook.output import DONE, Foreground, Item, relay
from gpunb.notebook.shipping import incoming, outgoing
from gpunb.refs import value_of
from gpunb.workers.cells import Ending
from gpunb.workers.shell import holds_group

GRACE = 5.0
"""Seconds after Stop that a cell has to end by itself, before its process is killed."""

STOP: Item = ("stop", "", {})


def run(
    shell: Any,
    source: str,
    first_line: str,
    options: Options,
    *,
    inputs: tuple[str, ...] | None = None,
    outputs: tuple[str, ...] | None = None,
) -> None:
    """Run a cell in a worker and wait for it.

    Raises:
        UsageError, InfeasibleRequestError: it could not be handed in.
        BaseException: what the cell raised, with the traceback that IPython made in the worker.
    """
    session.current()
    number = shell.displayhook.prompt_count
    name = options.name or f"In[{number}]"
    try:
        arguments, shipped = outgoing(
            shell, source, first_line, number, inputs=inputs, outputs=outputs
        )
    except SyntaxError as error:
        lines = shell.SyntaxTB.structured_traceback(type(error), error, [])
        raise _dressed(error, lines) from None
    sink = Foreground()
    spec = options.spec(name, "cell")
    current = backend.current()
    call = Call(spec, b"", arguments, kind="cell", sink=sink)
    with _stops(sink):
        try:
            obj = current.submit(call)[0]
        except GpunbError as error:
            raise _short(error) from None
        try:
            interrupted = _follow(shell, current, obj, sink)
            outcome = current.fetch([obj], 0)[0]
        except BaseException:  # a cell that nobody waits for must not go on
            current.cancel(obj, force=True, recursive=True)
            raise
        finally:
            current.drop(obj)
    if outcome.failed:
        raise _failure(value_of, outcome, name, interrupted)
    try:
        ending = incoming(shell, outcome.payload, shipped)
    except GpunbError as error:
        raise _short(error) from None
    if ending.failure is not None:
        raised = _raised(shell, ending)
        if isinstance(raised, KeyboardInterrupt) and not interrupted and options.timeout:
            text = f"{name} ran longer than its timeout of {options.timeout:g} s and was stopped"
            raised = _short(TimeoutError(text))
        raise raised


@contextlib.contextmanager
def _stops(sink: Foreground) -> Iterator[None]:
    """Make of Stop an item among the job's output: it hits no line of ours, and none is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not come here
        return
    before = signal.signal(signal.SIGINT, lambda *_: sink.queue.put(STOP))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)


def _follow(shell: Any, current: backend.Backend, obj: ObjectId, sink: Foreground) -> bool:
    """Relay the job's output until it is over. The first Stop interrupts it, the second kills it.

    Returns whether there was one.
    """
    current.notify(obj, sink.done)
    deadline: float | None = None
    while True:
        try:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            item = sink.queue.get(timeout=wait)
        except queue.Empty:
            item = STOP
        if item is DONE:
            return deadline is not None
        if item is not STOP:
            relay(shell, *item)
            continue
        if deadline is None:
            current.interrupt(obj)
        else:
            current.cancel(obj, force=True, recursive=True)
        deadline = time.monotonic() + GRACE


def _failure(
    value: Callable[[Any], Any], outcome: Any, name: str, interrupted: bool
) -> BaseException:
    """What to raise for a cell whose worker brought no ending home."""
    try:
        value(outcome)
    except TaskCancelledError as error:
        if not interrupted:
            return _short(error)
        text = f"{name} was stopped; its worker is gone and its share of the GPU is free again"
        return _dressed(KeyboardInterrupt(text), [f"KeyboardInterrupt: {text}"])
    except TaskError as error:
        if isinstance(error.cause, TimeoutError):
            return _short(error.cause)
        return _dressed(error, str(error).splitlines())
    except GpunbError as error:
        return _short(error)
    raise AssertionError("an outcome that failed has an error")


def _raised(shell: Any, ending: Ending) -> BaseException:
    """The cell's own error, of its own type, with the lines that IPython made of it."""
    assert ending.failure is not None
    error = serialize.load_failure(ending.failure, namespace=shell.user_ns)
    return _dressed(error.cause or error, list(ending.traceback) or str(error).splitlines())


def _short(error: BaseException) -> BaseException:
    """Shown as one sentence: where in gpunb it was raised tells the user nothing."""
    return _dressed(error, [f"{type(error).__name__}: {error}"])


def _dressed(error: BaseException, lines: list[str]) -> BaseException:
    """The error, shown by IPython as these lines and nothing else."""
    if isinstance(error, (SyntaxError, SystemExit)) or holds_group(error):
        # IPython has displays of its own for these, which the worker's shell has shown already.
        error = type(type(error).__name__, (Exception,), {})(str(error))
    try:
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    except AttributeError:  # an exception with slots
        return _dressed(GpunbError("\n".join(lines)), lines)
    error.__traceback__ = None
    return error
