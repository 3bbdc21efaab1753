"""The kept list of a suite: which of its tests do not pass, and why."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KINDS = {
    "not there": "needs a part of the other project that gpunb does not have, on purpose",
    "difference": "checks a behaviour that gpunb has differently, on purpose",
    "older": "checks a behaviour that later versions of the other project have changed",
    "shim": "a limit of the shim, or of running in another environment",
    "open": "a fault of gpunb that is known",
}
"""The kinds of reasons, and their meanings."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why tests do not pass.

    Attributes:
        kind: a key of KINDS.
        why: the reason in one sentence.
        page: a text that docs/ray-compatibility.md has, for a difference; else empty.
        sometimes: whether the tests may also pass.
    """

    kind: str
    why: str
    page: str = ""
    sometimes: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """The kept list of a suite.

    Attributes:
        files: the files of the suite that are run if the user names none.
        package: whether the files are modules of a package, with relative imports.
        reasons: the reasons, by test: a file, a test or a test with its parameters.
    """

    files: tuple[str, ...]
    package: bool
    reasons: dict[str, Reason]

    def of(self, test: str) -> Reason | None:
        """The reason why this test does not pass, if there is one."""
        return next((self.reasons[each] for each in _names(test) if each in self.reasons), None)


def _names(test: str) -> Iterator[str]:
    """The names that stand for a test, the most exact one first."""
    yield test
    yield test.partition("[")[0]
    yield test.partition("::")[0]


def load(path: Path) -> Kept:
    """Read a kept list.

    Raises:
        ValueError: a kind that is unknown, or a test that stands in the list twice.
    """
    table = tomllib.loads(path.read_text())
    reasons: dict[str, Reason] = {}
    for each in table.get("reasons", ()):
        tests = each.pop("tests")
        reason = Reason(**each)
        if reason.kind not in KINDS:
            raise ValueError(f"kind {reason.kind!r} must be one of {', '.join(map(repr, KINDS))}")
        for test in tests:
            if test in reasons:
                raise ValueError(f"{path.name} has {test!r} twice")
            reasons[test] = reason
    return Kept(tuple(table["files"]), table.get("package", False), reasons)
