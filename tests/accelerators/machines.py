"""Recorded machines: what the system's files and the vendors' tools say there.

A recording is a text of sections. ``=== file PATH`` and ``=== link PATH -> TARGET`` make files,
``=== run COMMAND`` is what a command prints, ``=== fail COMMAND`` what it says before it fails, and
``=== python MODULE`` a library. The lines before the first section say where it is from.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gpunb.accelerators import probing

RECORDINGS = Path(__file__).parent / "recordings"


class Machine:
    """A recorded machine in place of this one, until the test ends."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root / "root"
        self.tools = root / "bin"
        self.libraries = root / "libraries"
        for folder in (self.root, self.tools, self.libraries):
            folder.mkdir()
        self._answers: dict[str, list[tuple[str, Path, int]]] = {}
        monkeypatch.setattr(probing, "ROOT", self.root)
        monkeypatch.setenv("PATH", str(self.tools))
        monkeypatch.setenv("PYTHONPATH", str(self.libraries))
        for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    def play(self, name: str) -> Machine:
        text = (RECORDINGS / f"{name}.txt").read_text()
        for section in text.split("\n=== ")[1:]:
            head, _, body = section.partition("\n")
            self.add(head, body.strip("\n") + "\n")
        return self

    def add(self, head: str, body: str = "\n") -> None:
        what, _, where = head.partition(" ")
        if what == "file":
            path = self.root / where.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(body)
        elif what == "link":
            source, _, target = where.partition(" -> ")
            path = self.root / source.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(self.root / target.lstrip("/"))
        elif what == "python":
            (self.libraries / f"{where}.py").write_text(body)
        else:
            self._command(where, body, status={"run": 0, "fail": 1}[what])

    def _command(self, command: str, body: str, status: int) -> None:
        tool, _, arguments = command.partition(" ")
        answers = self._answers.setdefault(tool, [])
        answer_file = self.tools / f".{tool}-{len(answers)}"
        answer_file.write_text(body)
        answers.append((arguments, answer_file, status))
        cases = "".join(
            f"{shlex.quote(each)}) /bin/cat {shlex.quote(str(path))} >&{1 + bool(code)}; "
            f"exit {code};;\n"
            for each, path, code in answers
        )
        script = f'#!/bin/sh\ncase "$*" in\n{cases}*) echo "not known: $*" >&2; exit 64;;\nesac\n'
        (self.tools / tool).write_text(script)
        (self.tools / tool).chmod(0o755)

    def remove(self, path: str) -> None:
        (self.root / path.lstrip("/")).unlink()
