"""What is said of a process that ended before its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpunb.scheduler.resources import Demand

pytestmark = pytest.mark.needs_ray

LOG = """:job_id:01000000
Fatal Python error: Segmentation fault

Stack (most recent call first):
  File "<ipython-input-3-8625ba467bde>", line 5 in f
  File "/lib/site-packages/IPython/core/interactiveshell.py", line 3823 in run_code
  File "/lib/site-packages/gpunb/worker/task_runner.py", line 10 in call
  File "/lib/site-packages/ray/_private/worker.py", line 1069 in main_loop

Extension modules: numpy (total: 1)
"""


def job(**known: Any) -> Any:
    from gpunb.ray.jobs import RayJob

    return RayJob(3, "train", "call", Demand(), pid=77, **known)


def error_of(job: Any) -> str:
    from ray.exceptions import WorkerCrashedError

    from gpunb.ray import crashes

    return str(crashes.error_of(job, WorkerCrashedError()))


def test_a_fatal_error_has_the_lines_of_its_user(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(LOG)
    text = error_of(job(log=str(log), attempt=2))
    assert text == (
        "train (#3): its worker process 77 ended before the task did (attempt 2): it ended with "
        "Fatal Python error: Segmentation fault\nStack (most recent call first):\n"
        '  File "<ipython-input-3-8625ba467bde>", line 5 in f'
    )


def test_what_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.write_text(":job_id:01000000\n")
    text = error_of(job(log=str(log)))
    assert "Ray does not say how" in text
    assert "worker.err" not in text
    assert f"a fatal error is in {tmp_path}/gone.err" in error_of(job(log=f"{tmp_path}/gone.err"))


def test_ray_prints_nothing_of_the_end_of_our_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker

    from gpunb.ray.crashes import CrashMessageFilter

    printed: list[str] = []
    monkeypatch.setattr(
        worker, "print_to_stdstream", lambda data, **_: printed.extend(data["lines"])
    )

    def shown_text(text: str, pid: str = "raylet") -> bool:
        worker.print_to_stdstream({"lines": [text], "pid": pid}, ignore_prefix=False)
        return printed[-1:] == [text]

    died = "A worker died or was killed while executing a task by {}. Worker PID: {} Worker exit"
    hush = CrashMessageFilter(lambda pid: pid == 5)
    assert not shown_text(died.format("an error", 5))
    assert not shown_text("Task execute failed. There are 1 retries remaining, so the task will be")
    assert shown_text(died.format("an error", 6))
    assert shown_text("Task mine failed. There are 1 retries remaining, so the task will be")
    assert shown_text("the disk is full")
    assert shown_text(died.format("an error", 5), pid="5")
    hush.close()
    assert shown_text(died.format("an error", 5))
