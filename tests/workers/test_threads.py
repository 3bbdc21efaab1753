"""Numerical libraries get the cores that fall to a worker."""

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


def test_a_loaded_blas_obeys():
    script = """
        import numpy, threadpoolctl
        from gpunb.workers import threads
        threads.find()
        threads.obey({"OMP_NUM_THREADS": "3"})
        for each in threadpoolctl.threadpool_info():
            print(each["internal_api"], each["num_threads"])
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "4"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    if "openblas" not in run.stdout:
        pytest.skip("this numpy has a BLAS other than OpenBLAS")
    assert "openblas 3" in run.stdout


@pytest.mark.parametrize("text", [None, "", "many", "0", "-1"])
def test_nonsense_is_left_alone(text):
    threads.obey({"OMP_NUM_THREADS": text})
