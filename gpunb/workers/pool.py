"""The worker processes as the kernel sees them: standbys, hand-over, output, exits.

Every method runs on the loop's thread. A process is known by its `Process`; which worker of the
scheduler it has become is its `worker`. That a process is gone is told once, after everything
that it said was heard, and only when the children it left are gone too.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gpunb.core.tasks import WorkerId
from gpunb.exceptions import OutOfMemoryError
from gpunb.objects import Segment
from gpunb.workers import messages as msg
from gpunb.workers.channel import Channel, ChannelClosed, encode
from gpunb.workers.interrupts import NOTICE, WAKE, WAKE_AFTER, unread
from gpunb.workers.loop import Loop
from gpunb.workers.recent import Recent

PACE = 0.03
"""Seconds between two looks at the output of one process, so that a chatty one is heard in
large pieces."""

CHUNK = 1 << 20
_PIPE = 1 << 16
_REFILL_DELAY = 0.1
_RETRY = 1.0


class Process:
    """One worker process."""

    __slots__ = (
        "backlog",
        "channel",
        "environment",
        "err",
        "functions",
        "gone",
        "heard",
        "interrupts",
        "leave",
        "origin",
        "out",
        "paced",
        "pid",
        "ready",
        "reason",
        "surroundings",
        "token",
        "used",
        "worker",
    )

    def __init__(self, token: int, channel: Channel, out: int, err: int, interrupts: int) -> None:
        self.token = token
        self.channel = channel
        self.out = out
        self.err = err
        self.interrupts = interrupts
        self.origin: object = None
        self.pid: int | None = None
        self.worker: WorkerId | None = None
        self.ready = False
        self.used = False
        self.heard = False
        self.gone = False
        self.reason: str | None = None
        self.functions = Recent()
        self.environment: Mapping[str, str] = {}
        self.surroundings: Any = None
        self.backlog: deque[tuple[bytes, list[Segment]]] = deque()
        self.paced: set[int] = set()
        self.leave: Callable[[], None] | None = None
        """What ends it, if it is no process that was started here."""


class Listener(Protocol):
    """Who wants to know."""

    def said(self, process: Process, message: msg.Message, segments: list[Segment]) -> None:
        """A worker sent a message."""

    def printed(self, process: Process, name: str, data: bytes) -> None:
        """A worker wrote to ``"stdout"`` or ``"stderr"``."""

    def exited(self, process: Process, reason: str) -> None:
        """A worker and all it started are gone."""


class Source(Protocol):
    """Where processes come from."""

    notes: list[str]

    def start(self, process: Process, descriptors: Sequence[int]) -> None:
        """Start a process with these descriptors, which are closed here by the caller."""

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to a process that may be gone."""

    def close(self) -> None:
        """End everything that was started."""


class Pool:
    """Keeps standbys ready, and carries messages and signals to workers."""

    def __init__(self, loop: Loop, listener: Listener, standbys: int) -> None:
        self._loop = loop
        self._listener = listener
        self._standbys = standbys
        self._source: Source | None = None
        self._waiting: deque[Process] = deque()
        self._workers: dict[WorkerId, Process] = {}
        self._all: dict[int, Process] = {}
        self._tokens = itertools.count(1)
        self._refilling = False
        self._closed = False
        self._failures = 0

    def open(self, source: Source) -> None:
        """Start standbys from this source."""
        self._source = source
        self._refill()

    # ------------------------------------------------------------------------------------ workers

    def start(self, worker: WorkerId) -> Process:
        """A process that has run nothing yet, as this worker."""
        process = self._take()
        process.worker = worker
        process.used = True
        self._workers[worker] = process
        self._refill_soon()
        return process

    def _take(self) -> Process:
        for process in self._waiting:
            if process.ready:
                self._waiting.remove(process)
                return process
        return self._waiting.popleft() if self._waiting else self._start()

    def process(self, worker: WorkerId) -> Process | None:
        return self._workers.get(worker)

    def processes(self) -> list[Process]:
        return list(self._all.values())

    def send(self, process: Process, message: msg.Message, segments: list[Segment]) -> None:
        """Send without ever waiting; to a process that is gone, nothing is sent."""
        data = encode(message)
        if process.backlog:
            process.backlog.append((data, segments))
            return
        try:
            self._send_now(process, data, segments)
        except BlockingIOError:
            process.backlog.append((data, segments))
            self._loop.watch_writing(process.channel.fileno(), True)
        except ChannelClosed:
            pass
        except (OSError, OutOfMemoryError):
            self._unreachable(process)

    def _send_now(self, process: Process, data: bytes, segments: list[Segment]) -> None:
        descriptors = [each.fileno() for each in segments]
        process.channel.send_encoded(data, descriptors, socket.MSG_DONTWAIT)

    def send_backlog(self, process: Process) -> None:
        """Send what could not be sent before, as far as that is possible now."""
        while process.backlog:
            try:
                self._send_now(process, *process.backlog[0])
            except BlockingIOError:
                return
            except ChannelClosed:
                process.backlog.clear()
                break
            except (OSError, OutOfMemoryError):
                process.backlog.clear()
                self._unreachable(process)
                break
            process.backlog.popleft()
        self._loop.watch_writing(process.channel.fileno(), False)

    def _unreachable(self, process: Process) -> None:
        """It will wait for ever for what could not be sent, so it had better end."""
        if process.leave is not None:
            process.leave()
        elif self._source is not None:
            self._source.signal(process, signal.SIGKILL)

    def interrupt(self, worker: WorkerId, task: int, attempt: int) -> None:
        """Raise KeyboardInterrupt in this attempt, if it still runs there."""
        process = self._workers.get(worker)
        if process is not None and self._source is not None:
            try:
                os.write(process.interrupts, NOTICE.pack(task, attempt))
            except OSError:
                return
            self._source.signal(process, signal.SIGINT)
            self._wake(process, WAKE_AFTER)

    def _wake(self, process: Process, after: Sequence[float]) -> None:
        """Wake it if it did not hear of an interrupt, as often as there are seconds to wait."""

        def look() -> None:
            if not process.gone and self._source is not None and unread(process.interrupts):
                self._source.signal(process, WAKE)
                self._wake(process, after[1:])

        if after:
            self._loop.after(after[0], look)

    def kill(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None and self._source is not None:
            self._source.signal(process, signal.SIGKILL)

    def retire(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None:
            self.send(process, msg.Retired(), [])

    def renew(self) -> None:
        """Replace the standbys: better ones can be had now."""
        old, self._waiting = self._waiting, deque()
        for process in old:
            self.send(process, msg.Retired(), [])
        self._refill()

    def close(self) -> None:
        """End all processes; nothing more is told of them."""
        self._closed = True
        if self._source is not None:
            self._source.close()
        for process in list(self._all.values()):
            self._forget(process)

    # ----------------------------------------------------------------------------------- standbys

    def _refill_soon(self) -> None:
        """At once if the next task would wait for it. Else when a worker has gone, because to
        fork now would hold up the one that was just handed over, and its end."""
        if not self._waiting:
            self._refill()
        elif not self._refilling:
            self._refilling = True
            self._loop.after(_REFILL_DELAY, self._refill)

    def _refill(self) -> None:
        self._refilling = False
        if self._source is None or self._closed or self._failures > 3:
            return
        try:
            while len(self._waiting) < self._standbys:
                self._waiting.append(self._start())
        except OSError:  # too many open files, say: tasks that need a process will tell
            self._loop.after(_RETRY, self._refill)

    def _start(self) -> Process:
        token = next(self._tokens)
        ours, theirs = Channel.pair()
        with contextlib.ExitStack() as undo:
            pipes = []
            for _ in range(3):
                pipes.append(os.pipe2(os.O_CLOEXEC))
                for each in pipes[-1]:
                    undo.callback(os.close, each)
            undo.pop_all()
        (out, out_end), (err, err_end), (interrupts_end, interrupts) = pipes
        os.set_blocking(interrupts, False)
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        process = Process(token, Channel(ours), out, err, interrupts)
        self._all[token] = process
        self._loop.watch(ours.fileno(), lambda: self._heard(process))
        self._loop.watch(out, lambda: self._output(process, out))
        self._loop.watch(err, lambda: self._output(process, err))
        assert self._source is not None
        descriptors = [theirs.fileno(), out_end, err_end, interrupts_end]
        self._source.start(process, descriptors)
        theirs.close()
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        return process

    # ------------------------------------------------------------------------------------ hearing

    def _heard(self, process: Process) -> None:
        if process.backlog:
            self.send_backlog(process)
        try:
            message, descriptors = process.channel.receive(wait=False)
        except BlockingIOError:
            return
        except ChannelClosed:
            self._loop.unwatch(process.channel.fileno())
            process.heard = True
            self._finish(process)
            return
        if isinstance(message, msg.Ready):
            process.pid = message.pid
            process.ready = True
            self._failures = 0
            return
        # What it printed before it said this comes first; if there is any, it was seen with it.
        for descriptor in (process.out, process.err):
            if descriptor in self._loop.ready or descriptor in process.paced:
                self._drain(process, descriptor)
        self._listener.said(process, message, [Segment.adopt(each) for each in descriptors])

    def _output(self, process: Process, descriptor: int) -> None:
        """Read, and then not again for a moment. Who it is, it has said before it printed."""
        if not process.ready and not process.heard:
            self._heard(process)
            if process.gone:
                return
        if not self._drain(process, descriptor):
            return
        process.paced.add(descriptor)
        self._loop.pause(descriptor, True)

        def resume() -> None:
            if descriptor in process.paced and not process.gone:
                process.paced.discard(descriptor)
                self._loop.pause(descriptor, False)

        self._loop.after(PACE, resume)

    def _drain(self, process: Process, descriptor: int) -> bool:
        """Read what is there; False at the end of the stream."""
        self._loop.ready.discard(descriptor)
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self._loop.unwatch(descriptor)
            process.paced.discard(descriptor)
            return False
        if len(data) >= _PIPE:
            _widen(descriptor)
        name = "stdout" if descriptor == process.out else "stderr"
        self._listener.printed(process, name, data)
        return True

    # --------------------------------------------------------------------------------------- ends

    def gone(self, process: Process, reason: str) -> None:
        """The source says that the process, and what it left, is gone."""
        if process.gone:
            return
        process.reason = reason
        self._finish(process)

    def _finish(self, process: Process) -> None:
        """Tell of the end when both are known: that it said its last, and that it is gone."""
        if process.reason is None or process.gone:
            return
        while not process.heard and not process.gone:
            self._heard_rest(process)
        for descriptor in (process.out, process.err):
            self._drain(process, descriptor)
        self._forget(process)
        if process in self._waiting:
            self._waiting.remove(process)
            self._failures += not process.ready
            self._loop.after(0.05, self._refill)
        if process.worker is not None and not self._closed:
            del self._workers[process.worker]
            self._listener.exited(process, process.reason)
            self._refill()

    def _heard_rest(self, process: Process) -> None:
        """Receive what a process sent before it went; a descendant may still hold its end."""
        try:
            message, descriptors = process.channel.receive(wait=False)
        except (BlockingIOError, ChannelClosed, OSError):
            process.heard = True
            return
        for descriptor in (process.out, process.err):
            self._drain(process, descriptor)
        if not isinstance(message, msg.Ready):
            self._listener.said(process, message, [Segment.adopt(each) for each in descriptors])

    def _forget(self, process: Process) -> None:
        process.gone = True
        del self._all[process.token]
        for descriptor in (process.channel.fileno(), process.out, process.err):
            self._loop.unwatch(descriptor)
        process.channel.close()
        for descriptor in (process.out, process.err, process.interrupts):
            os.close(descriptor)


def _widen(pipe: int) -> None:
    """Let a pipe that was found full hold more between two looks."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, CHUNK)
    except (OSError, AttributeError):
        pass  # the system has its own limits; the writer waits a little more often
