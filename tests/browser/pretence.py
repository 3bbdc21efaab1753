"""Stands in for the server's extension: says what a test wants, or is not as it should be."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.browser.jupyter import Page

PANEL = "[...window.jupyterapp.shell.widgets('right')].find((each) => each.id === 'gpunb-panel')"
"""The widget of the panel, in JavaScript."""

HEARD = f"""time => {{
    const {{ state, problem }} = {PANEL}.connection;
    return state.at === time && !problem;
}}"""


class Pretence:
    """Answers a page in place of the server.

    Attributes:
        status: of the answer to a request; 0 for no answer at all.
        news: the first message of the web socket; None if the socket cannot be opened.
    """

    def __init__(self) -> None:
        self.status = 404
        self.news: dict[str, Any] | None = None
        self._socket: Any = None

    def prepare(self, context: Any) -> None:
        context.route_web_socket(re.compile("gpunb/api/changes"), self._opened)
        context.route("**/gpunb/api/machine*", self._answer)

    def retry(self, page: Page, status: int = 404, machine: dict[str, Any] | None = None) -> None:
        """Be otherwise from now on, and have the page try again at once."""
        self.status = status
        self.news = None if machine is None else news(machine=machine)
        page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")

    def tell(self, page: Page, said: dict[str, Any]) -> None:
        """Say this on an open socket or on the next one, and wait until the page has heard it."""
        self.news = said
        if self._socket is not None:
            self._socket.send(json.dumps(said))
        page.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.page.wait_for_function(HEARD, arg=said["time"])

    def fail(self) -> None:
        """Cut the page off, and answer nothing any more."""
        self.status, self.news = 0, None
        self._socket.close()
        self._socket = None

    def _opened(self, socket: Any) -> None:
        if self.news is None:
            socket.close()
        else:
            self._socket = socket
            socket.send(json.dumps(self.news))

    def _answer(self, route: Any) -> None:
        if self.status:
            route.fulfill(status=self.status, body="{}")
        else:
            route.abort()


def news(
    facts: dict[str, Any] | None = None, machine: dict[str, Any] | None = None, time: float = 0
) -> dict[str, Any]:
    """A message of the server with one session, or with none and the devices of the machine."""
    sessions = {} if facts is None else {"4711": facts}
    said = {"sessions": sessions, "gone": [], "whole": True, "machine": machine or {}}
    return {**said, "time": time or (facts or {}).get("time", 0)}
