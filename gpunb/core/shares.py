"""What a share of a device amounts to, and whether it was a good one."""

from __future__ import annotations

import math

from gpunb.core.resources import UNIT, amount, size_text

MIB = 2**20

CONTEXT = 512 * MIB
"""Bytes of a share that are left to the context on the device, which is in no framework's pool."""

_HINT_BELOW = 0.6
_HINT_ABOVE = 0.97
_STEP = 500


def pool(units: int, memory: int | None) -> tuple[float, int | None]:
    """What the pool of a framework may take of a device for this share, as a part and in bytes."""
    if not memory:
        return units / UNIT, None
    share = memory * units // UNIT
    nbytes = share - min(CONTEXT, share // 8)
    return nbytes / memory, nbytes


def allowed(units: int, memory: int) -> int:
    """Bytes from which on a share counts as exceeded; a context may be larger than expected."""
    share = memory * units // UNIT
    return share + min(CONTEXT, share // 10)


def hint(peak: int, units: int, memory: int) -> str | None:
    """What share of a device of so much memory would have done; None if it was about right."""
    share = memory * units // UNIT
    if peak > _HINT_ABOVE * share and units < UNIT:
        return f"used {_of(peak, share)}: a larger share would be safer"
    enough = math.ceil((peak * 1.2) / memory * UNIT / _STEP) * _STEP
    if peak and enough <= _HINT_BELOW * units:
        return f"used {_of(peak, share)}: {amount(max(enough, _STEP))} would do"
    return None


def _of(part: int, whole: int) -> str:
    """As ``"2.1 of 12 GiB"``."""
    of = size_text(whole)
    return f"{size_text(part).removesuffix(of.partition(' ')[2]).rstrip()} of {of}"
