"""Shows the output of jobs under their cells.

The main thread writes the output of a job in the foreground, as the cell itself would: `%%capture`,
Output widgets and a plain terminal work as usual. The engine's thread sends the output of any other
job to the front end, as a part of the cell that submitted the job, even if another cell runs by
then. In a notebook without a user it becomes a part of the cell that runs.
"""

from __future__ import annotations

import copyreg
import queue
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from IPython.core.displayhook import CapturingDisplayHook

from gpunb.data.serialize import Payload
from gpunb.engine.job_log import Item, Log
from gpunb.notebook import widgets
from gpunb.notebook.headless_output import Late
from gpunb.notebook.output_limit import OutputCaps
from gpunb.notebook.rank_output import Folds
from gpunb.notebook.shell import NotebookShell
from gpunb.protocol import sink as protocol_sink
from gpunb.protocol.sink import Answering, Sink

DONE: Item = ("done", "", {})

Answer: TypeAlias = Callable[[str | None, Exception | None], None]
"""Takes the answer to a question, or the reason why there is none."""


class Foreground(Sink):
    """A sink that queues everything, in order, for the thread that waits for the job."""

    asks = True

    def __init__(self, *, has_user: bool = False, folds: Folds | None = None) -> None:
        """
        Args:
            has_user: whether there is a user who can be asked.
            folds: shows the output of several ranks.
        """
        self._folds = folds
        self.queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self.log = Log()
        self._has_user = has_user
        self._worker: Answering | None = None
        self._caps = OutputCaps()

    def by(self, worker: Answering) -> None:
        self._worker = worker

    def ask(self, prompt: str | None, password: bool, answer: Answer) -> None:
        if prompt is not None:
            self._rest()
            content = {"prompt": prompt, "password": password, "answer": answer}
            self.queue.put(("ask", "", content))
        elif self._has_user:
            answer(None, None)
        else:
            answer(None, NotImplementedError("this front end does not support input requests"))

    def text(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))
        if self._folds is not None:
            text = self._folds.lead(stream, text)
        if shown := self._caps.feed(stream, text):
            self.queue.put(("text", stream, {"text": shown}))

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        self._rest()
        if kind in widgets.KINDS:
            message = {"content": content, "payloads": payloads, "worker": self._worker}
            self.queue.put(("comm", kind, message))
            return
        if kind == "failed":
            self.failed = True
        if kind == protocol_sink.REPORT:
            return  # this job is no trial of a sweep
        self.log.add(("show", kind, content))
        if kind != "rank":
            self.queue.put(("show", kind, content))
        elif self._folds is not None:
            self._put(self._folds.take(content))

    def done(self) -> None:
        """End the queue."""
        self._rest()
        if self._folds is not None:
            self._put(self._folds.rest())
        self.queue.put(DONE)

    def _put(self, items: Iterable[Item]) -> None:
        for item in items:
            self.queue.put(item)

    def _rest(self) -> None:
        for stream, text in self._caps.rest():
            self.queue.put(("text", stream, {"text": text}))


def relay(shell: NotebookShell, kind: str, what: str, content: Mapping[str, Any]) -> None:
    """Write one item of the output of a job in the foreground, as the running cell would."""
    ip = shell.ip
    if kind == "text":
        stream = getattr(sys, what)
        stream.write(content["text"])
        stream.flush()
    elif kind == "comm":
        sys.stdout.flush()
        sys.stderr.flush()
        widgets.deliver(
            shell, what, **content, parent=shell.request(), sink=lambda: Sent(shell, None)
        )
    elif what in ("display_data", "update_display_data"):
        sys.stdout.flush()
        ip.display_pub.publish(
            data=content["data"],
            metadata=content["metadata"],
            transient=content["transient"],
            update=what.startswith("update"),
        )
    elif what == "clear_output":
        ip.display_pub.clear_output(wait=content["wait"])
    elif what == "error":
        error = type(content["ename"], (Exception,), {})(content["evalue"])
        ip._showtraceback(type(error), error, content["traceback"])  # noqa: SLF001
    elif what == "execute_result":
        if isinstance(sys.displayhook, CapturingDisplayHook):
            sys.displayhook.outputs.append(dict(content))
            return
        hook = ip.displayhook
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(content["data"], content["metadata"])
        hook.log_output(content["data"])
        hook.finish_displayhook()


class Sent(Sink):
    """A sink that sends output to the cell in which the sink was made, in a Jupyter kernel."""

    def __init__(
        self,
        shell: NotebookShell,
        name: str | None,
        parent: Any = None,
        number: int | None = None,
        late: Late | None = None,
        *,
        folds: Folds | None = None,
    ) -> None:
        """Make a sink for the running cell, or for the cell of the request `parent`.

        Args:
            name: name of the task, for the start of each line; None for no such name.
            number: execution count of the cell, for the value of its last expression.
            late: sends the messages in a notebook without a user.
            folds: shows the output of several ranks.
        """
        self._folds = folds
        self._shell = shell
        self._number = number
        self._parent = parent or shell.request()
        self._late = late
        self.place = shell.place()
        self._console = None if name is None else _Prefixed(name, self._stream)
        self._caps = OutputCaps()
        self._worker: Answering | None = None
        self.log = Log()

    def by(self, worker: Answering) -> None:
        self._worker = worker

    def on(self, pid: int | None, actor: str = "") -> None:
        if self._console is not None:
            self._console.on(pid, actor)

    def named(self, name: str) -> Sent:
        made = Sent(self._shell, name, self._parent, late=self._late)
        made.place = self.place
        return made

    def text(self, stream: str, text: str) -> None:
        self.log.add(("text", stream, {"text": text}))
        if self._folds is not None:
            text = self._folds.lead(stream, text)
        self._write(stream, self._caps.feed(stream, text))

    def end(self) -> None:
        self.rest()
        if self._folds is not None:
            self._show_all(self._folds.rest())

    def rest(self) -> None:
        """Show the text that was held back."""
        for stream, text in self._caps.rest():
            self._write(stream, text)

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if kind in widgets.KINDS:
            self.rest()  # text that was held back comes first
            widgets.deliver(
                self._shell,
                kind,
                content,
                payloads,
                self._worker,
                parent=self._parent,
                sink=lambda: self,
            )
            return
        if kind == protocol_sink.REPORT:
            return  # this job is no trial of a sweep
        self.log.add(("show", kind, content))
        if kind == "rank":
            if self._folds is not None:
                self._show_all(self._folds.take(content))
            return
        own = {"execution_count": self._number} if kind == "execute_result" else {}
        self.send(kind, {**content, **own})

    def _show_all(self, items: Iterable[Item]) -> None:
        for kind, what, content in items:
            if kind == "text":
                self._write(what, content["text"])
            else:
                self.send(what, dict(content))

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
            self._shell.send(kind, content, self._parent)
        else:
            self._late.send(kind, content, self._parent)

    def _stream(self, stream: str, text: str) -> None:
        self.send("stream", {"name": stream, "text": text})


class _Prefixed(protocol_sink.Console):
    """Writes lines by a function, each with the name of its task."""

    def __init__(self, name: str, write: Any) -> None:
        super().__init__(name)
        self._write_to = write

    def write(self, stream: str, text: str) -> None:
        self._write_to(stream, text)


def install(shell: NotebookShell) -> None:
    """In a Jupyter kernel, send the output of functions to the cells that submitted them."""
    streams: Any = sys.modules.get("ipykernel.iostream")
    if streams is not None:
        # A stream of the notebook, as in `def log(text, file=sys.stderr)`, becomes the worker's.
        copyreg.pickle(streams.OutStream, lambda stream: (getattr, (sys, stream.name)))
    late = shell.part(Late)  # from now on it sees which cell runs
    protocol_sink.install(
        lambda name: Sent(shell, name, late=late if shell.headless() else None), shell.origin
    )
