"""The API's backend in a Ray worker, and what those see of it who run there."""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import ray

from gpunb import backend, exceptions
from gpunb.backend import Call, Context
from gpunb.core.tasks import TaskId
from gpunb.runtime.ray.asking import shown
from gpunb.runtime.ray.capture import Capture
from gpunb.runtime.ray.kits import Kit
from gpunb.runtime.ray.mailbox import Ear, Post
from gpunb.runtime.ray.onray import Head, OnRay
from gpunb.runtime.ray.parcels import pack
from gpunb.runtime.ray.waking import Waking
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.interrupts import NOTICE, WAKE, WAKE_AFTER, Interrupts, unread
from gpunb.workers.running import Runner

_FRESH = 1.0
"""Seconds for which what the cluster has is not asked for again."""

_LAST_WORDS_WITHIN = 2.0
"""Seconds for which the end of this process waits until its output has arrived."""

exit_at_once = os._exit

here: contextvars.ContextVar[Context | None] = contextvars.ContextVar("gpunb_ray", default=None)


class InWorker(OnRay):
    """The backend in a worker."""

    def __init__(self) -> None:
        super().__init__()
        start = random.SystemRandom().getrandbits(40) << 20 | 1 << 61
        self._numbers = itertools.count(start)
        self.key = f"worker-{os.getpid()}-{start:x}"
        reading, self._notices = os.pipe()
        self._interrupts = Interrupts(reading)
        self._waking = Waking()
        self._runner: Any = Runner(self, self._interrupts)  # type: ignore[arg-type]
        self._post = Post()
        self._capture: Capture | None = None
        self._kits: dict[str, Kit] = {}
        self._kit: tuple[str, list[Any]] = ("", [])
        self._box: Any = None
        self._ears: dict[str, Ear] = {}
        self._session = False
        self._fresh = True
        self._context = Context()
        self._sink = 0
        self._dynamic = False
        self._pinned: list[backend.ObjectId] = []
        self._several = False
        self._concurrent = False
        self._unmeant = False
        self._attempt: tuple[int, int] | None = None
        self._stopped: set[TaskId] = set()
        self._late: set[TaskId] = set()
        self._limits: dict[TaskId, float] = {}
        self._kept: Any = None
        self._yielded: dict[TaskId, Payload] = {}
        self._answers: dict[int, tuple[threading.Event, list[Any]]] = {}
        self._told: Callable[[msg.Told, Sequence[Payload]], None] | None = None
        self._total: tuple[float, dict[str, float]] = (0.0, {})
        self._main = threading.main_thread().ident
        if threading.current_thread() is threading.main_thread():
            self._interrupts.listen()
            signal.signal(signal.SIGINT, self._signalled)
        self._pid = os.getpid()
        self.fatal = _fatal_to_log()
        os._exit = self._exit

    # -------------------------------------------------------------------------- as the API sees it

    def new_task(self) -> TaskId:
        return next(self._numbers)

    def new_put(self) -> int:
        return next(self._numbers)

    def kit(self) -> tuple[str, list[Any]]:
        return self._kit

    def sink_of(self, call: Call) -> int:
        return self._sink

    def context(self) -> Context:
        return here.get() or self._context

    def failure_of(self, task: TaskId, error: BaseException) -> Payload:
        """Say it, too: a worker that crashed could not, and the kernel does not look for what is
        submitted here."""
        self._tell(("ended", task, "failed"))
        return super().failure_of(task, error)

    def say(self, worker: str, item: Any) -> None:
        if self._box is not None:
            self._post.send(self._box, item, worker)

    def interrupt(self, obj: backend.ObjectId) -> None:
        self.cancel(obj, force=False, recursive=False)

    def ask(self, what: str, *arguments: Any) -> Any:
        match what:
            case "total":
                seen, total = self._total
                if time.monotonic() - seen > _FRESH:
                    total = shown(ray.cluster_resources())
                    self._total = time.monotonic(), total
                return dict(total)
            case "available":
                return shown(ray.available_resources())
            case "assigned":
                return shown(ray.get_runtime_context().get_assigned_resources())
            case "actor":
                known = self._actors.get(*arguments)
                return known.facts() if known is not None else None
            case "job" | "log":
                return None
            case "memory":
                return []
            case _:
                raise exceptions.GpunbError(
                    f"gpunb.{what}() is for the kernel: on Ray a task knows only of itself"
                )

    def shutdown(self) -> None:
        raise exceptions.GpunbError("shutdown() is for the kernel; a task ends by returning")

    def put(self, payload: Payload) -> backend.ObjectId:
        obj = super().put(payload)
        if self._dynamic:  # the task's result will refer to it, and nothing does yet
            self.table.hold(obj)
            self._pinned.append(obj)
        return obj

    # -------------------------------------------------------------------- as what runs here sees it

    def enter(self, context: Context) -> None:
        """From now on this is what runs here."""
        self._context = context

    def send(self, message: msg.Message, payloads: Sequence[Payload] = ()) -> None:
        """What the runner has to say."""
        match message:
            case msg.Printed():
                self._tell(("text", message.task, message.stream, message.text))
            case msg.Yielded():
                self._yielded[message.task] = payloads[0]
            case _:
                pass  # results go by Ray

    def show(self, kind: str, content: dict[str, Any], payloads: Sequence[Payload] = ()) -> None:
        """Have something shown where the running task was submitted."""
        task = self.context().task
        if task is not None:
            if self._capture is not None:
                self._capture.drain()
            self._tell(
                ("show", task, kind, content, [pack(each, self._found) for each in payloads])
            )

    def question(self, prompt: str | None, password: bool = False) -> Any:
        """What the user answers; without a prompt, nothing if there is somebody to be asked.

        Raises:
            NotImplementedError: there is not.
        """
        number = next(self._numbers)
        event, answer = self._answers[number] = threading.Event(), []
        if self._capture is not None:
            self._capture.drain()
        self._tell(("ask", self.context().task, number, prompt, password, self.key))
        try:
            while not event.wait(0.1):
                pass  # so that an interrupt is heard
        finally:
            del self._answers[number]
        text, error = answer
        if error is not None:
            raise error
        return text

    def listen_to(self, told: Callable[[msg.Told, Sequence[Payload]], None] | None) -> None:
        """While a cell runs, call this with whatever is told here."""
        self._told = told

    def leave(self) -> None:
        """Ray counts references by itself."""

    take_stock = recover = report_references = leave

    # ------------------------------------------------------------------------------- being told so

    def _tell(self, item: Any) -> None:
        self._post.send(self._box, item)

    def _listening(self, head: Head) -> Any:
        """While a call runs that the kernel may have something to say to."""
        if head.kind != "cell" and not head.actor:
            return contextlib.nullcontext()
        where = head.kit[0].partition("/")[0]
        if where not in self._ears:
            self._ears[where] = Ear(self._box, self.key, self._hear, self._session)
        return self._ears[where]

    def _hear(self, item: Any) -> None:
        match item:
            case ("interrupt", task):
                self._interrupt(task)
            case ("answer", number, text, error):
                if number in self._answers:
                    event, answer = self._answers[number]
                    answer[:] = text, error
                    event.set()
            case ("told", kind, content, parcels):
                message = msg.Told(kind, content)
                self._be_told(message, [self.arrived(each) for each in parcels])
            case _:
                pass

    def _be_told(self, message: msg.Told, payloads: Sequence[Payload]) -> None:
        from gpunb.workers import comms

        if self._told is not None:  # the cell that runs
            self._told(message, payloads)
            return
        with self._captured():
            comms.told(message, payloads)

    def _interruptible(self, attempt: tuple[int, int]) -> None:
        """From now on interrupts are meant for this attempt, and one may have been early.

        Raises:
            KeyboardInterrupt: one was.
        """
        self._waking.listen()
        self._attempt = attempt
        self._interrupts.begin(attempt)
        if self._unmeant:
            self._unmeant = False
            if self._is_given_up():
                self._interrupts.hit = True
                raise KeyboardInterrupt

    def _signalled(self, number: int, frame: Any) -> None:
        self._waking.seen()
        if self._interrupts.running is None:
            self._unmeant = True  # Ray does not say which attempt it means
        self._interrupts.signalled(number, frame)

    def _interrupt(self, task: TaskId) -> None:
        """Raise KeyboardInterrupt in a call on the main thread; others are told if they ask."""
        self._stopped.add(task)
        if self._several or self._main is None:
            return
        running = self._attempt
        attempt = running[1] if running is not None and running[0] == task else 1
        os.write(self._notices, NOTICE.pack(task, attempt))
        signal.pthread_kill(self._main, signal.SIGINT)
        threading.Thread(target=self._wake, name="gpunb-wake", daemon=True).start()

    def _wake(self) -> None:
        for seconds in WAKE_AFTER:
            time.sleep(seconds)
            if not unread(self._notices):
                return
            signal.pthread_kill(self._main or 0, WAKE)

    def _exit(self, status: int) -> NoReturn:
        """Exit as `os._exit` does, but let arrive what was printed before."""
        task = self.context().task
        if os.getpid() == self._pid and task is not None and self._box is not None:
            with contextlib.suppress(Exception):
                if self._capture is not None:
                    self._capture.drain(_LAST_WORDS_WITHIN)
                self._tell(("exits", task, status))
                self._post.flush(self._box, _LAST_WORDS_WITHIN)
        exit_at_once(status)

    def _is_cancelled(self, task: TaskId) -> bool:
        return task in self._stopped or self._is_given_up()

    def _is_given_up(self) -> bool:
        """Whether what runs here was cancelled, and not only interrupted."""
        try:
            return bool(ray.get_runtime_context().is_canceled())
        except Exception:
            return False  # not asked on a thread of Ray's

    @contextlib.contextmanager
    def _captured(self) -> Iterator[None]:
        if self._capture is None:
            self._capture = Capture(self._printed)
        with self._capture.on():
            yield

    def _printed(self, stream: str, text: str) -> None:
        task = self._context.task
        if task is not None:
            self._tell(("text", task, stream, text))


def _fatal_to_log() -> str:
    """Have Python write a fatal error to Ray's log of this process, from where it can be read when
    the process is gone; its path, or an empty text."""
    try:
        log = os.dup(2)
        faulthandler.enable(log, all_threads=False)
        path = os.readlink(f"/proc/self/fd/{log}")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""
