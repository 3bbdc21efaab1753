"""The main function of a worker process: waits for work, runs it, reports.

A new worker has no work and no environment of its own yet. It says that it is ready, and while no
message comes it rehearses round trips on itself, because the first use of code and pages is what
costs time in a forked process. The first `Execute` brings its environment, which is set before
anything of the user's is imported or unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import multiprocessing.context
import multiprocessing.process
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle

from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.exceptions import OutOfMemoryError
from gpunb.protocol import backend
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, ChannelClosed, decode_trusted, encode
from gpunb.protocol.permits import PermitReader
from gpunb.system import process_control
from gpunb.worker.interrupts import Interrupts
from gpunb.worker.kernel_client import KernelClient
from gpunb.worker.limits import memory, usage
from gpunb.worker.streams import InTurn, flush, stream
from gpunb.worker.task_runner import TaskRunner

_EXIT_GRACE = 3.0

_SOON, _LATER = 0.003, 0.02
"""Seconds without a message after which a new worker rehearses a task, and what takes longer. While
tasks follow fast, rehearsals would only take the processor from them."""

_REHEARSAL = "gpunb_rehearsal"
"""A variable that is set during a rehearsal."""

ADAPTED = 10
"""Rehearsals after which Python has adapted the code that they use."""


def main(channel: int, out: int, err: int, interrupts: int) -> NoReturn:
    """Be a worker until the kernel says so, or is gone. The arguments are descriptors."""
    try:
        os.setsid()
        for source, target in ((out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
        for each in (channel, interrupts):
            os.set_inheritable(each, False)
        # Where Python was if a signal ends it: the error shows the end of this stream.
        faulthandler.enable(2, all_threads=False)
        process_control.set_name("gpunb-worker")
        process_control.adopt_orphans()
        atexit._clear()  # noqa: SLF001 - what the zygote's imports registered is not for its children
        WorkerLoop(Channel(socket.socket(fileno=channel), decode_trusted), interrupts).serve()
    except BaseException:
        traceback.print_exc()  # a bug, or a broken installation; `leave` would not show it
    finally:
        leave()


def leave() -> NoReturn:
    """End without the interpreter's clean-up, which takes half a second where torch is loaded."""
    if atexit._ncallbacks():  # noqa: SLF001 - there is no public way
        threading.Thread(target=_run_exit_functions, daemon=True).start()
        _exited.wait(_EXIT_GRACE)
    else:
        flush()
    # The system takes the memory apart, a millisecond and more: the kernel, which may wait on the
    # same processor, first takes the report that it was sent.
    process_control.give_way()
    os._exit(0)


_exited = threading.Event()


def _run_exit_functions() -> None:
    try:
        atexit._run_exitfuncs()  # noqa: SLF001 - there is no public way
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        _exited.set()


def own_streams() -> None:
    """Make descriptors 1 and 2 the standard streams."""
    sys.stdout = sys.__stdout__ = stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2)  # type: ignore[misc]


class WorkerLoop:
    """Receives work and runs it, one task at a time; or is an actor."""

    def __init__(self, channel: Channel, interrupts: int) -> None:
        self._channel = channel
        self._interrupts = Interrupts(interrupts)
        self._remote = KernelClient(channel)
        self._runner = TaskRunner(self._remote, self._interrupts)
        self._permits: PermitReader
        self._rehearsals: list[tuple[float, Callable[[], None]]] = [
            (_SOON, rehearse),
            (_LATER, functools.partial(rehearse, full=True)),
        ]

    def serve(self) -> None:
        _reseed()
        self._interrupts.listen()
        backend.install(self._remote)
        try:
            self._channel.send(msg.Ready(os.getpid()))
            self._serve()
        except ChannelClosed:
            return

    def _serve(self) -> None:  # noqa: C901 - one case for each message
        runner = self._runner
        threads: Any = None
        self._rehearse()
        while True:
            message, descriptors = self._remote.next_message()
            match message:
                case msg.Execute() if self._may_begin(message):
                    segments = [Segment.adopt(each) for each in descriptors]
                    if threads is not None:
                        threads.start(message, segments)
                        continue
                    host = msg.HostedActor(*message.host) if message.host is not None else None
                    if host is not None and host.concurrent:
                        from gpunb.worker.concurrent_actor import EventLoop

                        groups = [name for name, _ in host.groups]
                        EventLoop(runner, self._remote, self._channel, groups).serve(
                            message, segments
                        )
                        return
                    several: Any = None
                    if host is not None and (host.concurrency > 1 or host.groups):
                        from gpunb.worker.concurrent_actor import Threads

                        limits = {"": host.concurrency, **dict(host.groups)}
                        several = Threads(runner, self._remote, limits)
                    if not runner.execute(message, segments) or message.last:
                        return
                    threads = several
                case msg.CommMessage():
                    runner.on_comm(message, descriptors)
                case msg.Rehearse():
                    self._rehearsals.append((_LATER, rehearse_cell))
                    self._rehearse()
                case msg.Prepare():
                    from gpunb.worker import contexts

                    self._channel.send(msg.Prepared(contexts.prepare(message)))
                case msg.Park():
                    from gpunb.worker import contexts

                    self._remote.send(msg.ParkReply(contexts.park(message), message.back))
                case msg.Permits() if descriptors:  # else this process has none left
                    self._permits = PermitReader(*descriptors)
                    self._channel.send(message)
                case msg.Retired():
                    return
                case _:
                    pass

    def _may_begin(self, work: msg.Execute) -> bool:
        """Return False for a task that was sent ahead and that the kernel has taken back."""
        # What a task writes that was sent ahead comes after the report of the task before.
        InTurn.first = self._remote.catch_up if work.permit else None
        return not work.permit or self._permits.take(work.permit)

    def _rehearse(self) -> None:
        """Rehearse what is left, while no message comes."""
        waited = 0.0
        while self._rehearsals:
            pause, rehearsal = self._rehearsals[0]
            if not self._remote.transport.is_quiet(max(0.0, pause - waited)):
                return
            waited = max(waited, pause)
            del self._rehearsals[0]
            with contextlib.suppress(Exception):  # whatever it is, the work will say it
                rehearsal()


# ----------------------------------------------------------------------------- before there is work


def warm_up(rehearsals: int) -> None:
    """Run in the zygote, once: what every worker needs is then in pages that they share. After
    `ADAPTED` rehearsals Python has adapted the code to the types that it meets, which would change
    the pages of that code in each worker."""
    for _ in range(rehearsals):
        with contextlib.suppress(OSError, OutOfMemoryError):  # small tasks need no shared memory
            rehearse(full=True)
        rehearse()


def rehearse(*, full: bool = False) -> None:
    """Run a function by value on this process itself, from its message to its report. A `full`
    rehearsal also goes through what is not worth the time while tasks follow fast: the setup of a
    worker with a share of a device, and an array in shared memory as argument and result."""
    arguments = serialize.dumps(((_array() if full else 1, [2]), {"c": "3"}))
    setup = msg.Setup({_REHEARSAL: "1"}, (0,), None, sys.path[:], sys.argv[:], follow=True)
    work = msg.Execute(
        task=0,
        attempt=0,
        name="rehearsal",
        kind="call",
        setup=tuple(setup) if full else None,
        function="rehearsal",
        code=cloudpickle.dumps(_sample()),
        arguments=(arguments.wire(), len(arguments.segments)),
        inputs=(),
        late=(),
        returns=1,
        retry=False,
        last=False,
    )
    with contextlib.ExitStack() as undo:
        ours, theirs = (Channel(each, decode_trusted) for each in Channel.pair())
        undo.callback(ours.close)
        undo.callback(theirs.close)
        # Not the interrupts of the worker: they may be meant for a task that comes meanwhile.
        pipe = os.pipe()
        for end in pipe:
            undo.callback(os.close, end)
        if full:
            undo.callback(os.environ.pop, _REHEARSAL, None)
            undo.callback(usage.begin, ())
        remote = KernelClient(ours)
        theirs.send_encoded(encode(work), [each.fileno() for each in arguments.segments])
        message, descriptors = remote.next_message()
        assert isinstance(message, msg.Execute)
        segments = [Segment.adopt(each) for each in descriptors]
        TaskRunner(remote, Interrupts(pipe[0])).execute(message, segments)
        data, descriptors = theirs.receive_raw()
        for each in descriptors:
            os.close(each)
        decode_trusted(data)
        if full:
            memory.rehearse()


def rehearse_cell(*, forks: bool = False) -> None:
    """Rehearse a cell, where the zygote has loaded what cells need; `forks` in the zygote."""
    cells = sys.modules.get("gpunb.worker.cell.run")
    if cells is not None:
        cells.rehearse(forks=forks)


def _array() -> Any:
    """An array, or else bytes, too large for a message."""
    size = 2 * serialize.INLINE_LIMIT
    numpy = sys.modules.get("numpy")
    return bytearray(size) if numpy is None else numpy.zeros(size // 8)


def _sample() -> Callable[..., Any]:
    scale = 2

    def sample(a: int, b: list[int], c: str) -> Any:
        return [a * scale, *b], {"c": c}

    sample.__module__ = "__main__"
    return sample


def _reseed() -> None:
    """Forked processes start with equal random states; no two workers should draw the same."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def spawned(kernel: int, channel: Any, out: Any, err: Any, interrupts: Any, *kept: Any) -> NoReturn:
    """As `main`, in a new interpreter of its own; the other arguments are connections. Those
    `kept` stay open as long as the process lives."""
    process_control.die_with_parent(kernel)
    unbind()
    own_streams()
    connections = (channel, out, err, interrupts)
    descriptors = [os.dup(each.fileno()) for each in connections]
    for each in kept:
        os.dup(each.fileno())
    for each in (*connections, *kept):
        each.close()
    main(*descriptors)


def unbind() -> None:
    """Let multiprocessing see a program of its own here, with its usual start method, and not a
    child of loky's: what users start in workers would be one too."""
    process: Any = multiprocessing.process
    here, own = process.current_process(), process.BaseProcess(name="MainProcess")
    # The key is the kernel's: what that manages for others is open to workers.
    vars(own).update(_config={"authkey": here.authkey, "semprefix": "/mp"})
    vars(own).update(_identity=(), _parent_pid=None)
    vars(process).update(_current_process=own, _parent_process=None)
    vars(process).update(_process_counter=itertools.count(1))
    vars(vars(multiprocessing.context)["_default_context"]).update(_actual_context=None)
