"""Planted tests that fail in each way, under the program that runs failed tests again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.sessions import ROOT, alive

PLANTED = """
    import os, pathlib, pytest, subprocess, sys, threading

    def runs():
        "How often this was called, in all processes."
        file = pathlib.Path("runs")
        file.touch()
        file.write_text(file.read_text() + "x")
        return len(file.read_text())

    def test_well():
        pass
"""


ENVIRON = {
    "PYTHONPATH": str(ROOT),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take longer to load than the tests to run
    "GPUNB_TEST_GRACE": "1",
}


def ran(
    folder: Path,
    test: str,
    *arguments: str,
    processes: int = 0,
    file: Any = subprocess.PIPE,
    program: str = "tests.rerun",
) -> subprocess.CompletedProcess[str]:
    """A run of planted tests; they are in the file ``test_planted.py``."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p xdist.plugin -p pytest_timeout\n")
    planted = textwrap.dedent(PLANTED) + textwrap.dedent(test)
    (folder / "test_planted.py").write_text(planted)
    return subprocess.run(
        [sys.executable, "-m", program, "-n", str(processes), *arguments],
        cwd=folder,
        env={**os.environ, **ENVIRON},
        stdout=file,
        stderr=file,
        text=True,
        check=False,
    )


def test_a_run_without_failures_is_green(tmp_path):
    done = ran(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert "again" not in done.stdout


def test_a_test_that_always_fails_is_red_after_three_runs(tmp_path):
    done = ran(tmp_path, "def test_never():\n    assert runs() == 0, 'in vain'\n")
    assert done.returncode == 1
    assert (tmp_path / "runs").read_text() == "xxx"
    last = done.stdout.splitlines()[-1]
    assert last.startswith("  test_planted.py::test_never: AssertionError: in vain")
    assert "UNSTEADY" not in done.stdout


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("processes", [0, 2])
def test_a_test_that_fails_at_first_is_green_and_listed(tmp_path, times, processes):
    test = f"""
        @pytest.mark.parametrize("a", ["a[b]::c d/é"])
        def test_late(a):
            print("a planted word")
            assert runs() > {times}, "too early\\nsecond line"
    """
    done = ran(tmp_path, test, processes=processes)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "runs").read_text() == "x" * (times + 1)
    *_, head, line = done.stdout.splitlines()
    assert head.startswith("UNSTEADY")
    assert line.startswith("  test_planted.py::test_late[a[b]::c d/")
    assert "AssertionError: too early (load " in line
    (kept,) = (tmp_path / "build" / "unsteady").glob("python*/*.txt")
    assert "second line" in kept.read_text()
    assert "a planted word" in kept.read_text()


def test_a_failed_set_up_and_a_time_limit_are_failures_like_others(tmp_path):
    test = """
        @pytest.fixture
        def at_second():
            assert runs() > 1

        def test_set_up(at_second):
            pass

        @pytest.mark.timeout(1)
        def test_limit():
            if not pathlib.Path("begun").exists():
                pathlib.Path("begun").touch()
                threading.Event().wait()
    """
    done = ran(tmp_path, test)
    assert done.returncode == 0, done.stdout
    head, *lines = done.stdout.splitlines()[-3:]
    assert head.startswith("UNSTEADY")
    assert "test_set_up" in lines[0]
    assert "test_limit: Failed: Timeout" in lines[1]


def test_a_test_whose_worker_crashed_once_is_green_and_listed(tmp_path):
    test = "def test_crash():\n    runs() > 1 or os.kill(os.getpid(), 9)\n"
    done = ran(tmp_path, test, processes=2)
    assert done.returncode == 0, done.stdout
    assert "test_crash: worker 'gw" in done.stdout.splitlines()[-1]


def test_a_test_that_is_skipped_when_it_runs_again_has_not_passed(tmp_path):
    test = "def test_gone():\n    assert runs() > 1\n    pytest.skip('not now')\n"
    assert ran(tmp_path, test).returncode == 1


def test_strict_is_red_for_an_unsteady_test(tmp_path):
    test = "def test_late():\n    assert runs() > 1\n"
    assert ran(tmp_path, test, "--strict").returncode == 5


def test_failures_are_kept_in_a_folder_of_a_name(tmp_path):
    test = "def test_late():\n    assert runs() > 1\n"
    assert ran(tmp_path, test, "--folder", "other").returncode == 0
    assert [each.parent.name for each in tmp_path.glob("build/unsteady/*/*.txt")] == ["other"]


def test_more_than_ten_failures_are_red_at_once(tmp_path):
    test = """
        @pytest.mark.parametrize("number", range({}))
        def test_many(number):
            runs()
            assert pathlib.Path(f"begun{{number}}").exists() or not pathlib.Path(
                f"begun{{number}}").touch() and False
    """
    done = ran(tmp_path, test.format(11))
    assert done.returncode == 1
    assert (tmp_path / "runs").read_text() == "x" * 11
    assert done.stdout.splitlines()[-1].startswith("RED, nothing runs again: 11 tests failed")
    for each in tmp_path.glob("begun*"):
        each.unlink()
    assert ran(tmp_path, test.format(10)).returncode == 0


LEAKS = {
    "process": """
        def test_leak():
            subprocess.Popen(["sleep", "60"], start_new_session=True)
    """,
    "orphan": """
        def test_leak():
            subprocess.run([sys.executable, "-c",
                "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"])
    """,
    "memory file": """
        def test_leak():
            os.memfd_create("gpunb")
    """,
    "file of a session": """
        def test_leak(request):
            import tempfile
            folder = tempfile.mkdtemp(prefix="gpunb-")
            request.config.kept = open(folder + "/leases", "w")
    """,
}


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("test", LEAKS.values(), ids=LEAKS)
def test_a_leak_is_red_at_once_and_ended(tmp_path, test, processes):
    begun = "def test_late():\n    assert runs() > 1\n"
    done = ran(tmp_path, textwrap.dedent(test) + begun, processes=processes)
    assert done.returncode == 1, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("RED, nothing runs again: the tests left "), last
    if "sleep" in test:
        assert "sleep 60" in last
        assert not alive(int(last.split("process ")[1].split(":")[0]))


@pytest.mark.parametrize("processes", [0, 1])
def test_the_file_with_the_output_of_a_run_is_no_leak(tmp_path, processes):
    with tempfile.NamedTemporaryFile("w+", prefix="gpunb-") as file:
        assert ran(tmp_path, "", processes=processes, file=file).returncode == 0
        file.seek(0)
        assert "1 passed" in file.read()


def test_an_error_of_collection_is_red_at_once(tmp_path):
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    for processes in (0, 1):
        done = ran(tmp_path, "", processes=processes)
        assert done.returncode
        assert "RED, nothing runs again: collection of test_broken.py failed" in done.stdout


def test_an_internal_error_is_red_at_once(tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_collection_finish():\n    1 / 0\n")
    done = ran(tmp_path, "")
    assert done.returncode == 3
    assert "pytest had an internal error" in done.stdout.splitlines()[-1]


def test_another_end_of_pytest_is_red_at_once(tmp_path):
    done = ran(tmp_path, "", "-k", "nothing")
    assert done.returncode == 5
    assert done.stdout.splitlines()[-1] == "RED, nothing runs again: pytest ended with status 5"
    done = ran(tmp_path, "def test_end():\n    os.kill(os.getpid(), 9)\n")
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == "RED, nothing runs again: pytest ended with status -9"


def test_steady_counts_the_tests_that_fail_on_a_busy_machine(tmp_path):
    test = """
        import psutil

        def busy():
            "Whether a process runs beside this run."
            beside = psutil.Process(os.getppid()).children()
            return any("while True: pass" in each.cmdline() for each in beside)

        def test_alone():
            assert not busy(), "beside another"

        def test_first():
            assert runs() > 1, "too early"
    """
    steady = {"program": "tests.rerun.steady"}
    done = ran(tmp_path, test, "--runs", "2", "--busy", "1", **steady)
    assert done.returncode == 5, done.stdout
    head, *lines = done.stdout.splitlines()[-3:]
    assert head == "in 2 runs | in all 2 | test: first line"
    assert lines[0].startswith("        2 |      2 | test_planted.py::test_alone: ")
    assert "beside another" in lines[0]
    assert lines[1].startswith("        1 |      1 | test_planted.py::test_first: ")
    folder = tmp_path / "build" / "steady"
    assert len(list(folder.glob("*/*.txt"))) == 3
    # The next call goes on with the history.
    done = ran(tmp_path, test, "--runs", "1", "--busy", "1", **steady)
    assert "        1 |      3 | test_planted.py::test_alone: " in done.stdout
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [run["status"] for run in history] == [5, 5, 5]
    done = ran(tmp_path, "def test_red():\n    assert 0\n", "--runs", "1", **steady)
    assert done.returncode == 1
    assert " RED test_planted.py::test_red: " in done.stdout.splitlines()[-1]
