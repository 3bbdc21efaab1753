"""Background cells that another kernel has handed in, in the head process that has them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpunb import backend
from gpunb.backend import Keeper
from gpunb.core.options import Options
from gpunb.notebook import sessions
from gpunb.notebook.cells import HandedIn, Request
from gpunb.notebook.output import Place
from gpunb.notebook.shipping import Always, Shipment
from gpunb.runtime import log as logs
from gpunb.runtime.log import Item, Log
from gpunb.serialize import Payload

if TYPE_CHECKING:
    from gpunb.notebook.job import Job


class Fetched:
    """In place of a sink: what such a cell has shown, as far as it was asked for.

    Attributes:
        failed: whether the cell has said that it failed.
    """

    background = True
    failed = False
    place: Place | None = None

    def __init__(self, keeper: Keeper, job: int) -> None:
        self._keeper = keeper
        self._job = job
        self._log = Log()
        self._position = 0
        self._unseen: list[Item] = []

    @property
    def log(self) -> Log:
        """All that it has shown by now."""
        self._fetch()
        return self._log

    def news(self) -> list[Item]:
        """What was not shown here yet."""
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
            portion, self._position = self._keeper.log_of(self._job, self._position)
            if not portion:
                return
            for item in logs.items(portion):
                if item[1] == "failed":
                    if item[2]["ename"] == "KeyboardInterrupt":
                        continue  # the reason of that comes with its end
                    self.failed = True
                self._add(item)


def adopt(
    shell: Any, keeper: Keeper, ident: int
) -> tuple[HandedIn, Fetched, dict[str, Any] | None]:
    """A background cell that the head process keeps, its output, and what is known of it if it is
    over.

    Raises:
        ValueError: there is no such cell.
        ObjectLostError: what it made is not kept any more.
    """
    facts = keeper.adopt(ident)
    host = None
    if facts["actor"]:
        host = sessions.of(shell).hosting(facts["session"], facts["actor"])
    options = Options(timeout=facts["timeout"])
    request = Request("", "", options, session=host)
    current = backend.current()
    shipment = Shipment({}, since=Always())
    number = facts["number"]
    handed = HandedIn(shell, request, current, (ident, 0), facts["name"], number, shipment)
    return handed, Fetched(keeper, ident), facts["past"] if facts["over"] else None


def log_of(keeper: Keeper, ident: int) -> Log:
    """What a background cell has shown, even if its result is not kept any more.

    Raises:
        ValueError: nothing is kept of it.
    """
    return Fetched(keeper, ident).log


class Program:
    """In place of a notebook's shell: a program that has no notebook."""

    class _Hook:
        prompt_count = 0

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.displayhook = self._Hook()

    def push(self, names: Mapping[str, Any]) -> None:
        """Bind names; `Job.names` has them."""
        self.user_ns.update(names)


_program = Program()


def get_job(ident: int) -> Job:
    """As `gpunb.get_job`."""
    from gpunb.notebook import jobs

    if isinstance(ident, bool) or not isinstance(ident, int):
        raise TypeError(f"get_job takes the number of a job, such as 7, not {ident!r}")
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return jobs.of(shell if shell is not None else _program).find(ident)
