"""Makes texts safe to show on a terminal and in HTML.

Names, paths and notes come from users, other sessions and other processes. The type of a piece
says how to render it, never a mark inside a text, which any of them could have written.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Besides cursor movements and line ends: characters that change the direction of the text after
# them, and surrogates (from file names that are no UTF-8), which cannot be sent to a terminal.
_CONTROL = "[\0-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"

LAYOUT = "\n\t"
"""Control characters that a text of several lines may keep."""


TINTS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Colours that mark jobs by their numbers, as in `gpunb/live/view.css`."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The used part of a device, from 0.0 to 1.0, and its holders from left to right: the share and
    the number of each; None for another session."""

    used: float
    holders: tuple[tuple[float, int | None], ...] = ()

    @classmethod
    def of(cls, device: Mapping[str, Any]) -> Bar:
        """Return the bar of a device in a snapshot."""
        holders = [(share, task) for task, share in device["held"]]
        holders += [(each["share"], None) for each in device["others"] if each["share"]]
        return cls(1.0 - device["free"], tuple(holders))

    def __str__(self) -> str:
        return f"{self.used:.4f}".rstrip("0").rstrip(".")


_FRAME = (
    "display: inline-block; vertical-align: middle; width: 8em; height: .8em; "
    "border: 1px solid #8888"
)

Piece = str | Bar
"""Content of a table's cell."""


def control(text: str) -> str | None:
    """The first control character of a text, or None."""
    found = re.search(_CONTROL, text)
    return found and found[0]


def escaped(text: str, keep: str = "") -> str:
    r"""The text with an escape such as ``\x1b`` for each control character not in `keep`."""
    return re.sub(_CONTROL, lambda it: it[0] if it[0] in keep else ascii(it[0])[1:-1], text)


def as_text(piece: Piece) -> str:
    """One line for a terminal."""
    return escaped(str(piece))


def as_html(piece: Piece) -> str:
    """HTML for a page; no text becomes an element."""
    if isinstance(piece, str):
        return html.escape(escaped(piece))
    return (
        f'<span class="bar" role="meter" aria-label="share in use" aria-valuemin="0" '
        f'aria-valuemax="1" aria-valuenow="{piece.used:.4f}" '
        f'style="{_FRAME}; {_drawn(piece)}"></span> {piece}'
    )


def _drawn(bar: Bar) -> str:
    """The background of a bar: a piece in its colour for each holder."""
    if not bar.holders:
        return f"background: linear-gradient(#5a9 0 0) 0 / {100 * bar.used:.0f}% 100% no-repeat"
    stops, end = [], 0.0
    for share, number in bar.holders:
        begin, end = end, end + 100 * share
        colour = "#888" if number is None else TINTS[number % len(TINTS)]
        stops.append(f"{colour} {begin:.4g}% {end:.4g}%")
    return f"background: linear-gradient(90deg, {', '.join(stops)}, transparent 0)"
