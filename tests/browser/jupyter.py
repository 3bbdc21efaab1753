"""A Jupyter server, and its pages as a user drives them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.sessions import ROOT
from tests.waiting import PATIENCE, eventually

LABEXTENSION = ROOT / "gpunb" / "labextension"
TOKEN = "let-me-in"
BASE = "/under/a/prefix/"
DEVICES = "2xA100:40GiB"

_number = itertools.count(1)


class Jupyter:
    """A server that runs; `url` ends in a slash."""

    def __init__(self, folder: Path, url: str, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.url = url
        self.process = process
        self.runtime = folder / "gpunb"

    def notebook(self, cells: list[str]) -> str:
        """A new notebook with these cells of code; its path on the server."""
        name = f"test-{next(_number)}.ipynb"
        code = [
            {
                "cell_type": "code",
                "execution_count": None,
                "id": f"cell-{at}",
                "metadata": {},
                "outputs": [],
                "source": each,
            }
            for at, each in enumerate(cells)
        ]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        content = {
            "cells": code,
            "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.folder / "notebooks" / name).write_text(json.dumps(content))
        return name

    def ask(self, path: str, method: str = "GET", data: Any = None) -> Any:
        """What the server's REST API answers."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            headers={"Authorization": f"token {TOKEN}"},
            data=None if data is None else json.dumps(data).encode(),
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def cancel(self, job: int) -> None:
        """Cancel a job of the only session."""
        (pid,) = self.ask("gpunb/api/machine")["sessions"]
        self.ask(f"gpunb/api/sessions/{pid}/cancel", "POST", {"job": job})

    def kernels(self) -> list[str]:
        return [each["id"] for each in self.ask("api/kernels")]

    def shut_down_kernels(self) -> None:
        """End all kernels, at once: the server would wait for each to end by itself."""

        def ended() -> bool:
            for each in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "ipykernel_launcher" in each.cmdline():
                        each.kill()
            with contextlib.suppress(urllib.error.HTTPError):  # it may be restarting one
                for each in self.ask("api/sessions"):
                    self.ask(f"api/sessions/{each['id']}", "DELETE")
            return not self.kernels()

        eventually(ended, "the kernels end")


def _prepare(folder: Path) -> dict[str, str]:
    """The folders of a server of its own, and the environment that names them."""
    for name in ("notebooks", "config/jupyter_server_config.d", "share/labextensions", "home"):
        (folder / name).mkdir(parents=True)
    if LABEXTENSION.exists():
        (folder / "share/labextensions/gpunb").symlink_to(LABEXTENSION)
    enabled = ROOT / "labextension/jupyter-config/gpunb.json"
    if enabled.exists():
        (folder / "config/jupyter_server_config.d/gpunb.json").symlink_to(enabled)
    settings = {
        "@jupyterlab/apputils-extension/notification": {
            "fetchNews": "false",
            "checkForUpdates": False,
        },
        "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    }
    for name, content in settings.items():
        path = folder / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return {
        "HOME": str(folder / "home"),
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTER_PATH": str(folder / "share"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "GPUNB_RUNTIME_DIR": str(folder / "gpunb"),
        "GPUNB_SIMULATE": DEVICES,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@contextlib.contextmanager
def running(folder: Path, **environment: str) -> Iterator[Jupyter]:
    """A server in a folder of its own, with nothing left of it afterwards."""
    variables = {**os.environ, **_prepare(folder), **environment}
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
        *("--ServerApp.port=0", f"--ServerApp.base_url={BASE}"),
        f"--IdentityProvider.token={TOKEN}",
        f"--ServerApp.root_dir={folder / 'notebooks'}",
        "--ServerApp.terminals_enabled=False",
        "--LabApp.expose_app_in_browser=True",
        "--JupyterNotebookApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield Jupyter(folder, _address(folder, process), process)
    finally:
        _end(process)


def _address(folder: Path, process: subprocess.Popen[bytes]) -> str:
    """Of the server, once it answers."""

    def announced() -> str:
        if process.poll() is not None:
            raise AssertionError(f"the server ended:\n{(folder / 'log').read_text()[-4000:]}")
        for each in (folder / "runtime").glob("jpserver-*.json"):
            with contextlib.suppress(json.JSONDecodeError, KeyError, OSError):
                url = str(json.loads(each.read_text())["url"])
                urllib.request.urlopen(f"{url}api", timeout=PATIENCE).close()
                return url
        return ""

    url: str = eventually(announced, "the server starts", within=2 * PATIENCE)
    return url


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its kernels at once: it has nothing to save, and would wait for them."""
    started = psutil.Process(process.pid).children() if process.poll() is None else []
    process.kill()
    process.wait()
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


# JupyterLab opens the file of the page's address once more after it restored the last layout, which
# may be seconds later, and shows its tab then.
NOTE_OPENED = """
    const timer = setInterval(() => {
        if (window.jupyterapp) {
            clearInterval(timer);
            window.jupyterapp.commands.commandExecuted.connect((_, { id, result }) => {
                if (id === 'filebrowser:open-path') {
                    result.then(() => { window.addressOpened = true; });
                }
            });
        }
    }, 10);
"""


class Page:
    """A notebook in a page; `page` is playwright's, `errors` what our scripts raised."""

    def __init__(self, jupyter: Jupyter, context: Any, app: str, theme: str = "light") -> None:
        self.jupyter = jupyter
        self.app = app
        self.theme = theme
        self.path = ""
        self.page = context.new_page()
        self.page.set_default_timeout(PATIENCE * 1000)
        if app == "lab":
            self.page.add_init_script(NOTE_OPENED)
        self.errors: list[str] = []
        self.page.on("pageerror", self._raised)

    def _raised(self, error: Any) -> None:
        if "gpunb" in (error.stack or ""):  # Jupyter has errors of its own
            self.errors.append(f"{error}\n{error.stack}")

    def open(self, path: str) -> None:
        """Open a notebook, and wait until its kernel is there."""
        self.path = path
        where = f"lab/tree/{path}?reset&" if self.app == "lab" else f"notebooks/{path}?"
        self.page.goto(f"{self.jupyter.url}{where}token={TOKEN}")
        self.ready()
        self.set_theme(self.theme)

    def set_theme(self, theme: str) -> None:
        """Make it ``"light"``, ``"dark"`` or ``"dark high contrast"``; the server remembers it."""
        name = f"JupyterLab {theme.title()}"
        self.command("apputils:change-theme", {"theme": name})
        self.page.wait_for_selector(f'body[data-jp-theme-name="{name}"]', state="attached")
        # JupyterLab dims the page while the theme changes, and for a moment after.
        self.page.wait_for_selector("#jupyterlab-splash", state="detached")

    def reload(self) -> None:
        self.page.reload()
        self.ready()

    def ready(self) -> None:
        """Wait for the notebook and its kernel."""
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook")
        self.page.wait_for_function(
            """() => {
                const current = window.jupyterapp?.shell?.currentWidget;
                const kernel = current?.sessionContext?.session?.kernel;
                return kernel && kernel.connectionStatus === 'connected' && kernel.info;
            }"""
        )
        if self.app == "lab":
            self.page.wait_for_function("() => window.addressOpened")

    def command(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        """Run a command of the application, without waiting for its end."""
        self.page.evaluate(
            "([name, args]) => { void window.jupyterapp.commands.execute(name, args); }",
            [name, arguments or {}],
        )

    def save(self) -> None:
        """Save the notebook, again where its output changed while it was saved."""
        self.page.wait_for_function(
            """async () => {
                await window.jupyterapp.commands.execute('docmanager:save');
                return !window.jupyterapp.shell.currentWidget.context.model.dirty;
            }"""
        )

    def cell(self, at: int) -> Any:
        """The cell at this place."""
        return self.page.locator(".jp-Notebook .jp-Cell").nth(at)

    def run(self, at: int) -> None:
        """Run the cell at this place, and go on while it runs."""
        self.page.evaluate(
            """at => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.deselectAll();
                notebook.activeCellIndex = at;
                void window.jupyterapp.commands.execute('notebook:run-cell');
            }""",
            at,
        )

    def done(self, at: int) -> None:
        """Wait until the cell has a number, so is over."""
        self.page.wait_for_function(
            """at => window.jupyterapp.shell.currentWidget.content.widgets[at]
                .model.executionCount !== null""",
            arg=at,
        )

    def execute(self, at: int) -> str:
        """Run the cell at this place to its end; the text of its outputs."""
        self.run(at)
        self.done(at)
        return self.output(at)

    def output(self, at: int) -> str:
        """The text of a cell's outputs."""
        text: str = self.cell(at).locator(".jp-OutputArea").first.inner_text()
        return text
