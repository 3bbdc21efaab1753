"""Numerical libraries get the cores that fall to a worker."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from gpunb.engine.worker_setup import Setups
from gpunb.protocol.messages import THREAD_VARIABLES, Setup
from gpunb.scheduler.resources import UNIT, Allocation, Device, Machine

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
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    setups = Setups(Machine(EIGHT, 64 * UNIT), lambda devices: {})
    setup = Setup(*setups.of(allocation, (), {}, setups.now()))
    assert {setup.environment[name] for name in THREAD_VARIABLES} == {str(count)}


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    setups = Setups(Machine(EIGHT, 64 * UNIT), lambda devices: {})
    setup = Setup(*setups.of(Allocation(cpus=UNIT), (), dict(os.environ), setups.now()))
    assert not setup.environment.keys() & set(THREAD_VARIABLES)


def test_an_option_of_the_task_goes_before_the_rule(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    setups = Setups(Machine(EIGHT, 64 * UNIT), lambda devices: {})
    extra = (("OMP_NUM_THREADS", "7"),)
    setup = Setup(*setups.of(Allocation(cpus=UNIT), extra, {}, setups.now()))
    assert setup.environment["OMP_NUM_THREADS"] == "7"


def threads_after(script: str, **environment: str) -> dict[str, int]:
    """The threads that each library in a new process would use."""
    script = f"""
import ctypes, json, os, threadpoolctl
from gpunb.protocol.messages import THREAD_VARIABLES
from gpunb.system import process_control
from gpunb.worker.limits import threads
{textwrap.dedent(script)}
libraries = threadpoolctl.threadpool_info()
found = {{each["internal_api"]: each["num_threads"] for each in libraries}}
openblas = [each["filepath"] for each in libraries if each["internal_api"] == "openblas"]
found["running"] = len(process_control.other_threads()) + 1
found["before"] = int(os.environ.get("before", 0))
found["visible"] = all(hasattr(ctypes.CDLL(each), "blas_server_avail") for each in openblas)
found["said"] = len(os.environ.keys() & set(THREAD_VARIABLES))
print(json.dumps(found))
"""
    clean = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
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


def test_a_forked_worker_starts_no_thread_before_it_computes():
    facts = threads_after("""
        with threads.single():
            import numpy
        threads.find()
        parent = os.getpid()
        if pid := os.fork():
            os.waitpid(pid, 0)
            os._exit(0)
        threads.obey({"OMP_NUM_THREADS": "3"})
        before = len(process_control.other_threads()) + 1
        a = numpy.arange(250_000.0).reshape(500, 500)
        assert (a @ a)[3, 4] == a[3] @ a[:, 4]
        os.environ["before"] = str(before)
    """)
    before = 1 if facts["visible"] else 3  # newer builds of numpy hide the variables
    assert (facts["openblas"], facts["before"], facts["running"]) == (3, before, 3)


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
def test_a_text_that_is_no_number_of_threads_changes_nothing(text):
    facts = threads_after(f"""
        with threads.single():
            import numpy
        threads.find()
        threads.obey({{"OMP_NUM_THREADS": "3"}})
        threads.obey({{"OMP_NUM_THREADS": {text!r}}})
    """)
    assert (facts["openblas"], facts["running"]) == (3, 3)
