"""All that a job has shown, for `%gpu logs`: in memory while it is little, else in a file without
a name. Of very many large ones the oldest are given up.
"""

from __future__ import annotations

import io
import pickle
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

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

TOLD = 1 << 20
"""Characters of a log that are told at once to whoever asks for words, from its end."""

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Log:
    """What one job has shown, in order."""

    def __init__(self) -> None:
        self._file: Any = None
        self._size = 0
        self._lock = threading.Lock()
        self.on_disk = False

    def add(self, item: Item) -> None:
        """Keep one more thing, unless there is far too much already."""
        data = pickle.dumps(item, 5)
        with self._lock:
            if self._size > MOST:
                return
            self._size += len(data)
            if self._size > MOST:
                data = pickle.dumps(_note(f"more than {MOST >> 20} MiB: the rest is not kept"), 5)
            if self._file is None:
                self._file = io.BytesIO()
            self._file.write(data)
        _shelf.grown(self, len(data))

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def in_memory(self) -> int:
        """Bytes."""
        return 0 if self.on_disk else self._size

    def to_disk(self) -> None:
        """Take no more memory."""
        import tempfile

        with self._lock:
            if self._file is None or self.on_disk:
                return
            file = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as this lives
            file.write(self._file.getbuffer())
            self._file, self.on_disk = file, True

    def give_up(self) -> None:
        """Keep nothing any more."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = io.BytesIO(pickle.dumps(_note("no longer kept"), 5))
            self._size, self.on_disk = len(self._file.getbuffer()), False
            self._file.seek(0, 2)

    def __bool__(self) -> bool:
        return self._file is not None

    def __iter__(self) -> Iterator[Item]:
        """What is there now, from the start."""
        if self._file is None:
            return
        position = 0
        while True:
            with self._lock:
                self._file.seek(position)
                try:
                    item = pickle.load(self._file)
                except EOFError:
                    return
                finally:
                    position = self._file.tell()
                    self._file.seek(0, 2)
            yield item

    def portion(self, position: int) -> tuple[bytes, int]:
        """What comes from this position on, as `items` takes it, and where it goes on; not all
        at once, if that is much."""
        with self._lock:
            if self._file is None:
                return b"", position
            self._file.seek(position)
            try:
                while self._file.tell() - position < PORTION:
                    pickle.load(self._file)
            except EOFError:
                pass
            end = max(position, self._file.tell())
            self._file.seek(position)
            data: bytes = self._file.read(end - position)
            self._file.seek(0, 2)
            return data, end

    def told(self, position: int = 0) -> dict[str, Any]:
        """What it has from a position on as a terminal would show it, with values and errors:
        `text`, at most its end; whether that is not all of it (`truncated`); and the `position`
        where it goes on."""
        pieces: deque[str] = deque()
        size = gone = 0
        while True:
            data, position = self.portion(position)
            if not data:
                break
            for item in items(data):
                pieces.append(piece := _words(item))
                size += len(piece)
            while size - len(pieces[0]) > TOLD:
                gone += len(pieces[0])
                size -= len(pieces.popleft())
        text = "".join(pieces)
        return {
            "text": text[-TOLD:],
            "truncated": gone + len(text) > TOLD,
            "position": position,
        }

    def texts(self) -> Iterator[str]:
        """Its text as it came."""
        return (content["text"] for kind, _, content in self if kind == "text")

    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts())


def items(portion: bytes) -> Iterator[Item]:
    """What a portion of a log has in it."""
    file = io.BytesIO(portion)
    while file.tell() < len(portion):
        yield pickle.load(file)


def _words(item: Item) -> str:
    """What a terminal shows of it."""
    kind, what, content = item
    if kind == "text":
        text: str = content["text"]
        return text
    if "traceback" in content:
        return _COLOUR.sub("", "\n".join(content["traceback"])) + "\n"
    if what not in ("display_data", "execute_result") or "text/plain" not in content["data"]:
        return ""
    return f"{content['data']['text/plain']}\n"


def _note(text: str) -> Item:
    return "text", "stderr", {"text": f"\n... {text} ...\n"}


class _Shelf:
    """Keeps all logs together within their bounds."""

    def __init__(self) -> None:
        self._logs: weakref.WeakKeyDictionary[Log, None] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._grown = 0

    def grown(self, log: Log, size: int) -> None:
        """A log has become larger."""
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
