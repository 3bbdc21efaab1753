"""Registers gpunb as joblib's backend ``"ray"``, for programs written for Ray."""

from __future__ import annotations

import importlib


def register_ray() -> None:
    """Register gpunb's backend of joblib also under the name ``"ray"``."""
    import joblib

    own = importlib.import_module("gpunb.joblib")
    joblib.register_parallel_backend("ray", own.GpunbBackend)
