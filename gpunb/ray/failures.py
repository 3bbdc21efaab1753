"""Failures on Ray: how a task's own travel, and what Ray's are called here."""

from __future__ import annotations

import re
from typing import Any

from ray import exceptions as rays

from gpunb import exceptions
from gpunb.data import serialize
from gpunb.data.serialize import Payload

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Failed(Exception):
    """Raised towards Ray for what a task raised, which is inside as a payload."""

    def __init__(self, data: tuple[Any, ...], text: str, output_of: int = 0) -> None:
        super().__init__(data, text, output_of)
        self.data = data
        self.text = text
        self.output_of = output_of

    def __str__(self) -> str:
        return self.text

    def payload(self) -> Payload:
        """The payload of the exception."""
        return Payload(*self.data)


class Again(Failed):
    """As `Failed`, for an exception that leads to another attempt."""


def failed(payload: Payload, *, again: bool = False, output_of: int = 0) -> Failed:
    """The exception to raise in Ray for a payload of `dump_failure`, or of an error of gpunb."""
    error = serialize.loads(payload)
    text = str(error if isinstance(error, BaseException) else serialize.load_failure(payload))
    inline = Payload(_bytes(payload.stream), tuple(map(_bytes, payload.buffers)))
    if payload.segment is not None:
        memory = payload.segment.map()
        stream, *buffers = [bytes(memory[at : at + size]) for at, size in payload.spans]
        inline = Payload(stream, tuple(buffers))
    return (Again if again else Failed)((inline.stream, inline.buffers), text, output_of)


def _bytes(part: Any) -> bytes:
    return part if isinstance(part, bytes) else bytes(part)


def root(error: BaseException) -> BaseException:
    """The cause of an error of a task that Ray raises: `Failed`, or an error of Ray itself."""
    while isinstance(error, rays.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def output_of(error: BaseException) -> int:
    """The task whose output was sent before this."""
    return getattr(root(error), "output_of", 0)


def outcome_of(error: BaseException, label: str) -> Payload:
    """The payload that stands for what Ray raised instead of a value."""
    cause = root(error)
    if isinstance(cause, Failed):
        return cause.payload()
    if isinstance(cause, exceptions.GpunbError) and not isinstance(cause, exceptions.TaskError):
        return serialize.dumps(cause)
    ours = ours_of(cause, label)
    if isinstance(ours, exceptions.GpunbError):
        return serialize.dumps(ours)
    return serialize.dump_failure(ours, task=label)


def ours_of(error: BaseException, label: str) -> BaseException:
    """An error of Ray's as one of ours."""
    text = plain(error)
    match error:
        case rays.TaskCancelledError():
            return exceptions.TaskCancelledError(f"{label} was cancelled")
        case rays.ActorUnavailableError():
            return exceptions.ActorUnavailableError(
                f"{label}: the process of its actor ended or cannot be reached, and may start "
                f"again without its state: {text}"
            )
        case rays.RayActorError():
            return exceptions.ActorDiedError(f"{label}: the actor is gone: {text}")
        case rays.OutOfMemoryError():
            return exceptions.OutOfMemoryError(f"{label}: {text}\nThe machine was short of memory.")
        case rays.NodeDiedError() | rays.WorkerCrashedError() | rays.LocalRayletDiedError():
            return exceptions.WorkerCrashedError(
                f"{label}: its worker process, or the node that it was on, ended before the task "
                f"did: {text}"
            )
        case rays.ObjectLostError():
            return exceptions.ObjectLostError(f"the result of {label} is lost: {text}")
        case rays.TaskUnschedulableError() | rays.ActorUnschedulableError():
            return exceptions.InfeasibleRequestError(f"{label}: {text}")
        case rays.ObjectStoreFullError() | rays.OutOfDiskError():
            return exceptions.OutOfMemoryError(f"{label}: Ray has no room for its objects: {text}")
        case rays.RayError():
            return exceptions.GpunbError(f"{label}: {text}")
        case _:
            return error


def plain(error: BaseException) -> str:
    """The text of an error of Ray's, without colours and advice about its log files."""
    text = _COLORS.sub("", str(error)).strip()
    text = re.sub(r" Check python-core-worker-\*\.log files for more information\.", "", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines)
