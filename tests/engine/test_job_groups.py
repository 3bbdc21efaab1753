"""The tasks of placement groups and the trials of sweeps are counted."""

from __future__ import annotations

from typing import Any

import pytest

from gpunb.engine.actors import ActorTable
from gpunb.engine.job_groups import JobGroups
from gpunb.engine.jobs import Job, Past
from gpunb.engine.timeline import past_of
from gpunb.exceptions import GpunbError
from gpunb.protocol.backend import Call
from gpunb.scheduler.resources import Demand, Within
from tests.engine.parts import RecordingSink, actor_record, call, constructor

IN_GROUP = Demand(within=Within(7))
NOTHING: dict[str, Any] = {"actors": [], "running": [], "waiting": [], "finished": []}


class Session:
    """Jobs and actors, and the groups that they belong to."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.actors = ActorTable()
        self.groups = JobGroups(self.jobs, self.actors)

    def submit(self, made: Call, **fields: Any) -> Job:
        job = Job(100 + len(self.jobs), made, [], [], **fields)
        self.jobs[job.id] = job
        self.groups.submitted(job)
        return job

    def trial(self, sweep: int = 1, name: str = "lr", total: int = 4, **fields: Any) -> Job:
        """Submit a trial of a sweep."""
        sink = RecordingSink(sweep=(sweep, name, total), place=(3, "cell-id"))
        return self.submit(call("trial", sink=sink), **fields)

    def end(self, job: Job, state: str = "done") -> Past:
        past = past_of(job, state)
        del self.jobs[job.id]
        self.groups.over(past)
        return past

    def listed(self, *names: str, offset: float = 0.0) -> list[dict[str, Any]]:
        """Return the groups of a snapshot with a job of each of these groups."""
        running = [{"part_of": each} for each in names]
        return self.groups.listed({**NOTHING, "running": running}, offset)

    def states(self, name: str) -> Any:
        (group,) = self.listed(name)
        return group["states"]


@pytest.fixture
def session() -> Session:
    return Session()


class Kernel:
    """An attached kernel."""

    ident = 5


def test_trials_of_a_sweep_are_counted_by_their_state(session: Session) -> None:
    done, failed, running, _ = (session.trial() for _ in range(4))
    running.worker = 1
    session.end(done)
    session.end(failed, "failed")
    assert session.states("sweep 1") == {"done": 1, "failed": 1, "running": 1, "queued": 1}


def test_end_of_a_task_counts_once(session: Session) -> None:
    job = session.trial()
    session.trial()
    past = session.end(job)
    session.groups.over(past)
    assert session.states("sweep 1") == {"done": 1, "queued": 1}


def test_sweep_is_described_with_its_cell(session: Session) -> None:
    session.trial(name="lr", total=4)
    (sweep,) = session.listed("sweep 1")
    described = {each: sweep[each] for each in ("id", "kind", "name", "actor", "cell", "cell_id")}
    assert described == {
        "id": "sweep 1",
        "kind": "sweep",
        "name": "lr",
        "actor": None,
        "cell": 3,
        "cell_id": "cell-id",
    }
    assert sweep["total"] == 4


def test_total_is_at_least_the_number_of_trials(session: Session) -> None:
    """Nobody knows the number of trials when the sweep begins."""
    for _ in range(3):
        session.trial(total=0)
    (sweep,) = session.listed("sweep 1")
    assert sweep["total"] == 3


def test_later_trial_tells_what_is_known_of_its_sweep(session: Session) -> None:
    session.trial(total=0)
    session.trial(total=9)
    (sweep,) = session.listed("sweep 1")
    assert sweep["total"] == 9


def test_sweeps_of_two_kernels_are_two(session: Session) -> None:
    owner: Any = Kernel()
    session.trial()
    session.trial(owner=owner)
    assert session.states("sweep 1") == {"queued": 1}
    assert session.states("sweep 5.1") == {"queued": 1}


def test_group_ends_with_its_last_task(session: Session) -> None:
    first, second = session.trial(), session.trial()
    session.end(first)
    assert session.listed("sweep 1")[0]["ended"] is None
    past = session.end(second)
    (sweep,) = session.listed("sweep 1", offset=1000.0)
    assert sweep["ended"] == round(past.ended + 1000.0, 3)
    assert 1000.0 < sweep["began"] <= sweep["ended"]


def test_tasks_of_a_placement_group_are_counted(session: Session) -> None:
    session.submit(call(demand=IN_GROUP), worker=1)
    session.submit(call(demand=IN_GROUP))
    session.submit(call())
    (group,) = session.listed("group 7")
    assert (group["kind"], group["actor"], group["cell"]) == ("group", 7, None)
    assert group["states"] == {"running": 1, "queued": 1}


@pytest.mark.parametrize("rank", [-1, 0, 1])
def test_ranks_belong_to_their_coordinator(session: Session, rank: int) -> None:
    job = Job(1, call(demand=IN_GROUP), [], [], rank=rank)
    session.groups.submitted(job)
    assert session.listed("group 7") == []


@pytest.mark.parametrize(
    ("since", "over", "state"),
    [(0.0, False, "queued"), (5.0, False, "alive"), (5.0, True, "alive"), (0.0, True, "queued")],
)
def test_actor_of_a_group_counts_until_it_ends(
    session: Session, since: float, over: bool, state: str
) -> None:
    """Its constructor is over when it is alive, and it may be starting again."""
    job = session.submit(constructor(demand=IN_GROUP))
    session.actors.add(actor_record(job.id, since=since))
    if over:
        del session.jobs[job.id]
    assert session.states("group 7") == {state: 1}


def test_actor_that_is_gone_without_a_word_is_not_counted(session: Session) -> None:
    job = session.submit(constructor(demand=IN_GROUP))
    other = session.submit(call(demand=IN_GROUP))
    del session.jobs[job.id]
    assert session.states("group 7") == {"queued": 1}
    session.end(other)
    assert session.listed("group 7")[0]["ended"] is not None


def test_snapshot_lists_each_of_its_groups_once(session: Session) -> None:
    for sweep in (1, 2, 3):
        session.trial(sweep)
    facts = {
        "actors": [{"part_of": "sweep 2"}],
        "running": [{"part_of": None}],
        "waiting": [{"part_of": "sweep 2"}, {"part_of": "sweep 1"}],
        "finished": [{"part_of": "group 99"}],
    }
    assert [each["id"] for each in session.groups.listed(facts, 0.0)] == ["sweep 2", "sweep 1"]


def test_one_trial_hears_that_its_sweep_is_to_stop(session: Session) -> None:
    first, second = session.trial(), session.trial()
    other = session.trial(sweep=2)
    session.groups.stop_sweep("sweep 1")
    calls: list[Any] = [job.shown for job in (first, second, other)]
    assert sum(len(sink.calls) for sink in calls[:2]) == 1
    assert calls[2].calls == []


@pytest.mark.parametrize("name", ["sweep 9", "group 7", "sweep 1", "x" * 1000])
def test_what_is_no_sweep_that_runs_cannot_be_stopped(session: Session, name: str) -> None:
    session.submit(call(demand=IN_GROUP))
    session.end(session.trial())
    with pytest.raises(GpunbError, match="there is no sweep") as raised:
        session.groups.stop_sweep(name)
    assert len(str(raised.value)) < 120
