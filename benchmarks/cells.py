"""Cells in a real kernel, as a notebook sees them: until the cell is over and its output shown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import probe
from benchmarks.lines import MS, Line, Result, median, skipped, spread

KINDS = {"plain": "pass", "gpu": "%%gpu\npass", "background": "%%gpu --bg\npass"}
PAUSE = 0.02
"""Seconds between two cells, in which a standby gets ready for the next one."""

_SETUP = """\
import gpunb
gpunb.init(simulate="4xA100:40GiB")
%load_ext gpunb
while gpunb.status()["preload"] is None:
    __import__("time").sleep(0.02)
"""


FIGURES = (
    """import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import PercentFormatter

rng = np.random.default_rng(3)""",
    """values = rng.standard_normal(100_000)
fig, axes = plt.subplots(1, 2, sharey=True, tight_layout=True)
axes[0].hist(values, bins=30)
axes[1].hist(0.5 * values + 2, bins=30)
plt.show()""",
    """fig, ax = plt.subplots()
ax.hist(values, bins=30, density=True)
ax.yaxis.set_major_formatter(PercentFormatter(1))
ax.set_title("shares")""",
    """fig, ax = plt.subplots(tight_layout=True)
ax.hist2d(values[:-1], values[1:], bins=40)""",
)
"""Cells that draw, as those of a gallery."""

LEARNING = (
    """import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split""",
    """X, y = make_classification(2_000, 20, n_informative=5, random_state=0)
X_train, X_test, y_train, y_test = train_test_split(X, y, random_state=0)""",
    """model = RandomForestClassifier(100, random_state=0)
model.fit(X_train, y_train)
print(model.score(X_test, y_test))""",
    """order = np.argsort(model.feature_importances_)
fig, ax = plt.subplots()
ax.barh(order.astype(str), model.feature_importances_[order])
ax.set_xlabel("importance")""",
)
"""Cells that train a model on CPUs."""


@contextlib.contextmanager
def _kernel() -> Iterator[Callable[[str], float]]:
    """A new kernel: a function that runs a cell in it and returns the seconds."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")

    def run(code: str) -> float:
        start = time.perf_counter()
        reply = client.execute_interactive(
            code, store_history=False, output_hook=lambda _: None, timeout=60
        )
        took = time.perf_counter() - start
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{code!r}: {reply['content']}")
        return took

    try:
        run(_SETUP)
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)


def empty(n: int) -> Result:
    """Empty cells of each kind, in turns."""
    seconds: Result = {name: [] for name in KINDS}
    with _kernel() as run:
        for turn in range(n + 10):
            for name, code in KINDS.items():
                took = run(code)
                time.sleep(PAUSE)
                if turn >= 10:
                    seconds[name].append(took)
    return seconds


def notebook(name: str, n: int) -> Result:
    """All cells of a notebook one after the other, each time in a new kernel: plain, and under
    %%gpu, in turns."""
    cells: tuple[str, ...] = globals()[name]
    seconds: Result = {"plain": [], "gpu": []}
    for _ in range(n):
        for kind, line in (("plain", ""), ("gpu", "%%gpu 0.5\n")):
            with _kernel() as run:
                seconds[kind].append(sum(run(line + each) for each in cells))
    return seconds


NOTEBOOKS = {
    "FIGURES": ("a notebook with figures", FIGURES, ("matplotlib",)),
    "LEARNING": ("a notebook with scikit-learn", LEARNING, ("matplotlib", "sklearn")),
}


def measure(bench: Any) -> Iterator[Line]:
    yield from _empty_cells(bench)
    for key, (notebook_name, cells, needs) in NOTEBOOKS.items():
        name = f"{notebook_name}, all cells under %%gpu"
        wanted = probe.call(
            "cells.notebook", "jupyter_client", "ipykernel", *needs, name=key, n=bench.n(5, 2)
        )
        result = bench.run(wanted)
        if "skipped" in result:
            yield skipped(name, "s", result)
            continue
        plain = median(result["plain"])
        yield Line(
            name,
            median(result["gpu"]),
            "s",
            goal=1.3 * plain + 0.02 * len(cells),
            floor=("the same cells without %%gpu", plain),
            note=spread(result["gpu"]),
            detail=result,
        )


def _empty_cells(bench: Any) -> Iterator[Line]:
    result = bench.run(probe.call("cells.empty", "jupyter_client", "ipykernel", n=bench.n(100, 25)))
    goals = {
        "gpu": ("an empty %%gpu cell", 4 * MS),
        "background": ("an empty %%gpu --bg cell", None),
    }
    for kind, (cell, goal) in goals.items():
        name = f"{cell}, beyond a plain one"
        if "skipped" in result:
            yield skipped(name, "s", result)
            continue
        plain = median(result["plain"])
        yield Line(
            name,
            median(result[kind]) - plain,
            "s",
            goal=goal,
            floor=("a plain cell", plain),
            note=f"whole cells: {spread(result[kind])}",
            detail=result,
        )
