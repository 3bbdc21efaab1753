"""The comparison of examples: it finds a difference, and finds none where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.sessions import ROOT
from tests.strangers.cells import cells_of, imports_of
from tests.strangers.comparing import Difference, Expected, differences, expected
from tests.strangers.examples import EXPECTED, Report, main
from tests.strangers.running import MODES, Run, normal

SMALL = Path(__file__).parent / "small"


@pytest.mark.kernel
def test_examples_are_compared_and_a_planted_difference_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "expected.toml"
    known.write_text(
        '[[difference]]\nexample = "environment.py"\ndifference = "every: name values: *"\n'
        'reason = "a variable"\ndocs = "Environment variables"\n'
    )
    options = ["--jobs", "2", "--mode", "every", "--expected", str(known)]
    assert main([str(SMALL), *options]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^identical    3  alike.py$", shown, re.MULTILINE), shown
    assert re.search(r"^DIFFERS      2  environment.py$", shown, re.MULTILINE), shown
    assert "every: cell 2 stdout: the variable is 1 -> the variable is None" in shown
    assert "every: name values: " not in shown
    assert "(a variable)" in shown
    assert "fails plainly: error ModuleNotFoundError: No module named 'no_such_module'" in shown
    assert "3 examples, 5 cells compared: 1 DIFFERS, 1 identical, 1 left out" in shown


def test_odd_and_even_cells_run_under_gpunb_in_a_mode_of_their_own() -> None:
    marked = {mode: [n for n in range(1, 5) if MODES[mode](n)] for mode in MODES}
    assert marked == {"every": [1, 2, 3, 4], "odd": [1, 3], "even": [2, 4], "session": [1, 2, 3, 4]}


def test_an_example_with_expected_differences_only_does_not_differ() -> None:
    found = Difference("every", "cell 1 stdout", "a", "b")
    report = Report("lib/x.py", cells=2, found=[found])
    assert report.state == "DIFFERS"
    report.judge([Expected("lib/*.py", "*: cell 2 *", "another", "docs")])
    assert report.state == "DIFFERS"
    report.judge([Expected("lib/*.py", "*: cell 1 stdout: *", "why", "docs")])
    assert report.text().splitlines() == ["expected     2  lib/x.py", f"{'':16}(why)"]


def test_each_expected_difference_is_named_in_the_documentation() -> None:
    pages = {path: " ".join(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md")}
    for each in expected(EXPECTED):
        assert any(each.docs in text for text in pages.values()), each


def test_a_script_is_cut_at_its_marks_or_at_blank_lines(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('"""Text."""\nimport a.b\n\n# why\n@f\ndef g():\n\n    pass\nx = 1\n\nx\n')
    assert cells_of(script) == ["import a.b", "# why\n@f\ndef g():\n\n    pass\nx = 1", "x"]
    assert imports_of(script) == ["a.b"]
    script.write_text(f"x = 1\n\ny = 1\n# %%\n# text\n{'#' * 30}\n# more\nz = 1\n")
    assert cells_of(script) == ["x = 1\n\ny = 1", f"{'#' * 30}\n# more\nz = 1"]


def cell(**aspects: Any) -> dict[str, Any]:
    return {"status": "ok", "error": "", "stdout": "", "figures": [], **aspects}


def where(plain: Run, other: Run, again: Run | None = None) -> list[str]:
    return [each.where for each in differences("every", plain, other, again)]


def test_every_aspect_of_a_cell_and_each_name_is_compared() -> None:
    plain = Run([cell(stdout="a\nb"), cell()], {"x": "int 1", "y": "int 2"})
    assert where(plain, plain) == []
    other = Run([cell(stdout="a\nc"), cell(status="error ValueError")], {"x": "int 1"})
    assert where(plain, other) == ["cell 1 stdout", "cell 2 status", "name y"]
    (first, *_) = differences("every", plain, other)
    assert first.text() == "every: cell 1 stdout: b -> c"


def test_differences_between_two_plain_runs_are_not_counted() -> None:
    plain, again = (Run([cell(stdout=f"a\nrandom {n}")]) for n in "12")
    assert where(plain, Run([cell(stdout="a\nrandom 3")]), again) == []
    assert where(plain, Run([cell(stdout="b\nrandom 3")]), again) == ["cell 1 stdout"]
    assert where(plain, Run([cell(stdout="a\nrandom 3\nmore")]), again) == ["cell 1 stdout"]
    arrays = [Run([cell(stdout=f"[{n}]")]) for n in (" 0.35,-1.68", " 0.83,-1.61", " 0. ,-2.42")]
    assert where(arrays[0], arrays[2], arrays[1]) == []
    figures = [Run([cell(figures=[f"image/png 10x{size} {n}"])]) for n, size in ("a5", "b5", "c6")]
    assert where(figures[0], figures[2], figures[1]) == ["cell 1 figures"]
    assert where(figures[0], figures[1], figures[2]) == []


def test_addresses_times_and_files_of_cells_are_not_compared() -> None:
    assert normal("at 0x7f12ab34cd in 1.53 s, 12 ms") == "at 0x in time, time"
    assert normal("/tmp/ipykernel_12/34.py:1: Warning") == "file:1: Warning"


def test_an_expected_difference_covers_its_example_only() -> None:
    found = Difference("every", "cell 1 stdout", "a", "b")
    known = Expected("lib/*.py", "*: cell 1 stdout: *", "why", "docs")
    assert known.covers("lib/x.py", found)
    assert not known.covers("other/x.py", found)
