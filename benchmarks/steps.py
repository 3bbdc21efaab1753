"""Where the time of a fresh GPU task goes: from `.remote()` until its device is free, by step.

    python -m benchmarks.steps docs/images/fresh-task.png

draws the picture of the documentation. It needs matplotlib.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import probe
from benchmarks.lines import Line, Result, median, skipped, spread

STEPS = (
    ("sent", "kernel", "the kernel has decided, and sent the task to a standby"),
    ("begun", "worker", "the function begins in the worker"),
    ("reported", "worker", "the kernel has the report of the worker"),
    ("got", "kernel", "`get` has returned the result"),
    ("closed", "worker", "the worker has closed its channel: it ends"),
    ("gone", "zygote", "the zygote has reported the end of the worker"),
    ("free", "kernel", "the device is free"),
)
"""Each with the process that works, and the event that ends it. A step begins where the one before
ended."""

PROCESSES = ("kernel", "worker", "zygote")

PAUSE = 0.02


def fresh(n: int) -> Result:
    """Seconds of each step, and of processor time in the kernel, the zygote and the worker."""
    import gpunb
    from benchmarks import sessions
    from gpunb.engine import engine
    from gpunb.processes import outbox, receiver

    marks: dict[str, float] = {}
    _note(marks, "sent", outbox.Outbox, "send")
    _note(marks, "reported", engine.Engine, "on_message", before=True)
    _note(marks, "closed", receiver.Receiver, "_finish", before=True)
    _note(marks, "gone", receiver.Receiver, "gone", before=True)
    _note(marks, "free", engine.Engine, "on_exit")

    sessions.start(1)

    @gpunb.remote(num_gpus=1)
    @probe.by_value
    def clocks() -> tuple[float, float]:
        import time

        return time.monotonic(), time.process_time()

    zygote = _zygote()
    samples: Result = {name: [] for name, _, _ in STEPS}
    samples |= {"processor: kernel": [], "processor: zygote": [], "processor: worker": []}
    for turn in range(n + 10):
        marks.clear()
        used, forked = time.process_time(), _used(zygote)
        start = time.monotonic()
        ref = clocks.remote()
        begun, worker = gpunb.get(ref)
        marks["got"] = time.monotonic()
        marks["begun"] = begun
        time.sleep(PAUSE)
        while "free" not in marks:
            time.sleep(PAUSE)
        del ref
        if turn < 10:
            continue
        last = start
        for name, _, _ in STEPS:
            samples[name].append(max(0.0, marks[name] - last))
            last = max(last, marks[name])
        samples["processor: kernel"].append(time.process_time() - used)
        samples["processor: zygote"].append(_used(zygote) - forked)
        samples["processor: worker"].append(worker)
    gpunb.shutdown()
    return samples


def _note(
    marks: dict[str, float], name: str, owner: type, method: str, *, before: bool = False
) -> None:
    """Note the time of the first call of a method since the marks were cleared."""
    call = getattr(owner, method)

    def noting(*args: Any, **kwargs: Any) -> Any:
        if before:
            marks.setdefault(name, time.monotonic())
        result = call(*args, **kwargs)
        if not before:
            marks.setdefault(name, time.monotonic())
        return result

    setattr(owner, method, noting)


def _zygote() -> int:
    """Return the process id of the zygote that has the preload."""
    from benchmarks.processes import names

    return next(pid for pid, name in names() if name == "gpunb-preload")


def _used(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(bench: Any) -> Iterator[Line]:
    result = bench.run(probe.call("steps.fresh", n=bench.n(200, 50)))
    if "skipped" in result:
        yield skipped("steps of a fresh GPU task", "s", result)
        return
    for number, (name, _, event) in enumerate(STEPS, start=1):
        yield Line(
            f"fresh GPU task, step {number}",
            median(result[name]),
            "s",
            note=f"{event}; {spread(result[name])}",
        )
    for name in PROCESSES:
        samples = result[f"processor: {name}"]
        note = f"until the function begins; {spread(samples)}" if name == "worker" else ""
        yield Line(
            f"fresh GPU task, processor time, {name}",
            median(samples),
            "s",
            note=note or spread(samples),
        )


SHORT = {
    "sent": "decide,\nsend",
    "begun": "wake, environment,\nunpickle",
    "reported": "run,\nreport",
    "got": "bring the\nresult",
    "closed": "end: the system takes\nthe memory apart",
    "gone": "report\nthe end",
    "free": "free the\ndevice",
}
"""What happens in each step, for the picture."""


def picture(result: Result, path: str) -> None:
    """Draw the steps along the time, a row for each process."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), dpi=100, layout="constrained")
    axes = figure.subplots()
    rows = list(reversed(PROCESSES))
    at = 0.0
    for name, process, _ in STEPS:
        took = median(result[name]) * 1e3
        row, color = rows.index(process), f"C{PROCESSES.index(process)}"
        axes.barh(row, took, 0.45, left=at, color=color, edgecolor="white")
        label = f"{took:.2f} ms\n{SHORT[name]}"
        axes.text(at + took / 2, row - 0.28, label, ha="center", va="top", fontsize=8)
        at += took
    used = [f"{name}\n{median(result[f'processor: {name}']) * 1e3:.1f} ms" for name in rows]
    axes.set_yticks(range(len(rows)), used)
    axes.set_ylim(-0.95, len(rows) - 0.7)
    axes.set_xlabel("ms since the call; below the names: processor time for one task")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    picture(probe.run(probe.call("steps.fresh", n=200)), sys.argv[1])
