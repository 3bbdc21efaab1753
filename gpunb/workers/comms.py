"""Comms of a cell: how its widgets and the front end talk, by way of the kernel.

What a comm says goes home like a display, in order with what the cell prints. What the front end
says comes as `Told`. While a cell runs, a thread receives it and calls the handlers, so that a
button works in a cell that is busy; between the cells of a session the main thread does.
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
from traitlets.config import Config

from gpunb import serialize
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.remote import Remote
from gpunb.workers.shell import Show, prepare


class Comm(BaseComm):
    """The worker's end."""

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
            return  # there is no front end; or a fork would speak to the kernel
        said = {"data": data or {}, "metadata": metadata or {}, **keys}
        content = {
            "comm_id": self.comm_id,
            "said": json.dumps(said, default=_plain),
            "answers": _answered.get(),
        }
        if msg_type == "comm_open":
            _comms.opened()
        _comms.show(msg_type, content, packed(buffers))

    def handle_msg(self, msg: dict[str, Any]) -> None:
        """Call the handler; in a thread beside a cell nothing else, because what IPython does
        around it, such as showing figures, is for the main thread."""
        if threading.current_thread() is threading.main_thread():
            super().handle_msg(msg)
        elif self._msg_callback is not None:
            self._msg_callback(msg)

    def __del__(self) -> None:
        """It is closed, or the manager would have it."""

    def __reduce__(self) -> Any:
        raise TypeError(_WHY_HERE)


_WHY_HERE = "widgets live in the process that made them, and show what happens there"


def why_here(value: Any, reason: str) -> str:
    """The reason why something cannot leave the worker, in plain words if it is a widget, or a
    function or progress bar that has one."""
    of_bar = getattr(getattr(value, "container", None), "comm", None)
    return _WHY_HERE if _WHY_HERE in reason or isinstance(of_bar, Comm) else reason


class _Output:
    """Tells an Output widget which request's output it is to catch."""

    def __init__(self, request: str) -> None:
        self.request = request

    def get_parent(self) -> dict[str, Any]:
        return {"header": {"msg_id": _comms.request if _comms.running else self.request}}


class _Comms:
    """What the comms of this process have in common.

    Attributes:
        request: of the notebook, by which the cell was run; the last one.
        running: whether a cell runs.
        process: the worker's, not a fork's.
    """

    remote: Remote
    show: Show

    def __init__(self) -> None:
        self.request = ""
        self.running = False
        self.process = 0
        self.manager = CommManager()

    def opened(self) -> None:
        """A comm is opened: somebody should listen."""
        if self.running:
            self.remote.listen_to(told)


_comms = _Comms()
_answered: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "gpunb_answered", default=None
)
"""The header of the front end's message that is being handled."""


def begin(remote: Remote, show: Show, request: str) -> None:
    """A cell begins; without a request, the notebook shows no widgets."""
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
    """The cell is over."""
    if _comms.running:
        _comms.running = False
        _comms.remote.listen_to(None)


def told(message: msg.Told, payloads: Sequence[Payload]) -> None:
    """Call the handler of the comm that is meant. What it raises is shown, and nothing ends."""
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
    except BaseException:  # others than these the manager has shown
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
    """What stands in JSON for what has no place there; the same as in a kernel."""
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
_MODULE, _SECTION = "ipykernel.zmqshell", "IPKernelApp"


class _Bars:
    """Lets tqdm.auto choose bars that are widgets. It looks whether a certain module of ipykernel
    is loaded, and a quarter of a second is too much for that, so it is there for so long only; so
    is the section of the shell's configuration at which it looked before tqdm 4.68.3."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _AUTOMATIC:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                config, sign = prepare().config, types.ModuleType(_MODULE)
                config[_SECTION] = Config()
                sys.modules.setdefault(_MODULE, sign)
                try:
                    execute(module)
                finally:
                    del config[_SECTION]
                    if sys.modules.get(_MODULE) is sign:
                        del sys.modules[_MODULE]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _reconsider_bars() -> None:
    """Where tqdm.auto was loaded before there was a notebook, let it choose again."""
    chosen = sys.modules.get(_AUTOMATIC)
    if chosen is not None and chosen.tqdm.__module__ == "tqdm.std":
        for name in (_AUTOMATIC, "tqdm.auto"):
            sys.modules.pop(name, None)
