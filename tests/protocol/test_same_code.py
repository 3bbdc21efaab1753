"""Which changes of code make it other code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpunb.protocol.same_code import digest_of_cell, digest_of_function
from tests.sessions import ROOT

CELL = "x = 1\nprint(x)\n"


def magic(name: str, *arguments: str) -> str:
    return f"get_ipython().{name}({', '.join(map(repr, arguments))})\n"


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("# a comment\nx = 1\n\n\nprint(x)  # another\n", True),
        ("x = 1; print(x)", True),
        ("x = 2\nprint(x)\n", False),
        ("print(x)\nx = 1\n", False),
    ],
)
def test_comments_and_blank_lines_do_not_count(other: str, same: bool) -> None:
    assert (digest_of_cell(other) == digest_of_cell(CELL)) is same


def test_options_of_magics_do_not_count_but_their_code_does() -> None:
    timed = digest_of_cell(magic("run_cell_magic", "time", "", "x = 1\n"))
    assert digest_of_cell(magic("run_cell_magic", "time", "-q", "# a comment\nx = 1\n")) == timed
    assert digest_of_cell(magic("run_cell_magic", "time", "", "x = 2\n")) != timed
    assert digest_of_cell(magic("run_cell_magic", "bash", "", "x = 1\n")) != timed
    run = digest_of_cell(magic("run_line_magic", "run", "-i train.py"))
    assert digest_of_cell(magic("run_line_magic", "run", "train.py")) == run
    assert digest_of_cell(magic("run_line_magic", "run", "test.py")) != run
    within = magic("run_line_magic", "run", "-i train.py") + "x = 'it\\'s'\n"
    timed = digest_of_cell(magic("run_cell_magic", "time", "", within))
    assert digest_of_cell(magic("run_cell_magic", "time", "-q", within.replace("-i ", ""))) == timed
    other = within.replace("it", "its")
    assert digest_of_cell(magic("run_cell_magic", "time", "", other)) != timed


def test_cell_of_another_language_is_compared_as_text() -> None:
    shell = digest_of_cell(magic("run_cell_magic", "bash", "", "ls | wc -l\n"))
    assert digest_of_cell(magic("run_cell_magic", "bash", "", "ls | wc -c\n")) != shell


def define(body: str) -> object:
    space: dict[str, object] = {}
    exec(f"def f(x):\n{body}", space)
    return digest_of_function(space["f"])  # type: ignore[arg-type]


def test_function_is_the_same_wherever_it_stands() -> None:
    assert define("    return x + 1") == define("\n    # a comment\n\n    return x + 1")
    assert define("    return x + 1") != define("    return x + 2")
    assert define("    return [y + 1 for y in x]") != define("    return [y + 2 for y in x]")


def test_callables_without_code_are_known_by_name() -> None:
    assert digest_of_function(len) == digest_of_function(len) != digest_of_function(sum)


def test_digest_of_a_function_is_the_same_in_each_process() -> None:
    program = (
        "from gpunb.protocol.same_code import digest_of_function\n"
        "def f(x): return x in {'a', 'b', 'c', 'd', 'e'}\n"
        "print(digest_of_function(f))\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
