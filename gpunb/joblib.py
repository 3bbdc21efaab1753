"""The backend for joblib. Importing this module registers it under the name ``"gpunb"``."""

from gpunb.api.joblib import GpunbBackend

__all__ = ["GpunbBackend"]
