"""Run notebook cells and functions on shares of GPUs.

    %load_ext gpunb

    %%gpu 0.5
    model.fit(X, y)

    @gpunb.remote(num_gpus=1)
    def train(rate): ...

    losses = gpunb.get([train.remote(rate) for rate in rates])

Importing this module loads neither IPython nor any GPU library; names are loaded at first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from gpunb._version import __version__

if TYPE_CHECKING:
    from gpunb import accelerators, actor, exceptions, util
    from gpunb.api.public import (
        ActorHandle,
        DynamicObjectRefGenerator,
        Executor,
        ObjectRef,
        ObjectRefGenerator,
        as_completed,
        available_resources,
        cancel,
        cluster_resources,
        get,
        get_actor,
        get_gpu_ids,
        get_runtime_context,
        init,
        is_initialized,
        kill,
        method,
        nodes,
        put,
        remote,
        report,
        shutdown,
        status,
        timeline,
        wait,
    )
    from gpunb.live import monitor
    from gpunb.notebook import get_job, register_settings
    from gpunb.sweeps import sweep

__all__ = [
    "ActorHandle",
    "DynamicObjectRefGenerator",
    "Executor",
    "ObjectRef",
    "ObjectRefGenerator",
    "__version__",
    "accelerators",
    "actor",
    "as_completed",
    "available_resources",
    "cancel",
    "cluster_resources",
    "exceptions",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_job",
    "get_runtime_context",
    "init",
    "is_initialized",
    "kill",
    "load_ipython_extension",
    "method",
    "monitor",
    "nodes",
    "put",
    "register_settings",
    "remote",
    "report",
    "shutdown",
    "status",
    "sweep",
    "timeline",
    "unload_ipython_extension",
    "util",
    "wait",
]

_MODULES = ("accelerators", "actor", "exceptions", "util")
_MODULE_OF = {
    "get_job": "notebook",
    "monitor": "live",
    "register_settings": "notebook",
    "sweep": "sweeps",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"gpunb.{name}")
    if name in __all__:
        if sys.platform == "win32":  # the API cannot even be imported there
            importlib.import_module("gpunb.system.linux").check()
        module = _MODULE_OF.get(name, "api.public")
        value = getattr(importlib.import_module(f"gpunb.{module}"), name)
        globals()[name] = value
        return value
    raise importlib.import_module("gpunb.instead").missing("gpunb", name)


class _LastFinder:
    """The last finder of modules: says of a module that only Ray has what to use instead."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name.startswith("gpunb."):
            importlib.import_module("gpunb.instead").check_module(name)


sys.meta_path.append(_LastFinder)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext gpunb``: the magics ``%%gpu`` and ``%gpu``."""
    importlib.import_module("gpunb.notebook").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext gpunb``."""
    importlib.import_module("gpunb.notebook").unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    return [{"src": "labextension", "dest": "gpunb"}]
