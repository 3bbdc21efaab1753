"""Finds background cells of another kernel in the head process that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpunb.data.serialize import Payload
from gpunb.engine import job_log as logs
from gpunb.engine.job_log import Item, Log
from gpunb.notebook.capture import CellRequest
from gpunb.notebook.cell import HandedIn
from gpunb.notebook.sessions import Sessions
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.shipment import Shipment, Since
from gpunb.protocol import backend
from gpunb.protocol.backend import SharedBackend
from gpunb.protocol.sink import Sink
from gpunb.scheduler.markup import as_text
from gpunb.scheduler.options import Options


class Fetched(Sink):
    """The output of a cell of another kernel, fetched from the head process when it is needed."""

    background = True

    def __init__(self, head: SharedBackend, job: int) -> None:
        self._head = head
        self._job = job
        self._log = Log()
        self._position = 0
        self._unseen: list[Item] = []

    @property
    def log(self) -> Log:
        """Its output by now."""
        self._fetch()
        return self._log

    def news(self) -> list[Item]:
        """The output that `news` has not returned yet."""
        self._fetch()
        unseen, self._unseen = self._unseen, []
        return unseen

    def text(self, stream: str, text: str) -> None:
        self._add(("text", stream, {"text": text}))

    def show(self, kind: str, content: Mapping[str, Any], payloads: Sequence[Payload]) -> None:
        if not payloads:
            self._add(("show", kind, content))

    def error(self, content: dict[str, Any]) -> None:
        """Add an error, unless the cell has shown it."""
        self._fetch()
        if not self.failed:
            self.failed = True
            self._add(("show", "failed", content))

    def _add(self, item: Item) -> None:
        self._log.add(item)
        self._unseen.append(item)

    def _fetch(self) -> None:
        while True:
            portion, self._position = self._head.log_of(self._job, self._position)
            if not portion:
                return
            for item in logs.items(portion):
                if item[1] == "failed":
                    if item[2]["ename"] == "KeyboardInterrupt":
                        continue  # the end of the cell tells the reason
                    self.failed = True
                self._add(item)


def adopt(
    shell: NotebookShell, head: SharedBackend, ident: int
) -> tuple[HandedIn, Fetched, dict[str, Any] | None]:
    """A background cell that the head process keeps, and its output; and its last facts if it is
    over.

    Raises:
        ValueError: there is no such cell.
        ObjectLostError: its result is not kept any more.
    """
    facts, session = head.adopt(ident), None
    if facts["actor"]:
        session = shell.part(Sessions).of_actor(facts["session"], facts["actor"])
    request = CellRequest("", "", Options(timeout=facts["timeout"]), session=session)
    handed = HandedIn(
        shell,
        request,
        backend.current(),
        (ident, 0),
        as_text(facts["name"]),
        facts["number"],
        Shipment({}, since=Since({}, (), {})),
    )
    return handed, Fetched(head, ident), facts["past"] if facts["over"] else None
