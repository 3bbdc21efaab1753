"""What runs for each change: it agrees with the project, and may do no more than it has to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.sessions import ROOT

yaml = pytest.importorskip("yaml")
WORKFLOW = ROOT / ".github/workflows/ci.yml"


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    if not WORKFLOW.exists():
        pytest.skip("a source distribution has no workflow")
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())
    assert found["permissions"] == {}
    return found["jobs"]


def steps(jobs: dict[str, Any], key: str) -> list[str]:
    return [step[key] for job in jobs.values() for step in job["steps"] if key in step]


def test_actions_are_named_by_their_commit(jobs: dict[str, Any]) -> None:
    used = re.findall(r"uses: (\S+)(.*)", WORKFLOW.read_text())
    assert len(used) == len(steps(jobs, "uses")) > 0
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), "which version that is"


def test_each_job_has_its_limits(jobs: dict[str, Any]) -> None:
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 60
        wanted = {"id-token": "write"} if name == "publish" else {"contents": "read"}
        assert job["permissions"] == wanted
    for step in (step for job in jobs.values() for step in job["steps"]):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


def test_only_a_tag_is_published_and_only_after_all_else(jobs: dict[str, Any]) -> None:
    publish = jobs["publish"]
    assert "refs/tags/v" in publish["if"]
    assert set(publish["needs"]) == jobs.keys() - {"publish"}


def test_what_it_makes_can_be_made(jobs: dict[str, Any]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [run.split()[1] for run in steps(jobs, "run") if run.startswith("make ")]
    tests = {"test", "test-oldest", "test-portable", "test-ray-short"}
    assert {"lint", *tests, "docs", "release-check"} == {*targets}
    for target in targets:
        assert re.search(rf"^{target}:.* ## ", makefile, re.MULTILINE)


def test_the_tested_pythons_are_those_that_the_package_names(jobs: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if ":: 3." in each]
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    assert tested == named
    assert project["requires-python"] == f">={tested[0]}"
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        assert f"Python {tested[0]} to {tested[-1]}" in (ROOT / page).read_text()


def test_each_version_of_python_is_found_once_and_the_oldest_first(jobs: dict[str, Any]) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = subprocess.check_output([ROOT / ".ci/pythons"], env={**os.environ, "PATH": path})
    message = "import sys; print(sys.version_info[1])"
    versions = [
        int(subprocess.check_output([each, "-c", message])) for each in found.decode().splitlines()
    ]
    assert versions == sorted({*versions})
    assert sys.version_info[1] in versions
    assert min(versions) >= 11
