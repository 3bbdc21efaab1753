"""The kernel, as the code that runs tasks sees it: the same for workers of gpunb and of Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import Backend, Context, ObjectId


class TaskKernel(Backend, Protocol):
    """What `TaskRunner` and cells ask of the kernel. `KernelClient` and Ray's worker have it; the
    type checker compares both with this class, also where Ray is not installed."""

    def put(self, payload: Payload, *, failed: bool = False) -> ObjectId:
        """Store a value, or the failure that stands for it; the caller gets one reference."""

    def enter(self, context: Context) -> None:
        """Set the context of the code that runs from now on."""

    def leave(self) -> None:
        """At the end of a task, report new references."""

    def recover(self) -> None:
        """Clear up after an interrupt of the main thread."""

    def report_references(self) -> None:
        """Report which references have come and gone."""

    def take_stock(self) -> None:
        """Report all references anew."""

    def send(self, message: msg.Message, segments: Sequence[Segment] = ()) -> None:
        """Send a message."""

    def show(self, kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        """Show something where the running task was submitted."""

    def catch_up(self) -> None:
        """Wait until the kernel has what this process has written, or until its order is sure."""

    def question(self, prompt: str | None, password: bool = False) -> Any:
        """Return the user's answer; without a prompt, only check that the user can be asked."""

    def listen_to(
        self, on_comm: Callable[[msg.CommMessage, Sequence[Payload]], None] | None
    ) -> None:
        """Call this for each comm message while a cell runs; None between cells."""
