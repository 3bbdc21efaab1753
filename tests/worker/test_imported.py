"""Which modules a worker reports as imported by its tasks."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpunb.worker.imported import LEAST, ImportWatch, package_of


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a package of this many modules in a folder, and imports it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules.copy())

    def make(name: str, modules: int, folder: str = "site-packages", extra: str = "") -> str:
        place = tmp_path / folder / name
        place.mkdir(parents=True)
        numbers = range(modules - 1)
        lines = [f"from {name} import m{each}" for each in numbers]
        (place / "__init__.py").write_text("\n".join([*lines, extra]))
        for each in numbers:
            (place / f"m{each}.py").touch()
        sys.path.insert(0, str(tmp_path / folder))
        importlib.invalidate_caches()
        importlib.import_module(name)
        return name

    return make


def test_a_large_import_is_reported_once_and_what_it_imports_comes_first(
    package: Callable[..., str],
) -> None:
    watch = ImportWatch()
    watch.begin()
    package("followed_one", LEAST)
    report = watch.report()
    assert report is not None
    assert report.modules == (*(f"followed_one.m{n}" for n in range(LEAST - 1)), "followed_one")
    assert report.changed == ()
    assert watch.report() is None
    package("followed_two", LEAST)
    again = watch.report()
    assert again is not None
    assert again.modules[-1] == "followed_two"


def test_a_small_import_is_not_reported(package: Callable[..., str]) -> None:
    watch = ImportWatch()
    watch.begin()
    package("followed_small", LEAST - 1)
    assert watch.report() is None


def test_nothing_is_reported_before_it_begins(package: Callable[..., str]) -> None:
    package("followed_early", LEAST)
    assert ImportWatch().report() is None


def test_the_users_own_modules_are_not_reported(package: Callable[..., str]) -> None:
    watch = ImportWatch()
    watch.begin()
    package("followed_own", LEAST, folder="project")
    assert watch.report() is None


def test_changed_variables_are_reported(
    package: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLLOWED_OLD", "1")
    monkeypatch.setenv("FOLLOWED_KEPT", "1")
    monkeypatch.delenv("FOLLOWED_NEW", raising=False)
    watch = ImportWatch()
    watch.begin()
    extra = "import os; os.environ['FOLLOWED_NEW'] = '2'; del os.environ['FOLLOWED_OLD']"
    package("followed_variables", LEAST, extra=extra)
    report = watch.report()
    assert report is not None
    assert report.changed == (("FOLLOWED_NEW", "2"), ("FOLLOWED_OLD", None))
    os.environ.pop("FOLLOWED_NEW")


def test_what_cannot_be_imported_by_its_name_has_no_package(
    package: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = package("followed_alias", 2)
    assert package_of(name) == package_of(f"{name}.m0") == name
    monkeypatch.setitem(sys.modules, "other_name", sys.modules[name])
    assert package_of("other_name") == package_of("os") == package_of("__main__") == ""
    assert package_of("never_imported") == ""


@pytest.mark.parametrize("name", ["IPython", "matplotlib_inline", "ipykernel"])
def test_shells_are_not_followed(name: str) -> None:
    importlib.import_module(name)
    assert package_of(name) == ""
