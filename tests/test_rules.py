"""The rules that find tests that go by the clock, or that no run counts as left out."""

from __future__ import annotations

import textwrap

import pytest

from tests import rules

SLEEPS = """
    time.sleep(0.2)
    asyncio.sleep(0.05, "value")
    for each in many: sleep(1)
    while True: later = lambda: sleep(1)
    run("import time; time.sleep(0.3)")
    run(f"{first}; time.sleep(0.3)")
"""

NO_SLEEPS = """
    while not done(): time.sleep(0.01)
    time.sleep(0)
    time.sleep(60)
    time.sleep(pause)
    run("while not done(): time.sleep(0.3)")
    run(f"while not {done}: time.sleep(0.3)")
    time.sleep(0.2)  # by the clock: time stamps must differ
"""


@pytest.mark.parametrize("line", textwrap.dedent(SLEEPS).strip().splitlines())
def test_a_fixed_sleep_is_found(line):
    assert rules.problems(line) == [(1, rules.SLEEP)]


@pytest.mark.parametrize("line", textwrap.dedent(NO_SLEEPS).strip().splitlines())
def test_a_step_of_waiting_and_a_task_without_an_end_are_left(line):
    assert rules.problems(line) == []


def test_a_sleep_in_a_long_string_is_found_at_its_line():
    source = 'run("""\nimport time\ntime.sleep(2)\n""")\n'
    assert rules.problems(source) == [(3, rules.SLEEP)]


ELAPSED = """
    assert time.monotonic() - began < 5
    assert 0.1 < time.perf_counter() - began
    assert monotonic() - began < 3 * PATIENCE
    assert (took := time.time() - began) < 1, took
    took = time.monotonic() - began; assert took < 2
    took = time.monotonic() - began; assert min(took, other) < 2
"""

NOT_ELAPSED = """
    assert time.monotonic() - began < plain
    assert count < 5
    assert took < 5
    took = time.monotonic() - began; print(took)
    assert time.monotonic() - began > 1  # by the clock: the pause is what is tested
"""


@pytest.mark.parametrize("line", textwrap.dedent(ELAPSED).strip().splitlines())
def test_an_assert_on_elapsed_seconds_is_found(line):
    source = f"def test():\n    {line}\n"
    assert rules.problems(source) == [(2, rules.ELAPSED)]


@pytest.mark.parametrize("line", textwrap.dedent(NOT_ELAPSED).strip().splitlines())
def test_other_asserts_are_left(line):
    assert rules.problems(f"def test():\n    {line}\n") == []


def test_the_exception_may_stand_at_the_end_of_a_longer_statement():
    source = "time.sleep(\n    0.2)  # by the clock: a pause\n"
    assert rules.problems(source) == []
    assert rules.problems("time.sleep(1)  # by the clock:\n") == [(1, rules.SLEEP)]


def test_the_command_names_file_and_line(tmp_path, capsys):
    (tmp_path / "test_one.py").write_text("import time\ntime.sleep(1)\n")
    assert rules.main(tmp_path) == 1
    assert f"{tmp_path / 'test_one.py'}:2: a fixed sleep" in capsys.readouterr().out
    (tmp_path / "test_one.py").write_text("import time\n")
    assert rules.main(tmp_path) == 0


def test_a_skip_without_pytorch_that_is_not_counted_is_found():
    assert rules.problems('pytest.importorskip("torch")') == [(1, rules.UNCOUNTED)]
    assert rules.problems('pytest.importorskip("jax"); needs.pytorch()') == []
