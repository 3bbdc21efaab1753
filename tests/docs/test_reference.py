"""The reference is complete, and says what the code says."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re

import pytest

import gpunb
from gpunb import accelerators, exceptions
from gpunb.accelerators import testing
from tests.docs.pages import DOCS, pages, tables
from tests.sessions import ROOT

REFERENCE = DOCS / "reference"


def _tables():
    """The module that writes the tables."""
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described():
    """The names that the reference takes from docstrings."""
    text = "\n".join(each.read_text() for each in REFERENCE.glob("*.md"))
    return set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)), text


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_are_as_the_code_says(page):
    text = page.read_text()
    assert _tables().rewritten(text) == text, "run `python docs/tables.py`"


def test_a_table_that_is_out_of_date_is_found():
    text = (REFERENCE / "magics.md").read_text()
    changed = text.replace("| `--retries ", "| `--tries ")
    assert changed != text
    assert _tables().rewritten(changed) == text


def test_each_public_name_is_described():
    names, text = described()
    for name in gpunb.__all__:
        value = getattr(gpunb, name)
        known = f"gpunb.{name}" in names or (
            (inspect.ismodule(value) or name == "__version__") and f"`gpunb.{name}`" in text
        )
        assert known, f"gpunb.{name} is missing in docs/reference"


def test_each_public_name_of_accelerators_is_described():
    names, text = described()
    for name in accelerators.__all__:
        assert f"gpunb.accelerators.{name}" in names, name
    for name, value in vars(testing).items():
        if inspect.isclass(value) and value.__module__ == testing.__name__:
            assert f"gpunb.accelerators.testing.{name}" in names, name
    assert "gpunb.joblib.GpunbBackend" in names
    assert "`gpunb.util.accelerators`" in text


def test_what_is_described_exists():
    names, _ = described()
    for name in names:
        module, attribute = name, []
        while True:
            try:
                value = importlib.import_module(module)
                break
            except ModuleNotFoundError:
                module, _, last = module.rpartition(".")
                attribute.insert(0, last)
        for each in attribute:
            value = getattr(value, each)
        assert inspect.getdoc(value), f"{name} has no docstring"


def sections(text):
    """The text below each heading of the second level."""
    pieces = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.parametrize("name", [*exceptions.__all__, "DetectionError"])
def test_each_error_has_cause_and_cure(name):
    text = sections((REFERENCE / "errors.md").read_text())[name]
    rows = {row[0]: row[1] for row in next(tables(text)) if row[0]}
    assert list(rows) == ["When", "Why", "What to do"]
    assert all(rows.values())


def test_the_tree_of_errors_is_the_one_of_the_docstring():
    drawn = inspect.getdoc(exceptions).split("\n\n")[1]
    page = (REFERENCE / "errors.md").read_text()
    assert inspect.cleandoc(drawn) in page


def test_each_variable_is_explained():
    found = set()
    for path in (ROOT / "gpunb").rglob("*.py"):
        found |= set(re.findall(r"\bGPUNB_[A-Z_]+\b", path.read_text()))
    rows = {
        cell.strip("`")
        for table in tables((REFERENCE / "configuration.md").read_text())
        for cell, *_ in table
        if cell.startswith("`GPUNB_")
    }
    assert found == rows
    assert len(found) > 5


def test_each_argument_of_init_is_explained():
    arguments = set(inspect.signature(gpunb.init).parameters)
    assert set(_tables().described(gpunb.init)) == arguments


def test_each_option_of_remote_is_explained():
    from dataclasses import fields

    from gpunb.scheduler.options import ActorOptions, MethodOptions, Options

    options = {each.name for kind in (Options, ActorOptions) for each in fields(kind)}
    assert set(_tables().described(gpunb.remote)) == options
    assert set(_tables().described(gpunb.method)) == {each.name for each in fields(MethodOptions)}
