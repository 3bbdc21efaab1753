"""Reads the messages and the output of worker processes, and notes their ends.

The end of a process is reported once, after everything that it sent:

1. The channel closes, and the source reports that the process and its children are gone, in any
   order. A process that still runs `CLOSED_FOR` seconds after its channel closed is killed.
2. After the report of the source, the rest of the channel and of both pipes is read. Nobody
   waits for the end of these streams, because a descendant may hold them open.
3. Then the owner's `ended` is called.

Messages and output have no common order of their own. Before a message is delivered, both pipes are
read, so the output that a process wrote before the message comes first.
"""

from __future__ import annotations

import fcntl
import functools
import os
from typing import Protocol

from gpunb.data.segments import Segment
from gpunb.processes.worker_process import WorkerProcess
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import ChannelClosed
from gpunb.protocol.plain import Malformed
from gpunb.system.loop import Loop

PACE = 0.03
"""Seconds between two reads of a process's output, so that much output comes in large pieces."""

CLOSED_FOR = 5.0
"""Seconds that a process may take to end after its channel has closed."""

CHUNK = 1 << 20
_PIPE = 1 << 16


class MessageListener(Protocol):
    """Handles the messages and the output of workers."""

    def on_message(
        self, process: WorkerProcess, message: msg.Message, segments: list[Segment]
    ) -> None:
        """Handle a message of a worker."""

    def on_output(self, process: WorkerProcess, name: str, data: bytes) -> None:
        """Handle bytes that a worker wrote to ``"stdout"`` or ``"stderr"``."""


class ProcessOwner(Protocol):
    """The pool, as the receiver needs it."""

    def find(self, token: int) -> WorkerProcess | None:
        """Return the process with this number; None if it is gone."""

    def became_ready(self) -> None:
        """Note that a process has started."""

    def kill_process(self, process: WorkerProcess) -> None:
        """Kill a process."""

    def ended(self, process: WorkerProcess, reason: str) -> None:
        """Handle the end of a process, after everything that it sent."""


class Receiver:
    """Reads what processes send. On the loop's thread."""

    def __init__(self, loop: Loop, listener: MessageListener, owner: ProcessOwner) -> None:
        self._loop = loop
        self._listener = listener
        self._owner = owner

    def on_channel(self, process: WorkerProcess) -> None:
        """Handle that the channel of a process can be read or written."""
        if process.outbox.waiting:
            process.outbox.send_waiting()
        try:
            message, descriptors = process.channel.receive(wait=False)
        except BlockingIOError:
            return
        except ChannelClosed:
            self._loop.unwatch(process.channel.fileno())
            process.received_all = True
            self._finish(process)
            if not process.gone:
                # By its number: the timer would keep the process, with its buffers.
                self._loop.after(CLOSED_FOR, functools.partial(self._end_closed, process.token))
            return
        except (Malformed, OSError) as error:
            self._end_for(process, error)
            return
        if isinstance(message, msg.Ready):
            process.pid = message.pid
            process.ready = True
            self._owner.became_ready()
            return
        # Output that was written before this message was reported by the same poll, or paused.
        for descriptor in (process.out, process.err):
            if descriptor in self._loop.ready or descriptor in process.paced:
                self._drain(process, descriptor)
        self._deliver(process, message, descriptors)

    def _end_closed(self, token: int) -> None:
        """End a process that has closed its channel and still runs."""
        process = self._owner.find(token)
        if process is not None:
            self.banish(process, "it closed its channel to the kernel")

    def _deliver(
        self, process: WorkerProcess, message: msg.Message, descriptors: list[int]
    ) -> None:
        """Hand a message to the listener. If that fails, end the sender, and nothing else."""
        segments: list[Segment] = []
        try:
            segments.extend(map(Segment.adopt, descriptors))
            self._listener.on_message(process, message, segments)
        except Exception as error:
            for each in descriptors[len(segments) + 1 :]:  # `adopt` has closed the one that failed
                os.close(each)
            self._end_for(process, error)

    def _end_for(self, process: WorkerProcess, error: Exception) -> None:
        if isinstance(error, OSError):
            why = f"what it sent could not be received: {error.strerror or error}"
        else:
            why = f"it sent a message that cannot be understood: {error!r:.500}"
        self.banish(process, why)

    def banish(self, process: WorkerProcess, why: str) -> None:
        """End a process that cannot go on, and receive nothing more from it. `why` becomes part of
        the errors of its jobs."""
        if process.fault is not None or process.gone:
            return
        process.fault = why
        if process.reason is not None:  # the fault was found in its last messages
            process.reason = f"{process.reason}; {why}"
        if not process.received_all:
            self._loop.unwatch(process.channel.fileno())
            process.received_all = True
        self._owner.kill_process(process)

    def on_output(self, process: WorkerProcess, descriptor: int) -> None:
        """Read output, then pause for a moment. A message that names the process comes first."""
        if not process.ready and not process.received_all:
            self.on_channel(process)
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

    def read_output(self, process: WorkerProcess) -> None:
        """Read what a process has written."""
        for descriptor in (process.out, process.err):
            self._drain(process, descriptor)

    def _drain(self, process: WorkerProcess, descriptor: int) -> bool:
        """Read the available output; return False at the end of the stream."""
        self._loop.ready.discard(descriptor)
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return True
        except OSError as error:  # a writer into the full pipe would wait for ever
            data = b""
            self.banish(process, f"what it printed could not be read: {error.strerror}")
        if not data:
            self._loop.unwatch(descriptor)
            process.paced.discard(descriptor)
            return False
        if len(data) >= _PIPE:
            _widen(descriptor)
        name = "stdout" if descriptor == process.out else "stderr"
        try:
            self._listener.on_output(process, name, data)
        except Exception as error:
            self._end_for(process, error)
        return True

    # --------------------------------------------------------------------------------------- ends

    def gone(self, process: WorkerProcess, reason: str) -> None:
        """Note the source's report that a process and its children are gone."""
        if process.gone:
            return
        process.reason = process.fault or reason
        self._finish(process)

    def _finish(self, process: WorkerProcess) -> None:
        """Report the end of a process if the source has reported it."""
        if process.reason is None or process.gone:
            return
        while not process.received_all and not process.gone:
            self._receive_rest(process)
        self.read_output(process)
        self._owner.ended(process, process.reason)

    def _receive_rest(self, process: WorkerProcess) -> None:
        """Receive a message that a process sent before its end."""
        try:
            message, descriptors = process.channel.receive(wait=False)
        except (BlockingIOError, ChannelClosed):
            process.received_all = True
            return
        except (Malformed, OSError) as error:
            self._end_for(process, error)
            return
        self.read_output(process)
        if not isinstance(message, msg.Ready):
            self._deliver(process, message, descriptors)


def _widen(pipe: int) -> None:
    """Give a pipe that was full a larger buffer."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, CHUNK)
    except (OSError, AttributeError):
        pass  # the system forbids it; the writer waits more often
