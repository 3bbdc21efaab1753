"""Which modules a cell needs at its begin, and which ones the notebook will need after it."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpunb.notebook.leading_imports import import_here, modules_of_results, needed_modules


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the package `li_pack` with the modules `inner` and `deep.end`, and puts a module
    `li_own` of the user's beside the notebook."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages"), str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    folder = tmp_path / "site-packages" / "li_pack"
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("def make(): return 1\nprint('imported')")
    (folder / "deep" / "__init__.py").touch()
    (folder / "deep" / "end.py").write_text("class Thing: ...")
    (folder / "inner.py").touch()
    (tmp_path / "li_own.py").touch()
    importlib.invalidate_caches()


def body(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import li_pack", ("li_pack",)),
        ("import li_pack.inner as inner, li_pack", ("li_pack.inner", "li_pack")),
        ("from li_pack import make, inner", ("li_pack", "li_pack.inner")),
        ("from li_pack.deep.end import Thing", ("li_pack.deep.end",)),
        ("from li_pack import *", ("li_pack",)),
        ("import os, li_own, li_missing", ()),
        ("from . import inner\nimport li_pack", ()),
        ("import IPython", ()),
        ("'''text'''\nfrom __future__ import annotations\nimport li_pack", ("li_pack",)),
        ("get_ipython().run_line_magic('matplotlib', 'inline')\nimport li_pack", ("li_pack",)),
        ("import os\nos.environ['A'] = '1'\nimport li_pack", ()),
        ("try:\n    import li_pack\nexcept ImportError:\n    pass", ()),
        ("def f():\n    import li_pack", ()),
    ],
)
def test_a_cell_needs_the_installed_modules_that_it_imports_at_its_top(
    text: str, modules: tuple[str, ...]
) -> None:
    assert needed_modules(body(text), []) == modules
    assert "li_pack" not in sys.modules, "they are found without an import"


def test_a_cell_needs_the_modules_of_the_values_that_it_reads() -> None:
    end: Any = importlib.import_module("li_pack.deep.end")
    pack: Any = importlib.import_module("li_pack")
    own: Any = importlib.import_module("li_own")
    assert needed_modules([], [end.Thing()]) == ("li_pack.deep.end",)
    assert needed_modules([], [end.Thing, pack.make]) == ("li_pack.deep.end", "li_pack")
    assert needed_modules([], [pack, own, sys, 1, "text", None]) == ("li_pack",)


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import li_pack", ()),
        ("from li_pack import inner", ()),
        ("from li_pack.deep.end import Thing", ("li_pack.deep.end",)),
        ("import li_pack as p\nx = p.make()", ("li_pack",)),
        ("import li_pack.inner\nx = 1", ()),
        ("from li_pack import inner\nfor i in y:\n    x = inner.a.b()", ("li_pack.inner",)),
        ("x = known.make()", ("li_pack",)),
        ("x, y = known.deep.make(1)[0]", ()),
        ("known.make()", ()),
        ("def f():\n    x = known.make()", ()),
        ("x = other.make()", ()),
    ],
)
def test_the_notebook_needs_modules_whose_values_come_home(
    text: str, modules: tuple[str, ...]
) -> None:
    assert modules_of_results(body(text), {"known": "li_pack"}) == modules


def test_an_import_here_is_silent_and_raises_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "site-packages" / "li_exits.py").write_text("import sys\nsys.exit(3)")
    import_here(["li_missing", "li_exits", "li_pack.inner"])
    assert "li_pack.inner" in sys.modules
    assert capsys.readouterr() == ("", "")


def test_objects_that_hide_their_module_are_no_hindrance() -> None:
    kind: Callable[..., Any] = type("Odd", (), {"__module__": 3})
    lazy = types.ModuleType("li_pack")
    assert needed_modules([], [kind(), kind, lazy]) == ("li_pack",)
