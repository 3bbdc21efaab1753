"""The size of a share in bytes and in words."""

from __future__ import annotations

import math

from gpunb.scheduler.resources import UNIT, amount, size_text

MIB = 2**20

CONTEXT = 512 * MIB
"""Bytes of a share for the context on the device, which no framework counts in its pool."""

_HINT_BELOW = 0.6
_HINT_ABOVE = 0.97
_STEP = 500


def pool(units: int, memory: int | None) -> tuple[float, int | None]:
    """The limit of a framework's memory pool for a share: a fraction of the device, and bytes."""
    if not memory:
        return units / UNIT, None
    share = memory * units // UNIT
    nbytes = share - min(CONTEXT, share // 8)
    return nbytes / memory, nbytes


def allowed(units: int, memory: int) -> int:
    """Bytes above which a share counts as exceeded; a context may be larger than expected."""
    share = memory * units // UNIT
    return share + min(CONTEXT, share // 10)


def hint(peak: int, units: int, memory: int, *, ended: bool = True) -> str | None:
    """A better share for this peak, in words; None if the share was about right. Of a task that has
    not `ended` nobody knows yet whether a smaller one would do."""
    share = memory * units // UNIT
    if peak > _HINT_ABOVE * share and units < UNIT:
        return f"used {_of(peak, share)}: a larger share would be safer"
    enough = math.ceil((peak * 1.2) / memory * UNIT / _STEP) * _STEP
    if ended and peak and enough <= _HINT_BELOW * units:
        return f"used {_of(peak, share)}: {amount(max(enough, _STEP))} would do"
    return None


def _of(part: int, whole: int) -> str:
    """As ``"2.1 of 12 GiB"``."""
    of = size_text(whole)
    return f"{size_text(part).removesuffix(of.partition(' ')[2]).rstrip()} of {of}"
