"""The output of one job, for `%gpu logs`: in memory while it is small, then in an unnamed file.

Of very many large logs the oldest are given up.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from gpunb.protocol import plain

Item: TypeAlias = tuple[str, str, Mapping[str, Any]]
"""(``"text"``, stream, {"text": ...}) or (``"show"``, kind of message, its content)"""

PORTION = 1 << 20
"""Bytes of a log that are handed over at once."""

IN_MEMORY = 1 << 18
"""Bytes of one job's log that are kept in memory."""

MOST = 1 << 28
"""Bytes of one job's log that are kept at all."""

ALL_IN_MEMORY = 1 << 25
"""Bytes of all logs that are kept in memory."""

FILES = 100
"""Logs that may have a file."""

TAIL = 1 << 10
"""Characters at the end of an output in which a progress bar is looked for."""

LONGEST = 1 << 20
"""Characters at the end of a log that one request for its text returns."""

problems: list[str] = []
"""Why logs are incomplete, for the warnings of the session."""

COLOUR = re.compile(r"\x1b\[[\d;]*m")
"""Escape sequences that colour text in a terminal."""
_PERCENT = re.compile(r"(\d{1,3})%\|")
_LEFT = re.compile(r"(\d{1,3})%$")
"""The text left of a progress bar of tqdm that is a widget."""


class Log:
    """The output of one job, in order."""

    def __init__(self) -> None:
        self._file: Any = None
        self._size = 0
        self._lock = threading.Lock()
        self._bar = ""
        self.on_disk = False

    def add(self, item: Item) -> None:
        """Add an item, unless the log is too large already."""
        data = plain.dumps(item)
        if item[0] == "text" and "%|" in item[2]["text"]:
            self._bar = item[2]["text"][-TAIL:]
        try:
            with self._lock:
                if self._size > MOST:
                    return
                self._size += len(data)
                if self._size > MOST:
                    data = plain.dumps(_note(f"more than {MOST >> 20} MiB: the rest is not kept"))
                if self._file is None:
                    self._file = io.BytesIO()
                self._file.write(data)
            _shelf.grown(self, len(data))
        except OSError as error:
            # The cell has shown the output already. The log of this job begins anew.
            why = f"{error.strerror} in the folder for temporary files (set TMPDIR to another)"
            problems[:] = [f"output is not kept for %gpu logs: {why}"]
            self.give_up(f"not kept: {why}")

    def __del__(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def note_widget(self, content: Mapping[str, Any]) -> None:
        """Note how far a progress bar of tqdm is that is a widget. Its messages are not kept."""
        if '%"' not in content["message"]:
            return
        value = json.loads(content["message"])["data"].get("state", {}).get("value")
        if isinstance(value, str) and (found := _LEFT.search(value)):
            self._bar = f"{found[1]}%|"

    def progress(self) -> float | None:
        """Return the done part of the last progress bar of tqdm, from 0.0 to 1.0; None without."""
        found = _PERCENT.findall(self._bar)
        return min(1.0, int(found[-1]) / 100) if found else None

    @property
    def in_memory(self) -> int:
        """The bytes of the log in memory."""
        return 0 if self.on_disk else self._size

    def to_disk(self) -> None:
        """Move the log from memory to a file."""
        import tempfile

        with self._lock:
            if self._file is None or self.on_disk:
                return
            file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as this lives
            try:
                file.write(self._file.getbuffer())
                file.flush()
            except OSError:
                with contextlib.suppress(OSError):
                    file.close()
                raise
            self._file, self.on_disk = file, True

    def give_up(self, why: str = "no longer kept") -> None:
        """Drop the log; the text `why` takes its place."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):  # a full disk refuses the last bytes again
                    self._file.close()
            self._file = io.BytesIO(plain.dumps(_note(why)))
            self._size, self.on_disk = len(self._file.getbuffer()), False
            self._file.seek(0, 2)

    def __bool__(self) -> bool:
        return self._file is not None

    def __iter__(self) -> Iterator[Item]:
        """Yield the items that the log has now, from its start."""
        if self._file is None:
            return
        position = 0
        while True:
            with self._lock:
                self._file.seek(position)
                try:
                    item = plain.load(self._file)
                except EOFError:
                    return
                finally:
                    position = self._file.tell()
                    self._file.seek(0, 2)
            yield item

    def portion(self, position: int) -> tuple[bytes, int]:
        """Return the part of the log from this position on, as `items` takes it, and the next
        position. A long log comes in several parts."""
        with self._lock:
            if self._file is None:
                return b"", position
            self._file.seek(position)
            try:
                while self._file.tell() - position < PORTION:
                    plain.load(self._file)
            except EOFError:
                pass
            end = max(position, self._file.tell())
            self._file.seek(position)
            data: bytes = self._file.read(end - position)
            self._file.seek(0, 2)
            return data, end

    def read_from(self, position: int = 0) -> dict[str, Any]:
        """Return the log from a position on as a terminal would show it: `text`, at most its end;
        `truncated`, whether text is missing; and the next `position`."""
        pieces: deque[str] = deque()
        size = gone = 0
        while True:
            data, position = self.portion(position)
            if not data:
                break
            for item in items(data):
                pieces.append(piece := words(item))
                size += len(piece)
            while size - len(pieces[0]) > LONGEST:
                gone += len(pieces[0])
                size -= len(pieces.popleft())
        text = "".join(pieces)
        return {
            "text": text[-LONGEST:],
            "truncated": gone + len(text) > LONGEST,
            "position": position,
        }

    def texts(self) -> Iterator[str]:
        """Yield the text as it came."""
        return (content["text"] for kind, _, content in self if kind == "text")

    def text(self) -> str:
        """Return all text."""
        return "".join(self.texts())


def items(portion: bytes) -> Iterator[Item]:
    """Return the items in a portion of a log."""
    file = io.BytesIO(portion)
    while file.tell() < len(portion):
        yield plain.load(file)


def words(item: Item) -> str:
    """Return an item as a terminal would show it."""
    kind, what, content = item
    if what == "rank":
        return _of_rank(content)
    if kind == "text":
        text: str = content["text"]
        return text
    if "traceback" in content:
        return COLOUR.sub("", "\n".join(content["traceback"])) + "\n"
    if what not in ("display_data", "execute_result") or "text/plain" not in content["data"]:
        return ""
    return f"{content['data']['text/plain']}\n"


def _of_rank(marked: Mapping[str, Any]) -> str:
    """Return an item that is marked with its rank; the rank is before each line."""
    if marked["kind"] == "leads":
        return ""
    text = words((marked["kind"], marked["what"], marked["content"]))
    return "".join(f"[{marked['rank']}] {line}" for line in text.splitlines(keepends=True))


def _note(text: str) -> Item:
    return "text", "stderr", {"text": f"\n... {text} ...\n"}


class _Shelf:
    """Keeps all logs together within their limits."""

    def __init__(self) -> None:
        self._logs: weakref.WeakKeyDictionary[Log, None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._grown = 0

    def grown(self, log: Log, size: int) -> None:
        """Note that a log has become larger."""
        if log.in_memory > IN_MEMORY:
            log.to_disk()
        with self._lock:
            self._logs.pop(log, None)
            self._logs[log] = None  # the last one written to is the last one
            self._grown += size
            if self._grown < IN_MEMORY:
                return
            self._grown = 0
            logs = list(self._logs)
        taken = sum(each.in_memory for each in logs)
        if taken > ALL_IN_MEMORY:
            for each in logs:
                taken -= each.in_memory
                each.to_disk()
                if taken <= ALL_IN_MEMORY // 2:
                    break
        filed = [each for each in logs if each.on_disk]
        for each in filed[: max(0, len(filed) - FILES)]:
            each.give_up()


_shelf = _Shelf()
