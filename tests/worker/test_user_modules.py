"""Edits of the files of the user's modules.

`tests/notebook/test_autoreload.py` tests the edits themselves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from gpunb.worker.user_modules import Loaded


def load(monkeypatch: pytest.MonkeyPatch, path: object, name: str = "mine") -> None:
    """Put a module with this file among the loaded ones."""
    module = ModuleType(name)
    if path is not None:
        module.__file__ = path  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, name, module)


def test_file_that_was_written_after_the_last_look_counts_as_edited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody knows whether the module was loaded before or after that."""
    loaded = Loaded()
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    load(monkeypatch, str(path))
    assert "mine" in loaded.edited()
    assert "mine" in loaded.edited()


def test_module_without_its_file_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = Loaded()
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    load(monkeypatch, str(path))
    load(monkeypatch, str(tmp_path / "never.py"), "never")
    assert "mine" in loaded.edited()
    path.unlink()
    assert not {"mine", "never"} & set(loaded.edited())


def test_module_that_was_unloaded_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded = Loaded()
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    load(monkeypatch, str(path))
    assert "mine" in loaded.edited()
    monkeypatch.delitem(sys.modules, "mine")
    assert "mine" not in loaded.edited()
