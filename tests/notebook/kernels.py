"""Real Jupyter kernels for tests, and what a front end sees of their cells."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel

from tests.sessions import MARK, ROOT, marked
from tests.waiting import PATIENCE, eventually

PREPARE = """
import gpunb
%load_ext gpunb
gpunb.init(num_cpus=2, num_gpus=2)
"""

_SAYS_WHEN_IT_WAITS = """
def say_when_it_waits():
    import _thread, sys, threading, time

    # The functions of Python, of gpunb and of a loop in which the main thread waits.
    main = threading.main_thread().ident
    names = ("wait", "wait_for_gate", "select", "next")

    def look():
        while sys._current_frames()[main].f_code.co_name.strip("_") not in names:
            time.sleep(0.005)
        print("it waits", flush=True)

    _thread.start_new_thread(look, ())
"""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_KERNEL = "GPUNB_TEST_KERNEL"
_OUTPUTS = ("stream", "display_data", "update_display_data", "execute_result", "clear_output")


def plain(text: str) -> str:
    """The text without colours."""
    return _ANSI.sub("", text)


@dataclass
class Result:
    """A cell as a front end sees it; it grows while messages of the cell arrive.

    Attributes:
        messages: (type, content) of its output, in order.
        status: of the reply, once there is one: ok, error or aborted.
        count: its execution count.
        idle: whether the kernel said that it is done with it.
    """

    ident: str = ""
    code: str = ""
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    status: str = ""
    count: int = 0
    idle: bool = False
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    expressions: dict[str, Any] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """All that it wrote to a stream."""
        return "".join(
            content["text"]
            for kind, content in self.messages
            if kind == "stream" and content["name"] == name
        )

    @property
    def stdout(self) -> str:
        return self.text("stdout")

    @property
    def stderr(self) -> str:
        return self.text("stderr")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The contents of its messages of one type."""
        return [content for each, content in self.messages if each == kind]

    @property
    def result(self) -> dict[str, Any] | None:
        """The data of its last expression."""
        found = self.of("execute_result")
        return found[0]["data"] if found else None

    @property
    def value(self) -> str | None:
        """The text of its last expression."""
        return self.result["text/plain"] if self.result is not None else None

    @property
    def displayed(self) -> list[dict[str, Any]]:
        return [content["data"] for content in self.of("display_data")]

    def outputs(self) -> list[tuple[Any, ...]]:
        """What it showed in order; neighbouring texts as one, and standard error apart."""
        shown: list[tuple[Any, ...]] = []
        for kind, content in self.messages:
            if kind != "stream":
                rest = (content.get("data"), content.get("metadata"), content.get("wait"))
                shown.append((kind, *rest))
            elif content["name"] != "stdout":
                continue
            elif shown and shown[-1][0] == "stream":
                shown[-1] = "stream", shown[-1][1] + content["text"]
            else:
                shown.append(("stream", content["text"]))
        return [*shown, ("stderr", self.stderr)]

    def __bool__(self) -> bool:
        return self.status == "ok"


class Kernel:
    """A running kernel and a client of it.

    Attributes:
        stdin: whether cells may ask for input, as they may where a user sits before a notebook.
        lost: why no more cells can be run, once that is so.
    """

    stdin = False
    lost = ""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client
        self.results: dict[str, Result] = {}
        self.comms: list[dict[str, Any]] = []
        """The messages of all comms, as they came."""

    def __call__(self, code: str, **expressions: str) -> Result:
        """Run a cell to its end. `expressions` are evaluated after it, in the kernel."""
        return self.finish(self.start(code, **expressions))

    def ok(self, code: str, **expressions: str) -> Result:
        """As calling, of a cell that must succeed."""
        result = self(code, **expressions)
        assert result, f"{code}\n{result.stderr}\n{result.traceback}"
        return result

    def start(self, code: str, **expressions: str) -> Result:
        """Send a cell and do not wait for it."""
        assert not self.lost, self.lost
        ident = self.client.execute(
            code, allow_stdin=self.stdin, user_expressions=expressions, stop_on_error=False
        )
        return self.results.setdefault(ident, Result(ident, code))

    def finish(self, result: Result, within: float = PATIENCE) -> Result:
        """Wait until a cell is over: its reply and its last output."""
        self.until(lambda: result.status and result.idle, result, within)
        return result

    def until(self, true: Any, result: Result, within: float = PATIENCE) -> None:
        """Take in messages until the condition holds, looked at after each."""
        deadline = time.monotonic() + within
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within:g} s: {result}")
            self._take(self.client.get_iopub_msg)
            if result.idle:
                self._take(self.client.get_shell_msg)

    def begun(self, result: Result) -> None:
        """Wait until the kernel has begun a cell."""
        self.until(lambda: result.count, result)

    def shows(self, result: Result, text: str, stream: str = "stdout") -> None:
        """Wait until a cell has written this text."""
        self.until(lambda: text in result.text(stream), result)

    def waits(self, code: str) -> Result:
        """Send a cell that ends with a wait, and return when the kernel waits there."""
        self.ok(_SAYS_WHEN_IT_WAITS)
        result = self.start(f"say_when_it_waits()\n{code}")
        self.shows(result, "it waits")
        return result

    def late(self, true: Any, within: float = PATIENCE) -> None:
        """Take in what comes late, to cells that are over, until the condition holds."""
        deadline = time.monotonic() + within
        while not true():
            assert time.monotonic() < deadline, f"not within {within:g} s: {self.results}"
            self._take(self.client.get_iopub_msg)

    def settle(self, seconds: float = 0.3) -> None:
        """Take in what comes late, to cells that are over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._take(self.client.get_iopub_msg)

    def interrupt(self) -> None:
        """What the Stop button does."""
        self.manager.interrupt_kernel()

    def recover(self, within: float = PATIENCE) -> None:
        """Stop what a test that failed left running, for which all others would wait."""
        if self.lost:
            return
        try:
            last = self.start("")
            deadline = time.monotonic() + within
            while True:
                assert self.manager.is_alive(), "dead"
                assert time.monotonic() < deadline, "busy"
                with contextlib.suppress(AssertionError):
                    self.finish(last, 1)
                    return
                self.interrupt()
        except Exception as error:  # noqa: BLE001 - of whatever the test left of it
            self.lost = f"the kernel is lost since an earlier test: {error!r}"

    def value(self, expression: str) -> Any:
        """The value of an expression in the kernel, by its repr."""
        result = self.ok("", value=f"repr({expression})")
        answer = result.expressions["value"]
        assert answer["status"] == "ok", answer
        text = answer["data"]["text/plain"]
        return eval(eval(text))

    def _take(self, receive: Any) -> None:
        try:
            message = receive(timeout=0.2)
        except queue.Empty:
            return
        ident = message["parent_header"].get("msg_id", "")
        result = self.results.setdefault(ident, Result(ident))
        kind, content = message["msg_type"], message["content"]
        if kind in _OUTPUTS:
            result.messages.append((kind, content))
        elif kind.startswith("comm_"):
            self.comms.append(message)
        elif kind == "execute_input":
            result.count = content["execution_count"]
        elif kind == "status":
            result.idle = content["execution_state"] == "idle"
        elif kind == "error":
            result.ename, result.evalue = content["ename"], content["evalue"]
            result.traceback = plain("\n".join(content["traceback"]))
        elif kind == "execute_reply":
            result.status = content["status"]
            result.expressions = content.get("user_expressions") or {}


@contextlib.contextmanager
def kernel(folder: Path, prepare: str = PREPARE, **variables: str) -> Iterator[Kernel]:
    """A kernel in a folder, after whose end no process of it is left."""
    unwanted = {"CUDA_VISIBLE_DEVICES", "GPUNB_SIMULATE", "GPUNB_NUM_GPUS", "GPUNB_NUM_CPUS"}
    unwanted.add("PYTEST_CURRENT_TEST")  # with it ipykernel does not capture what C code prints
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / "ipython"), **variables}
    assert MARK in env
    with leaving_nothing() as mark:
        env |= mark
        manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=env)
        running = Kernel(manager, client)
        try:
            if prepare:
                running.ok(prepare)
            yield running
        finally:
            running.lost = "the kernel was ended"
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()


@contextlib.contextmanager
def leaving_nothing() -> Iterator[dict[str, str]]:
    """A variable for programs of which no process may be left in the end; other kernels may get
    new ones meanwhile."""
    own = f"{os.getpid()}-{time.time_ns()}"
    yield {_KERNEL: own}
    eventually(lambda: not _of(own), f"processes are left: {marked()}")


def _of(kernel: str) -> list[int]:
    """The processes that come from a kernel."""
    found = []
    for pid in marked():
        with contextlib.suppress(OSError):
            if f"{_KERNEL}={kernel}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found
