"""Widgets of a cell: passes messages between the worker and the front end, through the kernel.

The messages of a comm go to the kernel like displays, in order with the text of the cell. Messages
of the front end come as `CommMessage`. While a cell runs, a thread reads them and calls the
handlers, so that a button works in a busy cell; between the cells of a session the main thread
does.
"""

from __future__ import annotations

import base64
import contextvars
import datetime
import json
import numbers
import os
import pickle
import sys
import threading
import traceback
import types
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import comm
from comm.base_comm import BaseComm, CommManager

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.protocol import messages as msg
from gpunb.worker.cell.shell import Show
from gpunb.worker.task_kernel import TaskKernel


class Comm(BaseComm):
    """The worker's end of a comm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.kernel = _Output(_comms.request)
        super().__init__(*args, **kwargs)

    def publish_msg(
        self,
        msg_type: str,
        data: Any = None,
        metadata: Any = None,
        buffers: Sequence[Any] | None = None,
        **keys: Any,
    ) -> None:
        if not _comms.request or os.getpid() != _comms.process:
            return  # there is no front end, or this is a fork, which must not use the channel
        message = {"data": data or {}, "metadata": metadata or {}, **keys}
        content = {
            "comm_id": self.comm_id,
            "message": json.dumps(message, default=_plain),
            "answers": _answered.get(),
        }
        if msg_type == "comm_open":
            _comms.opened()
        _comms.show(msg_type, content, packed(buffers))

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Call the handler. In a thread beside a cell do nothing else, because the hooks of IPython
        around a handler, such as showing figures, are for the main thread."""
        if threading.current_thread() is threading.main_thread():
            super().handle_msg(msg)
        elif self._msg_callback is not None:
            self._msg_callback(msg)

    def __del__(self) -> None:
        """Do nothing: the comm is closed, or the manager would refer to it."""

    def __reduce__(self) -> Any:
        raise TypeError(WHY_HERE)


WHY_HERE = "widgets live in the process that made them"


def why_here(value: Any, reason: str) -> str:
    """The reason why a value cannot leave the worker; in plain words for a widget, and for a
    function or a progress bar that has one."""
    of_bar = getattr(getattr(value, "container", None), "comm", None)
    return WHY_HERE if WHY_HERE in reason or isinstance(of_bar, Comm) else reason


class _Output:
    """Gives an Output widget the request whose output it catches."""

    def __init__(self, request: str) -> None:
        self.request = request

    def get_parent(self) -> dict[str, Any]:
        return {"header": {"msg_id": _comms.request if _comms.running else self.request}}


class _Comms:
    """The state that the comms of this process share.

    Attributes:
        request: id of the notebook's request for the last cell.
        running: whether a cell runs.
        process: id of the worker's process, to know its forks.
    """

    remote: TaskKernel
    show: Show

    def __init__(self) -> None:
        self.request = ""
        self.running = False
        self.process = 0
        self.manager = CommManager()

    def opened(self) -> None:
        """Start to read messages of the front end."""
        if self.running:
            self.remote.listen_to(on_message)


_comms = _Comms()
_answered: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "gpunb_answered", default=None
)
"""The header of the front end's message that a handler handles now."""


def begin(remote: TaskKernel, show: Show, request: str) -> None:
    """Note that a cell begins; without a request, the notebook shows no widgets."""
    if not _comms.process:
        _comms.process = os.getpid()
        if request:
            sys.meta_path.insert(0, _Bars)
            _reconsider_bars()
    comm.create_comm = Comm
    comm.get_comm_manager = lambda: _comms.manager
    _comms.remote, _comms.show, _comms.request = remote, show, request
    _comms.running = True
    if _comms.manager.comms:
        _comms.opened()


def end() -> None:
    """Note that the cell is over."""
    if _comms.running:
        _comms.running = False
        _comms.remote.listen_to(None)


def on_message(message: msg.CommMessage, payloads: Sequence[Payload]) -> None:
    """Call the handler of the comm that a message is for. An error of the handler is only shown."""
    content, kind = message.content, message.kind
    if content["comm_id"] not in _comms.manager.comms:
        return
    whole = {
        "header": content["header"],
        "parent_header": {},
        "msg_id": content["header"].get("msg_id"),
        "msg_type": kind,
        "metadata": content["metadata"],
        "content": {"comm_id": content["comm_id"], "data": content["data"]},
        "buffers": unpacked(payloads),
    }
    token = _answered.set(content["header"])
    try:
        handle = getattr(_comms.manager, kind)
        handle(None, None, whole)
    except BaseException:  # the manager has shown plain exceptions itself
        traceback.print_exc()
    finally:
        _answered.reset(token)


# ------------------------------------------------------------------------------------- in between


def packed(buffers: Sequence[Any] | None) -> list[Payload]:
    """The binary buffers of a message."""
    if not buffers:
        return []
    return [serialize.dumps([pickle.PickleBuffer(each) for each in buffers], what="buffers")]


def unpacked(payloads: Sequence[Payload]) -> list[memoryview]:
    """The opposite of `packed`."""
    return [memoryview(each) for each in serialize.loads(payloads[0])] if payloads else []


def _plain(value: Any) -> Any:
    """A value for JSON in place of one that JSON cannot have; the same as in a kernel."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            value = value.astimezone()
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Iterable):
        return list(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r} is not JSON serializable")


# -------------------------------------------------------------------------------------------- tqdm

_AUTOMATIC = "tqdm.autonotebook"
_MODULE = "ipykernel.zmqshell"


class _Bars:
    """Lets tqdm.auto choose bars that are widgets.

    tqdm.auto checks whether a module of ipykernel is loaded. Loading it takes a quarter of a
    second, so an empty module takes its place while tqdm.auto is imported.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _AUTOMATIC:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                sign = types.ModuleType(_MODULE)
                sys.modules.setdefault(_MODULE, sign)
                try:
                    execute(module)
                finally:
                    if sys.modules.get(_MODULE) is sign:
                        del sys.modules[_MODULE]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _reconsider_bars() -> None:
    """Let tqdm.auto choose again if it was loaded before there was a notebook."""
    chosen = sys.modules.get(_AUTOMATIC)
    if chosen is not None and chosen.tqdm.__module__ == "tqdm.std":
        for name in (_AUTOMATIC, "tqdm.auto"):
            sys.modules.pop(name, None)
