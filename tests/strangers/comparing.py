"""Finds the differences between runs of an example."""

from __future__ import annotations

import difflib
import fnmatch
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.strangers.running import Run

_SHORT = 160


@dataclass(frozen=True)
class Difference:
    """A difference between a plain run and another run.

    Attributes:
        mode: of the other run.
        where: a cell, such as ``cell 3 stdout``, or a name at the end, such as ``name x``.
        plain: what the plain run has there.
        other: what the other run has there.
    """

    mode: str
    where: str
    plain: str
    other: str

    def text(self) -> str:
        return f"{self.mode}: {self.where}: {self.plain} -> {self.other}"


@dataclass(frozen=True)
class Expected:
    """A difference that follows from the model of gpunb.

    Attributes:
        example: pattern of the example's path.
        difference: pattern of the difference's text.
        reason: why the example differs.
        docs: the sentence of the documentation that names the difference.
    """

    example: str
    difference: str
    reason: str
    docs: str

    def covers(self, example: str, difference: Difference) -> bool:
        return fnmatch.fnmatchcase(example, self.example) and fnmatch.fnmatchcase(
            difference.text(), self.difference
        )


def expected(path: Path) -> list[Expected]:
    """The expected differences in a file."""
    return [Expected(**each) for each in tomllib.loads(path.read_text()).get("difference", [])]


def differences(mode: str, plain: Run, other: Run, again: Run | None = None) -> list[Difference]:
    """The differences between a plain run and another run.

    Args:
        again: a second plain run; differences between the two plain runs are not counted.
    """
    found = []
    for where, one, two, third in _pairs(plain, other, again or plain):
        if one != two and not _varies(one, two, third):
            found.append(Difference(mode, where, *_shortened(one, two)))
    return found


def _pairs(plain: Run, other: Run, again: Run) -> Iterator[tuple[str, Any, Any, Any]]:
    """Each place, with what the runs have there."""
    for number, (one, two, third) in enumerate(
        zip(plain.cells, other.cells, again.cells, strict=True), start=1
    ):
        for aspect, value in one.items():
            yield f"cell {number} {aspect}", value, two[aspect], third[aspect]
    for name in sorted({*plain.names, *other.names}):
        has = (each.names.get(name) for each in (plain, other, again))
        yield f"name {name}", *has


def _varies(one: Any, other: Any, again: Any) -> bool:
    """Whether the two plain runs differ where the other run differs from the first."""
    if one == again:
        return False
    parts = [_parts(each) for each in (one, other, again)]
    if len({len(each) for each in parts}) > 1:
        return len(parts[0]) != len(parts[2])
    return all(a == b or a != c for a, b, c in zip(*parts, strict=True))


def _parts(value: Any) -> list[str]:
    """The words of texts, descriptions and figures. A bracket or a comma ends a word, because the
    spaces beside them depend on the numbers of an array."""
    texts = value if isinstance(value, list) else [value or ""]
    return [part for each in texts for part in re.findall(r"[^\s,()<>[\]]+", each)]


def _shortened(one: Any, two: Any) -> tuple[str, ...]:
    """The first parts that differ."""
    one, two = ([str(each) for each in _listed(value)] for value in (one, two))
    for tag, a, b, c, d in difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        if tag != "equal":
            return _cut(" | ".join(one[a:b]), " | ".join(two[c:d]))
    return "", ""


def _listed(value: Any) -> Sequence[str]:
    if value is None:
        return ["(nothing)"]
    return value if isinstance(value, list) else value.splitlines() or [""]


def _cut(*texts: str) -> tuple[str, ...]:
    """Two texts from a little before the place where they begin to differ."""
    same = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    start = max(0, same - _SHORT // 3)
    dots = "..." if start else ""
    return tuple(f"{dots}{' '.join(each[start:].split())[:_SHORT]}" for each in texts)
