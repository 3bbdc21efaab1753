"""Joins a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray._private import auto_init_hook

from gpunb.exceptions import GpunbError
from gpunb.ray.kernel import RayKernel


def start(address: str, settings: Mapping[str, Any]) -> RayKernel:
    """Join a cluster, or start one."""
    own = not ray.is_initialized()
    # Else a late call, such as one in a destructor, starts another cluster.
    auto_init_hook.enable_auto_connect = False
    if own:
        wanted = {name: value for name, value in settings.items() if value is not None}
        # Output comes by the mailbox. A user who wants the dashboard starts the cluster by hand.
        quiet: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "include_dashboard": False,
        }
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(**quiet, **wanted)
        except ConnectionError as error:
            raise GpunbError(f"address={address!r} cannot be reached: {error}") from error
        except ValueError as error:
            if not wanted or "existing cluster" not in str(error):
                raise
            raise ValueError(
                f"{', '.join(wanted)} cannot be said, because a Ray cluster runs here already: "
                f"gpunb.init({address!r}) joins it as it is"
            ) from error
    elif given := [name for name, value in settings.items() if value is not None]:
        raise ValueError(
            f"{', '.join(given)} cannot be said when ray.init was called before: what the cluster "
            "has is settled"
        )
    if ray.util.client.ray.is_connected():
        raise GpunbError(
            "ray.init has connected as a Ray client, which carries no streams, callbacks and live "
            "output. Run the notebook on a node of the cluster, and use gpunb.init('ray') there"
        )
    try:
        return RayKernel(own=own)
    except BaseException:
        if own:
            ray.shutdown()
        raise
