"""The pool of worker processes: standbys, hand-over and ends.

Every method runs on the loop's thread. A `WorkerProcess` is a standby until it becomes one of the
scheduler's workers (`worker`). The `Receiver` reads the messages and the output of all processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gpunb.processes.outbox import Outbox
from gpunb.processes.receiver import MessageListener, Receiver
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, encode_trusted
from gpunb.protocol.zygote import Imports
from gpunb.scheduler.tasks import WorkerId
from gpunb.system import limits
from gpunb.system.loop import Loop
from gpunb.worker.interrupts import NOTICE, WAKE, WAKE_AFTER, unread

_START_PAUSE, _END_PAUSE = 0.1, 0.003
"""Seconds from the start and from the end of a worker until the next standby is forked, if there is
another one. On many systems a fork keeps a processor for a millisecond, and somebody may wait for
it: the worker that starts, or who is told of the end."""

_RETRY = 1.0


class PoolListener(MessageListener, Protocol):
    """Handles the messages, the output and the ends of workers."""

    def on_exit(self, process: WorkerProcess, reason: str) -> None:
        """Handle the end of a worker and of all processes that it started."""

    def on_renewed(self) -> None:
        """Handle that processes which start from now on have the modules of the preload."""


class Source(Protocol):
    """Starts processes and sends them signals."""

    @property
    def notes(self) -> list[str]:
        """Texts on problems of the source."""

    def import_first(self, imports: Imports) -> bool:
        """Preload what a task needs, unless new workers have it. Return whether the worker of the
        task should `wait` for that."""

    def start(
        self,
        process: WorkerProcess,
        descriptors: Sequence[int],
        *,
        bare: bool = False,
        wait: bool = False,
    ) -> None:
        """Start a process with these descriptors, which the source has to close. A `bare` one has
        no modules that other tasks have imported. One that should `wait` starts when the modules of
        the last `import_first` are preloaded."""

    def held_up(self, process: WorkerProcess) -> str | None:
        """Return why a process has not started, or gets no signal; None if nothing is known."""

    def signal(self, process: WorkerProcess, number: int) -> None:
        """Send a signal to a process, which may have ended."""

    def close(self) -> None:
        """End all processes that were started."""

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""


class WorkerPool:
    """Keeps standbys ready, and sends messages and signals to workers."""

    def __init__(self, loop: Loop, listener: PoolListener, standbys: int) -> None:
        self._loop = loop
        self._listener = listener
        self.receiver = Receiver(loop, listener, self)
        self._standby_count = standbys
        self._source: Source | None = None
        self._standbys: deque[WorkerProcess] = deque()
        self._workers: dict[WorkerId, WorkerProcess] = {}
        self._all: dict[int, WorkerProcess] = {}
        self._tokens = itertools.count(1)
        self._refill_at = 0.0
        self._for_cells = False
        self._closed = False
        self._failures = 0

    def open(self, source: Source) -> None:
        """Start standbys with this source."""
        self._source = source
        self._refill()

    # ------------------------------------------------------------------------------------ workers

    def start(
        self, worker: WorkerId, *, bare: bool = False, imports: Imports | None = None
    ) -> WorkerProcess:
        """Turn a standby, or else a new process, into this worker. The process has the modules that
        the task needs, `imports`, if they can be preloaded; else it is `bare` as in
        `Source.start`."""
        source = self._source
        if imports is not None and source is not None and source.import_first(imports):
            process = self._start(wait=True)
        else:
            process = self._start(bare=True) if bare else self._take()
        process.worker = worker
        self._workers[worker] = process
        self._refill_after(_START_PAUSE)
        return process

    def _take(self) -> WorkerProcess:
        for process in self._standbys:
            if process.ready:
                self._standbys.remove(process)
                return process
        return self._standbys.popleft() if self._standbys else self._start()

    def expect(self, *, cells: bool) -> None:
        """Note whether the next workers will probably run cells: standbys then rehearse one."""
        if cells and not self._for_cells:
            for each in self._standbys:
                each.outbox.send(msg.Rehearse())
        self._for_cells = cells

    def process(self, worker: WorkerId) -> WorkerProcess | None:
        return self._workers.get(worker)

    def held_up(self, process: WorkerProcess) -> str | None:
        """Return why a process has not started, or gets no signal; None if nothing is known."""
        return None if self._source is None or process.gone else self._source.held_up(process)

    def processes(self) -> list[WorkerProcess]:
        return list(self._all.values())

    def interrupt(self, worker: WorkerId, task: int, attempt: int) -> None:
        """Raise KeyboardInterrupt in this attempt, if the worker still runs it."""
        process = self._workers.get(worker)
        if process is not None and self._source is not None:
            try:
                os.write(process.interrupts, NOTICE.pack(task, attempt))
            except BlockingIOError:  # earlier notices are unread: the process may be stopped
                self._loop.after(_RETRY, lambda: self.interrupt(worker, task, attempt))
                return
            except OSError:  # the process is gone, or has closed the pipe
                self.kill_process(process)
                return
            self._source.signal(process, signal.SIGINT)
            self._wake(process, WAKE_AFTER)

    def _wake(self, process: WorkerProcess, after: Sequence[float]) -> None:
        """Send another signal after each of these seconds, while the notice is still unread."""

        def look() -> None:
            if not process.gone and self._source is not None and unread(process.interrupts):
                self._source.signal(process, WAKE)
                self._wake(process, after[1:])

        if after:
            self._loop.after(after[0], look)

    def kill(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None:
            self.kill_process(process)

    def kill_process(self, process: WorkerProcess) -> None:
        """Kill a process, which may be a standby."""
        if self._source is not None:
            self._source.signal(process, signal.SIGKILL)

    def _kill_unreachable(self, token: int) -> None:
        """Kill a process that would wait for ever for a message that could not be sent."""
        process = self._all.get(token)
        if process is not None:
            self.kill_process(process)

    def retire(self, worker: WorkerId) -> None:
        process = self._workers.get(worker)
        if process is not None:
            process.outbox.send(msg.Retired())

    def renew(self) -> None:
        """Replace the standbys by processes of the present zygote."""
        old, self._standbys = self._standbys, deque()
        for process in old:
            process.outbox.send(msg.Retired())
        self._refill()
        self._listener.on_renewed()

    def close(self) -> None:
        """End all processes, and report nothing more of them."""
        self._closed = True
        if self._source is not None:
            self._source.close()
        for process in list(self._all.values()):
            self._forget(process)

    def forked(self) -> None:
        """Close the parent's descriptors in a forked child."""
        source, self._source = self._source, None
        if source is not None:
            source.forked()
        while self._all:
            self._all.popitem()[1].close()

    # ----------------------------------------------------------------------------------- standbys

    def _refill_after(self, pause: float) -> None:
        """Start standbys: at once if there are none, else after a pause."""
        if not self._standbys:
            self._refill()
            return
        self._refill_at = time.monotonic() + pause
        self._loop.at(self._refill_at, self._refill_if_due)

    def _refill_if_due(self) -> None:
        if time.monotonic() >= self._refill_at:  # else a worker has started or ended since
            self._refill()

    def _refill(self) -> None:
        if self._source is None or self._closed or self._failures > 3:
            return
        try:
            while len(self._standbys) < self._standby_count:
                self._standbys.append(self._start())
                if self._for_cells:
                    self._standbys[-1].outbox.send(msg.Rehearse())
        except OSError:  # such as too many open files: the tasks that need a process report it
            self._loop.after(_RETRY, self._refill)

    def _start(self, *, bare: bool = False, wait: bool = False) -> WorkerProcess:
        """Let the source start a process.

        Raises:
            OSError: no descriptor or memory is left; the text explains which.
        """
        assert self._source is not None
        try:
            process, theirs = self._make()
        except OSError as error:
            raise OSError(error.errno, limits.explain(error)) from error
        self._all[process.token] = process
        self._source.start(process, theirs, bare=bare, wait=wait)
        return process

    def _make(self) -> tuple[WorkerProcess, list[int]]:
        """Make the kernel's side of a process; return it and the descriptors for the process."""
        with contextlib.ExitStack() as undo:
            ours, theirs = Channel.pair()
            undo.enter_context(ours)
            undo.enter_context(theirs)
            pipes = []
            for _ in range(3):
                pipes.append(os.pipe2(os.O_CLOEXEC))
                for each in pipes[-1]:
                    undo.callback(os.close, each)
            (out, out_end), (err, err_end), (interrupts_end, interrupts) = pipes
            for each in (out, err, interrupts):
                os.set_blocking(each, False)
            channel, token = Channel(ours), next(self._tokens)
            unreachable = functools.partial(self._kill_unreachable, token)
            outbox = Outbox(self._loop, channel, encode_trusted, unreachable)
            process = WorkerProcess(token, channel, outbox, (out, err, interrupts))
            receiver = self.receiver
            for each, callback in (
                (ours.fileno(), lambda: receiver.on_channel(process)),
                (out, lambda: receiver.on_output(process, out)),
                (err, lambda: receiver.on_output(process, err)),
            ):
                self._loop.watch(each, callback)
                undo.callback(self._loop.unwatch, each)
            undo.pop_all()
        return process, [theirs.detach(), out_end, err_end, interrupts_end]

    # --------------------------------------------------------------------------------------- ends

    def gone(self, process: WorkerProcess, reason: str) -> None:
        """Note the source's report that a process and its children are gone."""
        self.receiver.gone(process, reason)

    def gone_later(self, process: WorkerProcess, reason: str) -> None:
        """Call `gone` from the loop, for a source that the pool is just calling."""
        self._loop.after(0, functools.partial(self.gone, process, reason))

    def banish(self, process: WorkerProcess, why: str) -> None:
        """End a process that cannot go on; see `Receiver.banish`."""
        self.receiver.banish(process, why)

    def find(self, token: int) -> WorkerProcess | None:
        """Return the process with this number; None if it is gone."""
        return self._all.get(token)

    def became_ready(self) -> None:
        """Note that a process has started."""
        self._failures = 0

    def ended(self, process: WorkerProcess, reason: str) -> None:
        """Forget a process that has ended; report the end of a worker, and replace a standby."""
        if process.permits is not None:
            process.permits.take_back()  # what is left now is what it has not begun
        self._forget(process)
        if process in self._standbys:
            self._standbys.remove(process)
            self._failures += not process.ready
            self._loop.after(0.05, self._refill)
        if process.worker is not None and not self._closed:
            del self._workers[process.worker]
            self._listener.on_exit(process, reason)
            self._refill_after(_END_PAUSE)

    def _forget(self, process: WorkerProcess) -> None:
        process.gone = True
        del self._all[process.token]
        for descriptor in (process.channel.fileno(), process.out, process.err):
            self._loop.unwatch(descriptor)
        process.close()
