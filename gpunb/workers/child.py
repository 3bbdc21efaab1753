"""What a worker process does: wait for work, run it, report.

A new worker has no work and no environment of its own yet. It rehearses one round trip on itself,
because the first use of code and pages is what costs time in a forked process, and says that it
is ready. The first `Execute` brings its environment, which is set before anything of the user's
is imported or unpickled.
"""

from __future__ import annotations

import atexit
import inspect
import io
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import cloudpickle

from gpunb import backend, serialize
from gpunb.backend import Context, Slot
from gpunb.objects import Segment
from gpunb.refs import value_of
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers import system, threads
from gpunb.workers.channel import Channel, ChannelClosed, decode, encode
from gpunb.workers.interrupts import Interrupts
from gpunb.workers.remote import Remote

MOST_SEGMENTS = 200
"""Of one message; the system's limit is 253 descriptors."""

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
    finally:
        leave()


def leave() -> NoReturn:
    """End without the interpreter's clean-up, which takes half a second where torch is loaded."""
    if not atexit._ncallbacks():  # noqa: SLF001 - there is no public way
        _flush()
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
    """Receives work and runs it, one task at a time."""

    def __init__(self, channel: Channel, interrupts: int) -> None:
        self._channel = channel
        self._interrupts = Interrupts(interrupts)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._codes: dict[str, bytes] = {}
        self._gpu_ids: tuple[int | str, ...] = ()
        self._pid = os.getpid()
        self._remote = Remote(channel)

    def serve(self) -> None:
        _reseed()
        self._rehearse()
        self._interrupts.listen()
        backend.install(self._remote)
        try:
            self._channel.send(msg.Ready(os.getpid()))
            while True:
                message, descriptors = self._remote.next_message()
                match message:
                    case msg.Execute():
                        self.execute(message, [Segment.adopt(each) for each in descriptors])
                        if message.last:
                            return
                    case msg.Retired():
                        return
                    case _:
                        pass
        except ChannelClosed:
            return

    # ------------------------------------------------------------------------------------ a task

    def execute(self, work: msg.Execute, segments: list[Segment]) -> None:
        """Run one attempt and report it."""
        if work.setup is not None:
            self._set_up(msg.Setup(*work.setup))
        if work.code is not None:
            # Kept now: it is sent once, and an interrupt may come before it is unpickled.
            self._codes[work.function] = work.code
        self._remote.enter(Context(work.task, work.attempt, work.name, self._gpu_ids))
        report, results = self._attempt(work, segments)
        self._interrupts.end()
        if os.getpid() != self._pid:
            os._exit(0)  # a child that the function forked and let return
        self._remote.leave()
        _flush()
        if len(results) > MOST_SEGMENTS:
            results = [*results[:MOST_SEGMENTS], *map(_inline, results[MOST_SEGMENTS:])]
        done = msg.Done(work.task, work.attempt, report, wires(results))
        self._channel.send(done, [each.segment for each in results if each.segment is not None])
        self._remote.report_references()

    def _set_up(self, setup: msg.Setup) -> None:
        for name, value in setup.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        threads.obey(setup.environment)
        self._gpu_ids = tuple(setup.gpu_ids)
        if setup.directory is not None:
            try:
                os.chdir(setup.directory)
            except OSError:
                pass  # a directory that is gone is not worth the task
        sys.path[:] = setup.path
        sys.argv[:] = setup.argv

    def _attempt(self, work: msg.Execute, segments: list[Segment]) -> tuple[str, list[Payload]]:
        label = f"{work.name} (#{work.task})"
        try:
            try:
                self._interrupts.begin((work.task, work.attempt))
                value = self._call(work, segments)
                return "ok", _results(value, work, label)
            finally:
                self._interrupts.end()
        except BaseException as error:
            if self._interrupts.hit and isinstance(error, KeyboardInterrupt):
                return "interrupted", []
            self._interrupts.end()
            failure = serialize.dump_failure(error, task=label, skip=2)
            return ("retry" if _retryable(error, work.retry) else "raised"), [failure]

    def _call(self, work: msg.Execute, segments: list[Segment]) -> Any:
        taken = iter(segments)
        arguments = unwire(work.arguments, taken)
        inputs = [unwire(each, taken) for each in work.inputs]
        if work.kind == "cell":
            from gpunb.workers import cells

            return cells.run(arguments, self._remote.show, f"{work.name} (#{work.task})")
        function = self._functions.get(work.function)
        if function is None:
            function = pickle.loads(self._codes[work.function])
            self._functions[work.function] = function
            del self._codes[work.function]
        args, kwargs = serialize.loads(arguments)
        if inputs:
            values = [serialize.loads(each) for each in inputs]
            if work.late:
                values += [value_of(each) for each in self._remote.fetch(work.late, None)]
            args = [values[each.index] if type(each) is Slot else each for each in args]
            kwargs = {
                name: values[each.index] if type(each) is Slot else each
                for name, each in kwargs.items()
            }
        value = function(*args, **kwargs)
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError(
                f"{work.name} is an async function: a task must be a plain one; "
                "call asyncio.run inside it"
            )
        return value

    def _rehearse(self) -> None:
        """One round trip of a function by value, on this process itself."""
        ours, theirs = (Channel(each) for each in Channel.pair())
        code = cloudpickle.dumps(_sample())
        arguments = serialize.dumps(((1, [2]), {"c": "3"}))
        work = msg.Execute(
            0,
            0,
            "rehearsal",
            "call",
            None,
            "",
            code,
            (arguments.wire(), False),
            (),
            (),
            1,
            False,
            False,
        )
        channel, self._channel = self._channel, ours
        try:
            for _ in range(3):
                theirs.send_encoded(encode(work))
                message, _ = ours.receive()
                assert isinstance(message, msg.Execute)
                self.execute(message, [])
                data, _ = theirs.receive_raw()
                decode(data)
                self._functions.clear()
        finally:
            self._channel = channel
            ours.close()
            theirs.close()


def _results(value: Any, work: msg.Execute, label: str) -> list[Payload]:
    what = f"the result of {label}"
    if isinstance(value, Payload):
        return [value]
    if work.returns == 1:
        return [serialize.dumps(value, what=what)]
    if work.returns == 0:
        return []
    values = list(value) if isinstance(value, Sequence | set) or hasattr(value, "__iter__") else []
    if len(values) != work.returns:
        raise ValueError(
            f"{label} has num_returns={work.returns}, but returned "
            f"{len(values) if values else repr(value)[:80]}"
        )
    return [serialize.dumps(each, what=what) for each in values]


def _inline(payload: Payload) -> Payload:
    """The same without a segment of its own."""
    if payload.segment is None:
        return payload
    memory = payload.segment.map()
    stream, *buffers = (bytes(memory[start : start + size]) for start, size in payload.spans)
    return Payload(stream, tuple(buffers), references=payload.references)


def _retryable(error: BaseException, retry: bytes | bool) -> bool:
    if isinstance(retry, bool):
        return retry and isinstance(error, Exception)
    return isinstance(error, pickle.loads(retry))


def wires(payloads: Sequence[Payload]) -> tuple[tuple[msg.Wire, bool], ...]:
    return tuple((each.wire(), each.segment is not None) for each in payloads)


def unwire(wire: tuple[msg.Wire, bool], segments: Any) -> Payload:
    """The payload of a wire, with its segment from the iterator of those that came along."""
    return Payload.from_wire(wire[0], next(segments) if wire[1] else None)


def _flush() -> None:
    for each in (sys.stdout, sys.stderr):
        try:
            each.flush()
        except Exception:
            pass  # closed, or not a stream at all: the task may have put anything there


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


def spawned(channel: Any, out: Any, err: Any, interrupts: Any, kernel: int) -> NoReturn:
    """As `main`, in a new interpreter of its own; the arguments are connections."""
    system.die_with_parent(kernel)
    own_streams()
    connections = (channel, out, err, interrupts)
    descriptors = [os.dup(each.fileno()) for each in connections]
    for each in connections:
        each.close()
    main(*descriptors)
