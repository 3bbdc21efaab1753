"""A Ray cluster as backend: the same cells, functions, actors and objects, on Ray's workers.

Nothing outside this package knows that Ray exists, and nothing in here is loaded before somebody
connects.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from gpunb.exceptions import GpunbError


def connect(address: str, **settings: Any) -> Any:
    """Join a Ray cluster, or start one on this machine; the backend of this kernel.

    Args:
        address: ``"ray"``: the cluster that runs here, or that RAY_ADDRESS names, else a new one.
        settings: for a new cluster, as `ray.init` takes them.

    Raises:
        GpunbError: Ray is not installed, or cannot be reached.
        ValueError: settings for a cluster that runs already.
    """
    if importlib.util.find_spec("ray") is None:
        raise GpunbError(
            f"address={address!r} needs Ray, which is not installed here: pip install 'gpunb[ray]'"
        )
    from gpunb.ray.joining import start

    return start(address, settings)
