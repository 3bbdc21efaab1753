"""The file of a sweep: what it keeps, and what happens if it cannot."""

from __future__ import annotations

import os
import sqlite3

import numpy as np
import pytest

from gpunb.exceptions import GpunbError
from gpunb.sweeps.storage import Storage, path_of
from gpunb.sweeps.trials import Trial


@pytest.fixture
def path(tmp_path):
    return tmp_path / ".gpunb" / "digits.sqlite"


def ended(value, state="done", number=0):
    trial = Trial(number, {"rate": 0.1, "data": {(1, 2): object()}})
    trial.ended(state, value)
    return trial


def loaded(path, key="k", function="f", **options):
    """A trial with what the file has of it, and the notes."""
    trial = Trial(0, {"rate": 0.1})
    storage = Storage(path, function, **options)
    storage.load({key: trial})
    storage.close()
    return trial, storage.notes


def saved(path, *pairs, function="f"):
    storage = Storage(path, function)
    storage.save(pairs)
    storage.close()


def test_a_result_comes_back_with_its_value_and_reports(path):
    trial = ended({"loss": 0.5, "weights": np.arange(3)})
    trial.reports, trial.seconds, trial.devices = [{"loss": 1.0}], 2.5, "GPU 1"
    saved(path, ("k", trial))
    again, notes = loaded(path)
    assert (again.state, again.metrics, again.reports) == ("done", {"loss": 0.5}, [{"loss": 1.0}])
    assert (again.seconds, again.devices, again.resumed) == (2.5, "GPU 1", True)
    assert again.value["weights"].tolist() == [0, 1, 2]
    assert not notes


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_trial_that_did_not_end_well_runs_again(path, state):
    saved(path, ("k", ended(None, state)))
    again, _ = loaded(path)
    assert again.state == "queued"


def test_results_of_another_version_of_the_function_are_left_aside_and_counted(path):
    saved(path, ("k", ended(1)), ("l", ended(2)), ("m", ended(None, "failed")))
    again, (note,) = loaded(path, function="g")
    assert again.state == "queued"
    assert "the function has changed: 2 results" in note
    assert loaded(path)[0].value == 1


def test_fresh_deletes_the_results(path):
    saved(path, ("k", ended(1)))
    assert loaded(path, fresh=True)[0].state == "queued"
    assert loaded(path)[0].state == "queued"


def test_a_second_sweep_is_told_who_has_the_file(path):
    first = Storage(path, "f")
    with pytest.raises(GpunbError, match=rf"in use by process {os.getpid()} on "):
        Storage(path, "f")
    first.close()
    Storage(path, "f").close()


def test_a_damaged_file_is_kept_aside(path):
    saved(path, *((f"k{number}", ended("x" * 4000)) for number in range(20)))
    data = bytearray(path.read_bytes())
    data[4096:12288] = b"damage! " * 1024
    path.write_bytes(data)
    for number in (1, 2):
        again, (note,) = loaded(path)
        assert again.state == "queued"
        aside = path.with_name(f"digits.sqlite.damaged-{number}")
        assert aside.name in note
        assert aside.read_bytes() == data
        path.write_bytes(data)


def test_a_file_that_is_no_database_is_kept_aside(path):
    path.parent.mkdir()
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    _, (note,) = loaded(path)
    assert "is damaged (file is not a database)" in note


def test_a_database_of_another_program_is_left_alone(path):
    path.parent.mkdir()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE accounts (name)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(GpunbError, match="another program"):
        Storage(path, "f")
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir() if "damaged" in each.name] == []


def test_a_full_disk_keeps_results_in_memory_until_there_is_room(path, capsys):
    storage = Storage(path, "f")
    pages = storage._database.execute("PRAGMA page_count").fetchone()[0]
    storage._database.execute(f"PRAGMA max_page_count = {pages}")
    storage.save([("k", ended("x" * 100_000))])
    assert "1 results are only in memory" in storage.problem
    assert "database or disk is full" in storage.problem
    assert "gpunb: 1 results are only in memory" in capsys.readouterr().err
    storage._database.execute("PRAGMA max_page_count = 1000000")
    storage.save([("l", ended(2))])
    assert storage.problem == ""
    assert storage._unsaved == []
    storage.close()
    assert len(loaded(path, "k")[0].value) == 100_000
    assert loaded(path, "l")[0].value == 2


def test_a_result_that_cannot_be_read_again_runs_anew_and_is_counted(path):
    saved(path, ("k", ended(1)))
    with sqlite3.connect(path) as database:
        database.execute("UPDATE trials SET value = x'00'")
    database.close()
    again, (note,) = loaded(path)
    assert again.state == "queued"
    assert "1 results" in note


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Storage(tmp_path / "file" / "a.sqlite", "f")


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a\nb", 3])
def test_a_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(ValueError, match="it names a file"):
        path_of(name, None)


def test_the_file_lies_beside_the_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert path_of("digits", None) == tmp_path / ".gpunb" / "digits.sqlite"
    assert path_of(None, "results.db") == tmp_path / "results.db"
    notebook = tmp_path / "sub" / "a.ipynb"
    notebook.parent.mkdir()
    notebook.touch()
    monkeypatch.setenv("JPY_SESSION_NAME", str(notebook))
    assert path_of("digits", None) == notebook.parent / ".gpunb" / "digits.sqlite"
