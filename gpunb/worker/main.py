"""The main function of a worker process: waits for work, runs it, reports.

A new worker has no work and no environment of its own yet. It rehearses one round trip on itself,
because the first use of code and pages is what costs time in a forked process, and says that it
is ready. The first `Execute` brings its environment, which is set before anything of the user's
is imported or unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
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
from gpunb.protocol import backend
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, ChannelClosed, decode_trusted, encode
from gpunb.system import process_control
from gpunb.worker.interrupts import Interrupts
from gpunb.worker.kernel_client import KernelClient
from gpunb.worker.streams import flush, stream
from gpunb.worker.task_runner import TaskRunner

_EXIT_GRACE = 3.0

_REHEARSE_AFTER = 0.02
"""Seconds without a task after which a new worker rehearses a cell: not while tasks follow fast."""

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
    if not atexit._ncallbacks():  # noqa: SLF001 - there is no public way
        flush()
        os._exit(0)
    threading.Thread(target=_run_exit_functions, daemon=True).start()
    _exited.wait(_EXIT_GRACE)
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

    def serve(self) -> None:
        _reseed()
        rehearse(self._interrupts)
        self._interrupts.listen()
        backend.install(self._remote)
        try:
            self._channel.send(msg.Ready(os.getpid()))
            self._serve()
        except ChannelClosed:
            return

    def _serve(self) -> None:
        runner = self._runner
        threads: Any = None
        while True:
            message, descriptors = self._remote.next_message()
            match message:
                case msg.Execute():
                    segments = [Segment.adopt(each) for each in descriptors]
                    if threads is not None:
                        threads.start(message, segments)
                        continue
                    host = msg.HostedActor(*message.host) if message.host is not None else None
                    if host is not None and host.concurrent:
                        from gpunb.worker.concurrent_actor import EventLoop

                        groups = [name for name, _ in host.groups]
                        EventLoop(runner, self._channel, groups).serve(message, segments)
                        return
                    several: Any = None
                    if host is not None and (host.concurrency > 1 or host.groups):
                        from gpunb.worker.concurrent_actor import Threads

                        limits = {"": host.concurrency, **dict(host.groups)}
                        several = Threads(runner, limits)
                    if not runner.execute(message, segments) or message.last:
                        return
                    threads = several
                case msg.CommMessage():
                    runner.on_comm(message, descriptors)
                case msg.Rehearse():
                    self._rehearse()
                case msg.Prepare():
                    from gpunb.worker import contexts

                    self._channel.send(msg.Prepared(contexts.prepare(message)))
                case msg.Park():
                    from gpunb.worker import contexts

                    self._remote.send(msg.ParkReply(contexts.park(message), message.back))
                case msg.Retired():
                    return
                case _:
                    pass

    def _rehearse(self) -> None:
        if self._remote.transport.is_quiet(_REHEARSE_AFTER):
            rehearse_cell()


# ----------------------------------------------------------------------------- before there is work


def warm_up(rehearsals: int) -> None:
    """Run in the zygote, once: what every worker needs is then in pages that they share. After
    `ADAPTED` rehearsals Python has adapted the code to the types that it meets, which would change
    the pages of that code in each worker."""
    pipe = os.pipe()
    for _ in range(rehearsals):
        rehearse(Interrupts(pipe[0]))
    for each in pipe:
        os.close(each)


def rehearse(interrupts: Interrupts) -> None:
    """Run a function by value on this process itself, from its message to its report."""
    ours, theirs = (Channel(each, decode_trusted) for each in Channel.pair())
    arguments = serialize.dumps(((1, [2]), {"c": "3"}))
    work = msg.Execute(
        task=0,
        attempt=0,
        name="rehearsal",
        kind="call",
        setup=None,
        function="rehearsal",
        code=cloudpickle.dumps(_sample()),
        arguments=(arguments.wire(), 0),
        inputs=(),
        late=(),
        returns=1,
        retry=False,
        last=False,
    )
    remote = KernelClient(ours)
    runner = TaskRunner(remote, interrupts)
    try:
        theirs.send_encoded(encode(work))
        message, _ = remote.next_message()
        assert isinstance(message, msg.Execute)
        runner.execute(message, [])
        data, _ = theirs.receive_raw()
        decode_trusted(data)
    finally:
        ours.close()
        theirs.close()


def rehearse_cell() -> None:
    """Rehearse a cell, where the zygote has loaded what cells need."""
    cells = sys.modules.get("gpunb.worker.cell.run")
    if cells is not None:
        with contextlib.suppress(Exception):  # whatever it is, a cell will say it
            cells.rehearse()


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
