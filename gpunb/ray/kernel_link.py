"""The connection of a Ray worker to the kernel: reports, questions, and messages of the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, assert_never

from gpunb.protocol.rpc import Pending
from gpunb.ray.mailbox import BackgroundSender, WorkerReader
from gpunb.ray.messages import Answer, Ask, Comm, Interrupt, ToKernel, ToWorker
from gpunb.ray.transport import INTERRUPTED, CallHeader
from gpunb.scheduler.tasks import TaskId


class KernelLink:
    """Sends to the mailbox of the kernel that this worker works for, and reads from it.

    Attributes:
        key: the name under which the kernel sends messages to this worker.
        mailbox: the kernel's mailbox; None before the first call.
        session: whether this worker is a session of cells, which also reads between its cells.
    """

    def __init__(
        self, key: str, on_interrupt: Callable[[TaskId], None], on_comm: Callable[[Comm], None]
    ) -> None:
        self.key = key
        self.mailbox: Any = None
        self.session = False
        self._sender = BackgroundSender()
        self._readers: dict[str, WorkerReader] = {}
        self._questions: Pending[tuple[Any, BaseException | None]] = Pending()
        self._on_interrupt = on_interrupt
        self._on_comm = on_comm

    def report(self, message: ToKernel) -> None:
        """Send a report to the kernel, without waiting."""
        self._sender.send(self.mailbox, message)

    def send_to_worker(self, worker: str, message: ToWorker) -> None:
        """Send a message to another worker of the kernel."""
        if self.mailbox is not None:
            self._sender.send(self.mailbox, message, worker)

    def flush(self, timeout: float = 5.0) -> None:
        """Return when all reports have arrived."""
        self._sender.flush(self.mailbox, timeout)

    def ask(self, task: TaskId | None, prompt: str | None, password: bool) -> Any:
        """Return the user's answer; without a prompt, None if a user can be asked.

        Raises:
            NotImplementedError: no user can be asked.
        """
        waiter = self._questions.expect()
        self.report(Ask(task, waiter.number, prompt, password, self.key))
        try:
            while waiter.reply is None:
                waiter.gate.acquire(timeout=0.1)  # an interrupt is seen between two waits
        finally:
            self._questions.forget(waiter.number)
        text, error = waiter.reply
        if error is not None:
            raise error
        return text

    def reading(self, header: CallHeader) -> AbstractContextManager[None]:
        """Read messages of the kernel while this call runs, if the kernel may send any."""
        if header.kind not in INTERRUPTED and not header.actor:
            return contextlib.nullcontext()
        kernel = header.job_env.key.partition("/")[0]
        if kernel not in self._readers:
            self._readers[kernel] = WorkerReader(
                self.mailbox, self.key, self._on_message, self.session
            )
        return self._readers[kernel]

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case Interrupt():
                self._on_interrupt(message.task)
            case Answer():
                self._questions.arrived(message.number, (message.text, message.error))
            case Comm():
                self._on_comm(message)
            case _:
                assert_never(message)
