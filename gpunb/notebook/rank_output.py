"""Folds the output of the ranks that do not lead into one line for each rank."""

from __future__ import annotations

import html
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gpunb.engine.job_log import COLOUR, Item, words
from gpunb.scheduler.markup import LAYOUT, escaped

FIRST = 10.0
"""Seconds before the first line. A cell that ends before has its lines at its end, in order."""

PERIOD = 1.0
"""Seconds between two updates of the lines."""

MOST = 1 << 16
"""Characters of a rank, from its end, that its line has behind it."""

_NUMBERS = itertools.count(1)


class _Fold:
    """The output of one rank."""

    def __init__(self) -> None:
        self.ident = f"gpunb-rank-{os.getpid()}-{next(_NUMBERS)}"
        self.text = ""
        self.ended_lines = 0
        self.was_shown = False
        self.is_shown = False

    @property
    def lines(self) -> int:
        return self.ended_lines + (not self.text.endswith("\n"))


class Folds:
    """The output of the ranks of one job, for display.

    The methods return items as in `Log`, which are to be shown.
    """

    def __init__(
        self,
        full: Callable[[int], bool],
        *,
        live: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            full: tells for a rank whether its output is shown in full.
            live: whether a line can be updated in place; else it is shown at the end.
        """
        self._full = full
        self._live = live
        self._clock = clock
        self._next = clock() + FIRST
        self._lead = 0
        self._folds: dict[int, _Fold] = {}
        self._within_line: set[tuple[int, str]] = set()

    def take(self, marked: Mapping[str, Any]) -> list[Item]:
        """Take an item that is marked with its rank."""
        rank = marked["rank"]
        if marked["kind"] == "leads":
            self._lead = rank
            return []
        item = marked["kind"], marked["what"], marked["content"]
        if self._full(rank):
            return [self._prefixed(rank, item)]
        fold = self._folds.setdefault(rank, _Fold())
        fold.text += (text := words(item))
        fold.ended_lines += text.count("\n")
        fold.text = fold.text[-MOST:]
        fold.is_shown = False
        if not self._live or self._clock() < self._next:
            return []
        self._next = self._clock() + PERIOD
        return self.rest()

    def lead(self, stream: str, text: str) -> str:
        """Return text of the rank that leads, with the rank before each line if that is wanted."""
        if not self._full(self._lead):
            return text
        shown: str = self._prefixed(self._lead, ("text", stream, {"text": text}))[2]["text"]
        return shown

    def rest(self) -> list[Item]:
        """Return the lines that are not up to date."""
        late = [each for each in sorted(self._folds.items()) if not each[1].is_shown]
        return [self._line(rank, fold) for rank, fold in late]

    def _line(self, rank: int, fold: _Fold) -> Item:
        plural = "" if fold.lines == 1 else "s"
        line = f"rank {rank}: {fold.lines} line{plural}"
        again, fold.was_shown, fold.is_shown = fold.was_shown, True, True
        if not self._live:
            return "text", "stdout", {"text": f"{line}\n"}
        text = html.escape(escaped(_as_on_screen(COLOUR.sub("", fold.text)), LAYOUT))
        body = f"<details><summary>{line}</summary><pre>{text}</pre></details>"
        bundle = {"text/plain": line, "text/html": body}
        kind = "update_display_data" if again else "display_data"
        content = {"data": bundle, "metadata": {}, "transient": {"display_id": fold.ident}}
        return "show", kind, content

    def _prefixed(self, rank: int, item: Item) -> Item:
        kind, stream, content = item
        if kind != "text":
            return item
        text: str = content["text"]
        pieces, key = text.splitlines(keepends=True), (rank, stream)
        for at, piece in enumerate(pieces):
            if piece == "\r":  # a bar that is drawn again: its line gets the rank
                self._within_line.discard(key)
                continue
            if key not in self._within_line:
                pieces[at] = f"[{rank}] {piece}"
            ended = piece.endswith(("\n", "\r"))
            (self._within_line.discard if ended else self._within_line.add)(key)
        return kind, stream, {"text": "".join(pieces)}


def _as_on_screen(text: str) -> str:
    """Return text as a terminal shows it: what comes after ``\\r`` replaces the line before."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def of_rank(log: Iterable[Item], rank: int) -> Iterator[Item]:
    """Yield the items of one rank."""
    lead = 0
    for item in log:
        _, what, content = item
        if what != "rank":
            if rank == lead:
                yield item
        elif content["kind"] == "leads":
            lead = content["rank"]
        elif content["rank"] == rank:
            yield content["kind"], content["what"], content["content"]


def folded(log: Iterable[Item], folds: Folds) -> Iterator[Item]:
    """Yield the items of a log, with those of ranks as `folds` shows them."""
    for item in log:
        if item[1] == "rank":
            yield from folds.take(item[2])
        elif item[0] == "text":
            yield "text", item[1], {"text": folds.lead(item[1], item[2]["text"])}
        else:
            yield item
    yield from folds.rest()


def none(_: int) -> bool:
    """Return that a rank is not shown in full."""
    return False
