"""A plugin for pytest: joblib's processes are gpunb's."""

from __future__ import annotations

from joblib import parallel

import gpunb
from gpunb.joblib import GpunbBackend

parallel.BACKENDS["loky"] = GpunbBackend  # joblib's default


def pytest_configure() -> None:
    """Start the session that all tests share, before test modules ask for the number of CPUs."""
    gpunb.init(num_cpus=8)


def pytest_unconfigure() -> None:
    gpunb.shutdown()
