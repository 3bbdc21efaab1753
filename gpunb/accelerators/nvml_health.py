"""Finds the faults of an NVIDIA card through NVML."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpunb.accelerators.base import Lost

Ask = Callable[..., Any]
"""Calls an NVML function by name; raises what NVML raises."""

LOST = Lost("it has fallen off the bus: restart the machine, and check its power and its seat")
GONE = Lost(
    "the driver does not list it any more: see nvidia-smi, and 'sudo dmesg | grep NVRM' for why"
)
_RESET = "it has to be reset ('sudo nvidia-smi --gpu-reset'), or the machine restarted"

_FATAL = {"NVMLError_GpuIsLost": LOST, "NVMLError_ResetRequired": Lost(_RESET)}
_UNCORRECTED, _VOLATILE = 1, 0


def problem(ask: Ask, handle: Any, unreadable: tuple[type[Exception], ...]) -> str | None:
    """The faults of the card, a text; None if it has none or reports none."""
    problems: list[str] = []
    for check in (_memory, _errors, _rows, _pages):
        try:
            found = check(ask, handle)
        except unreadable as error:
            fatal = _FATAL.get(type(error).__name__)
            if fatal:
                return fatal
            continue
        if found:
            problems.append(found)
    return "; ".join(problems) or None


def _memory(ask: Ask, handle: Any) -> None:
    """Raise the error of a lost card. Every other card supports this function."""
    ask("nvmlDeviceGetMemoryInfo", handle)


def _errors(ask: Ask, handle: Any) -> str | None:
    count = ask("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE)
    if not isinstance(count, int) or not count:
        return None
    return (
        f"{count} memory error{'s' if count > 1 else ''} that could not be corrected since the "
        "driver was loaded: results may be wrong, so reset it ('sudo nvidia-smi --gpu-reset')"
    )


def _rows(ask: Ask, handle: Any) -> str | None:
    """Faulty rows of memory, which the card replaces by spare rows."""
    _, _, pending, failed = ask("nvmlDeviceGetRemappedRows", handle)
    if failed:
        return "faulty memory could not be replaced by spare rows: the card needs to be serviced"
    if pending:
        return f"faulty memory waits to be replaced by spare rows: {_RESET}"
    return None


def _pages(ask: Ask, handle: Any) -> str | None:
    """Faulty pages of memory, which cards without spare rows stop using."""
    if ask("nvmlDeviceGetRetiredPagesPendingStatus", handle) == 1:
        return f"faulty memory pages wait to be retired: {_RESET}"
    return None
