"""The device memory and the time that earlier runs took: a SQLite file that all kernels of a user
share.

Each access opens the file: no descriptor stays open, a fork inherits nothing, and a file that was
replaced is found. A file that SQLite cannot read is kept aside, and a new one is begun. No access
waits for long while another process writes: what cannot be written now is written with the next
run.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpunb.scheduler.auto_share import Run

if TYPE_CHECKING:
    import sqlite3

MOST_RUNS = 10_000
"""Runs that the file keeps, of all code together."""

_LOOKED_AT = 50
"""The last runs of some code that are looked at."""

_PATIENCE = 0.2
"""Seconds to wait for another process that writes."""

_SHORT = 0.005
"""The same while tasks are waiting to be started or settled."""

_WAITING = 1000
"""Runs that wait to be written, at most."""

_UPGRADES = (
    """
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, code TEXT NOT NULL, size INTEGER NOT NULL,
        memory INTEGER NOT NULL, peak INTEGER NOT NULL, share INTEGER NOT NULL,
        name TEXT NOT NULL, ended REAL NOT NULL);
    CREATE INDEX runs_of_code ON runs (code, id)
    """,
    "ALTER TABLE runs ADD COLUMN seconds REAL",
)
"""The statements that make a file of version 1 from a new one, and one of version 2 from that."""

VERSION = len(_UPGRADES)
"""Version of the tables; a file with a later one is left alone."""


class Row(NamedTuple):
    """A run as the file has it; `share` in units of a device, `ended` in seconds since 1970.
    `seconds` is how long it ran; None if an earlier version of gpunb wrote it."""

    code: str
    size: int
    memory: int
    peak: int
    share: int
    name: str
    ended: float
    seconds: float | None = None


def history_file() -> Path:
    """The path of the file, in the user's folder for data."""
    import platformdirs

    return platformdirs.user_data_path("gpunb") / "history.sqlite"


class PeakHistory:
    """The file of earlier runs. `add` and `close` are for one thread, the rest for any. Nothing is
    opened before the first use.

    Attributes:
        problem: why the last access failed; empty if it did not.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._waiting: deque[Row] = deque(maxlen=_WAITING)

    def runs(self, digest: str) -> list[Run]:
        """The last runs of some code, the newest first; none if the file cannot be read."""
        query = (
            "SELECT size, memory, peak, seconds FROM runs WHERE code = ? ORDER BY id DESC LIMIT ?"
        )
        written = self._query(query, (digest, _LOOKED_AT), _SHORT)
        waiting = [row for row in reversed(self._waiting.copy()) if row.code == digest]
        return [Run(row.size, row.memory, row.peak, row.seconds) for row in waiting] + [
            Run(*each) for each in written
        ]

    def rows(self) -> list[Row]:
        """All runs, the oldest first."""
        query = f"SELECT {', '.join(Row._fields)} FROM runs ORDER BY id"
        return [Row(*row) for row in self._query(query, ())]

    def add(self, row: Row) -> None:
        """Note a run that has ended. Nothing is noted if the file cannot be written."""
        name = row.name.encode("utf-8", "backslashreplace").decode()
        self._waiting.append(row._replace(name=name))
        self._write(_SHORT)

    def close(self) -> None:
        """Write what could not be written yet."""
        if self._waiting:
            self._write(_PATIENCE)

    def _write(self, patience: float) -> None:
        marks = ", ".join("?" * len(Row._fields))
        insert = f"INSERT INTO runs ({', '.join(Row._fields)}) VALUES ({marks})"

        def write(file: sqlite3.Connection) -> None:
            file.executemany(insert, self._waiting)
            file.execute(
                "DELETE FROM runs WHERE id <= (SELECT max(id) FROM runs) - ?", (MOST_RUNS,)
            )

        if not self._access(write, patience, make=True):
            self._waiting.clear()

    def clear(self) -> None:
        """Forget all runs."""
        self._access(lambda file: file.execute("DELETE FROM runs"))

    def _query(
        self, query: str, values: tuple[Any, ...], patience: float = _PATIENCE
    ) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        self._access(lambda file: found.extend(file.execute(query, values)), patience)
        return found

    def _access(self, use: Any, patience: float = _PATIENCE, *, make: bool = False) -> bool:
        """Call `use` with the file, in one transaction. A damaged file is kept aside, and a new one
        is used. Returns whether another process writes, so that another attempt makes sense."""
        try:
            import sqlite3
        except ImportError as error:  # a Python that was built without it
            self.problem = str(error)
            return False
        path = history_file()
        if not make and not path.exists():
            self.problem = ""
            return False
        for attempt in range(2):
            opened: int | None = None
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                opened = path.stat().st_ino if path.exists() else None
                with _opened(path, patience) as file:
                    use(file)
                self.problem = ""
                break
            except sqlite3.OperationalError as error:  # busy, no room, no permission
                self.problem = f"{path}: {error}"
                return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            except sqlite3.DatabaseError as error:
                self.problem = f"{path}: {error}"
                if attempt or not _keep_aside(path, opened):
                    break
            except OSError as error:
                self.problem = f"{path}: {error.strerror}"
                break
        return False


@contextlib.contextmanager
def _opened(path: Path, patience: float) -> Iterator[sqlite3.Connection]:
    """The file with its tables, in a transaction that is committed at the end."""
    import sqlite3

    file = sqlite3.connect(path, timeout=patience, isolation_level=None)
    try:
        # A record that is lost when the machine loses power costs one run on a whole device.
        file.execute("PRAGMA synchronous = OFF")
        version = _version(file)
        if version > VERSION:
            raise sqlite3.OperationalError(f"written by a later version of gpunb ({version})")
        if version < VERSION:
            file.execute("BEGIN IMMEDIATE")
            for each in ";".join(_UPGRADES[_version(file) :]).split(";"):
                file.execute(each)  # none if another process was faster
            file.execute(f"PRAGMA user_version = {VERSION}")
            file.execute("COMMIT")
        file.execute("BEGIN")
        yield file
        file.execute("COMMIT")
    finally:
        file.close()


def _version(file: sqlite3.Connection) -> int:
    (version,) = file.execute("PRAGMA user_version").fetchone()
    return int(version)


def _keep_aside(path: Path, opened: int | None) -> bool:
    """Rename a damaged file, unless another process has put a new one in its place already.
    Returns whether another attempt makes sense."""
    try:
        if opened is not None and path.stat().st_ino == opened:
            os.replace(path, path.with_suffix(".damaged"))
            for name in ("-journal", "-wal", "-shm"):
                path.with_name(path.name + name).unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True
