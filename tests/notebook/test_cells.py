"""Cells under %%gpu, in a real kernel: each does what it does as a plain cell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import Kernel, Result

pytestmark = pytest.mark.kernel

DIFFERENCES = {
    "return outside": "a syntax error that Python's compiler finds late is raised at once here, "
    "before a GPU is waited for; IPython runs the statements before it",
    "break outside": "as return outside",
    "group": "IPython prints a group of errors as text of its own; here it is an error's output",
}
"""Snippets that differ from a plain cell for now, with the reason."""

LATE = {"raw writes": "raw\n", "raw writes to standard error": "raw error\n", "subprocess": "42\n"}
"""Output that a thread of ipykernel reads: it may come after the end of a plain cell."""

LOOK = r"""
import types, warnings
own = set()
filters = warnings.filters[:]
def names():
    compiled = {"__annotations__", "__annotate__", "__conditional_annotations__"}
    hidden = shell.user_ns_hidden.keys() | own | compiled | {"__warningregistry__"}
    return {name: f"module {each.__name__}" if isinstance(each, types.ModuleType) else repr(each)
            for name, each in list(shell.user_ns.items())
            if name not in hidden and name.strip("_ih0123456789")}
def forget():
    for name in names():
        del shell.user_ns[name]
    shell.compile.reset_compiler_flags()
    warnings.resetwarnings()
    warnings.filters.extend(filters)
own |= names().keys()
"""
"""Run in a namespace of its own, so that cells may shadow what they like."""


@pytest.fixture(scope="module", autouse=True)
def prepared(cell: Kernel) -> None:
    cell.ok(f"_look = {{'shell': get_ipython()}}\nexec({LOOK!r}, _look)")


FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Snippet:
    """A cell to run, a cell before it, and an expression after it."""

    what: str
    before: str
    body: str
    after: str


def snippets() -> Iterator[Snippet]:
    text = (FOLDER / "snippets.txt").read_text()
    text = re.sub("^###.*\n", "", text, flags=re.MULTILINE)
    for block in re.split("^=== ", text, flags=re.MULTILINE)[1:]:
        head, _, code = block.partition("\n")
        before, _, rest = f"\n{code}".partition("\n---\n")
        body, _, after = rest.rstrip("\n").partition("\n??? ")
        yield Snippet(head, before.strip("\n"), body, after)
    yield Snippet("empty", "", "\n", "")
    yield Snippet("blank lines", "", "\n\n# a comment\n\nx = 1\n\n", "")
    yield Snippet("null byte", "", "x = 'a\0b'", "")
    yield Snippet("form feed", "", "x = 1\n\f\ny = 2", "")


def _normal(text: Any) -> Any:
    """Without what differs from run to run, be it plain or not."""
    if isinstance(text, str):
        text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
        text = re.sub(r"/tmp/ipykernel_\d+/\d+\.py|\d{6,}\.py|<ipython-input-[-\w]+>", "file", text)
        text = re.sub(r"^<>:\d+: .*\n", "", text, flags=re.MULTILINE)
        return re.sub(r"\d+(\.\d+)?(e[+-]\d+)? ?(ns|[u\u00b5\u03bc]s|ms|s)\b", "time", text)
    if isinstance(text, dict):
        return {key: _normal(each) for key, each in text.items()}
    if isinstance(text, (list, tuple)):
        return [_normal(each) for each in text]
    return text


def _places(result: Result) -> list[str]:
    """Where an error came from, of the last in the chain, and what is said of each.

    How many lines are shown around a place depends on the name of the file.
    """
    parts = re.split("\n\n(?:During|The above)", result.traceback)
    places = re.findall(r"^Cell In\[\d+\], line \d+(?:, in .*)?$", parts[-1], re.MULTILINE)
    first = min([int(each) for each in re.findall(r"In\[(\d+)\]", result.traceback)], default=0)
    places = [re.sub(r"\[(\d+)\]", lambda m: f"[{int(m[1]) - first}]", each) for each in places]
    return [*places, *re.findall(r"^[A-Z]\w*(?::.*)?$", result.traceback, re.MULTILINE)]


def _seen(result: Result, names: dict[str, str], after: Any) -> dict[str, Any]:
    counts = {content["execution_count"] - result.count for content in result.of("execute_result")}
    seen = {
        "outputs": result.outputs(),
        "counts": list(counts),
        "status": result.status,
        "error": (result.ename, result.evalue),
        "places": _places(result),
        "names": names,
        "after": after,
    }
    return {key: _normal(each) for key, each in seen.items()}


def run(cell: Kernel, snippet: Snippet, first: str, late: str = "") -> dict[str, Any]:
    """What can be seen of a snippet that begins with this line, once its output has this text."""
    cell.ok(f"_look['forget']()\n{snippet.before}")
    result = cell(f"{first}{snippet.body}")
    cell.late(lambda: late in result.stdout + result.stderr)
    after, names = cell.value(f"(repr(({snippet.after})), _look['names']())")
    return _seen(result, names, after)


def compare(cell: Kernel, snippet: Snippet) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a snippet does under %%gpu, and as a plain cell."""
    comment = "" if snippet.body.startswith("%%") else "#\n"
    if snippet.body.startswith("    "):
        comment = f"    {comment}"
    plain = run(cell, snippet, comment, LATE.get(snippet.what, ""))
    return run(cell, snippet, "%%gpu\n"), plain


def _marked(snippet: Snippet) -> Any:
    reason = DIFFERENCES.get(snippet.what)
    marks = [pytest.mark.xfail(reason=reason)] if reason else []
    return pytest.param(snippet, id=snippet.what.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("snippet", [*map(_marked, snippets())])
def test_a_gpu_cell_does_the_same_as_a_plain_cell(cell: Kernel, snippet: Snippet) -> None:
    under, plain = compare(cell, snippet)
    assert under == plain
