"""The kernel's part in the comms of workers: between a cell's widgets and the front end.

Each comm that a worker opens has a place in the kernel's comm manager, so that the front end finds
it and what it says is handed on. The state of a widget is kept here as well: when the page is
loaded again, its widgets are there again, though most of their workers are long gone.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpunb.runtime.output import Answering, Sink
from gpunb.serialize import Payload
from gpunb.workers.comms import packed, unpacked

KINDS = frozenset({"comm_open", "comm_msg", "comm_close"})

MOST = 5000
"""Comms of workers that are gone, of which the kernel keeps the state."""

WIDGETS = "jupyter.widget"
_CONTROL = "jupyter.widget.control"

_blocked = 0
_subshell: str | None = None
_lines: dict[str, Line] = {}
_guard = threading.Lock()


class Line:
    """A comm of a worker, as the kernel's comm manager has it.

    Attributes:
        sink: where it goes what the worker shows because of the front end, between cells.
    """

    primary = False

    def __init__(
        self, kernel: Any, ident: str, target: str, worker: Answering | None, sink: Sink
    ) -> None:
        self.comm_id = ident
        self.target_name = target
        self.sink = sink
        self._kernel = kernel
        self._worker = worker
        self._state: dict[str, Any] = {}
        self._buffers: dict[tuple[Any, ...], Any] = {}

    @property
    def gone(self) -> bool:
        """Whether its worker is."""
        return self._worker is None or self._worker.gone

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """The front end says something."""
        data, buffers = msg["content"].get("data") or {}, msg.get("buffers") or []
        if self.target_name == WIDGETS and data.get("method") == "request_state":
            self._tell_state(msg)
            return
        self.note(data, buffers)
        self._hand_on("comm_msg", msg, buffers)

    def handle_close(self, msg: dict[str, Any]) -> None:
        """The front end closes it."""
        _lines.pop(self.comm_id, None)
        self._hand_on("comm_close", msg, msg.get("buffers") or [])

    def close(self, *_: Any, **__: Any) -> None:
        """Close it towards the front end."""
        if self._kernel.comm_manager.comms.pop(self.comm_id, None) is not None:
            _lines.pop(self.comm_id, None)
            _send(self._kernel, "comm_close", self.comm_id, {"data": {}}, None)

    def note(self, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """Keep what the message says of a widget's state."""
        if self.target_name != WIDGETS or not isinstance(data.get("state"), dict):
            return
        self._state.update(data["state"])
        for path in [each for each in self._buffers if each[0] in data["state"]]:
            del self._buffers[path]
        paths = map(tuple, data.get("buffer_paths") or [])
        self._buffers.update((path, each) for path, each in zip(paths, buffers, strict=False))

    def _tell_state(self, msg: dict[str, Any]) -> None:
        paths = [list(each) for each in self._buffers]
        data = {"method": "update", "state": self._state, "buffer_paths": paths}
        said, buffers = {"data": data}, list(self._buffers.values())
        _send(self._kernel, "comm_msg", self.comm_id, said, msg, buffers=buffers)

    def _hand_on(self, kind: str, msg: dict[str, Any], buffers: Sequence[Any]) -> None:
        if self.gone:
            return  # it stays as it was
        assert self._worker is not None
        content = {
            "comm_id": self.comm_id,
            "data": msg["content"].get("data") or {},
            "metadata": msg.get("metadata") or {},
            "header": {name: _plain(value) for name, value in msg["header"].items()},
        }
        self._worker.tell(kind, content, packed(buffers), self.sink)

    def _reply_subshell_for(self, data: Any, default: str | None) -> str | None:
        """Asked by ipykernel, on the thread that takes in messages: the subshell that is to call
        `handle_msg`. While a cell blocks the main thread, it must be another one."""
        return default or (aside(self._kernel) if _blocked else None)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime.datetime) else value


def aside(kernel: Any) -> str | None:
    """A subshell of our own, for front ends that have none."""
    global _subshell
    if _subshell is None:
        try:
            manager = kernel.shell_channel_thread.manager
            _subshell = manager._create_subshell()  # noqa: SLF001 - there is no public way
        except Exception:  # of another version; the message waits for the end of the cell
            return None
    return _subshell


class Blocking:
    """While a cell in the foreground keeps the main thread."""

    def __enter__(self) -> None:
        global _blocked
        with _guard:
            _blocked += 1

    def __exit__(self, *_: object) -> None:
        global _blocked
        with _guard:
            _blocked -= 1


def deliver(
    shell: Any,
    kind: str,
    content: Mapping[str, Any],
    payloads: Sequence[Payload],
    worker: Answering | None,
    *,
    parent: Any,
    sink: Callable[[], Sink],
) -> None:
    """Send what a worker's comm says to the front end.

    Args:
        worker: for the answers.
        parent: the request of the cell, unless it is an answer itself.
        sink: makes what shows in that cell when it is over.
    """
    kernel = getattr(shell, "kernel", None)
    manager = getattr(kernel, "comm_manager", None)
    if manager is None:
        return
    ident, said, buffers = content["comm_id"], json.loads(content["said"]), unpacked(payloads)
    line: Line | None
    if kind == "comm_open":
        line = Line(kernel, ident, said["target_name"], worker, sink())
        _keep(manager, line)
    else:
        line = _lines.get(ident)
    if kind == "comm_close":
        manager.comms.pop(ident, None)
        _lines.pop(ident, None)
    elif line is not None:
        line.note(said["data"], buffers)
    answers = content.get("answers")
    _send(kernel, kind, ident, said, {"header": answers} if answers else parent, buffers=buffers)


def _keep(manager: Any, line: Line) -> None:
    manager.comms[line.comm_id] = _lines[line.comm_id] = line
    if line.target_name == WIDGETS and manager.targets.get(_CONTROL) is not _refuse:
        manager.targets[_CONTROL] = _refuse
    if len(_lines) > MOST:
        for ident, each in list(_lines.items())[: len(_lines) - MOST]:
            if each.gone:
                del _lines[ident]
                manager.comms.pop(ident, None)


def _refuse(comm: Any, _: Any) -> None:
    """The front end asks for the states of all widgets at once. ipywidgets would answer for those
    of the kernel only; so it has to ask for each of those that `comm_info` lists."""
    comm.close()


def _send(
    kernel: Any,
    kind: str,
    ident: str,
    said: Mapping[str, Any],
    parent: Any,
    *,
    buffers: Sequence[Any] = (),
) -> None:
    content = {name: each for name, each in said.items() if name != "metadata"}
    kernel.session.send(
        kernel.iopub_socket,
        kind,
        {"comm_id": ident, **content},
        metadata=said.get("metadata"),
        parent=parent,
        ident=f"comm-{ident}".encode(),
        buffers=list(buffers),
    )
