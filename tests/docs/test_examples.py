"""The examples of the README and of the documentation run, and print what stands below them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, README, examples, pages
from tests.sessions import ROOT
from tests.waiting import PATIENCE

ELSEWHERE = {DOCS / "add-an-accelerator.md"}  # tests/accelerators/test_tutorial.py
PAGES = [
    each
    for each in (README, *pages())
    if each not in ELSEWHERE and list(examples(each.read_text()))
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What became of each example, by page and line."""
    folder = tmp_path_factory.mktemp("docs")
    environment = {
        **os.environ,
        "GPUNB_NUM_CPUS": "2",
        "GPUNB_SIMULATE": "2xA100:40GiB",
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.runner", *map(str, PAGES)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=10 * PATIENCE,
        check=False,
    )
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-4000:]
    return {(Path(each["page"]), each["line"]): each for each in facts}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page(page, outputs):
    for example in examples(page.read_text()):
        facts = outputs[page, example.line]
        where = f"{page.relative_to(ROOT)}, line {example.line}"
        assert not facts["error"], f"{where}: {facts['error']}"
        if facts["expected"] is not None:
            assert facts["printed"].strip() == facts["expected"].strip(), where


def test_each_page_with_examples_is_run():
    assert len(PAGES) > 8
    assert sum(len(list(examples(each.read_text()))) for each in PAGES) > 40


def test_a_failing_example_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```\n2\n```\n\n```python\n1 / 0\n```\n")
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.runner", str(page)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        check=True,
        timeout=10 * PATIENCE,
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["printed"], first["expected"]) == ("1\n", "2\n")
    assert second["error"] == "ZeroDivisionError: division by zero"
