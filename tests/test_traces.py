"""The simulations with a published trace: they run gpunb's own rules."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from benchmarks import packing, trace_data, traces
from benchmarks.trace_data import Task
from gpunb.scheduler.placement import Capacity
from gpunb.scheduler.resources import UNIT, Demand


def test_tables_have_the_whole_cluster() -> None:
    assert sum(each.count for each in trace_data.nodes()) == 1213
    assert packing.Cluster(0).total == 6212 * packing.WHOLE
    assert len(trace_data.tasks("default")) == len(trace_data.tasks("gpushare100")) == 8152
    assert all(task.gpus * task.share <= 1000 for task in trace_data.tasks("gpushare100"))


def test_rule_of_the_cluster_chooses_the_devices_that_the_scheduler_chooses() -> None:
    chance = random.Random(1)
    cluster = packing.Cluster(0)
    at = int(np.argmax((cluster.gpus >= 0).sum(1) == 8))
    others = np.arange(len(cluster.cpu)) != at
    cluster.memory[others] = 0
    cluster.cpu[at] = cluster.memory[at] = 10**9
    capacity = Capacity(traces.machine(8))
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


def test_task_without_a_gpu_goes_where_it_strands_none() -> None:
    cluster = packing.Cluster(0)
    cluster.gpus[5] = np.where(cluster.gpus[5] >= 0, 0, -1)
    assert packing.place(cluster, Task(1000, 1, 0, 0, ""), packing.Ours())
    assert cluster.cpu[5] == packing.Cluster(0).cpu[5] - 1000


@pytest.mark.parametrize("rule", traces.RULES)
def test_every_job_runs_once_and_gets_at_least_what_it_needs(rule: str) -> None:
    jobs = traces.draw(2, 60, seed=1)
    outcome = traces.RULES[rule](jobs, 2)
    needed = sum(each.seconds * each.units / UNIT for each in jobs)
    assert len(outcome.waited) == 60
    assert min(outcome.waited) >= 0
    assert outcome.held >= needed - 1e-6
    assert needed / 2 <= outcome.makespan < math.inf


def test_first_come_first_served_holds_up_the_jobs_behind_a_large_one() -> None:
    jobs = [
        traces.Job(0.0, 10.0, UNIT // 2, 0),
        traces.Job(1.0, 10.0, 2 * UNIT, 1),
        traces.Job(2.0, 10.0, UNIT // 2, 2),
    ]
    whole = traces.RULES["whole GPUs, first come first served"](jobs, 2)
    assert sorted(whole.waited) == [0.0, 9.0, 18.0]
    shared = traces.RULES["Ray's rule"](jobs, 2)
    assert sorted(shared.waited) == [0.0, 0.0, 11.0]
    assert sorted(traces.RULES["ours"](jobs, 2).waited) == [0.0, 0.0, 11.0]


def test_auto_learns_the_share_of_a_kind_of_job() -> None:
    jobs = [traces.Job(100.0 * at, 10.0, UNIT // 10, 7) for at in range(4)]
    outcome = traces.RULES["ours with auto"](jobs, 1)
    assert outcome.held == pytest.approx(10 * (1 + 3 * 0.15))
