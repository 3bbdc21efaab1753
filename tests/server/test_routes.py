"""The routes of a real server, and what they do to a real session."""

from __future__ import annotations

import asyncio
import http.cookiejar
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from tests import sessions
from tests.browser.jupyter import BASE, TOKEN, Jupyter, running
from tests.waiting import PATIENCE, Gate, eventually

pytest.importorskip("jupyterlab")
pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jupyter]:
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def session(server: Jupyter, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A session of this process that the server can see."""
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(server.runtime))
    with sessions.session(num_gpus=2):
        mine(server)
        yield


def mine(server: Jupyter) -> dict[str, Any]:
    """What the server says of the session of this process, which may be slow to answer."""

    def reported() -> Any:
        return server.ask("gpunb/api/machine")["sessions"].get(str(os.getpid()), {})

    found: dict[str, Any] = eventually(lambda: "devices" in reported() and reported(), "it is told")
    return found


def post(server: Jupyter, what: str, of: int | None = None, **printed: Any) -> Any:
    answer = server.ask(f"gpunb/api/sessions/{of or os.getpid()}/{what}", "POST", printed)
    return answer["value"]


def refused(server: Jupyter, what: str, of: int | None = None, **printed: Any) -> tuple[int, str]:
    """The status and the message of a request that fails."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, what, of, **printed)
    with caught.value as error:
        text = error.read()
        return error.code, str(json.loads(text)["message"]) if text.startswith(b"{") else ""


def status(url: str, method: str = "GET", opener: Any = None) -> int:
    """The status of an answer to somebody with no token."""
    opener = opener or urllib.request.build_opener()
    data = b"{}" if method == "POST" else None
    request = urllib.request.Request(url, method=method, data=data)
    try:
        with opener.open(request, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_without_a_session_the_machine_route_has_its_devices(server: Jupyter) -> None:
    whole = server.ask("gpunb/api/machine")
    assert whole["sessions"] == {}
    assert [each["type"] for each in whole["machine"]["devices"]] == ["A100", "A100"]


def test_the_machine_route_has_a_session(server: Jupyter, session: None) -> None:
    assert [each["id"] for each in mine(server)["devices"]] == [0, 1]
    assert server.ask("gpunb/api/machine")["machine"] == {}


def test_a_job_is_cancelled(server: Jupyter, session: None, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    ref = gpunb.remote(num_gpus=1)(gate.enter).remote()
    gate.await_()
    (job,) = mine(server)["running"]
    post(server, "cancel", job=job["id"], force=True)
    with pytest.raises(gpunb.exceptions.GpunbError):
        gpunb.get(ref, timeout=PATIENCE)


def test_a_job_is_interrupted(server: Jupyter, session: None, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    ref = gpunb.remote(num_gpus=1)(gate.enter).remote()
    gate.await_()
    (job,) = mine(server)["running"]
    post(server, "interrupt", job=job["id"])
    with pytest.raises((gpunb.exceptions.GpunbError, KeyboardInterrupt)):
        gpunb.get(ref, timeout=PATIENCE)


def test_an_actor_is_killed(server: Jupyter, session: None) -> None:
    @gpunb.remote(num_gpus=0.5)
    class Held:
        def here(self) -> bool:
            return True

    actor = Held.remote()
    assert gpunb.get(actor.here.remote(), timeout=PATIENCE)
    (seen,) = mine(server)["actors"]
    post(server, "kill", actor=seen["id"])
    eventually(lambda: gpunb.available_resources().get("GPU") == 2)


def test_requests_that_cannot_be_done_are_refused_with_a_reason(
    server: Jupyter, session: None
) -> None:
    assert refused(server, "cancel", job=999) == (409, "there is no job #999 that is not over")
    assert "must be a number" in refused(server, "cancel", job="7; rm")[1]
    assert refused(server, "cancel", of=999999999, job=1) == (
        409,
        "process 999999999 has no session of gpunb",
    )
    assert refused(server, "release", all=True)[0] == 404  # not for the front end


def test_requests_without_a_token_are_refused(server: Jupyter) -> None:
    machine = f"{server.url}gpunb/api/machine"
    assert status(machine) == 403
    assert status(f"{server.url}gpunb/api/sessions/1/cancel", "POST") == 403
    assert asyncio.run(first_word(server, "")) == 403


@pytest.fixture(scope="module")
def cookies(server: Jupyter) -> http.cookiejar.CookieJar:
    """Those of a browser that has logged in."""
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(f"{server.url}api/status?token={TOKEN}", timeout=PATIENCE).close()
    return jar


def test_a_browser_needs_more_than_its_cookie_to_change_something(
    server: Jupyter, cookies: http.cookiejar.CookieJar
) -> None:
    """Another site could make it send that (XSRF)."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    assert status(f"{server.url}gpunb/api/machine", opener=opener) == 200
    assert status(f"{server.url}gpunb/api/sessions/1/cancel", "POST", opener) == 403


def test_web_sockets_of_other_sites_are_refused(
    server: Jupyter, cookies: http.cookiejar.CookieJar
) -> None:
    cookie = "; ".join(f"{each.name}={each.value}" for each in cookies)
    own = {"Cookie": cookie, "Origin": server.url.removesuffix(BASE)}
    assert asyncio.run(first_word(server, "", **own))["whole"]
    other = {"Cookie": cookie, "Origin": "https://elsewhere.example"}
    assert asyncio.run(first_word(server, "", **other)) == 403


def test_changes_are_pushed(server: Jupyter) -> None:
    assert BASE in server.url
    word = asyncio.run(first_word(server, TOKEN))
    assert isinstance(word, dict)
    assert word["whole"]


async def first_word(server: Jupyter, token: str, **headers: str) -> Any:
    """What the socket says first, or the status with which it is refused."""
    from tornado.httpclient import HTTPClientError, HTTPRequest
    from tornado.websocket import websocket_connect

    url = f"{server.url.replace('http', 'ws', 1)}gpunb/api/changes?interval=1"
    url += f"&token={token}" if token else ""
    try:
        socket = await websocket_connect(HTTPRequest(url, headers=headers))
    except HTTPClientError as error:
        return error.code
    try:
        printed = await asyncio.wait_for(socket.read_message(), PATIENCE)
        return json.loads(printed or "null")
    finally:
        socket.close()
        while await socket.read_message() is not None:
            pass  # until the other side has heard of it
