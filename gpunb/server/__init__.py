"""The machine's view for JupyterLab and Notebook 7: routes of the Jupyter server."""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "gpunb.server"}]


def _load_jupyter_server_extension(serverapp: Any) -> None:
    from gpunb.server.handlers import install

    install(serverapp)
