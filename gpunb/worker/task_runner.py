"""Runs one attempt of a task: from the message to its results, or to its error."""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from gpunb.api.refs import value_of
from gpunb.data import serialize
from gpunb.data.segments import Segment
from gpunb.data.serialize import Payload
from gpunb.protocol import backend, plain
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import Context, ExitActor, FailedWith, Slot, titled
from gpunb.protocol.function_cache import MOST, Recent
from gpunb.scheduler.markup import control
from gpunb.system.signals import UNDIVIDED
from gpunb.worker.imported import ImportWatch
from gpunb.worker.interrupts import Interrupts
from gpunb.worker.limits import memory as limits_memory
from gpunb.worker.limits import threads, usage
from gpunb.worker.packing import Packer
from gpunb.worker.streams import flush, warn
from gpunb.worker.task_kernel import TaskKernel
from gpunb.worker.transport import arrived
from gpunb.worker.user_modules import loaded

MOST_SEGMENTS = 200
"""Of one message; the system's limit is 253 descriptors."""

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")

_LONGEST_TITLE = 200
"""Characters. A longer text of an actor's `__repr__` would hide the output that it precedes."""

TERMINATE, READY, CALL = "__ray_terminate__", "__ray_ready__", "__ray_call__"


class TaskRunner:
    """Runs attempts on the main thread, and knows what those in threads and coroutines need.

    Attributes:
        actor: the object that this worker is, if it is one; and what it was told of itself.
        title: the text by which the actor describes itself; empty if it has no such text.
    """

    def __init__(self, remote: TaskKernel, interrupts: Interrupts) -> None:
        self.remote = remote
        self.interrupts = interrupts
        self.actor: Any = None
        self.host: msg.HostedActor | None = None
        self.title = ""
        self._class_name = ""
        self.functions: dict[str, Callable[..., Any]] = {}
        self._codes: dict[str, bytes] = {}
        self._recent = Recent()
        self._packer = Packer(remote, self._label)
        self.results, self.yielded = self._packer.results, self._packer.yielded
        self._gpu_ids: tuple[int | str, ...] = ()
        self._others: tuple[tuple[str, tuple[int | str, ...]], ...] = ()
        self._reporter: usage.Reporter | None = None
        self._imports = ImportWatch()
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
            self.host = msg.HostedActor(*work.host)
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
                warn(f"gpunb: goes on with the modules that it knows: {error}\n")
        for name in self._codes:
            self.functions.pop(name, None)
        loaded.forget()

    def finish(self, work: msg.Execute, report: str, results: list[Payload]) -> None:
        """Report the end of an attempt."""
        self.end_forked()
        if self._gpu_ids and (memory := usage.measured()):
            self._report_memory(memory)
        if (imported := self._imports.report()) is not None:
            self.remote.send(imported)
        moved = self._packer.forget(work)
        if moved is not None and (note := str(moved)):
            warn(f"gpunb: {note}\n")
        self.remote.leave()
        flush()
        if len(results) > MOST_SEGMENTS:
            results = [*results[:MOST_SEGMENTS], *map(serialize.inlined, results[MOST_SEGMENTS:])]
        wires, segments = serialize.to_wires(results)
        done = msg.Done(work.task, work.attempt, report, wires, usage.took_short())
        self.remote.send(done, segments)
        if self.interrupts.raised:
            self.remote.take_stock()
        else:
            self.remote.report_references()

    def end_forked(self) -> None:
        """End this process if it is a child that the function forked and let go on as if it were
        the worker."""
        if os.getpid() != self._pid:
            os._exit(0)

    def on_comm(self, message: msg.CommMessage, descriptors: list[int]) -> None:
        """Between the cells of a session: the front end says something to one of its widgets."""
        from gpunb.worker.cell import widgets

        widgets.on_message(message, arrived(message.payloads, descriptors))
        flush()
        self.remote.report_references()

    def context(self, work: msg.Execute, cancelled: Callable[[], bool] | None = None) -> Context:
        """Where the attempt runs, for those who ask."""
        host, function = self.host, functools.partial(self._function_name, work)
        if host is None:
            return Context(
                work.task,
                work.attempt,
                work.name,
                self._gpu_ids,
                cancelled=self._interrupted,
                others=self._others,
                function=function,
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
            function,
        )

    def _function_name(self, work: msg.Execute) -> str:
        """Return the module and the name of what runs."""
        if work.kind == "method":
            owner, name = type(self.actor), work.function
            return f"{owner.__module__}.{owner.__name__}.{name}"
        function = self.functions.get(work.function)
        name = getattr(function, "__name__", work.name) + ".__init__" * (work.kind == "create")
        return f"{getattr(function, '__module__', '__main__')}.{name}"

    def _interrupted(self) -> bool:
        return self.interrupts.hit

    def _set_up(self, setup: msg.Setup) -> None:
        for name, value in setup.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        threads.obey(setup.environment)
        if "JAX_PROCESS_ID" in setup.environment:
            from gpunb.worker import jax_ranks

            jax_ranks.announce()
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
        if setup.follow:
            self._imports.begin()

    def _share(self, setup: msg.Setup) -> None:
        """Keep to the share of a device, and say what is taken of it."""
        if setup.reports != msg.UNPINNED:
            usage.begin(setup.gpu_ids)
        if setup.caps is not None:
            limits_memory.install(limits_memory.Caps(*setup.caps))
        if setup.reports > 0 and self._reporter is None:
            self._reporter = usage.Reporter(setup.reports, self._report_memory)
            self._reporter.start()

    def _report_memory(self, memory: Mapping[int, usage.ProcessMemory]) -> None:
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
        """The report of an attempt that raised: its error, and the results before it."""
        if isinstance(error, FailedWith):
            return "raised", [error.payload]
        if self.host is not None and isinstance(error, (ExitActor, SystemExit)):
            return "exit", [Payload(plain.dumps(each)) for each in _exits(work, error)]
        if self._gpu_ids:
            usage.explain(error)
            usage.ended_with(error)
        with serialize.moving() or nullcontext():
            payload = serialize.dump_failure(
                error, task=self._label(work), skip=_frames_of_ours(error)
            )
        report = "retry" if _retryable(error, work.retry) else "raised"
        return report, [payload, *self._packer.results_before(work, payload)]

    def call(self, work: msg.Execute, segments: list[Segment]) -> Any:
        """Call what the work says; a coroutine of an async actor is not awaited. The value of a
        constructor is the packed title of the actor, if it has one."""
        arguments, *inputs = serialize.from_wires((work.arguments, *work.inputs), segments)
        if work.kind == "cell":
            with UNDIVIDED:  # IPython takes an interrupt while it tries itself out for no matter
                from gpunb.worker.cell import run, shell

                shell.prepare()
            return run.run(arguments, self.remote, self._label(work), work.code or b"")
        if work.kind == "ranks":
            from gpunb.worker import ranks

            label = self._label(work)
            return ranks.run(work.code or b"", arguments, self.actor, label, _retryable)
        if self.host is not None and self.host.concurrent:
            import asyncio  # such an actor has loaded it

            backend.CALL.set(asyncio.current_task())
        function = self._function(work)
        args, kwargs = self._arguments(work, arguments, inputs)
        if work.kind == "create":
            self.actor = _made(function, args, kwargs)
            self.title, self._class_name = _title_of(self.actor), work.name
            return Payload(plain.dumps(self.title)) if self.title else None
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
                return lambda: True
            actor = self.actor
            if work.function == CALL:
                return lambda function, /, *args, **kwargs: function(actor, *args, **kwargs)
            bound: Callable[..., Any]
            if work.function in getattr(actor, "__dict__", ()):  # it does not hide the method
                bound = inspect.getattr_static(type(actor), work.function)
                return bound.__get__(actor, type(actor)) if hasattr(bound, "__get__") else bound
            bound = getattr(actor, work.function)
            return bound
        function = self.functions.get(work.function)
        if not work.function:
            assert work.code is not None
            function = serialize.loads_function(work.code)
        elif function is None:
            function = serialize.loads_function(self._codes[work.function])
            self.functions[work.function] = function
            del self._codes[work.function]
        return function

    def _arguments(
        self, work: msg.Execute, arguments: Payload, inputs: list[Payload]
    ) -> tuple[Any, Any]:
        args, kwargs = serialize.loads_arguments(arguments)
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

    def _label(self, work: msg.Execute) -> str:
        name = titled(work.name, self._class_name, self.title) if self.title else work.name
        return f"{name} (#{work.task})"


def _made(cls: Any, args: Any, kwargs: Any) -> Any:
    """An instance of the class. What its `__init__` returns is ignored, as Ray does it."""
    if type(cls).__call__ is not type.__call__:
        return cls(*args, **kwargs)
    made = cls.__new__(cls, *args, **kwargs)
    if isinstance(made, cls):
        type(made).__init__(made, *args, **kwargs)
    return made


def _title_of(actor: Any) -> str:
    """The text of the actor's own `__repr__`. Empty if its class has none in Python, or if the text
    is not one line of at most `_LONGEST_TITLE` characters."""
    if not inspect.isfunction(type(actor).__repr__):
        return ""
    try:
        text = str.__str__(repr(actor))  # exactly a str
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""
    return text if len(text) <= _LONGEST_TITLE and control(text) is None else ""


def _frames_of_ours(error: BaseException) -> int:
    """How many frames of its traceback, from the outermost on, are in this package."""
    count, frame = 0, error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        count, frame = count + 1, frame.tb_next
    return count


def _exits(work: msg.Execute, error: BaseException) -> list[tuple[str, bool]]:
    """How a call has ended its actor, if not by `exit_actor`; and whether it said that it failed,
    which 0 and nothing do not."""
    if isinstance(error, ExitActor) and error.args:
        return [(str(error), True)]
    if not isinstance(error, SystemExit):
        return []
    who = f"its method {work.function}" if work.kind == "method" else "its constructor"
    code = "" if error.code is None else f"{error.code!r:.500}"
    return [(f"{who} called sys.exit({code})", error.code not in (None, 0))]


def _retryable(error: BaseException, retry: bytes | bool) -> bool:
    if isinstance(retry, bool):
        return retry and isinstance(error, Exception)
    return isinstance(error, pickle.loads(retry))
