"""Shares that come from earlier runs, and shares that grow; with a stand-in for CuPy."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpunb
from gpunb import cli
from gpunb.engine.peak_history import PeakHistory

CARD = "1xA100:40GiB"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def take(gib: float, most: float = 100) -> None:
    """Have so much memory of this process's device, or run out of it."""
    pool = SimpleNamespace(total_bytes=lambda: int(min(gib, most) * 2**30))
    cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    sys.modules["cupy"] = SimpleNamespace(get_default_memory_pool=lambda: pool, cuda=cuda)  # type: ignore[assignment]
    if gib > most:
        raise MemoryError("CUDA out of memory, says the stand-in")


def limit() -> float:
    """GiB that a framework is told to keep to; 40 on a whole device."""
    return int(os.environ.get("CUPY_GPU_MEMORY_LIMIT", str(40 * 2**30))) / 2**30


@gpunb.remote(num_gpus="auto")
def measured(gib: float, data: bytes = b"") -> float:
    take(gib, limit())
    return limit()


def share_of(ref: gpunb.ObjectRef[Any]) -> float:
    past = {each["id"]: each for each in gpunb.status()["finished"]}
    ((_, _, share),) = past[ref.id[0]]["devices"]
    return float(share)


def why(ref: gpunb.ObjectRef[Any]) -> str:
    return str(gpunb.protocol.backend.current().ask("job", ref.id[0])["auto"])


def test_second_run_gets_the_share_that_the_first_one_needed(
    start: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    start(simulate=CARD)
    first = measured.remote(3)
    assert gpunb.get(first) == 40
    assert "first run of this function: one whole GPU; next time 0.1" in capfd.readouterr().err
    assert why(first) == "one whole GPU, because no run of this code was measured"
    second = measured.remote(3)
    assert gpunb.get(second) == 3.5
    assert share_of(second) == 0.1
    assert why(second).startswith("0.1 of a GPU, because it had at most 3 GiB in its last run")
    other = measured.remote(3, bytes(2**22))
    assert gpunb.get(other) == 40
    assert "with inputs of about 4 MiB" in why(other)
    by_memory = measured.options(gpu_memory="auto").remote(3)
    assert gpunb.get(by_memory) == 3.5
    assert "first run" in capfd.readouterr().err  # of the other inputs


def test_tasks_that_wait_for_the_first_run_get_the_share_that_it_needed(
    start: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    start(simulate=CARD)
    refs = [measured.remote(3) for _ in range(3)]
    assert gpunb.get(refs) == [40, 3.5, 3.5]
    assert [share_of(ref) for ref in refs] == [1, 0.1, 0.1]
    assert why(refs[2]).startswith("0.1 of a GPU, because it had at most 3 GiB in its last run")
    assert capfd.readouterr().err.count("first run of this function") == 1


def test_history_is_shared_with_later_sessions(
    start: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    start(simulate=CARD)
    gpunb.get(measured.remote(3))
    gpunb.shutdown()
    gpunb.init(simulate=CARD, num_cpus=2, preload=())
    assert gpunb.get(measured.remote(3)) == 3.5
    capsys.readouterr()
    assert cli.main(["history"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"measured: 3 GiB of 40 GiB at a share of 1 for \d\S* m?s,", lines[0])
    assert "at a share of 0.1 for " in lines[1]
    assert cli.main(["history", "--clear"]) == 0
    assert PeakHistory().rows() == []


def test_runs_that_fail_are_not_noted(start: Callable[..., Any]) -> None:
    start(simulate=CARD)

    @gpunb.remote(num_gpus="auto")
    def fails() -> None:
        take(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        gpunb.get(fails.remote())
    assert PeakHistory().rows() == []


def test_runs_that_were_not_measured_say_so_once(
    start: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    start(simulate=CARD)
    unmeasured = gpunb.remote(num_gpus="auto")(os.getpid)
    gpunb.get([unmeasured.remote() for _ in range(3)])
    gpunb.get(unmeasured.remote())
    assert capfd.readouterr().err.count("its use of GPU memory was not measured") == 1


def test_task_that_outgrows_its_share_runs_again_with_twice_the_share(
    start: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    start(simulate=CARD)

    @gpunb.remote(num_gpus=0.25, retry_oom=True)
    def grows(gib: float) -> float:
        sys.stdout.write(f"asks for {gib} GiB of {limit()}\n")
        take(gib, limit())
        return limit()

    ref = grows.remote(12)
    assert gpunb.get(ref) == 19.5
    assert share_of(ref) == 0.5
    out, err = capfd.readouterr()
    assert "ran out of memory at 0.25 of GPU 0 (10 GiB); again with 0.5" in err
    assert out.count("asks for 12 GiB") == 2
    with pytest.raises(MemoryError, match="out of memory"):
        gpunb.get(grows.remote(50))
    assert capfd.readouterr().err.count("again with") == 2
    with pytest.raises(MemoryError):
        gpunb.get(grows.options(retry_oom=False).remote(12))
    assert "again" not in capfd.readouterr().err


def test_auto_share_grows_when_the_code_takes_more_than_before(start: Callable[..., Any]) -> None:
    start(simulate=CARD)
    gpunb.get(measured.remote(3))
    ref = measured.remote(6)
    assert gpunb.get(ref) == 7.5
    assert share_of(ref) == 0.2
    assert [row.peak / 2**30 for row in PeakHistory().rows()] == [3, 6]


def test_error_of_a_nested_task_does_not_grow_its_parent(
    start: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    start(simulate=CARD)

    @gpunb.remote(num_gpus=0.25)
    def child() -> None:
        take(12, limit())

    @gpunb.remote(num_gpus=0.25, retry_oom=True)
    def parent() -> None:
        gpunb.get(child.remote())

    with pytest.raises(MemoryError):
        gpunb.get(parent.remote())
    assert "again with" not in capfd.readouterr().err


def test_task_that_the_sampler_ended_runs_again_with_twice_the_share(
    start: Callable[..., Any],
) -> None:
    start(simulate=CARD, share="kill")

    @gpunb.remote(num_gpus=0.25, retry_oom=True, caps=False)
    def takes_too_much(gib: float) -> str:
        take(gib)
        if "0.5" not in str(gpunb.get_runtime_context().get_assigned_resources()):
            gpunb.wait([never.remote()])  # until it is ended
        return "done"

    @gpunb.remote(num_cpus=0)
    def never() -> None:
        import time

        time.sleep(60)

    ref = takes_too_much.remote(12)
    assert gpunb.get(ref) == "done"
    assert share_of(ref) == 0.5


def test_actor_that_runs_out_of_memory_names_the_share_to_start_it_with(
    start: Callable[..., Any],
) -> None:
    start(simulate=CARD)

    @gpunb.remote(num_gpus=0.25)
    class Model:
        def load(self) -> None:
            take(12, limit())

    model = Model.remote()
    with pytest.raises(MemoryError, match=r"is not run again with a larger share.*with 0\.5"):
        gpunb.get(model.load.remote())


@pytest.mark.parametrize(
    "use",
    [
        lambda: gpunb.remote(num_gpus="auto")(type("Model", (), {})),
        lambda: gpunb.Executor(num_gpus="auto"),
        lambda: gpunb.remote(num_gpus="lots")(len),
        lambda: gpunb.remote(num_gpus="auto", gpu_memory="auto")(len),
        lambda: gpunb.remote(num_gpus=0.5, retry_oom="yes")(len),
    ],
    ids=["an actor", "an executor", "another text", "both", "no switch"],
)
def test_auto_where_it_has_no_meaning_is_refused(use: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        use()
