"""The routes: the machine as JSON, its changes over a socket, and requests to sessions.

All are below ``gpunb/api`` of the server's base URL, for those who may use the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from gpunb.control import client
from gpunb.exceptions import GpunbError
from gpunb.server import machine
from gpunb.server.watcher import INTERVAL, NewsListener, Watcher

RESOURCE = "gpunb"
"""The resource that the server's authorizer checks."""

PATIENCE = 10.0
"""Seconds to wait for a session's reply on a busy machine."""

_REQUESTS = {
    "cancel": "job",
    "interrupt": "job",
    "kill": "actor",
    "logs": "job",
    "stop": "sweep",
}
"""The requests to a session, and the field of each with its job, actor or sweep."""


class MachineRoute(APIHandler):
    """Route for the snapshots of all sessions of this user, or the devices if none runs."""

    auth_resource = RESOURCE

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await machine.whole(), default=str))


class ChangesRoute(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """A web socket that gets the whole state first, and then the changes."""

    auth_resource = RESOURCE

    def initialize(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._listener: NewsListener | None = None

    @ws_authenticated
    async def get(self, *arguments: Any, **named: Any) -> None:
        allowed = self.authorizer.is_authorized(self, self.current_user, "read", RESOURCE)
        if not await ensure_async(allowed):
            raise web.HTTPError(403)
        await super().get(*arguments, **named)

    def open(self, *arguments: Any, **named: Any) -> None:
        super().open(*arguments, **named)
        try:
            interval = float(self.get_argument("interval", str(INTERVAL)))
        except ValueError:
            interval = INTERVAL
        self._listener = NewsListener(self._send, interval)
        self._watcher.join(self._listener)

    def on_message(self, message: str | bytes) -> None:
        """Ignore messages: requests are POSTs, which the server protects better."""

    def on_close(self) -> None:
        if self._listener is not None:
            self._watcher.leave(self._listener)

    def get_compression_options(self) -> dict[str, Any]:
        return {"compression_level": 1}

    async def _send(self, text: str) -> None:
        with contextlib.suppress(WebSocketClosedError):  # the page is being closed
            await self.write_message(text)


class RequestRoute(APIHandler):
    """Route for requests to a session about one of its jobs or actors."""

    auth_resource = RESOURCE

    @web.authenticated
    @authorized
    async def post(self, pid: str, what: str) -> None:
        body = self.get_json_body() or {}
        if not isinstance(body, dict):
            raise web.HTTPError(400, "the body must be a JSON object")
        request = {"do": what, _REQUESTS[what]: body.get(_REQUESTS[what])}
        if what == "cancel" and body.get("force") is True:
            request["force"] = True
        if what == "logs" and "position" in body:
            request["position"] = body["position"]
        try:
            value = await asyncio.to_thread(client.ask, int(pid), request, PATIENCE)
        except GpunbError as error:
            self.set_status(409)
            self.finish(json.dumps({"message": str(error)}))
            return
        self.finish(json.dumps({"value": value}))


def install(serverapp: Any) -> None:
    """Add the routes to a server."""
    watcher = Watcher()
    base = url_path_join(serverapp.web_app.settings["base_url"], "gpunb", "api")
    routes = [
        (url_path_join(base, "machine"), MachineRoute),
        (url_path_join(base, "changes"), ChangesRoute, {"watcher": watcher}),
        (url_path_join(base, "sessions", "([0-9]{1,9})", f"({'|'.join(_REQUESTS)})"), RequestRoute),
    ]
    serverapp.web_app.add_handlers(".*$", routes)
