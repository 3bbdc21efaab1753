"""The file of earlier runs: what it keeps, for several kernels at once, and after damage."""

from __future__ import annotations

import inspect
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpunb.engine import peak_history
from gpunb.engine.peak_history import PeakHistory, Row, history_file
from gpunb.protocol.same_code import digest_of_cell
from gpunb.scheduler.auto_share import Run
from tests.sessions import ROOT

GiB = 2**30

CELL = inspect.getsource(shutil.copyfile)
"""The source of a cell with some fifty lines."""

CELLS = {
    "plain": CELL,
    "line magic": f"get_ipython().run_line_magic('matplotlib', 'inline')\n{CELL}",
    "cell magic": f"get_ipython().run_cell_magic('time', '', {CELL!r})\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "gpunb"


def row(code: str = "a", peak: int = 3) -> Row:
    return Row(code, 100, 40 * GiB, peak * GiB, 10_000, "train \udc80", 1.5)


def test_runs_of_the_same_code_are_found_the_newest_first() -> None:
    history = PeakHistory()
    assert history.runs("a") == []
    assert not history_file().exists()
    for code, peak in (("a", 1), ("b", 2), ("a", 3)):
        history.add(row(code, peak))
    peaks = [run.peak // GiB for run in PeakHistory().runs("a")]
    assert peaks == [3, 1]
    assert PeakHistory().runs("b") == [Run(100, 40 * GiB, 2 * GiB)]
    assert [each.code for each in history.rows()] == ["a", "b", "a"]
    history.clear()
    assert history.rows() == []


def test_file_keeps_a_bounded_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_history, "MOST_RUNS", 3)
    history = PeakHistory()
    for peak in range(6):
        history.add(row(peak=peak))
    assert [each.peak // GiB for each in history.rows()] == [3, 4, 5]


@pytest.mark.parametrize("damage", ["text", "pages"])
def test_damaged_file_is_kept_aside_and_a_new_one_begins(folder: Path, damage: str) -> None:
    history = PeakHistory()
    history.add(row())
    path = history_file()
    if damage == "text":
        path.write_bytes(b"this is no database" * 100)
    else:
        whole = bytearray(path.read_bytes())
        whole[100:] = b"\xff" * (len(whole) - 100)
        path.write_bytes(whole)
    assert history.runs("a") == []
    assert not history.problem
    history.add(row("b"))
    assert len(history.runs("b")) == 1
    assert path.with_suffix(".damaged").exists()


def test_file_that_was_replaced_meanwhile_is_not_kept_aside(folder: Path) -> None:
    history = PeakHistory()
    history.add(row())
    assert peak_history._keep_aside(history_file(), opened=1)
    assert len(history.runs("a")) == 1


def test_history_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.joinpath("gpunb").write_text("a file in place of the folder")
    history = PeakHistory()
    history.add(row())
    assert "history.sqlite" in history.problem
    assert history.runs("a") == []


def test_file_of_the_first_version_is_read_and_gets_the_times() -> None:
    history_file().parent.mkdir(parents=True)
    first = sqlite3.connect(history_file(), isolation_level=None)
    first.executescript(f"{peak_history._UPGRADES[0]}; PRAGMA user_version = 1")
    first.execute("INSERT INTO runs VALUES (1, 'a', 100, 2, 1, 10000, 'train', 1.5)")
    first.close()
    history = PeakHistory()
    assert history.runs("a") == [Run(100, 2, 1, None)]
    history.add(row()._replace(seconds=12.5))
    assert [each.seconds for each in PeakHistory().rows()] == [None, 12.5]
    assert not history.problem


def test_file_of_a_later_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    history = PeakHistory()
    with monkeypatch.context() as later:
        later.setattr(peak_history, "VERSION", peak_history.VERSION + 1)
        history.add(row())
    before = history_file().read_bytes()
    history.add(row())
    assert history.runs("a") == []
    assert "later version" in history.problem
    assert history_file().read_bytes() == before


def test_several_processes_write_at_once() -> None:
    program = (
        "from gpunb.engine.peak_history import PeakHistory, Row\n"
        "history = PeakHistory()\n"
        "for at in range(50): history.add(Row('a', 1, 2**35, at, 1, 'f', 0.0))\n"
        "history.close()\n"
        "assert not history.problem, history.problem\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) for _ in range(3)]
    assert [each.wait() for each in writers] == [0, 0, 0]
    assert len(PeakHistory().rows()) == 150


def test_run_is_kept_while_another_process_writes(folder: Path) -> None:
    history = PeakHistory()
    history.add(row(peak=1))
    other = sqlite3.connect(history_file(), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for peak in (2, 3):
        history.add(row(peak=peak))
    assert "locked" in history.problem
    assert [run.peak // GiB for run in history.runs("a")] == [3, 2, 1]
    assert len(PeakHistory().rows()) == 1
    other.execute("ROLLBACK")
    history.add(row(peak=4))
    other.execute("BEGIN IMMEDIATE")
    history.add(row(peak=5))
    other.close()
    history.close()
    assert [each.peak // GiB for each in PeakHistory().rows()] == [1, 2, 3, 4, 5]
    assert not history.problem


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_look_up_of_a_cell_takes_less_than_four_times_its_compilation(cell: str) -> None:
    """That is a millisecond on a quiet machine; both are slower on a busy one."""
    history = PeakHistory()
    code = digest_of_cell(cell)
    for peak in range(100):
        history.add(row(code, peak=peak))
    taken, compilation = [], []
    for _ in range(100):
        begin = time.process_time()
        assert history.runs(digest_of_cell(cell))
        middle = time.process_time()
        compile(CELL, "cell", "exec")
        taken.append(middle - begin)
        compilation.append(time.process_time() - middle)
    assert min(taken) < 4 * min(compilation)


def test_import_of_gpunb_loads_no_sqlite() -> None:
    program = "import sys, gpunb; gpunb.remote; assert 'sqlite3' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
