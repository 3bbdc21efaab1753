"""The record of a worker process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gpunb.processes.outbox import Outbox
from gpunb.protocol.channel import Channel
from gpunb.protocol.function_cache import Recent
from gpunb.protocol.permits import Permits
from gpunb.scheduler.tasks import WorkerId


class WorkerProcess:
    """One worker process."""

    __slots__ = (
        "channel",
        "environment",
        "err",
        "fault",
        "functions",
        "gone",
        "interrupts",
        "origin",
        "out",
        "outbox",
        "paced",
        "permits",
        "pid",
        "quiet",
        "ready",
        "reason",
        "received_all",
        "surroundings",
        "threads",
        "token",
        "worker",
    )

    def __init__(
        self, token: int, channel: Channel, outbox: Outbox, pipes: tuple[int, int, int]
    ) -> None:
        """`pipes` are the kernel's ends for output, errors and notices of interrupts."""
        self.token = token
        self.channel = channel
        self.outbox = outbox
        self.out, self.err, self.interrupts = pipes
        self.origin: object = None
        self.pid: int | None = None
        self.worker: WorkerId | None = None
        self.ready = False
        self.received_all = False
        self.gone = False
        self.reason: str | None = None
        self.fault: str | None = None
        """Why the pool has ended this process, if it has."""
        self.functions = Recent()
        self.environment: Mapping[str, str] = {}
        self.surroundings: Any = None
        self.threads = 0  # that its numerical libraries were set to use
        self.paced: set[int] = set()
        self.quiet = 0
        """The calls of an actor that ended since the process wrote anything."""
        self.permits: Permits | None = None

    @property
    def holder(self) -> WorkerId:
        """The number under which the store counts the references of this process."""
        assert self.worker is not None
        return self.worker

    def close(self) -> None:
        """Close the descriptors of the kernel's side."""
        self.channel.close()
        for descriptor in (self.out, self.err, self.interrupts):
            os.close(descriptor)
        if self.permits is not None:
            self.permits.close()
