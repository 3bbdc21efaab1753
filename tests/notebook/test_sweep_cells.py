"""`%%gpu --sweep` in a plain shell in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.utils.capture import capture_output

import gpunb
from gpunb.notebook import sweep_cell
from tests.sessions import assert_idle, session
from tests.shells import gpunb_shell
from tests.waiting import eventually


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    with session(num_gpus=1, preload=None), gpunb_shell() as made:
        yield made
        made.user_ns.pop("sweep", None)
        assert_idle()


def run(shell: Any, code: str) -> tuple[Any, str]:
    """The result of a cell, and what it wrote."""
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    return result, captured.stdout + captured.stderr


def test_a_cell_runs_once_for_each_combination_and_binds_only_sweep(shell: Any) -> None:
    shell.user_ns.update(base=10, rate="the notebook's own")
    result, text = run(
        shell,
        "%%gpu 0.25 --sweep rate=1,2 --sweep kind=adam,sgd --out loss\n"
        "other = 1\nprint('rate', rate)\nloss = base * rate if kind == 'adam' else -rate",
    )
    assert result.success, text
    sweep = shell.user_ns["sweep"]
    assert [(each.params, each.value) for each in sweep.trials] == [
        ({"rate": 1, "kind": "adam"}, {"loss": 10}),
        ({"rate": 1, "kind": "sgd"}, {"loss": -1}),
        ({"rate": 2, "kind": "adam"}, {"loss": 20}),
        ({"rate": 2, "kind": "sgd"}, {"loss": -2}),
    ]
    assert sweep.best("loss").number == 3
    assert sweep.trials[2].logs() == "rate 2\n"
    assert "4 trials: 4 done" in text
    assert shell.user_ns["rate"] == "the notebook's own"
    assert not {"other", "loss", "kind"} & shell.user_ns.keys()


def test_a_function_of_the_notebook_sees_the_value_of_the_trial(shell: Any) -> None:
    run(shell, "rate = 0\ndef double():\n    return 2 * rate")
    shell.user_ns["grid"] = [{"rate": 3}, {"rate": 4}]
    run(shell, "%%gpu 0.25 --sweep grid\ndouble()")
    assert [each.value for each in shell.user_ns["sweep"].trials] == [6, 8]


def test_a_trial_that_raises_has_its_traceback_and_the_others_run(shell: Any) -> None:
    result, _ = run(shell, "%%gpu 0.25 --sweep rate=0,1\n1 / rate")
    assert result.success
    sweep = shell.user_ns["sweep"]
    assert sweep.counts() == {"failed": 1, "done": 1}
    assert sweep.trials[0].reason == "ZeroDivisionError: division by zero"
    ((_, what, content),) = [each for each in sweep.trials[0].log if each[0] == "show"]
    assert what == "failed"
    assert "1 / rate" in "\n".join(content["traceback"])


def test_a_named_sweep_of_a_cell_resumes_until_the_cell_or_its_data_change(
    shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shell.user_ns["offset"] = 1

    def resumed(code: str, options: str = "") -> list[bool]:
        run(shell, f"%%gpu 0.25 --sweep rate=1,2 --name digits --out loss {options}\n{code}")
        return [each.resumed for each in shell.user_ns["sweep"].trials]

    assert resumed("loss = rate + offset") == [False, False]
    assert resumed("# a comment\nloss = rate + offset") == [True, True]
    assert shell.user_ns["sweep"].trials[1].value == {"loss": 3}
    assert resumed("loss = rate - offset") == [False, False]
    shell.user_ns["offset"] = 2
    assert resumed("loss = rate + offset") == [False, False]
    assert resumed("loss = rate + offset", "--fresh") == [False, False]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--sweep rate=1 --session a", "--sweep does not go with --session"),
        ("--sweep rate=1 --ranks 2", "--ranks 2 does not go with --sweep"),
        ("--sweep nothing", "nothing: the notebook has no such name"),
        ("--sweep rate=1 --sweep grid", "grid must be the only --sweep"),
        ("--sweep rate=1 --sweep rate=2", "rate= is there twice"),
        ("--sweep 2x=1", "'2x' is not a name"),
        ("--sweep rate=", "list of values of 'rate' is empty"),
        ("--sweep number", "a sweep takes a dict"),
        ("--sweep rate=1 --name a/b", "it names a file"),
        ("--fresh", "--fresh goes with --sweep"),
        ("--sweep rate=1 --fresh", "no name="),
        ("2 --sweep rate=1", "a request for 2 GPU"),
    ],
)
def test_a_bad_line_is_refused(shell: Any, line: str, text: str) -> None:
    shell.user_ns.update(number=3, grid=[{"rate": 1}])
    result, shown = run(shell, f"%%gpu {line}\nrate")
    assert not result.success
    assert text in f"{result.error_in_exec} {shown}"


def test_a_name_that_cannot_be_pickled_is_refused(shell: Any) -> None:
    run(shell, "import threading\ngrid = {'lock': [threading.Lock()]}")
    result, _ = run(shell, "%%gpu 0.25 --sweep grid\nlock")
    assert not result.success
    assert "lock" in f"{result.error_in_exec}"


def test_a_stop_while_trials_are_submitted_leaves_none(
    shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_in, count = sweep_cell.hand_in, iter(range(10))

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(count) == 1:
            raise KeyboardInterrupt
        return hand_in(*args, **options)

    monkeypatch.setattr(sweep_cell, "hand_in", interrupted)
    result, _ = run(shell, "%%gpu 0.25 --sweep rate=1,2\nimport time\ntime.sleep(60)")
    assert "while its trials were submitted" in str(result.error_in_exec)
    eventually(lambda: not gpunb.status()["running"] and not gpunb.status()["queued"])
