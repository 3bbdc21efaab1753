"""How a notebook shows its figures, and the same in a worker.

That is the configuration of the inline backend of matplotlib. Nothing is imported for it: what is
not loaded has no settings beyond those of the notebook's configuration files.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Mapping
from typing import Any

from traitlets.config import Config

_SETTINGS = ("figure_formats", "print_figure_kwargs", "rc", "close_figures")
_OWN = ("fmt", "base64")
"""What IPython itself passes on, beside what it was told to."""


def settings(shell: Any) -> dict[str, Any]:
    """What the notebook has set."""
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
    except Exception:  # an argument for the printing of figures may be anything
        return {}


def _backend() -> Any:
    """The inline backend's settings, if there are any yet."""
    kind = getattr(sys.modules.get("matplotlib_inline.config"), "InlineBackend", None)
    return kind.instance() if kind is not None and kind.initialized() else None


def _chosen(shell: Any) -> dict[str, Any]:
    """What figures are shown as now: `set_matplotlib_formats` tells IPython alone."""
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


_applied: Mapping[str, Any] = {}


def apply(shell: Any, wanted: Mapping[str, Any]) -> None:
    """Have the worker's shell show figures as the notebook does; what a session has set itself
    stays until the notebook's settings change."""
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
    if rc := wanted.get("rc"):
        sys.modules["matplotlib"].rcParams.update(rc)
