"""Shows matplotlib figures in a worker as the notebook would.

The worker gets the configuration of matplotlib's inline backend. Nothing is imported for it: a
backend that is not loaded has only the settings of the notebook's configuration files.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from traitlets.config import Config

CHOSEN = "figures"
"""Stands for settings that a cell has chosen, among those of libraries that come home."""

_SETTINGS = ("figure_formats", "print_figure_kwargs", "rc", "close_figures")
_OWN = ("fmt", "base64")
"""Arguments that IPython adds to those of the user."""


def settings(shell: Any) -> dict[str, Any]:
    """The notebook's settings, where they are not the defaults."""
    backend = _backend()
    if backend is None:
        found = dict(shell.config.get("InlineBackend", {}))
    else:
        unset = type(backend)()
        found = {name: getattr(backend, name) for name in _SETTINGS}
        found.update(_chosen(shell))
        found = {name: value for name, value in found.items() if value != getattr(unset, name)}
    try:
        return found if not found or pickle.dumps(found) else {}
    except Exception:  # an argument for printing figures may be any object
        return {}


def inline() -> bool:
    """Whether the kernel shows figures inline, unless the notebook chooses another backend."""
    return os.environ.get("MPLBACKEND", "").endswith("backend_inline")


def expect(shell: Any) -> None:
    """Load the inline backend when the first figure is shown. A figure that came from another
    process has not loaded it, as it was made there."""

    def load(_: Any) -> None:
        importlib.import_module("matplotlib_inline.backend_inline")

    shell.display_formatter.mimebundle_formatter.for_type_by_name(
        "matplotlib.figure", "Figure", load
    )


def _backend() -> Any:
    """The settings of the inline backend, if it is loaded."""
    kind = getattr(sys.modules.get("matplotlib_inline.config"), "InlineBackend", None)
    return kind.instance() if kind is not None and kind.initialized() else None


def _chosen(shell: Any) -> dict[str, Any]:
    """The formats of figures, which `set_matplotlib_formats` keeps in IPython only."""
    figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
    formats, arguments = set(), {}
    for formatter in shell.display_formatter.formatters.values():
        shows = formatter.type_printers.get(figure)
        if isinstance(shows, functools.partial):
            retina = getattr(shows.func, "__name__", "") == "retina_figure"
            formats.add("retina" if retina else shows.keywords.get("fmt"))
            arguments = {n: each for n, each in shows.keywords.items() if n not in _OWN}
    if not formats or None in formats:
        return {}
    return {"figure_formats": formats, "print_figure_kwargs": arguments}


def bring_home(shell: Any, chosen: Mapping[str, Any]) -> None:
    """Show figures in the notebook as a cell has chosen."""
    global _applied
    _applied = settings(shell)  # so that what the cell has reset is reset
    apply(shell, chosen)


_applied: Mapping[str, Any] = {}


def apply(shell: Any, wanted: Mapping[str, Any]) -> None:
    """Show figures as the notebook does. Settings that a session has made itself stay until the
    notebook's settings change."""
    global _applied
    if wanted == _applied:
        return
    names, _applied = {*_applied, *wanted}, wanted
    shell.config["InlineBackend"] = Config(wanted)
    backend = _backend()
    if backend is None:
        return
    unset = type(backend)()
    for name in names:
        setattr(backend, name, wanted.get(name, getattr(unset, name)))
    # `set_matplotlib_formats` changes the formats without the backend's knowledge.
    tools: Any = importlib.import_module("IPython.core.pylabtools")
    tools.select_figure_formats(shell, backend.figure_formats, **backend.print_figure_kwargs)
    if rc := wanted.get("rc"):
        sys.modules["matplotlib"].rcParams.update(rc)
