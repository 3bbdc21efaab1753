"""What a worker process does: wait for work, run it, report.

A new worker has no work and no environment of its own yet. It rehearses one round trip on itself,
because the first use of code and pages is what costs time in a forked process, and says that it
is ready. The first `Execute` brings its environment, which is set before anything of the user's
is imported or unpickled.
"""

from __future__ import annotations

import atexit
import io
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle

from gpunb import backend, serialize
from gpunb.objects import Segment
from gpunb.workers import messages as msg
from gpunb.workers import system
from gpunb.workers.channel import Channel, ChannelClosed, decode, encode
from gpunb.workers.interrupts import Interrupts
from gpunb.workers.launching import unbind
from gpunb.workers.remote import Remote
from gpunb.workers.running import Runner, flush

_EXIT_GRACE = 3.0


def main(channel: int, out: int, err: int, interrupts: int) -> NoReturn:
    """Be a worker until the kernel says so, or is gone. The arguments are descriptors."""
    try:
        os.setsid()
        for source, target in ((out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
        for each in (channel, interrupts):
            os.set_inheritable(each, False)
        system.set_name("gpunb-worker")
        system.adopt_orphans()
        atexit._clear()  # noqa: SLF001 - what the zygote's imports registered is not for its children
        Worker(Channel(socket.socket(fileno=channel)), interrupts).serve()
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


def stream(descriptor: int) -> io.TextIOWrapper:
    """Text output that is written line by line: no line is lost in a crash, and what child
    processes and C code print comes in its place."""
    raw = io.FileIO(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True
    )


def own_streams() -> None:
    """Make descriptors 1 and 2 the standard streams."""
    sys.stdout = sys.__stdout__ = stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stream(2)  # type: ignore[misc]


class Worker:
    """Receives work and runs it, one task at a time; or is an actor."""

    def __init__(self, channel: Channel, interrupts: int) -> None:
        self._channel = channel
        self._interrupts = Interrupts(interrupts)
        self._remote = Remote(channel)
        self._runner = Runner(self._remote, self._interrupts)

    def serve(self) -> None:
        _reseed()
        self._rehearse()
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
                    host = msg.Host(*message.host) if message.host is not None else None
                    if host is not None and host.concurrent:
                        from gpunb.workers.hosting import EventLoop

                        EventLoop(runner, self._channel).serve(message, segments)
                        return
                    several: Any = None
                    if host is not None and host.concurrency > 1:
                        from gpunb.workers.hosting import Threads

                        several = Threads(runner, host.concurrency)
                    if not runner.execute(message, segments) or message.last:
                        return
                    threads = several
                case msg.Told():
                    runner.told(message, descriptors)
                case msg.Retired():
                    return
                case _:
                    pass

    def _rehearse(self) -> None:
        """One round trip of a function by value, on this process itself."""
        ours, theirs = (Channel(each) for each in Channel.pair())
        code = cloudpickle.dumps(_sample())
        arguments = serialize.dumps(((1, [2]), {"c": "3"}))
        work = msg.Execute(
            task=0,
            attempt=0,
            name="rehearsal",
            kind="call",
            setup=None,
            function="rehearsal",
            code=code,
            arguments=(arguments.wire(), 0),
            inputs=(),
            late=(),
            returns=1,
            retry=False,
            last=False,
        )
        remote = Remote(ours)
        runner = Runner(remote, self._interrupts)
        try:
            for _ in range(3):
                theirs.send_encoded(encode(work))
                message, _ = remote.next_message()
                assert isinstance(message, msg.Execute)
                runner.execute(message, [])
                data, _ = theirs.receive_raw()
                decode(data)
                runner.functions.clear()
        finally:
            ours.close()
            theirs.close()


# ----------------------------------------------------------------------------- before there is work


def warm_up() -> None:
    """Run in the zygote, once: what every worker will need is then in pages they share."""
    serialize.dumps({"a": 1})
    cloudpickle.dumps(lambda: None)


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
    system.die_with_parent(kernel)
    unbind()
    own_streams()
    connections = (channel, out, err, interrupts)
    descriptors = [os.dup(each.fileno()) for each in connections]
    for each in kept:
        os.dup(each.fileno())
    for each in (*connections, *kept):
        each.close()
    main(*descriptors)
