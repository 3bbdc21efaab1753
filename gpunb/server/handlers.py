"""The routes: the machine as JSON, its changes as they happen, and what may be done to a job.

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

from gpunb.exceptions import GpunbError
from gpunb.runtime import kernels
from gpunb.server import machine
from gpunb.server.watching import INTERVAL, Listener, Watching

RESOURCE = "gpunb"
"""What an authorizer of the server is asked about."""

PATIENCE = 10.0
"""Seconds that a session on a busy machine may take to do what it is asked."""

_REQUESTS = {"cancel": "job", "interrupt": "job", "kill": "actor", "logs": "job"}
"""What may be asked of a session, and the number that says of what."""


class Machine(APIHandler):
    """All sessions of this user, or the devices where none runs."""

    auth_resource = RESOURCE

    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await machine.whole(), default=str))


class Changes(WebSocketMixin, WebSocketHandler, JupyterHandler):
    """A socket that gets everything first, and then what changes."""

    auth_resource = RESOURCE

    def initialize(self, watching: Watching) -> None:
        self._watching = watching
        self._listener: Listener | None = None

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
        self._listener = Listener(self._send, interval)
        self._watching.join(self._listener)

    def on_message(self, message: str | bytes) -> None:
        """Nothing is said here; requests are POSTs, which the server protects better."""

    def on_close(self) -> None:
        if self._listener is not None:
            self._watching.leave(self._listener)

    def get_compression_options(self) -> dict[str, Any]:
        return {"compression_level": 1}

    async def _send(self, text: str) -> None:
        with contextlib.suppress(WebSocketClosedError):  # it is leaving
            await self.write_message(text)


class Request(APIHandler):
    """Something that a session is asked to do to one of its jobs."""

    auth_resource = RESOURCE

    @web.authenticated
    @authorized
    async def post(self, pid: str, what: str) -> None:
        said = self.get_json_body() or {}
        if not isinstance(said, dict):
            raise web.HTTPError(400, "the body must be a JSON object")
        request = {"do": what, _REQUESTS[what]: said.get(_REQUESTS[what])}
        if what == "cancel" and said.get("force") is True:
            request["force"] = True
        try:
            value = await asyncio.to_thread(kernels.ask, int(pid), request, PATIENCE)
        except GpunbError as error:
            self.set_status(409)
            self.finish(json.dumps({"message": str(error)}))
            return
        self.finish(json.dumps({"value": value}))


def install(serverapp: Any) -> None:
    """Add the routes to a server."""
    watching = Watching()
    base = url_path_join(serverapp.web_app.settings["base_url"], "gpunb", "api")
    routes = [
        (url_path_join(base, "machine"), Machine),
        (url_path_join(base, "changes"), Changes, {"watching": watching}),
        (url_path_join(base, "sessions", "([0-9]{1,9})", f"({'|'.join(_REQUESTS)})"), Request),
    ]
    serverapp.web_app.add_handlers(".*$", routes)
