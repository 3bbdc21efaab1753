"""Many kernels on one head process, each with many jobs: none is lost.

The whole of it, 20 kernels with 1,000 jobs each, runs where GPUNB_SLOW_TESTS is set.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.protocol import backend
from tests.notebook.kernels import Kernel, kernel
from tests.sessions import running
from tests.waiting import PATIENCE, eventually

FULL = bool(os.environ.get("GPUNB_SLOW_TESTS"))
PROGRAMS, NOTEBOOKS, JOBS, CELLS = (17, 2, 1000, 50) if FULL else (5, 1, 150, 5)
LIMIT = 1200 if FULL else 4 * PATIENCE

PROGRAM = f"""
import gpunb, sys
gpunb.init('lab')

@gpunb.remote
def job(number):
    return number * number

@gpunb.remote(num_cpus=0)
class Counter:
    def __init__(self):
        self.seen = []
    def see(self, number):
        self.seen.append(number)
        return number
    def all(self):
        return self.seen

print('ready', flush=True)
own = int(sys.stdin.readline())
counter = Counter.remote()
jobs = [job.remote(own + each) for each in range({JOBS} // 2)]
calls = [counter.see.remote(own + each) for each in range({JOBS} // 2)]
found = gpunb.get(jobs) + gpunb.get(calls)
assert gpunb.get(counter.all.remote()) == [own + each for each in range({JOBS} // 2)]
wanted = [(own + each) ** 2 for each in range({JOBS} // 2)]
wanted += [own + each for each in range({JOBS} // 2)]
print(len(found), found == wanted, flush=True)
"""
PREPARE = """
import gpunb
%load_ext gpunb
gpunb.init('lab')
%config GpuMagics.headless = False
@gpunb.remote
def job(number):
    return number * number
"""


@pytest.fixture
def notebooks(head: dict[str, Any], tmp_path: Path) -> Iterator[list[Kernel]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(kernel(tmp_path, PREPARE)) for _ in range(NOTEBOOKS + 1)]


def cells(number: int) -> str:
    """Code that hands in cells in the background."""
    return (
        f"magic, first = get_ipython().run_cell_magic, {number}\n"
        f"for each in range({CELLS}):\n"
        "    magic('gpu', '0 --bg', f'made_{each} = first + {each}; print(made_{each})')\n"
    )


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_nothing_is_lost(notebooks: list[Kernel]) -> None:
    dies, *others = notebooks
    with contextlib.ExitStack() as stack:
        programs = [stack.enter_context(running(PROGRAM)) for _ in range(PROGRAMS)]
        for each in programs:
            assert each.stdout.readline() == "ready\n", each.stderr.read()
        for number, each in enumerate(programs):
            each.stdin.write(f"{number * JOBS}\n")
            each.stdin.flush()
        started = []
        for number, each in enumerate(others):
            code = f"{cells(1000 * number)}refs = [job.remote(n) for n in range({JOBS - CELLS})]"
            started.append((each, each.start(code)))
        last = dies.start(f"{cells(7000)}print('all', flush=True)\nimport time\ntime.sleep(600)")
        dies.shows(last, "all")
        os.kill(dies.manager.provisioner.pid, signal.SIGKILL)
        for each, result in started:
            assert each.finish(result, LIMIT), result
            waits = each.start("found = gpunb.get(refs)\n%gpu wait")
            assert each.finish(waits, LIMIT), waits
            assert each.value(f"found == [n * n for n in range({JOBS - CELLS})]")
            made = f"[globals()[f'made_{{n}}'] - first for n in range({CELLS})]"
            assert each.value(made) == list(range(CELLS))
        for each in programs:
            assert each.stdout.readline() == f"{JOBS // 2 * 2} True\n", each.stderr.read()
    with gpunb.init("lab"):
        assert sorted(collected()) == [7000 + each for each in range(CELLS)]
        eventually(lambda: gpunb.status()["queued"] == 0 and not gpunb.status()["running"])
        eventually(lambda: gpunb.available_resources() == gpunb.cluster_resources(), "all is free")


def collected() -> list[int]:
    """What the cells of the kernel that died have made, each as it has printed it too."""
    current = backend.current()
    assert isinstance(current, backend.SharedBackend)
    found = []
    for each in current.retained():
        job = gpunb.get_job(each["id"]).wait(LIMIT)
        (value,) = job.names.values()
        assert job.logs() == f"{value}\n"
        found.append(value)
    assert not current.retained()
    return found
