"""The Jupyter server's extension: routes for the view of the machine in JupyterLab and Notebook."""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "gpunb.server"}]


def _load_jupyter_server_extension(serverapp: Any) -> None:
    from gpunb.server.handlers import install

    install(serverapp)
