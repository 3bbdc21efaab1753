"""An attempt of a task, in the worker: from the message to its results, or what it raised."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from gpunb import serialize
from gpunb.backend import DYNAMIC, STREAMING, Context, ExitActor, Slot
from gpunb.generators import DynamicObjectRefGenerator
from gpunb.objects import Segment
from gpunb.refs import ObjectRef, value_of
from gpunb.serialize import Moved, Payload
from gpunb.signals import UNDIVIDED
from gpunb.workers import caps, threads, usage
from gpunb.workers import messages as msg
from gpunb.workers.interrupts import Interrupts
from gpunb.workers.modules import loaded
from gpunb.workers.recent import MOST, Recent
from gpunb.workers.remote import Remote, arrived

MOST_SEGMENTS = 200
"""Of one message; the system's limit is 253 descriptors."""

_HERE = os.path.dirname(__file__)

TERMINATE, READY = "__ray_terminate__", "__ray_ready__"


class Runner:
    """Runs attempts on the main thread, and knows what those in threads and coroutines need.

    Attributes:
        actor: the object that this worker is, if it is one; and what it was told of itself.
    """

    def __init__(self, remote: Remote, interrupts: Interrupts) -> None:
        self.remote = remote
        self.interrupts = interrupts
        self.actor: Any = None
        self.host: msg.Host | None = None
        self.functions: dict[str, Callable[..., Any]] = {}
        self._codes: dict[str, bytes] = {}
        self._recent = Recent()
        self._moved: dict[tuple[int, int], Moved] = {}
        self._gpu_ids: tuple[int | str, ...] = ()
        self._others: tuple[tuple[str, tuple[int | str, ...]], ...] = ()
        self._reporter: usage.Reporter | None = None
        self._pid = os.getpid()

    def execute(self, work: msg.Execute, segments: list[Segment]) -> bool:
        """Run one attempt and report it; whether there may be more."""
        self.prepare(work)
        self.remote.enter(self.context(work))
        report, results = self._attempt(work, segments)
        self.interrupts.end()
        if report == "interrupted":
            self.remote.recover()
        self.finish(work, report, results)
        return report != "exit"

    def prepare(self, work: msg.Execute) -> None:
        """Take in what comes with the first attempt, or is sent once."""
        if work.setup is not None:
            self._set_up(msg.Setup(*work.setup))
        if self.host is None and loaded.edited():
            self._renew()
        if work.host is not None:
            self.host = msg.Host(*work.host)
        if work.kind == "call" and work.function:
            self._recent.use(work.function)
            if work.code is not None:
                # Kept now: it is sent once, and an interrupt may come before it is unpickled.
                self._codes[work.function] = work.code
            for kept in (self.functions, self._codes):
                if len(kept) > MOST:
                    for name in [each for each in kept if each not in self._recent]:
                        del kept[name]

    def _renew(self) -> None:
        """The user has edited modules: what runs next imports them as they are now.

        An actor goes on with what it has loaded, as its state is made of that.
        """
        for name, function in self.functions.items():
            try:
                self._codes[name] = serialize.dumps_function(function)
            except Exception as error:  # a call has bound a global to something
                say(f"gpunb: goes on with the modules that it knows: {error}\n")
        for name in self._codes:
            self.functions.pop(name, None)
        loaded.forget()

    def finish(self, work: msg.Execute, report: str, results: list[Payload]) -> None:
        """Report the end of an attempt."""
        self.end_forked()
        if self._gpu_ids and (memory := usage.measured()):
            self._tell(memory)
        moved = self._moved.pop((work.task, work.attempt), None)
        if moved is not None and moved.count:
            say(f"gpunb: {moved}\n")
        self.remote.leave()
        flush()
        if len(results) > MOST_SEGMENTS:
            results = [*results[:MOST_SEGMENTS], *map(_inline, results[MOST_SEGMENTS:])]
        wires, _ = serialize.to_wires(results)
        self.remote.send(msg.Done(work.task, work.attempt, report, wires), results)
        if self.interrupts.hit:
            self.remote.take_stock()
        else:
            self.remote.report_references()

    def end_forked(self) -> None:
        """End this process if it is a child that the function forked and let go on as if it were
        the worker."""
        if os.getpid() != self._pid:
            os._exit(0)

    def told(self, message: msg.Told, descriptors: list[int]) -> None:
        """Between the cells of a session: the front end says something to one of its widgets."""
        from gpunb.workers import comms

        comms.told(message, arrived(message.payloads, descriptors))
        flush()
        self.remote.report_references()

    def context(self, work: msg.Execute, cancelled: Callable[[], bool] | None = None) -> Context:
        """Where the attempt runs, for those who ask."""
        host = self.host
        if host is None:
            return Context(
                work.task,
                work.attempt,
                work.name,
                self._gpu_ids,
                cancelled=self._interrupted,
                others=self._others,
            )
        return Context(
            work.task,
            work.attempt,
            work.name,
            self._gpu_ids,
            host.actor,
            host.type,
            host.name,
            host.restarted,
            cancelled or self._interrupted,
            self._others,
        )

    def _interrupted(self) -> bool:
        return self.interrupts.hit

    def _set_up(self, setup: msg.Setup) -> None:
        for name, value in setup.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        threads.obey(setup.environment)
        self._gpu_ids = tuple(setup.gpu_ids)
        self._others = tuple((name, tuple(ids)) for name, ids in setup.others)
        if self._gpu_ids:
            self._share(setup)
        if setup.directory is not None:
            try:
                os.chdir(setup.directory)
            except OSError:
                pass  # a directory that is gone is not worth the task
        sys.path[:] = setup.path
        sys.argv[:] = setup.argv

    def _share(self, setup: msg.Setup) -> None:
        """Keep to the share of a device, and say what is taken of it."""
        usage.begin(setup.gpu_ids)
        if setup.caps is not None:
            caps.install(caps.Caps(*setup.caps))
        if setup.reports and self._reporter is None:
            self._reporter = usage.Reporter(setup.reports, self._tell)
            self._reporter.start()

    def _tell(self, memory: Mapping[int, usage.Memory]) -> None:
        self.remote.send(msg.Used(tuple((at, *each) for at, each in memory.items())))

    def _attempt(self, work: msg.Execute, segments: list[Segment]) -> tuple[str, list[Payload]]:
        try:
            try:
                self.interrupts.begin((work.task, work.attempt))
                return "ok", self.results(work, self.call(work, segments))
            finally:
                self.interrupts.end()
        except BaseException as error:
            if self.interrupts.hit and isinstance(error, KeyboardInterrupt):
                return "interrupted", []
            self.interrupts.end()
            return self.failure(work, error)

    def failure(self, work: msg.Execute, error: BaseException) -> tuple[str, list[Payload]]:
        """The report of an attempt that raised."""
        if self.host is not None and isinstance(error, (ExitActor, SystemExit)):
            return "exit", [serialize.dumps(text) for text in _exits(work, error)]
        if self._gpu_ids:
            usage.explain(error)
        with serialize.moving() or nullcontext():
            payload = serialize.dump_failure(error, task=_label(work), skip=_frames_of_ours(error))
        return ("retry" if _retryable(error, work.retry) else "raised"), [payload]

    def call(self, work: msg.Execute, segments: list[Segment]) -> Any:
        """Call what the work says; a coroutine of an async actor is not awaited."""
        arguments, *inputs = serialize.from_wires((work.arguments, *work.inputs), segments)
        if work.kind == "cell":
            with UNDIVIDED:  # IPython takes an interrupt while it tries itself out for no matter
                from gpunb.workers import cells, shell

                shell.prepare()
            return cells.run(arguments, self.remote, _label(work))
        function = self._function(work)
        args, kwargs = self._arguments(work, arguments, inputs)
        if work.kind == "create":
            self.actor = _made(function, args, kwargs)
            return None
        value = function(*args, **kwargs)
        if inspect.iscoroutine(value) and (self.host is None or not self.host.concurrent):
            value.close()
            raise TypeError(
                f"{work.name} is an async function: a task must be a plain one; "
                "call asyncio.run inside it"
            )
        return value

    def _function(self, work: msg.Execute) -> Callable[..., Any]:
        if work.kind == "method":
            if work.function == TERMINATE:
                raise ExitActor
            if work.function == READY:
                return bool
            bound: Callable[..., Any] = getattr(self.actor, work.function)
            return bound
        function = self.functions.get(work.function)
        if not work.function:
            assert work.code is not None
            function = pickle.loads(work.code)
        elif function is None:
            function = pickle.loads(self._codes[work.function])
            self.functions[work.function] = function
            del self._codes[work.function]
        return function

    def _arguments(
        self, work: msg.Execute, arguments: Payload, inputs: list[Payload]
    ) -> tuple[Any, Any]:
        args, kwargs = serialize.loads(arguments)
        if inputs:
            values = [serialize.loads(each) for each in inputs]
            if work.late:
                values += [value_of(each) for each in self.remote.fetch(work.late, None)]
            args = [values[each.index] if type(each) is Slot else each for each in args]
            kwargs = {
                name: values[each.index] if type(each) is Slot else each
                for name, each in kwargs.items()
            }
        return args, kwargs

    def results(self, work: msg.Execute, value: Any) -> list[Payload]:
        """The results to report; those that come one by one are sent as they come."""
        returns, label = work.returns, _label(work)
        what = f"the result of {label}"
        if isinstance(value, Payload):
            return [value]
        if returns == 1:
            return [self._dumps(work, value, what)]
        if returns == 0:
            if inspect.isgenerator(value):
                deque(value, maxlen=0)  # its results are not wanted, but what it does is
            return []
        if returns == STREAMING:
            for index, each in enumerate(_generator(value, label)):
                self.yielded(work, index, each)
            return []
        if returns == DYNAMIC:
            refs = [self._put(work, each) for each in _generator(value, label)]
            return [serialize.dumps(DynamicObjectRefGenerator(refs), what=what)]
        many = isinstance(value, Sequence | set) or hasattr(value, "__iter__")
        values = list(value) if many else []
        if len(values) != returns:
            raise ValueError(
                f"{label} has num_returns={returns}, but returned "
                f"{len(values) if values else repr(value)[:80]}"
            )
        return [self._dumps(work, each, what) for each in values]

    def yielded(self, work: msg.Execute, index: int, value: Any) -> None:
        """Send a generator's value."""
        payload = self._dumps(work, value, f"value {index} of {_label(work)}")
        (wire,), _ = serialize.to_wires([payload])
        self.remote.send(msg.Yielded(work.task, work.attempt, index, wire), [payload])

    def _put(self, work: msg.Execute, value: Any) -> ObjectRef[Any]:
        return ObjectRef(self.remote.put(self._dumps(work, value, "value")), held=True)

    def _dumps(self, work: msg.Execute, value: Any, what: str) -> Payload:
        """Pickle something for the kernel, which touches no device."""
        moved = serialize.moving()
        if moved is None:
            return serialize.dumps(value, what=what)
        with self._moved.setdefault((work.task, work.attempt), moved):
            return serialize.dumps(value, what=what)


def _made(cls: Any, args: Any, kwargs: Any) -> Any:
    """An instance of the class. What its `__init__` returns is ignored, as Ray does it."""
    if type(cls).__call__ is not type.__call__:
        return cls(*args, **kwargs)
    made = cls.__new__(cls, *args, **kwargs)
    if isinstance(made, cls):
        type(made).__init__(made, *args, **kwargs)
    return made


def _frames_of_ours(error: BaseException) -> int:
    """How many frames of its traceback, from the outermost on, are in this package."""
    count, frame = 0, error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_HERE):
        count, frame = count + 1, frame.tb_next
    return count


def _exits(work: msg.Execute, error: BaseException) -> list[str]:
    """How a call has ended its actor, if not by `exit_actor`."""
    if not isinstance(error, SystemExit):
        return []
    who = f"its method {work.function}" if work.kind == "method" else "its constructor"
    code = "" if error.code is None else f"{error.code!r:.500}"
    return [f"{who} called sys.exit({code})"]


def _label(work: msg.Execute) -> str:
    return f"{work.name} (#{work.task})"


def _generator(value: Any, label: str) -> Iterator[Any]:
    if not hasattr(value, "__next__"):
        raise TypeError(f"{label} was to yield its results, but returned {value!r:.80}")
    generator: Iterator[Any] = value
    return generator


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


def say(text: str) -> None:
    """To whoever reads what the task prints."""
    try:
        sys.stderr.write(text)
    except Exception:
        pass  # as in `flush`


def flush() -> None:
    for each in (sys.stdout, sys.stderr):
        try:
            each.flush()
        except Exception:
            pass  # closed, or not a stream at all: the task may have put anything there
