"""Tests of the runner: it sees what fails, and the kept lists are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.strangers import kept
from tests.strangers.__main__ import HERE, SUITES, main

ROOT = HERE.parents[1]

SUITE = """
import os

import pytest
import ray
from ray._private.gcs_utils import GcsChannel
from ray._private.test_utils import SignalActor
from ray.util.queue import Queue


@ray.remote
def more(x):
    return x + 1


def test_signal(ray_start_regular):
    signal = SignalActor.remote()
    ref = signal.wait.remote()
    signal.send.remote()
    assert ray.get(ref) is None and ray.get(more.remote(1)) == 2 and Queue().empty()


@pytest.mark.parametrize("right", [3, 4])
def test_planted(right):
    assert 1 + 1 == right


def test_listed_and_passes():
    assert ray.exceptions.RayTaskError


def test_of_internals():
    GcsChannel("address")


def test_that_ends_the_process():
    os._exit(0)


@pytest.mark.skip
def test_skipped():
    pass


def test_after_it():
    pass
"""

LIST = """
files = ["test_suite.py"]

[[reasons]]
kind = "shim"
why = "three is not two"
tests = ["test_suite.py::test_planted[3]", "test_suite.py::test_listed_and_passes"]
"""


def test_runner_tells_apart_planted_failures_and_those_that_the_kept_list_expects(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text("raise AssertionError('not for this library')")
    (tmp_path / "kept.toml").write_text(LIST)
    status = main(["ray", str(tmp_path), "--kept", str(tmp_path / "kept.toml")])
    shown, errors = capfd.readouterr()
    assert status == 1
    assert errors == ""
    lines = shown.splitlines()
    assert lines[0] == ("test_suite.py: 3 passed, 1 skipped, 1 not there, 1 shim, 2 unexpected")
    assert "UNEXPECTED test_suite.py::test_planted[4]: assert (1 + 1) == 4" in shown
    assert "UNEXPECTED test_suite.py::test_that_ends_the_process: the process" in shown
    assert "PASSES, and the kept list says why not: test_suite.py::test_listed_and_pass" in shown
    assert "    1 shim: three is not two" in lines
    assert "    1 not there: ray._private.gcs_utils.GcsChannel()" in lines


def test_runner_succeeds_if_each_failure_is_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_suite.py").write_text("def test_planted():\n    assert False\n")
    (tmp_path / "kept.toml").write_text(LIST.replace("[3]", "").replace("listed", "gone"))
    assert main(["ray", str(tmp_path), "--kept", str(tmp_path / "kept.toml")]) == 0
    assert capsys.readouterr().out.startswith("test_suite.py: 1 shim\n")


@pytest.mark.parametrize("suite", SUITES)
def test_kept_lists_give_each_test_one_reason_and_name_the_line_of_each_difference(
    suite: str,
) -> None:
    page = (ROOT / "docs/ray-compatibility.md").read_text()
    listed = kept.load(HERE / f"{suite}.toml")
    assert len(set(listed.files)) == len(listed.files) > 0
    for test, reason in listed.reasons.items():
        assert test.partition("::")[0] in listed.files, test
        assert reason.why, test
        if reason.kind == "difference" and suite == "ray":
            assert reason.page, f"{test}: no line of the page"
            assert reason.page in page, reason.page


def test_kept_list_refuses_a_test_with_two_reasons_and_an_unknown_kind(tmp_path: Path) -> None:
    path = tmp_path / "kept.toml"
    reason = '[[reasons]]\nkind = "shim"\nwhy = "w"\ntests = ["t"]\n'
    path.write_text("files = []\n" + 2 * reason)
    with pytest.raises(ValueError, match="has 't' twice"):
        kept.load(path)
    path.write_text("files = []\n" + reason.replace("shim", "luck"))
    with pytest.raises(ValueError, match="kind 'luck' must be one of"):
        kept.load(path)
