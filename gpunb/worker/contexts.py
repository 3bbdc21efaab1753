"""The worker's context on its device: made before there is a task, and parked while it is idle."""

from __future__ import annotations

import os
import sys

from gpunb.protocol import messages as msg
from gpunb.worker.cuda_driver import CudaDriver, CudaError


def prepare(message: msg.Prepare) -> str:
    """Set the variables and make the context. Returns why it cannot be made, or an empty text."""
    for name, value in message.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if message.vendor != "nvidia":  # simulated and logical devices have none
        return ""
    try:
        CudaDriver().make_context()
        _first_kernel()
    except Exception as error:
        return str(error) or repr(error)
    return ""


def _first_kernel() -> None:
    """Have PyTorch start, where the preload has imported it: its first kernel takes as long as half
    of a context. The pool of the device is empty afterwards, and its generator untouched."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.ones(1, device="cuda").sum().item()
        torch.cuda.empty_cache()


def park(message: msg.Park) -> str:
    """Move the device memory of this process to the host, or back. Returns why this is not
    possible, or an empty text."""
    global _is_parked
    if message.vendor != "nvidia" or (message.back and not _is_parked):
        return ""
    try:
        driver = CudaDriver(loaded=True)
        if message.back:
            driver.restore(os.getpid())
            _is_parked = False
        else:
            _is_parked = driver.park(os.getpid())
    except CudaError as error:
        return str(error)
    return ""


_is_parked = False
