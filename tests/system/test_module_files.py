"""Which modules are the user's own code."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import ModuleType
from typing import Any

import pytest

import gpunb
from gpunb.system.module_files import users_file

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
