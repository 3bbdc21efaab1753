"""Runs the cells of an example in a Jupyter kernel, and notes what a user can see of them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.notebook.kernels import Kernel, Result, kernel
from tests.strangers.cells import cells_of, imports_of

PLAIN = "plain"
MODES = {
    "every": lambda number: "%%gpu 0.5",
    "odd": lambda number: "%%gpu" if number % 2 else "",
    "even": lambda number: "" if number % 2 else "%%gpu",
    "session": lambda number: "%%gpu --session s 0.5",
}
"""Functions that return the first line of a cell with this number, counted from 1."""

_LOOK = (Path(__file__).parent / "look.py").read_text()
_SET = {
    **dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1"),
    "PYTHONHASHSEED": "0",
}
"""A sum of floating point numbers depends on the number of threads, which gpunb sets by share, and
the order of a set depends on the process."""

_SAME_EACH_RUN = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x"),
    (re.compile(r"\S*/ipykernel_\d+/\d+\.py|<ipython-input-[-\w]+>"), "file"),
    (re.compile(r"\d+(\.\d+)?(e[+-]\d+)? ?(ns|[uµμ]s|ms|s|sec|secs|seconds?|min)\b"), "time"),
    (re.compile(r"\d+:\d\d(:\d\d)?(\.\d+)?"), "time"),
)
"""What differs from run to run: addresses, files of cells, times."""


@dataclass(frozen=True)
class Run:
    """One run of an example.

    Attributes:
        cells: what each cell showed, by aspects such as ``status`` or ``stdout``.
        names: descriptions of the values of the notebook's names at the end.
    """

    cells: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)


def run(path: Path, mode: str, seconds: float) -> Run:
    """Run all cells of an example in a new kernel.

    Args:
        mode: `PLAIN` or one of `MODES`.
        seconds: the time limit of each cell.

    Raises:
        AssertionError: a cell did not end in time, or a process was left at the end.
    """
    with tempfile.TemporaryDirectory(prefix="gpunb-") as folder:
        out = Path(folder) / "names.json"
        with kernel(path.parent, _prepare(path, mode), IPYTHONDIR=folder, **_SET) as running:
            cells = [
                _seen(_executed(running, source, number, mode, seconds))
                for number, source in enumerate(cells_of(path), start=1)
            ]
            running.ok(_looking(out))
        return Run(cells, {n: normal(each) for n, each in json.loads(out.read_text()).items()})


def _prepare(path: Path, mode: str) -> str:
    prepare = f"__file__ = {str(path)!r}"
    if mode == PLAIN:
        return prepare
    wanted = ["numpy", "IPython", *imports_of(path)]
    return (
        "import gpunb, importlib.util\n%load_ext gpunb\n"
        "def _there(name):\n"
        "    try: return importlib.util.find_spec(name.partition('.')[0]) is not None\n"
        "    except ValueError: return False\n"
        "gpunb.init(simulate='2xA100:40GiB', num_cpus=2, "
        f"preload=[each for each in {wanted!r} if _there(each)])\n"
        f"del importlib, _there\n{prepare}"
    )


def _executed(running: Kernel, source: str, number: int, mode: str, seconds: float) -> Result:
    first = MODES[mode](number) if mode != PLAIN else ""
    if not first and not source.startswith("%%"):
        first = "#"  # so that the lines have the same numbers
    return running.finish(running.start(f"{first}\n{source}".lstrip("\n")), seconds)


def _looking(out: Path) -> str:
    return (
        f"_look = {{'__name__': 'look'}}; exec({_LOOK!r}, _look)\n"
        f"_look['out'] = open({str(out)!r}, 'w')\n"
        "__import__('json').dump(_look['look'](get_ipython()), _look['out'])\n"
        "_look['out'].close()"
    )


def _seen(result: Result) -> dict[str, Any]:
    """What a user sees of a cell, by aspects."""
    displays, figures = [], []
    for kind, content in result.messages:
        for mime, data in sorted((content.get("data") or {}).items()):
            if mime.startswith("image/"):
                figures.append(_figure(mime, _text(data)))
            else:
                displays.append(normal(f"{kind} {mime}\n{_text(data)}"))
    return {
        "status": f"{result.status} {result.ename}".strip(),
        "error": normal(result.evalue),
        "stdout": normal(result.stdout),
        "stderr": normal(result.stderr),
        "displays": displays,
        "figures": figures,
    }


def _figure(mime: str, data: str) -> str:
    """Type, size in pixels and hash of a figure."""
    size = ""
    if mime == "image/png":
        width, height = struct.unpack(">II", base64.b64decode(data[:48])[16:24])
        size = f" {width}x{height}"
    return f"{mime}{size} {hashlib.sha1(data.encode()).hexdigest()}"


def _text(data: Any) -> str:
    return data if isinstance(data, str) else json.dumps(data, sort_keys=True)


def normal(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, replacement in _SAME_EACH_RUN:
        text = pattern.sub(replacement, text)
    return text
