"""The simulations with a published trace: they run gpunb's own rules."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from benchmarks import packing, trace_rules, traces
from benchmarks.trace_data import Task, Trace
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import UNIT, Demand

NODES = """\
sn,cpu_milli,memory_mib,gpu,model
node-0,64000,262144,2,P100
node-1,96000,786432,8,V100M32
node-2,32000,131072,1,T4
node-3,96000,786432,8,G2
"""

TASKS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,\
scheduled_time
pod-0,12000,16384,1,1000,,LS,Running,0,12537496,0
pod-1,6000,12288,1,460,,LS,Succeeded,10,110,20.0
pod-2,6000,12288,1,460,V100M32|T4,BE,Succeeded,25,145,25.0
pod-3,88000,327680,8,1000,,LS,Failed,100,400,
pod-4,1000,2048,0,0,,BE,Succeeded,120,400,120.0
pod-5,6000,12288,1,250,,BE,Failed,130,130,130.0
pod-6,6000,12288,2,1000,,BE,Pending,140,,
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A small one in the form of the published one."""
    folder = tmp_path_factory.mktemp("trace")
    (folder / "openb_node_list_gpu_node.csv").write_text(NODES)
    (folder / "openb_pod_list_default.csv").write_text(TASKS)
    return Trace(folder)


def test_a_trace_is_read(trace: Trace) -> None:
    assert [each.gpus for each in trace.nodes] == [2, 8, 1, 8]
    tasks = trace.tasks("default")
    assert len(tasks) == 7
    assert tasks[2] == Task(6000, 12288, 1, 460, "V100M32|T4")
    assert [each.asked for each in tasks] == [1000, 460, 460, 8000, 0, 250, 2000]


def test_only_gpu_tasks_that_ran_and_ended_are_drawn(trace: Trace) -> None:
    assert [each.seconds for each in trace.lived] == [12537496, 90, 120, 300]
    assert [each.kind.asked for each in trace.lived] == [1000, 460, 460, 8000]
    assert trace.gaps == [10, 15, 75, 30]
    jobs = trace_rules.draw(trace, 2, 50, seed=1)
    assert {each.seconds for each in jobs} == {90, 120}, "services, and what does not fit, are not"


def test_rule_of_the_cluster_chooses_the_devices_that_the_scheduler_chooses(trace: Trace) -> None:
    chance = random.Random(1)
    cluster = packing.Cluster(trace.nodes, 0)
    at = int(np.argmax((cluster.gpus >= 0).sum(1) == 8))
    others = np.arange(len(cluster.cpu)) != at
    cluster.memory[others] = 0
    cluster.cpu[at] = cluster.memory[at] = 10**9
    capacity = Capacity(trace_rules.machine(8))
    for _ in range(40):
        gpus, share = chance.choice([(1, 250), (1, 600), (1, 100), (1, 1000), (2, 1000)])
        before = cluster.gpus[at].copy()
        placed = packing.place(cluster, Task(0, 1, gpus, share, ""), packing.Ours())
        theirs = capacity.place(Demand(gpus=gpus * share * UNIT // 1000))
        assert placed == (theirs is not None)
        if theirs is not None:
            capacity.take(theirs)
            chosen = [f"GPU-{each}" for each in np.flatnonzero(before != cluster.gpus[at])]
            assert chosen == [key for key, _ in theirs.shares]


def test_task_without_a_gpu_goes_where_it_strands_none(trace: Trace) -> None:
    cluster = packing.Cluster(trace.nodes, 0)
    cluster.gpus[2] = np.where(cluster.gpus[2] >= 0, 0, -1)
    assert packing.place(cluster, Task(1000, 1, 0, 0, ""), packing.Ours())
    assert cluster.cpu[2] == packing.Cluster(trace.nodes, 0).cpu[2] - 1000


@pytest.fixture
def jobs() -> list[trace_rules.Job]:
    chance, at = random.Random(1), 0.0
    found = []
    for number in range(60):
        at += chance.expovariate(1 / 20)
        units = chance.choice((UNIT // 4, UNIT // 2, UNIT, 2 * UNIT))
        found.append(trace_rules.Job(at, chance.uniform(10, 60), units, number % 5))
    return found


@pytest.mark.parametrize("rule", trace_rules.RULES)
def test_every_job_runs_once_and_gets_at_least_what_it_needs(
    jobs: list[trace_rules.Job], rule: str
) -> None:
    outcome = trace_rules.RULES[rule](jobs, 2)
    needed = sum(each.seconds * each.units / UNIT for each in jobs)
    assert len(outcome.waited) == 60
    assert min(outcome.waited) >= 0
    assert outcome.held >= needed - 1e-6
    assert needed / 2 <= outcome.makespan < math.inf


def test_first_come_first_served_holds_up_the_jobs_behind_a_large_one() -> None:
    jobs = [
        trace_rules.Job(0.0, 10.0, UNIT // 2, 0),
        trace_rules.Job(1.0, 10.0, 2 * UNIT, 1),
        trace_rules.Job(2.0, 10.0, UNIT // 2, 2),
    ]
    whole = trace_rules.RULES["whole GPUs, first come first served"](jobs, 2)
    assert sorted(whole.waited) == [0.0, 9.0, 18.0]
    shared = trace_rules.RULES["Ray's rule"](jobs, 2)
    assert sorted(shared.waited) == [0.0, 0.0, 11.0]
    assert sorted(trace_rules.RULES["ours"](jobs, 2).waited) == [0.0, 0.0, 11.0]


def test_auto_learns_the_share_of_a_kind_of_job() -> None:
    jobs = [trace_rules.Job(100.0 * at, 10.0, UNIT // 10, 7) for at in range(4)]
    outcome = trace_rules.RULES["ours with auto"](jobs, 1)
    assert outcome.held == pytest.approx(10 * (1 + 3 * 0.15))


def test_known_times_shorten_the_mean_wait(jobs: list[trace_rules.Job]) -> None:
    unknown, known = (traces.compare(jobs, 2, rule) for rule in ("nothing known", "exact"))
    assert unknown.longest_of_ray == known.longest_of_ray
    assert known.mean < 0.9 * unknown.mean
