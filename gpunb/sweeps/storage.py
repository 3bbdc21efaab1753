"""The file of a named sweep: SQLite, with one row for each trial that has ended.

Every result is on the disk before the sweep gives it to anybody, so that an end of the kernel at
any moment loses no result that was seen. One sweep at a time writes to a file: it locks a second
file beside it, which the system unlocks when the kernel ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.data.serialize.values import dumps_in_band
from gpunb.exceptions import GpunbError
from gpunb.sweeps.trials import Trial, shown
from gpunb.system.process_info import notebook

_APPLICATION = 0x6770756E
"""SQLite's application id of these files: "gpun"."""

_VERSION = 1

_LARGEST = 900_000_000
"""Bytes of one value; SQLite's own limit is a little higher."""

_TABLE = """
CREATE TABLE trials (
    function TEXT, trial TEXT, params TEXT, state TEXT, metrics TEXT, reports TEXT, value BLOB,
    error TEXT, seconds REAL, devices TEXT, ended REAL, PRIMARY KEY (function, trial))
"""

_FINAL = "state IN ('done', 'stopped')"


def path_of(name: str | None, storage: str | os.PathLike[str] | None) -> Path:
    """The file of a sweep: `storage`, or ``.gpunb/NAME.sqlite`` beside the notebook.

    Raises:
        ValueError: `name` cannot be the name of a file.
    """
    if storage is not None:
        return Path(storage).expanduser().absolute()
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w .+-]{0,100}", name):
        raise ValueError(
            f"name={name!r} must be letters, digits, spaces and . + - _: it names a file"
        )
    beside = notebook()
    known = beside is not None and beside.endswith(".ipynb") and os.path.isabs(beside)
    return Path(os.path.dirname(beside) if known and beside else ".").absolute() / (
        f".gpunb/{name}.sqlite"
    )


class Storage:
    """The results of a sweep on disk. From `open` to `close` no other sweep writes there.

    Attributes:
        problem: why results are only in memory; empty if they are on the disk.
        notes: what the user should know of the file.
    """

    def __init__(self, path: Path, function: str, *, fresh: bool = False) -> None:
        """Open the file, or make it.

        Args:
            function: fingerprint of the function.
            fresh: whether to delete the results in the file.

        Raises:
            GpunbError: another sweep writes to the file, or the file is not a sweep's.
            OSError: the file cannot be opened.
        """
        self.path, self.function = path, function
        self.problem = ""
        self.notes: list[str] = []
        self._unsaved: list[tuple[Any, ...]] = []
        self._saving = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        try:
            self._database = self._opened()
            if fresh:
                with self._database:
                    self._database.execute("DELETE FROM trials")
        except sqlite3.Error as error:
            self._lock.close()
            raise OSError(f"the sweep's file {path} cannot be used: {error}") from error
        except BaseException:
            self._lock.close()
            raise

    def _opened(self) -> sqlite3.Connection:
        try:
            return _connected(self.path)
        except sqlite3.OperationalError:
            raise  # the disk or a permission, not the contents
        except sqlite3.DatabaseError as error:
            aside = _set_aside(self.path)
            self.notes.append(
                f"the sweep's file {self.path} is damaged ({error}): it is now {aside.name}, and "
                "the sweep starts with an empty file"
            )
            return _connected(self.path)

    def load(self, trials: Mapping[str, Trial]) -> None:
        """Give the trials with these keys their results, and note those that are left aside."""
        query = f"SELECT * FROM trials WHERE function = ? AND {_FINAL}"
        lost = 0
        with closing(self._database.execute(query, [self.function])) as found:
            found.row_factory = sqlite3.Row
            for row in found:
                trial = trials.get(row["trial"])
                if trial is not None and not _restored(trial, row):
                    lost += 1
        if lost:
            self.notes.append(f"{lost} results in {self.path} cannot be read again: they run anew")
        query = f"SELECT count(*) FROM trials WHERE function != ? AND {_FINAL}"
        ((others,),) = self._database.execute(query, [self.function]).fetchall()
        if others:
            self.notes.append(
                f"the function has changed: {others} results of other versions of it are left "
                f"aside in {self.path}"
            )

    def save(self, trials: Iterable[tuple[str, Trial]]) -> None:
        """Write the results of trials that have ended; on the disk when this returns, unless there
        is a `problem`. Results that could not be written are written with the next ones."""
        with self._saving:
            self._unsaved += [self._row(key, trial) for key, trial in trials]
            if self._unsaved:
                self._write()

    def retry(self) -> None:
        """After `close`, write the results that could not be written before.

        Raises:
            GpunbError: another sweep writes to the file.
            OSError: the file cannot be opened.
        """
        self._lock = _locked(self.path)
        try:
            self._database = _connected(self.path)
            self.save([])
        except sqlite3.Error as error:
            raise OSError(f"the sweep's file {self.path} cannot be used: {error}") from error
        finally:
            self.close()

    def _write(self) -> None:
        marks = ", ".join("?" * len(self._unsaved[0]))
        try:
            with self._database:  # one transaction
                self._database.executemany(
                    f"INSERT OR REPLACE INTO trials VALUES ({marks})", self._unsaved
                )
        except sqlite3.Error as error:
            if not self.problem:
                sys.stderr.write(f"gpunb: {self._said(error)}\n")
            self.problem = self._said(error)
        else:
            self._unsaved.clear()
            self.problem = ""

    def _said(self, error: sqlite3.Error) -> str:
        return (
            f"{len(self._unsaved)} results are only in memory, as the sweep's file {self.path} "
            f"cannot be written: {error}; they are written as soon as that is possible, and by "
            "the sweep's save()"
        )

    def close(self) -> None:
        """Let other sweeps write to the file."""
        self._database.close()
        self._lock.close()

    def _row(self, key: str, trial: Trial) -> tuple[Any, ...]:
        value = None
        if trial.value is not None:
            try:
                value = dumps_in_band(trial.value)[0]
                if len(value) > _LARGEST:
                    raise TypeError(f"it has {len(value):,} bytes, and {_LARGEST:,} is the limit")
            except Exception as error:  # it arrived by a pickle, but may have none of its own
                value = None
                note = f"the value of trial {trial.number} is not in the file: {error}"
                self.notes.append(note)
        params = {name: shown(each) for name, each in trial.params.items()}
        return (
            *(self.function, key, json.dumps(params), trial.state),
            *(json.dumps(trial.metrics), json.dumps(trial.reports), value, trial.reason),
            *(trial.seconds, trial.devices, time.time()),
        )


def _connected(path: Path) -> sqlite3.Connection:
    """A connection to a file of a sweep.

    Raises:
        sqlite3.DatabaseError: the file is damaged.
        GpunbError: the file is another program's, another user's or a later version's.
    """
    if path.exists() and path.stat().st_uid != os.getuid():
        raise GpunbError(f"the sweep's file {path} belongs to another user: gpunb does not read it")
    database = sqlite3.connect(path, check_same_thread=False)
    try:
        ((damage,),) = database.execute("PRAGMA quick_check(1)").fetchall()
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        ((application,),) = database.execute("PRAGMA application_id").fetchall()
        ((version,),) = database.execute("PRAGMA user_version").fetchall()
        ((tables,),) = database.execute("SELECT count(*) FROM sqlite_master").fetchall()
        if not tables and not application:
            with database:
                database.execute(_TABLE)
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
        elif application != _APPLICATION or version > _VERSION:
            whose = "a later version of gpunb" if application == _APPLICATION else "another program"
            raise GpunbError(f"{path} is a file of {whose}: give the sweep another name or storage")
    except BaseException:
        database.close()
        raise
    return database


def _locked(path: Path) -> Any:
    """The lock of a file, held until it is closed.

    Raises:
        GpunbError: another sweep has it.
    """
    lock = open(f"{path}.lock", "a+", encoding="utf-8")  # noqa: SIM115 - it is open as long as the sweep
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise GpunbError(
            f"the sweep's file {path} is in use by {holder}. Wait for the end of that sweep, "
            "cancel it, or give this one another name"
        ) from None
    except BaseException:
        lock.close()
        raise
    lock.truncate(0)
    where = f" ({name})" if (name := notebook()) else ""
    host = socket.gethostname()  # the file may lie on a disk that several machines share
    holder = f"process {os.getpid()} on {host}{where} since {time.strftime('%F %T')}"
    with contextlib.suppress(OSError):  # on a full disk the sweep's file has the better error
        os.write(lock.fileno(), holder.encode())
    return lock


def _set_aside(path: Path) -> Path:
    """Give a damaged file a name that no file has; return it."""
    for aside in _names_aside(path):
        try:
            os.link(path, aside)  # unlike a rename, it replaces no other file
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            if aside.exists():
                continue
            path.rename(aside)
            return aside
        path.unlink()
        return aside
    raise AssertionError("the names do not end")


def _names_aside(path: Path) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        yield path.with_name(f"{path.name}.damaged-{number}")


def _restored(trial: Trial, row: sqlite3.Row) -> bool:
    """Give a trial its result from the file; whether that was possible."""
    try:
        value = None if row["value"] is None else serialize.loads(Payload(row["value"]))
        reports, metrics = json.loads(row["reports"]), json.loads(row["metrics"])
    except Exception:
        return False
    trial.reports, trial.seconds, trial.devices = reports, row["seconds"], row["devices"]
    trial.ended(row["state"], value)
    trial.metrics, trial.resumed = metrics, True
    return True
