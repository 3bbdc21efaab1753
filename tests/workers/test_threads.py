"""Numerical libraries get the cores that fall to a worker."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from gpunb.core.resources import UNIT, Allocation, Device, Machine
from gpunb.runtime.setup import Setups
from gpunb.workers import threads
from gpunb.workers.messages import Setup

EIGHT = tuple(Device(f"d{at}", at, "card") for at in range(8))


@pytest.mark.parametrize(
    ("allocation", "count"),
    [
        (Allocation(shares=(("d0", UNIT),)), 8),
        (Allocation(shares=(("d0", UNIT), ("d1", UNIT))), 16),
        (Allocation(shares=(("d0", UNIT // 2),)), 4),
        (Allocation(shares=(("d0", 1),)), 1),
        (Allocation(cpus=3 * UNIT), 3),
        (Allocation(cpus=UNIT // 2), 1),
        (Allocation(shares=(("d0", UNIT),), cpus=2 * UNIT), 2),
        (Allocation(), 1),
    ],
)
def test_the_share_of_cores(allocation, count, monkeypatch):
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    setups = Setups(Machine(EIGHT, 64 * UNIT), lambda devices: {})
    setup = Setup(*setups.of(allocation, (), {}, setups.now()))
    assert {setup.environment[name] for name in threads.VARIABLES} == {str(count)}


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    setups = Setups(Machine(EIGHT, 64 * UNIT), lambda devices: {})
    setup = Setup(*setups.of(Allocation(cpus=UNIT), (), dict(os.environ), setups.now()))
    assert not setup.environment.keys() & set(threads.VARIABLES)


def test_an_option_of_the_task_goes_before_the_rule(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    setups = Setups(Machine(EIGHT, 64 * UNIT), lambda devices: {})
    extra = (("OMP_NUM_THREADS", "7"),)
    setup = Setup(*setups.of(Allocation(cpus=UNIT), extra, {}, setups.now()))
    assert setup.environment["OMP_NUM_THREADS"] == "7"


def threads_after(script: str, **environment: str) -> dict[str, int]:
    """The threads that each library in a new process would use."""
    script = f"""
import json, os, threadpoolctl
from gpunb.workers import system, threads
{textwrap.dedent(script)}
found = {{each["internal_api"]: each["num_threads"] for each in threadpoolctl.threadpool_info()}}
found["running"] = system.threads()
found["said"] = len(os.environ.keys() & set(threads.VARIABLES))
print(json.dumps(found))
"""
    clean = {name: value for name, value in os.environ.items() if name not in threads.VARIABLES}
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**clean, **environment},
    )
    facts = json.loads(run.stdout)
    if "openblas" not in facts:
        pytest.skip("this numpy has a BLAS other than OpenBLAS")
    return facts


@pytest.mark.parametrize("count", [1, 3])
def test_a_loaded_blas_obeys(count):
    facts = threads_after(f"""
        with threads.single():
            import numpy
        threads.find()
        threads.obey({{"OMP_NUM_THREADS": "{count}"}})
    """)
    assert (facts["openblas"], facts["running"], facts["said"]) == (count, count, 0)


def test_a_loaded_openmp_obeys():
    facts = threads_after("""
        with threads.single():
            import sklearn.cluster
        threads.find()
        threads.obey({"OMP_NUM_THREADS": "3"})
    """)
    assert (facts["openmp"], facts["openblas"]) == (3, 3)


def test_the_zygote_loads_it_as_the_user_said():
    facts = threads_after("with threads.single():\n    import numpy", OPENBLAS_NUM_THREADS="2")
    assert (facts["openblas"], facts["said"]) == (2, 1)


@pytest.mark.parametrize("text", [None, "", "many", "0", "-1"])
def test_nonsense_is_left_alone(text):
    threads.obey({"OMP_NUM_THREADS": text})
