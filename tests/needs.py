"""What some tests need beside gpunb[test]. Where it is absent they skip, and the last line of the
run says so; with ``GPUNB_REQUIRE_BROWSER=1``, and so with PYTORCH and others, they fail instead.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

import pytest

_MARK = "Skipped: without "


def absent(what: str, reason: str) -> NoReturn:
    """End the test, since what it needs is not here."""
    variable = f"GPUNB_REQUIRE_{what.upper().replace('-', '_')}"
    if os.environ.get(variable, "0") not in ("", "0"):
        pytest.fail(f"{variable} is set, and {reason}", pytrace=False)
    pytest.skip(f"without {what}: {reason}")


def pytorch() -> None:
    """Go on only where it is installed. It is not imported."""
    _package("torch", "PyTorch")


def jax() -> None:
    """Go on only where it is installed. It is not imported."""
    _package("jax", "JAX")


def packages(names: Iterable[str]) -> None:
    """Go on only where all of these are installed, by the names that are imported."""
    for name in sorted(set(names)):
        _package(name, _CALLED.get(name, name))


_CALLED = {"torch": "PyTorch", "jax": "JAX", "sklearn": "scikit-learn"}
"""What packages are called that are imported by another name."""


def _package(name: str, what: str) -> None:
    if importlib.util.find_spec(name) is None:
        package = what if name == "sklearn" else name
        absent(what, f"it is not installed (.venv/bin/pip install {package})")


def left_out(reports: Iterable[Any]) -> str | None:
    """What to say of the tests among these reports that were skipped for want of something.

    The reports, since with several processes the one that says it has run no test itself.
    """
    reasons = (each.longrepr[2] for each in reports if isinstance(each.longrepr, tuple))
    counts = Counter(each.removeprefix(_MARK) for each in reasons if each.startswith(_MARK))
    if not counts:
        return None
    printed = (
        f"{count} test{'s' if count > 1 else ''} without {why}" for why, count in counts.items()
    )
    return f"LEFT OUT: {'; '.join(printed)}"
