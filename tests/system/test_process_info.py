"""The facts about a session that other sessions may read."""

from __future__ import annotations

import os
import sys
import types

import pytest

from gpunb.system import process_info


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(process_info, "_from_editor", lambda: None)


def test_the_server_names_the_notebook(monkeypatch, tmp_path):
    notebook = tmp_path / "train.ipynb"
    notebook.touch()
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebook))
    assert process_info.notebook() == str(notebook)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JPY_SESSION_NAME", "train.ipynb")
    assert process_info.notebook() == str(notebook)


def test_a_name_that_is_no_path_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "RTC:team/train.ipynb")
    assert process_info.notebook() == "RTC:team/train.ipynb"


def test_editor_names_the_notebook_in_a_variable(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("JPY_SESSION_NAME", "/other.ipynb")
    shell = types.SimpleNamespace(user_ns={"__vsc_ipynb_file__": "/home/a/code.ipynb"})
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert process_info.notebook() == "/home/a/code.ipynb"
    shell.user_ns.clear()
    assert process_info.notebook() == "/other.ipynb"


def test_program_is_named_by_its_file(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert process_info.notebook() is None
    main.__file__ = "train.py"
    assert process_info.notebook() == os.path.abspath("train.py")
    main.__file__ = "/lib/site-packages/ipykernel_launcher.py"
    assert process_info.notebook() is None


def test_a_user_without_a_name_is_a_number(monkeypatch):
    def nobody():
        raise KeyError("uid not found")

    monkeypatch.setattr(process_info.getpass, "getuser", nobody)
    assert process_info.user() == str(os.getuid())


def test_facts_about_a_session_have_all_fields():
    about = process_info.about()
    assert about["pid"] == os.getpid()
    assert set(about) == {"pid", "user", "notebook", "kernel", "since", "python"}
