"""From a job to the cell that it belongs to.

A job in the foreground hands its output to the main thread, which writes it as the cell itself
would: `%%capture`, Output widgets and a plain terminal see nothing unusual. Any other job's output
is sent to the front end by the runtime's thread, with the request that submitted the job as its
parent, whichever cell runs by then; but where nobody would see it there, as one of that cell's.
"""

from __future__ import annotations

import copyreg
import queue
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from IPython.core.displayhook import CapturingDisplayHook

from gpunb.notebook import comms, unattended
from gpunb.notebook.capping import Cap
from gpunb.runtime import output
from gpunb.runtime.log import Item, Log
from gpunb.runtime.output import Answering
from gpunb.serialize import Payload

DONE: Item = ("done", "", {})

Place: TypeAlias = tuple[int, str | None]
"""A cell: its number, and the front end's name for it."""

Answer: TypeAlias = Callable[[str | None, Exception | None], None]
"""Takes the answer to a question, or why there is none."""


class Foreground:
    """A sink that keeps everything, in order, for whoever waits for the job. `asks` says whether
    there is a user who can be asked."""

    failed = False
    """Whether the cell has said that it failed."""

    def __init__(self, *, asks: bool = False) -> None:
        self.queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.log = Log()
        self.place: Place | None = None
        self._asks = asks
        self._worker: Answering | None = None
        self._caps: dict[str, Cap] = {}

    def by(self, worker: Answering) -> None:
        """Who shows what comes next."""
        self._worker = worker

    def ask(self, prompt: str | None, password: bool, answer: Answer) -> None:
        """Have the user asked; without a prompt, say whether that can be done."""
        if prompt is not None:
            self._rest()
            content = {"prompt": prompt, "password": password, "answer": answer}
            self.queue.put(("ask", "", content))
        elif self._asks:
            answer(None, None)
        else:
            answer(None, NotImplementedError("this front end does not support input requests"))

    def text(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))
        shown = self._caps.setdefault(stream, Cap()).feed(text)
        if shown:
            self.queue.put(("text", stream, {"text": shown}))

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        self._rest()
        if kind in comms.KINDS:
            said = {"content": content, "payloads": payloads, "worker": self._worker}
            self.queue.put(("comm", kind, said))
            return
        if kind == "failed":
            self.failed = True
        self.log.add(("show", kind, content))
        self.queue.put(("show", kind, content))

    def done(self) -> None:
        """Nothing more will come."""
        self._rest()
        self.queue.put(DONE)

    def _rest(self) -> None:
        for stream, cap in self._caps.items():
            if rest := cap.rest():
                self.queue.put(("text", stream, {"text": rest}))


def relay(shell: Any, kind: str, what: str, content: Mapping[str, Any]) -> None:
    """Write one thing that a job in the foreground showed, as the running cell would."""
    if kind == "text":
        stream = getattr(sys, what)
        stream.write(content["text"])
        stream.flush()
    elif kind == "comm":
        sys.stdout.flush()
        sys.stderr.flush()
        comms.deliver(
            shell, what, **content, parent=request_of(shell), sink=lambda: Sent(shell, None)
        )
    elif what in ("display_data", "update_display_data"):
        sys.stdout.flush()
        shell.display_pub.publish(
            data=content["data"],
            metadata=content["metadata"],
            transient=content["transient"],
            update=what.startswith("update"),
        )
    elif what == "clear_output":
        shell.display_pub.clear_output(wait=content["wait"])
    elif what == "error":
        error = type(content["ename"], (Exception,), {})(content["evalue"])
        shell._showtraceback(type(error), error, content["traceback"])  # noqa: SLF001
    elif what == "execute_result":
        if isinstance(sys.displayhook, CapturingDisplayHook):
            sys.displayhook.outputs.append(dict(content))
            return
        hook = shell.displayhook
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(content["data"], content["metadata"])
        hook.log_output(content["data"])
        hook.finish_displayhook()


class Sent:
    """A sink that sends to the cell from which it was made, in a Jupyter kernel; each line with
    the task it comes from if there is a name."""

    def __init__(
        self, shell: Any, name: str | None, parent: Any = None, number: int | None = None
    ) -> None:
        """For the running cell, or the one of the request `parent`; `number` is the cell's, for
        the value of its last expression."""
        self._shell = shell
        self._number = number
        self._kernel = shell.kernel
        self._parent = parent or request_of(shell)
        self._late: unattended.Late | None = None
        self.place: Place | None = place_of(shell)
        self._console = None if name is None else _Prefixed(name, self._stream)
        self._caps: dict[str, Cap] = {}
        self._worker: Answering | None = None
        self.log = Log()

    def by(self, worker: Answering) -> None:
        """Who shows what comes next."""
        self._worker = worker

    def on(self, pid: int | None) -> None:
        """The worker's process, for the prefix of its lines."""
        if self._console is not None:
            self._console.on(pid)

    def named(self, name: str) -> Sent:
        """For a task of another name that shows in the same cell."""
        made = Sent(self._shell, name, self._parent)
        made.place, made._late = self.place, self._late
        return made

    def text(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))
        self._write(stream, self._caps.setdefault(stream, Cap()).feed(text))

    def end(self) -> None:
        """The job is over."""
        for stream, cap in self._caps.items():
            self._write(stream, cap.rest())

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind in comms.KINDS:
            for stream, cap in self._caps.items():
                self._write(stream, cap.rest())
            comms.deliver(
                self._shell,
                kind,
                content,
                payloads,
                self._worker,
                parent=self._parent,
                sink=lambda: self,
            )
            return
        self.log.add(("show", kind, content))
        own = {"execution_count": self._number} if kind == "execute_result" else {}
        self.send(kind, {**content, **own})

    def _write(self, stream: str, text: str) -> None:
        if not text:
            return
        if self._console is None:
            self._stream(stream, text)
        else:
            self._console.text(stream, text)

    def send(self, kind: str, content: dict[str, Any]) -> None:
        """Send a message as a part of the cell's output."""
        if self._late is None:
            _send(self._kernel, kind, content, self._parent)
        else:
            self._late.send(kind, content, self._parent)

    def unattended(self) -> Sent:
        """The same, for a notebook without a user."""
        self._late = _late(self._shell)
        return self

    def _stream(self, stream: str, text: str) -> None:
        self.send("stream", {"name": stream, "text": text})


def _send(kernel: Any, kind: str, content: dict[str, Any], parent: Any) -> None:
    kernel.session.send(kernel.iopub_socket, kind, content, parent=parent)


def _late(shell: Any) -> unattended.Late:
    return unattended.of(shell, lambda: request_of(shell), partial(_send, shell.kernel))


class _Prefixed(output.Console):
    """Lines with the task they come from, written by a function."""

    def __init__(self, name: str, write: Any) -> None:
        super().__init__(name)
        self._write_to = write

    def write(self, stream: str, text: str) -> None:
        self._write_to(stream, text)


def install(shell: Any) -> None:
    """In a Jupyter kernel, send what functions print to the cells that submitted them."""
    streams: Any = sys.modules.get("ipykernel.iostream")
    if streams is not None:
        # The notebook's own, as in `def log(text, file=sys.stderr)`, become those of the worker.
        copyreg.pickle(streams.OutStream, lambda stream: (getattr, (sys, stream.name)))
    _late(shell)  # from now on it sees which cell runs

    def sink(name: str) -> Sent:
        made = Sent(shell, name)
        return made.unattended() if headless(shell) else made

    output.install(sink, lambda: _cell(shell))


def request_of(shell: Any) -> Any:
    """The message that has the running cell in it."""
    get_parent = getattr(shell, "get_parent", None) or shell.kernel.get_parent
    return get_parent()


def may_ask(shell: Any) -> bool:
    """Whether the front end of the running cell takes input: those that only execute do not, and
    they do not wait for output that comes late."""
    if not hasattr(shell, "kernel"):
        return True
    return bool((request_of(shell).get("content") or {}).get("allow_stdin", True))


def headless(shell: Any) -> bool:
    """Whether nobody would see what comes after a cell's end."""
    magics = shell.magics_manager.registry.get("GpuMagics")
    said = magics.headless if magics is not None else None
    return not may_ask(shell) if said is None else bool(said)


def place_of(shell: Any) -> Place:
    """The running cell."""
    request = request_of(shell) if hasattr(shell, "kernel") else {}
    number: int = shell.displayhook.prompt_count
    return number, (request.get("metadata") or {}).get("cellId")


def _cell(shell: Any) -> str | None:
    """The running cell, the same whenever it is run: the front end's name for it, or its text."""
    request = request_of(shell)
    named = (request.get("metadata") or {}).get("cellId")
    return named or (request.get("content") or {}).get("code")
