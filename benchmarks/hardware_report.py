"""The report of a run on hardware, in Markdown and JSON."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report
from gpunb.cli.gpu_report import nameless

NEEDED = (
    "IPython anywidget cloudpickle comm hypothesis ipywidgets joblib loky numpy psutil pynvml "
    "platformdirs pytest pytest_timeout torch traitlets"
).split()
"""The modules that all parts need."""


LATE = "no time was left"


@dataclass(slots=True)
class Part:
    """The result of a part; `state` is one of ok, failed, cut and not run."""

    name: str
    state: str = "not run"
    seconds: float = 0.0
    note: str = ""
    tests: list[dict[str, Any]] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        lines = [each.as_dict() for each in self.lines]
        return {name: getattr(self, name) for name in self.__slots__} | {"lines": lines}


class Report:
    """The report of a run: `report.md` for readers, `report.json` for programs."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.parts = [Part(name) for name in names]
        self.facts: dict[str, Any] = {}

    def write(self) -> None:
        """Write the report of what there is until now."""
        found = {"machine": self.facts, "parts": [each.as_dict() for each in self.parts]}
        for name, words in (
            ("report.json", json.dumps(found, indent=1, default=str)),
            ("report.md", "\n".join(self.text())),
        ):
            _replace(self.folder / name, nameless(words) + "\n")

    def text(self) -> Iterator[str]:
        """The report in Markdown."""
        yield f"# gpunb on {self.facts.get('devices') or 'no device'}\n"
        yield from self.summary()
        yield "\n| part | state | seconds | result |\n|---|---|--:|---|"
        for part in self.parts:
            yield f"| {part.name} | {part.state} | {part.seconds:g} | {part.note} |"
        yield from self.values()
        for title, outcome in (("Failures", "failed"), ("Skipped", "skipped")):
            found = self.tests(outcome)
            if found:
                yield f"\n## {title}"
            for test in found:
                message = test["says"].strip()
                lines_of = f"\n```\n{message}\n```" if "\n" in message else f" {message}"
                yield f"\n`{test['test']}`:{lines_of}"
        yield "\n## The machine\n"
        yield from (f"- {name}: {value}" for name, value in self.facts.items() if value)

    def tests(self, outcome: str) -> list[dict[str, Any]]:
        return [each for part in self.parts for each in part.tests if each["outcome"] == outcome]

    def summary(self) -> Iterator[str]:
        """The machine and the outcome in a few lines, with the names of what failed."""
        names = ("nvidia-smi", "PyTorch", "python", "packages", "missing packages")
        found = [f"{name}: {self.facts[name]}" for name in names if self.facts.get(name)]
        yield "; ".join(found) + "\n"
        if rehearsal():
            yield "**A rehearsal on a stand-in: no figure here says anything about a GPU.**\n"
        states = [each.state for each in self.parts]
        counts = [f"{states.count(each)} {each}" for each in dict.fromkeys(states)]
        tests = [f"{len(self.tests(each))} {each}" for each in ("passed", "failed", "skipped")]
        seconds = sum(each.seconds for each in self.parts)
        yield f"Parts: {', '.join(counts)}. Tests: {', '.join(tests)}. It took {seconds:.0f} s.\n"
        for part in self.parts:
            if part.state in ("failed", "cut"):
                yield f"- **{part.name}** {part.state}: {part.note}"
        if late := [each.name for each in self.parts if each.note == LATE]:
            yield f'- no time was left for the rest: run it with `--only "{",".join(late)}"`'
        for test in self.tests("failed"):
            errors = [each for each in test["says"].splitlines() if each.startswith("E ")]
            yield f"- `{test['test']}`: {errors[0][2:].strip() if errors else 'see below'}"

    def values(self) -> Iterator[str]:
        """The measurements, and the figures that the tests recorded."""
        if lines := [line for part in self.parts for line in part.lines]:
            yield "\n## Measurements\n"
            yield "Medians. *to floor*: how many times as long as the named way without gpunb.\n"
            yield report.table(lines)
        figures = [
            (*name.removesuffix("]").partition(" [")[::2], value, test["outcome"])
            for part in self.parts
            for test in part.tests
            for name, value in test["figures"].items()
        ]
        if figures:
            yield "\n## Figures of the tests\n\n| | | the test |\n|---|--:|---|"
        for name, unit, value, outcome in figures:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"| {name} | {text} {unit} | {outcome} |"


def machine() -> dict[str, Any]:
    """The facts about the machine that a reader has to know."""
    from gpunb import accelerators

    found, facts = accelerators.detect(), report.machine()
    packages = facts.pop("packages")
    return {
        "devices": "; ".join(f"{each.name}, {each.key}" for each in found.devices),
        "nvidia-smi": _smi(),
        "PyTorch": _torch(),
        "notes": "; ".join(found.notes),
        **facts,
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "missing packages": ", ".join(
            each for each in NEEDED if importlib.util.find_spec(each) is None
        ),
    }


def rehearsal() -> bool:
    return "GPUNB_STAND_IN" in os.environ


def _smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not found"
    query = "--query-gpu=name,driver_version,memory.total"
    return _answer(["nvidia-smi", query, "--format=csv,noheader"], 20)


def _torch() -> str:
    """What PyTorch says of itself. It also comes from the disk now, before a test waits for it."""
    code = "import torch; print(torch.__version__, 'for CUDA', torch.version.cuda)"
    return _answer([sys.executable, "-c", code], 120)


def _answer(command: list[str], seconds: float) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        return (done.stdout or done.stderr).strip().replace("\n", "; ")
    return "it does not answer"


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is never seen half written."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)
