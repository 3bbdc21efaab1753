"""Who a session says it is."""

from __future__ import annotations

import os
import sys
import types

import pytest

from gpunb.runtime import origin


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(origin, "_of_the_editor", lambda: None)


def test_the_server_names_the_notebook(monkeypatch, tmp_path):
    notebook = tmp_path / "train.ipynb"
    notebook.touch()
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebook))
    assert origin.notebook() == str(notebook)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JPY_SESSION_NAME", "train.ipynb")
    assert origin.notebook() == str(notebook)


def test_a_name_that_is_no_path_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "RTC:team/train.ipynb")
    assert origin.notebook() == "RTC:team/train.ipynb"


def test_the_editor_names_it_in_a_variable(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("JPY_SESSION_NAME", "/other.ipynb")
    shell = types.SimpleNamespace(user_ns={"__vsc_ipynb_file__": "/home/a/code.ipynb"})
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert origin.notebook() == "/home/a/code.ipynb"
    shell.user_ns.clear()
    assert origin.notebook() == "/other.ipynb"


def test_a_program_is_named_by_its_file(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert origin.notebook() is None
    main.__file__ = "train.py"
    assert origin.notebook() == os.path.abspath("train.py")
    main.__file__ = "/lib/site-packages/ipykernel_launcher.py"
    assert origin.notebook() is None


def test_a_user_without_a_name_is_a_number(monkeypatch):
    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(origin.getpass, "getuser", nobody)
    assert origin.user() == str(os.getuid())


def test_what_others_are_told():
    about = origin.about()
    assert about["pid"] == os.getpid()
    assert set(about) == {"pid", "user", "notebook", "kernel", "since", "python"}
