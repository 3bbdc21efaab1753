"""Sweeps: one function, or one cell, with many parameters."""

from __future__ import annotations

from gpunb.sweeps.start import sweep
from gpunb.sweeps.sweep import Sweep
from gpunb.sweeps.trials import MedianStoppingRule, Trial

__all__ = ["MedianStoppingRule", "Sweep", "Trial", "sweep"]
