"""`docs/architecture.md` names each module, only files that exist, and all states."""

from __future__ import annotations

import re

import pytest

from gpunb.scheduler import state
from tests.sessions import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "gpunb"
MODULES = sorted(
    path.relative_to(PACKAGE)
    for path in PACKAGE.rglob("*.py")
    if not path.name.startswith("_") and path.parts[len(PACKAGE.parts)] not in ("cli", "util")
)
LISTED_TOGETHER = ("accelerators", "serialize")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_each_module_is_named(module):
    if not any(each in module.parts for each in LISTED_TOGETHER):
        assert re.search(rf"\b{re.escape(module.name)}\b", PAGE), f"{module} is not on the page"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(\w+(?:/\w+)+\.py)`", PAGE))))
def test_each_file_of_the_walks_exists(path):
    assert (PACKAGE / path).is_file()


@pytest.mark.parametrize("record", ["task", "worker", "actor"])
def test_the_states_are_those_of_the_scheduler(record):
    table = getattr(state, f"{record.upper()}_TRANSITIONS")
    shown = PAGE.split(f"<!-- table: states:{record} -->")[1].split("<!-- end -->")[0]
    rows = {
        before: set(re.findall(r"`(\w+)`", after))
        for before, after in re.findall(r"^\| `(\w+)` \|(.*)\|$", shown, re.MULTILINE)
    }
    assert rows == table, "run `python docs/tables.py`"
