"""What Binder is to make of the repository, checked without Docker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.notebooks.conftest import NOTEBOOKS

ROOT = NOTEBOOKS.parent
BINDER = ROOT / "binder"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLS = re.compile(r"'\.\[([\w,]+)\]'")
DISTRIBUTIONS = {"sklearn": "scikit-learn", "jupyter_client": "jupyter-client"}
"""Packages of another name than the module."""

MAY_BE_ABSENT = {"torch", "ray", "joblib"}
"""The notebooks say what they leave out; joblib comes with scikit-learn."""


def requirements(extra: str) -> set[str]:
    """The names of what an extra brings."""
    found = set()
    for text in PROJECT["optional-dependencies"][extra]:
        each = Requirement(text)
        if each.name == PROJECT["name"]:
            found |= {name for own in each.extras for name in requirements(own)}
        else:
            found.add(each.name)
    return found


def installed() -> set[str]:
    """What is there once postBuild has run."""
    (extras,) = INSTALLS.findall((BINDER / "postBuild").read_text())
    own = {Requirement(each).name for each in PROJECT["dependencies"]}
    return own.union(*(requirements(extra) for extra in extras.split(",")))


def test_its_python_is_one_that_gpunb_runs_on() -> None:
    (version,) = re.findall(r"^python-(\d+\.\d+)$", (BINDER / "runtime.txt").read_text())
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_installs_what_the_notebooks_import(notebook: Path) -> None:
    source = "\n".join(
        cell.source
        for cell in nbformat.read(notebook, as_version=4).cells
        if cell.cell_type == "code"
    )
    modules = set(re.findall(r"^\s*(?:import|from) (\w+)", source, re.MULTILINE))
    others = modules - set(sys.stdlib_module_names) - MAY_BE_ABSENT - {"gpunb"}
    assert {DISTRIBUTIONS.get(each, each) for each in others} <= installed()


@pytest.mark.parametrize("script", ["postBuild", "start"])
def test_its_scripts_can_be_run(script: str) -> None:
    assert os.access(BINDER / script, os.X_OK)
    subprocess.run(["bash", "-n", BINDER / script], check=True)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with commands that only write down what they are asked to do."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, does in {
        "python": f'[ "$1" = -c ] && echo {tmp_path} || echo "$@" >> {tmp_path}/asked',
        "node": "exit ${OLD_NODE:-0}",
        "npm": "exit 1",
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{does}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(("old", "how"), [("0", "--no-cache-dir"), ("1", "--editable")])
def test_post_build_installs_and_opens_the_quick_start(
    commands: Path, tmp_path: Path, old: str, how: str
) -> None:
    environment = {"PATH": f"{commands}:{os.defpath}", "OLD_NODE": old}
    subprocess.run([BINDER / "postBuild"], cwd=ROOT, env=environment, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == [f"-m pip install {how} .[lab,notebooks]"]
    for application in ("lab", "server"):
        config = tmp_path / f"etc/jupyter/jupyter_{application}_config.json"
        for settings in json.loads(config.read_text()).values():
            folder, path = settings["default_url"].split("/tree/")
            assert folder == "/lab"
            assert (ROOT / path).is_file()


def test_start_runs_its_command_with_simulated_devices() -> None:
    code = "import gpunb; print(gpunb.init())"
    environment = {name: value for name, value in os.environ.items() if name != "GPUNB_SIMULATE"}
    done = subprocess.run(
        [BINDER / "start", sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "2 x A100 (40 GiB)" in done.stdout


@pytest.mark.skipif(
    not os.environ.get("GPUNB_SLOW_TESTS"),
    reason="downloads all of JupyterLab, for minutes: GPUNB_SLOW_TESTS=1 does it",
)
@pytest.mark.timeout(3600)
def test_all_of_it_in_an_environment_of_its_own(tmp_path: Path) -> None:
    venv.create(tmp_path / "own", with_pip=True)
    own = f"{tmp_path / 'own/bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": own, "JUPYTER_PREFER_ENV_PATH": "1"}
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "--quiet", ROOT, copy], check=True)
    subprocess.run([copy / "binder/postBuild"], cwd=copy, env=environment, check=True)
    for notebook in sorted((copy / "notebooks").glob("*.ipynb")):
        command = [copy / "binder/start", "jupyter", "execute", notebook]
        subprocess.run(command, env=environment, check=True)
