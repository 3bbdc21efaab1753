"""The module `ray` for Ray's own tests: its names are those of gpunb.

A name that gpunb does not have is an `Absent` object; a test that uses one ends with `NotThere`.
"""

from __future__ import annotations

import functools
from typing import Any

import gpunb
from ray import _cluster, _lookup
from ray._lookup import NotThere

_lookup.install()
__version__ = "2.9.3"
"""The version of Ray whose tests the kept list describes."""


class Context:
    """The result of `init`, with the members of gpunb's session."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def __getitem__(self, key: str) -> Any:
        if key == "node_id":
            return self._session[key]
        raise NotThere(f"ray.init()[{key!r}]")

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        gpunb.shutdown()


def init(address: str | None = None, **settings: Any) -> Context:
    """Start a session. The address of a `Cluster` is a session with the resources of its node."""
    if settings.pop("local_mode", False):
        raise NotThere("local_mode")
    if address == "auto" and _cluster.NODES:
        address = next(reversed(_cluster.NODES))
    if address is not None and address.startswith(_cluster.PREFIX):
        settings, address = {**_cluster.NODES.get(address, {}), **settings}, None
    if address in ("auto", "ray", "default") or "://" in (address or ""):
        raise NotThere("a program that joins the cluster of another program")
    settings.setdefault("preload", ("numpy", "pytest"))
    internal = settings.get("_system_config") or {}
    settings.setdefault("spill", internal.get("automatic_object_spilling_enabled", True))
    return Context(gpunb.init(None if address == "local" else address, **settings))


def shutdown(*_: object, **__: object) -> None:
    """End the session."""
    gpunb.shutdown()


__getattr__ = functools.partial(_lookup.find, "ray", "gpunb")
