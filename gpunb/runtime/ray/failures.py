"""Failures on Ray: how a task's own travel, and what Ray's are called here."""

from __future__ import annotations

import re
from typing import Any

from ray import exceptions as rays

from gpunb import exceptions, serialize
from gpunb.serialize import Payload

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Failed(Exception):
    """Raised towards Ray for what a task raised, which is inside as a payload."""

    def __init__(self, data: tuple[Any, ...], text: str, told: int = 0) -> None:
        super().__init__(data, text, told)
        self.data = data
        self.text = text
        self.told = told

    def __str__(self) -> str:
        return self.text

    def payload(self) -> Payload:
        """What was raised."""
        return Payload(*self.data)


class Again(Failed):
    """The same, of an exception that is worth another attempt."""


def failed(payload: Payload, *, again: bool = False, told: int = 0) -> Failed:
    """What to raise for a payload of `dump_failure`, or of one of our own errors."""
    error = serialize.loads(payload)
    text = str(error if isinstance(error, BaseException) else serialize.load_failure(payload))
    inline = Payload(_bytes(payload.stream), tuple(map(_bytes, payload.buffers)))
    if payload.segment is not None:
        memory = payload.segment.map()
        stream, *buffers = [bytes(memory[at : at + size]) for at, size in payload.spans]
        inline = Payload(stream, tuple(buffers))
    return (Again if again else Failed)((inline.stream, inline.buffers), text, told)


def _bytes(part: Any) -> bytes:
    return part if isinstance(part, bytes) else bytes(part)


def root(error: BaseException) -> BaseException:
    """What is behind an error of a task that Ray raises: `Failed`, or what Ray itself says."""
    while isinstance(error, rays.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def told(error: BaseException) -> int:
    """The task whose output was sent before this."""
    return getattr(root(error), "told", 0)


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
