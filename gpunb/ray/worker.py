"""The API's backend in a Ray worker, and the kernel as the task runner there sees it."""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import ray

from gpunb import exceptions
from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.protocol import backend
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import DYNAMIC, Call, Context
from gpunb.protocol.facts import Fact
from gpunb.protocol.ranks import Ranks
from gpunb.ray import named_actors
from gpunb.ray.capture import StreamCapture
from gpunb.ray.interrupts import CallInterrupts
from gpunb.ray.job_env import JobEnv
from gpunb.ray.kernel_link import KernelLink
from gpunb.ray.messages import Comm, Ended, Exits, Interrupt, Show, Text, ToWorker
from gpunb.ray.resources import available, shown
from gpunb.ray.submission import RayBackend
from gpunb.ray.transport import CallHeader, JobEnvRef, RayPayload, key_of
from gpunb.scheduler.tasks import ActorId, TaskId, TaskSpec
from gpunb.worker.rank_setup import Placed
from gpunb.worker.task_runner import TERMINATE

_FRESH = 1.0
"""Seconds for which the resources of the cluster are not asked for again."""

_CATCH_UP_WITHIN = 0.1
"""Seconds for which a write to one stream waits until what the other has is on its way."""

_LAST_OUTPUT_WITHIN = 2.0
"""Seconds for which the end of this process waits until its output has arrived."""

exit_at_once = os._exit

here: contextvars.ContextVar[Context | None] = contextvars.ContextVar("gpunb_ray", default=None)


class RayWorker(RayBackend):
    """The backend in a worker.

    Attributes:
        fatal: the file to which Python writes a fatal error; empty if there is none.
        interrupts: the interrupts of the calls that run here.
        link: the connection to the kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        start = random.SystemRandom().getrandbits(40) << 20 | 1 << 61
        self._numbers = itertools.count(start)
        self.interrupts = CallInterrupts()
        self.link = KernelLink(
            f"worker-{os.getpid()}-{start:x}", self.interrupts.interrupt, self._receive_comm
        )
        self._capture: StreamCapture | None = None
        self._job_env = JobEnvRef("", b"")
        self._context = Context()
        self._sink = 0
        self._dynamic = False
        self._pinned: list[backend.ObjectId] = []
        self._yielded: dict[TaskId, Payload] = {}
        self._on_comm: Callable[[msg.CommMessage, Sequence[Payload]], None] | None = None
        self._total: tuple[float, dict[str, float]] = (0.0, {})
        self._pid = os.getpid()
        self.fatal = _fatal_to_log()
        os._exit = self._exit

    # -------------------------------------------------------------------------- as the API sees it

    def new_task(self) -> TaskId:
        return next(self._numbers)

    def new_put(self) -> int:
        return next(self._numbers)

    def job_env(self) -> JobEnvRef:
        return self._job_env

    def sink_of(self, call: Call) -> int:
        return self._sink

    def context(self) -> Context:
        return here.get() or self._context

    def failure_of(self, task: TaskId, error: BaseException) -> Payload:
        """Report the failure: a worker that crashed cannot report it, and the kernel does not watch
        calls that this worker submits."""
        self.link.report(Ended(task, "failed"))
        return super().failure_of(task, error)

    def send_to_worker(self, worker: str, message: ToWorker) -> None:
        self.link.send_to_worker(worker, message)

    def interrupt(self, obj: backend.ObjectId) -> None:
        _, actor = self.objects.labels.get(obj[0], ("", 0))
        if actor:
            self.link.send_to_worker(key_of(actor), Interrupt(obj[0]))
        else:
            self.cancel(obj, force=False, recursive=False)

    def exit_actor(self, actor: ActorId) -> None:
        """End the actor of this process by a call: Ray then lets the running calls finish."""
        arguments = serialize.dumps(((), {}))
        spec = TaskSpec("exit_actor", function=TERMINATE)
        for each in self.submit(Call(spec, b"", arguments, kind="method", actor=actor)):
            self.drop(each)

    def place_ranks(self, call: Call, ranks: Ranks) -> Placed:
        """Place the ranks of a call on the nodes of the cluster."""
        from gpunb.ray.ranks import RayRanks  # most processes need no ranks

        return RayRanks(self, call, ranks)

    def ask(self, what: Fact, *arguments: Any) -> Any:
        match what:
            case "total":
                seen, total = self._total
                if time.monotonic() - seen > _FRESH:
                    total = shown(ray.cluster_resources())
                    self._total = time.monotonic(), total
                return dict(total)
            case "available":
                return available()
            case "assigned":
                return shown(ray.get_runtime_context().get_assigned_resources())
            case "actor":
                known = self.objects.actors.get(*arguments)
                return known.facts() if known is not None else None
            case "job" | "log":
                return None
            case "names":
                return named_actors.listed()
            case "memory":
                return []
            case _:
                raise exceptions.GpunbError(
                    f"gpunb.{what}() is for the kernel: on Ray a task knows only of itself"
                )

    def shutdown(self) -> None:
        raise exceptions.GpunbError("shutdown() is for the kernel; a task ends by returning")

    def put(self, payload: Payload, *, failed: bool = False) -> backend.ObjectId:
        obj = super().put(payload, failed=failed)
        if self._dynamic:  # the task's result will refer to it, and nothing does yet
            self.objects.table.hold(obj)
            self._pinned.append(obj)
        return obj

    # ------------------------------------------------------------------ as the task runner sees it

    def enter_call(self, header: CallHeader, env: JobEnv) -> None:
        """Run for this call, and so for its kernel, from now on."""
        self._job_env, self.link.mailbox = header.job_env, env.mailbox
        self._sink, self._dynamic = header.sink, header.returns == DYNAMIC

    def release_pinned(self) -> None:
        """Drop the references to the objects that a result refers to by now."""
        self._dynamic = False
        self.objects.table.leave(self._pinned)
        self._pinned = []

    def enter(self, context: Context) -> None:
        """Set the context in which code runs from now on."""
        self._context = context

    def send(self, message: msg.Message, segments: Sequence[Segment] = ()) -> None:
        """Handle a message of the runner to the kernel. Results travel through Ray instead."""
        match message:
            case msg.Printed():
                self.link.report(Text(message.task, message.stream, message.text))
            case msg.Yielded():
                (self._yielded[message.task],) = serialize.from_wires([message.result], segments)
            case _:
                pass

    def pack_yielded(self, task: TaskId) -> RayPayload:
        """Return the value that a generator has just yielded."""
        return self.objects.pack(self._yielded.pop(task))

    def show(self, kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        """Show output in the cell that submitted the running task."""
        task = self.context().task
        if task is not None:
            self._drain()
            packed = [self.objects.pack(each) for each in payloads]
            self.link.report(Show(task, kind, content, packed))

    def catch_up(self) -> None:
        """Wait until what this process has written is on its way to the kernel."""
        if os.getpid() == self._pid and self._capture is not None:
            self._capture.drain(_CATCH_UP_WITHIN)

    def question(self, prompt: str | None, password: bool = False) -> Any:
        """Return the user's answer; without a prompt, None if a user can be asked.

        Raises:
            NotImplementedError: no user can be asked.
        """
        self._drain()
        return self.link.ask(self.context().task, prompt, password)

    def listen_to(
        self, on_comm: Callable[[msg.CommMessage, Sequence[Payload]], None] | None
    ) -> None:
        """Call this for each comm message while a cell runs; None between cells."""
        self._on_comm = on_comm

    def leave(self) -> None:
        """Do nothing: Ray counts references by itself."""

    take_stock = recover = report_references = leave

    # -------------------------------------------------------------------------------------- output

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Send the output of the block to the kernel."""
        if self._capture is None:
            self._capture = StreamCapture(self._report_text)
        with self._capture.on():
            yield

    @property
    def wrote(self) -> bool:
        """Whether the last captured block has written something."""
        return self._capture is not None and self._capture.wrote

    def _drain(self) -> None:
        if self._capture is not None:
            self._capture.drain()

    def _report_text(self, stream: str, text: str) -> None:
        task = self._context.task
        if task is not None:
            self.link.report(Text(task, stream, text))

    def _receive_comm(self, comm: Comm) -> None:
        message = msg.CommMessage(comm.kind, comm.content)
        payloads = [self.objects.unpack(each) for each in comm.payloads]
        if self._on_comm is not None:  # the cell that runs
            self._on_comm(message, payloads)
            return
        from gpunb.worker.cell import widgets

        with self.captured():
            widgets.on_message(message, payloads)

    def _exit(self, status: int) -> NoReturn:
        """Exit as `os._exit` does, but wait until the output has arrived."""
        task = self.context().task
        if os.getpid() == self._pid and task is not None and self.link.mailbox is not None:
            with contextlib.suppress(Exception):
                if self._capture is not None:
                    self._capture.drain(_LAST_OUTPUT_WITHIN)
                self.link.report(Exits(task, status))
                self.link.flush(_LAST_OUTPUT_WITHIN)
        exit_at_once(status)


def _fatal_to_log() -> str:
    """Let Python write a fatal error to Ray's log of this process, which stays when the process
    is gone. Return the path of the log, or an empty text."""
    try:
        log = os.dup(2)
        faulthandler.enable(log, all_threads=False)
        path = os.readlink(f"/proc/self/fd/{log}")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""
