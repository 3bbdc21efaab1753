"""Which modules are the user's, so that an edit of their files counts.

`tests/notebook/test_autoreload.py` tests the edits themselves.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gpunb
from gpunb.worker.user_modules import Loaded, users_file

STDLIB = sysconfig.get_path("stdlib")
OURS = os.path.dirname(str(gpunb.__file__))


def load(monkeypatch: pytest.MonkeyPatch, path: object, name: str = "mine") -> None:
    """Put a module with this file among the loaded ones."""
    module = ModuleType(name)
    if path is not None:
        module.__file__ = path  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    "path",
    ["/home/ada/mine.py", "/home/ada/site-packages.py", f"{OURS}_tools/mine.py", "relative.py"],
)
def test_python_file_of_the_user(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    load(monkeypatch, path)
    assert users_file("mine") == path


@pytest.mark.parametrize(
    "path",
    [
        None,
        7,
        "/home/ada/mine.so",
        "/home/ada/mine.pyc",
        "/venv/lib/python3.12/site-packages/mine.py",
        "/usr/lib/python3/dist-packages/mine/__init__.py",
        f"{STDLIB}/mine.py",
        f"{OURS}/worker/mine.py",
    ],
    ids=[
        "none",
        "no path",
        "extension",
        "compiled",
        "installed",
        "by the system",
        "Python",
        "gpunb",
    ],
)
def test_other_modules_are_not_of_the_user(monkeypatch: pytest.MonkeyPatch, path: object) -> None:
    load(monkeypatch, path)
    assert users_file("mine") is None


@pytest.mark.parametrize("name", ["__main__", "__mp_main__"])
def test_program_itself_is_no_module_to_import_again(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    load(monkeypatch, "/home/ada/program.py", name)
    assert users_file(name) is None


class NoModule:
    """Stands in the place of a module, as some libraries do."""

    __file__ = "/home/ada/mine.py"


@pytest.mark.parametrize("thing", [NoModule(), NoModule, None])
def test_things_in_the_place_of_a_module_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, thing: Any
) -> None:
    monkeypatch.setitem(sys.modules, "mine", thing)
    assert users_file("mine") is None
    assert users_file("never loaded") is None


def test_look_at_a_module_does_not_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError("it is loaded")

    module = Lazy("mine")
    object.__getattribute__(module, "__dict__")["__file__"] = "/home/ada/mine.py"
    monkeypatch.setitem(sys.modules, "mine", module)
    assert users_file("mine") == "/home/ada/mine.py"


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
