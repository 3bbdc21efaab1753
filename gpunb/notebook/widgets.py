"""The kernel's part of a cell's widgets: passes messages between the worker and the front end.

The kernel's comm manager has an entry for each comm that a worker opens, so that the front end
finds the comm and its messages reach the worker. The kernel keeps the state of each widget as well,
so that a page that is loaded again shows the widgets of workers that are gone.
"""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gpunb.data.serialize import Payload
from gpunb.notebook.shell import NotebookShell
from gpunb.protocol.sink import Answering, Sink
from gpunb.worker.cell.widgets import packed, unpacked

KINDS = frozenset({"comm_open", "comm_msg", "comm_close"})

MOST = 5000
"""Comms of ended workers whose state the kernel keeps, at most."""

WIDGETS = "jupyter.widget"
_CONTROL = "jupyter.widget.control"

_blocked = 0
_subshell: str | None = None
_lines: dict[str, CommProxy] = {}
_guard = threading.Lock()


class CommProxy:
    """A comm of a worker, as an entry of the kernel's comm manager.

    Attributes:
        sink: receives the output that the worker's handlers produce between cells.
    """

    primary = False

    def __init__(
        self, shell: NotebookShell, ident: str, target: str, worker: Answering | None, sink: Sink
    ) -> None:
        self.comm_id = ident
        self.target_name = target
        self.sink = sink
        self._shell = shell
        self._worker = worker
        self._state: dict[str, Any] = {}
        self._buffers: dict[tuple[Any, ...], Any] = {}

    @property
    def gone(self) -> bool:
        """Whether its worker is gone."""
        return self._worker is None or self._worker.gone

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Take a message of the front end."""
        data, buffers = msg["content"].get("data") or {}, msg.get("buffers") or []
        if self.target_name == WIDGETS and data.get("method") == "request_state":
            self._send_state(msg)
            return
        self.note(data, buffers)
        self._pass_on("comm_msg", msg, buffers)

    def handle_close(self, msg: dict[str, Any]) -> None:
        """Take the end of the comm from the front end."""
        _lines.pop(self.comm_id, None)
        self._pass_on("comm_close", msg, msg.get("buffers") or [])

    def close(self, *_: Any, **__: Any) -> None:
        """Close it towards the front end."""
        if self._shell.kernel.comm_manager.comms.pop(self.comm_id, None) is not None:
            _lines.pop(self.comm_id, None)
            _send(self._shell, "comm_close", self.comm_id, {"data": {}}, None)

    def note(self, data: Mapping[str, Any], buffers: Sequence[Any]) -> None:
        """Keep the part of a widget's state that a message has."""
        if self.target_name != WIDGETS or not isinstance(data.get("state"), dict):
            return
        self._state.update(data["state"])
        for path in [each for each in self._buffers if each[0] in data["state"]]:
            del self._buffers[path]
        paths = map(tuple, data.get("buffer_paths") or [])
        self._buffers.update((path, each) for path, each in zip(paths, buffers, strict=False))

    def _send_state(self, msg: dict[str, Any]) -> None:
        paths = [list(each) for each in self._buffers]
        data = {"method": "update", "state": self._state, "buffer_paths": paths}
        buffers = list(self._buffers.values())
        _send(self._shell, "comm_msg", self.comm_id, {"data": data}, msg, buffers=buffers)

    def _pass_on(self, kind: str, msg: dict[str, Any], buffers: Sequence[Any]) -> None:
        if self.gone:
            return  # its last state stays
        assert self._worker is not None
        content = {
            "comm_id": self.comm_id,
            "data": msg["content"].get("data") or {},
            "metadata": msg.get("metadata") or {},
            "header": {name: _plain(value) for name, value in msg["header"].items()},
        }
        self._worker.send_comm(kind, content, packed(buffers), self.sink)

    def _reply_subshell_for(self, data: Any, default: str | None) -> str | None:
        """The subshell that calls `handle_msg`; ipykernel asks on the thread that reads messages.
        While a cell blocks the main thread, the subshell must be another one."""
        return default or (aside(self._shell) if _blocked else None)


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime.datetime) else value


def aside(shell: NotebookShell) -> str | None:
    """A subshell of gpunb, for front ends that use none; None if the kernel cannot have it."""
    global _subshell
    if _subshell is None:
        try:
            manager = shell.kernel.shell_channel_thread.manager
            _subshell = manager._create_subshell()  # noqa: SLF001 - there is no public way
        except Exception:  # another version of ipykernel; the message waits for the end of the cell
            return None
    return _subshell


@contextmanager
def blocking() -> Iterator[None]:
    """Count a cell in the foreground, which blocks the main thread."""
    global _blocked
    with _guard:
        _blocked += 1
    try:
        yield
    finally:
        with _guard:
            _blocked -= 1


def deliver(
    shell: NotebookShell,
    kind: str,
    content: Mapping[str, Any],
    payloads: Sequence[Payload],
    worker: Answering | None,
    *,
    parent: Any,
    sink: Callable[[], Sink],
) -> None:
    """Send a message of a worker's comm to the front end.

    Args:
        worker: gets the front end's messages.
        parent: request of the cell; unused if the message replies to the front end.
        sink: makes the sink for output between cells.
    """
    manager = getattr(shell.kernel, "comm_manager", None)
    if manager is None:
        return
    ident, message, buffers = content["comm_id"], json.loads(content["message"]), unpacked(payloads)
    line: CommProxy | None
    if kind == "comm_open":
        line = CommProxy(shell, ident, message["target_name"], worker, sink())
        _keep(manager, line)
    else:
        line = _lines.get(ident)
    if kind == "comm_close":
        manager.comms.pop(ident, None)
        _lines.pop(ident, None)
    elif line is not None:
        line.note(message["data"], buffers)
    answers = content.get("answers")
    _send(shell, kind, ident, message, {"header": answers} if answers else parent, buffers=buffers)


def _keep(manager: Any, line: CommProxy) -> None:
    manager.comms[line.comm_id] = _lines[line.comm_id] = line
    if line.target_name == WIDGETS and manager.targets.get(_CONTROL) is not _refuse:
        manager.targets[_CONTROL] = _refuse
    if len(_lines) > MOST:
        for ident, each in list(_lines.items())[: len(_lines) - MOST]:
            if each.gone:
                del _lines[ident]
                manager.comms.pop(ident, None)


def _refuse(comm: Any, _: Any) -> None:
    """Refuse the front end's request for the states of all widgets at once, to which ipywidgets
    would reply with those of the kernel only. The front end then asks for each widget that
    `comm_info` lists."""
    comm.close()


def _send(
    shell: NotebookShell,
    kind: str,
    ident: str,
    message: Mapping[str, Any],
    parent: Any,
    *,
    buffers: Sequence[Any] = (),
) -> None:
    content = {name: each for name, each in message.items() if name != "metadata"}
    shell.send(
        kind,
        {"comm_id": ident, **content},
        parent,
        metadata=message.get("metadata"),
        ident=f"comm-{ident}".encode(),
        buffers=list(buffers),
    )
