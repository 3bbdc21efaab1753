"""Reports of workers become objects, and tasks are settled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.engine.jobs import Job
from gpunb.engine.results import choose_share
from gpunb.exceptions import (
    ActorDiedError,
    ObjectLostError,
    OutOfMemoryError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from gpunb.protocol import messages as msg
from gpunb.protocol import plain
from gpunb.protocol.backend import COMPLETED, HANDLE, SESSIONS, STREAM, STREAMING
from gpunb.protocol.plain import Malformed
from gpunb.scheduler import events as ev
from gpunb.scheduler import tasks
from gpunb.scheduler.auto_share import Choice
from gpunb.scheduler.resources import UNIT, Demand
from gpunb.scheduler.tasks import ActorSpec, AutoShare
from tests.engine.parts import (
    GIB,
    LARGE,
    TWO_GPUS,
    Parts,
    RecordingSink,
    call,
    constructor,
    method,
    value,
    worker_process,
)

HALF = (("gpu-0", UNIT // 2),)
WHOLE = (("gpu-0", UNIT),)


@pytest.fixture
def cramped(parts: Parts) -> Iterator[Parts]:
    """Parts with room for one large value, but not for two."""
    small = Parts(limit=len(LARGE) + 50_000)
    yield small
    small.close()


def failure(error: Exception) -> Payload:
    return serialize.dump_failure(error, task="train")


def made(title: str = "Counter") -> Payload:
    """The result of a constructor: the title of its actor."""
    return Payload(plain.dumps(title))


# ---------------------------------------------------------------------------- reports of workers


@pytest.mark.parametrize(
    ("report", "results", "expected"),
    [
        ("ok", [serialize.dumps(1)], tasks.Succeeded()),
        ("raised", [failure(KeyError("x"))], tasks.Raised()),
        ("retry", [failure(KeyError("x"))], tasks.Raised(retry=True)),
        ("interrupted", [], tasks.Interrupted()),
        ("exit", [], tasks.Exited()),
        ("exit", [Payload(plain.dumps(("it left", True)))], tasks.Exited("it left", failed=True)),
        ("exit", [Payload(plain.dumps(("it left", 1)))], tasks.Exited("it left", failed=False)),
    ],
)
def test_report_of_a_worker_becomes_an_event_for_the_scheduler(
    parts: Parts, report: str, results: list[Payload], expected: tasks.Report
) -> None:
    job = parts.submit(call())
    process = parts.start(job, attempt=3)
    (event,) = parts.done(job, process, report, *results)
    assert event == ev.Finished(job.id, 3, process.worker, expected)


def test_results_are_stored_in_their_order(parts: Parts) -> None:
    job = parts.submit(call(returns=2))
    parts.start(job)
    parts.finish(job, "ok", serialize.dumps("first"), serialize.dumps("second"))
    assert [value(parts, each) for each in job.results] == ["first", "second"]
    assert parts.engine.past[job.id].state == "done"


def test_report_is_kept_only_while_the_scheduler_handles_it(parts: Parts) -> None:
    job = parts.submit(call())
    parts.done(job, parts.start(job), "ok", serialize.dumps(1))
    assert job.reported is None


def test_end_of_an_abandoned_call_frees_its_worker(parts: Parts) -> None:
    """The scheduler has settled the call before, for example because its time was over."""
    process = worker_process(5)
    parts.results.done(process, msg.Done(99, 1, "ok", ()), [])
    assert parts.engine.fed == [ev.Finished(99, 1, 5, tasks.Succeeded())]


def test_report_of_a_process_that_is_no_worker_changes_nothing(parts: Parts) -> None:
    job = parts.submit(call())
    process = parts.start(job)
    process.worker = None
    assert parts.done(job, process, "interrupted") == []


@pytest.mark.parametrize(("report", "returns"), [("ok", 2), ("raised", 2)])
def test_missing_results_are_the_fault_of_the_worker(
    parts: Parts, report: str, returns: int
) -> None:
    job = parts.submit(call(returns=returns))
    process = parts.start(job)
    results = [serialize.dumps(1)] * (1 if report == "ok" else 0)
    with pytest.raises(Malformed, match="results, "):
        parts.done(job, process, report, *results)


def test_result_without_its_memory_is_a_lost_object(parts: Parts) -> None:
    """The system had no descriptor left for the segment."""
    job = parts.submit(call())
    process = parts.start(job)
    wires, _ = serialize.to_wires([serialize.dumps(LARGE)])
    parts.engine.decide = lambda _: parts.results.end(job, tasks.Raised())
    parts.results.done(process, msg.Done(job.id, 1, "ok", wires), [])
    with pytest.raises(ObjectLostError, match=r"the result of train .* did not arrive"):
        value(parts, job.results[0])


def test_result_beyond_the_memory_of_objects_fails_the_task(cramped: Parts) -> None:
    cramped.admission.keep(serialize.dumps(LARGE))
    job = cramped.submit(call())
    (finished,) = cramped.finish(job, "ok", serialize.dumps(LARGE))
    assert isinstance(finished, ev.Finished)
    assert finished.report == tasks.Raised()
    with pytest.raises(OutOfMemoryError, match=r"the result of train"):
        value(cramped, job.results[0])


def test_memory_of_a_settled_result_is_counted_once(parts: Parts) -> None:
    job = parts.submit(call())
    parts.finish(job, "ok", serialize.dumps(LARGE))
    used = parts.store.memory.facts()["used"]
    assert used >= len(LARGE)
    parts.store.drop(job.results[0])
    assert parts.store.memory.facts()["used"] == 0


def test_references_in_a_result_live_as_long_as_the_result(parts: Parts) -> None:
    """The worker drops its own reference right after its report."""
    job = parts.submit(call())
    parts.start(job)
    inner = parts.admission.keep(serialize.dumps("inner"))
    outer = serialize.dumps(LARGE)
    outer.references = (inner,)
    parts.finish(job, "ok", outer)
    parts.store.drop(inner)
    assert parts.store.wanted(inner)
    parts.store.drop(job.results[0])
    assert not parts.store.wanted(inner)


def test_title_of_an_actor_comes_with_its_constructor(parts: Parts) -> None:
    job = parts.submit(constructor())
    parts.finish(job, "ok", made("Counter(3)"))
    actor = parts.engine.actors.get(job.id)
    assert actor is not None
    assert actor.title == "Counter(3)"


# ----------------------------------------------------------------------------------- generators


def yields(parts: Parts, job: Job, position: int, payload: Payload, attempt: int = 1) -> None:
    wires, segments = serialize.to_wires([payload])
    message = msg.Yielded(job.id, attempt, position, wires[0])
    parts.results.yielded(message, segments)


def test_values_of_a_generator_are_there_when_they_are_yielded(parts: Parts) -> None:
    job = parts.submit(call(returns=STREAMING))
    parts.start(job)
    yields(parts, job, 0, serialize.dumps("small"))
    yields(parts, job, 1, serialize.dumps(LARGE))
    assert value(parts, (job.id, 0)) == "small"
    assert value(parts, (job.id, 1)) == LARGE
    assert job.id in parts.engine.jobs


def test_value_of_an_earlier_attempt_is_ignored(parts: Parts) -> None:
    job = parts.submit(call(returns=STREAMING))
    parts.start(job, attempt=2)
    yields(parts, job, 0, serialize.dumps("old"), attempt=1)
    assert parts.store.get((job.id, 0)) is None


def test_yielded_value_beyond_the_memory_is_an_error_in_its_place(cramped: Parts) -> None:
    cramped.admission.keep(serialize.dumps(LARGE))
    job = cramped.submit(call(returns=STREAMING))
    cramped.start(job)
    yields(cramped, job, 0, serialize.dumps(LARGE))
    with pytest.raises(OutOfMemoryError, match="a value of train"):
        value(cramped, (job.id, 0))


def test_yielded_value_without_its_memory_is_a_lost_object(parts: Parts) -> None:
    job = parts.submit(call(returns=STREAMING))
    parts.start(job)
    ((wire, _),), _ = serialize.to_wires([serialize.dumps(LARGE)])
    parts.results.yielded(msg.Yielded(job.id, 1, 0, (wire, 1)), [])
    with pytest.raises(ObjectLostError, match="did not arrive"):
        value(parts, (job.id, 0))


def test_failed_generator_spares_tasks_that_need_only_earlier_values(parts: Parts) -> None:
    job = parts.submit(call(returns=STREAMING))
    process = parts.start(job)
    yields(parts, job, 0, serialize.dumps("first"))
    parts.store.entry((job.id, 1))
    early = parts.submit(call(inputs=((job.id, 0), (job.id, COMPLETED))))
    parts.submit(call(inputs=((job.id, 0), (job.id, 1))))
    parts.submit(call())
    (event,) = parts.done(job, process, "raised", failure(KeyError("x")))
    assert isinstance(event, ev.Finished)
    assert event.report == tasks.Raised(spared=(early.id,))


def test_error_of_a_generator_is_its_last_value(parts: Parts) -> None:
    job = parts.submit(call(returns=STREAMING))
    parts.start(job)
    yields(parts, job, 0, serialize.dumps("first"))
    parts.finish(job, "raised", failure(KeyError("x")))
    with pytest.raises(TaskError, match="x"):
        value(parts, (job.id, 1))
    assert value(parts, (job.id, COMPLETED)) is None


def test_generator_that_was_cancelled_is_not_completed(parts: Parts) -> None:
    job = parts.submit(call(returns=STREAMING))
    parts.results.end(job, tasks.Cancelled())
    for index in (0, COMPLETED):
        with pytest.raises(TaskCancelledError):
            value(parts, (job.id, index))
    assert parts.store.wanted((job.id, STREAM))


# ----------------------------------------------------------------------------------- settled tasks


@pytest.mark.parametrize(
    ("outcome", "error", "state"),
    [
        (tasks.Cancelled(), TaskCancelledError, "cancelled"),
        (tasks.Crashed("it was killed"), WorkerCrashedError, "failed"),
        (tasks.TimedOut(2.0), TimeoutError, "failed"),
    ],
)
def test_all_results_of_a_task_without_a_report_have_the_same_error(
    parts: Parts, outcome: tasks.Outcome, error: type[Exception], state: str
) -> None:
    job = parts.submit(call(returns=2))
    parts.results.end(job, outcome)
    for each in job.results:
        with pytest.raises(error):
            value(parts, each)
    assert parts.engine.past[job.id].state == state
    assert job.id not in parts.engine.jobs


def test_failure_of_an_input_is_the_failure_of_the_task(parts: Parts) -> None:
    above = parts.submit(call())
    below = parts.submit(call(inputs=(above.results[0],)))
    parts.results.end(above, tasks.Cancelled())
    parts.results.end(below, tasks.UpstreamFailed(above.id))
    assert parts.store.get(below.results[0]) is parts.store.get(above.results[0])
    assert parts.engine.past[below.id].state == "failed"


@pytest.mark.parametrize(("end", "state"), [("cancelled", "cancelled"), ("failed", "failed")])
def test_constructor_of_an_actor_that_was_killed_counts_as_cancelled(
    parts: Parts, end: Any, state: str
) -> None:
    job = parts.submit(constructor(name="tally"))
    assert parts.engine.actors.names() == [("", "tally")]
    parts.results.end(job, tasks.ActorDied(job.id, "it was ended", end=end))
    assert parts.engine.past[job.id].state == state
    assert parts.engine.actors.names() == []
    with pytest.raises(ActorDiedError, match="it was ended"):
        value(parts, job.results[0])


def test_sink_hears_the_error_of_the_last_attempt_before_the_end(parts: Parts) -> None:
    sink = RecordingSink()
    job = parts.submit(call(sink=sink))
    job.failure = {"ename": "KeyError"}, []
    parts.results.end(job, tasks.Cancelled())
    assert sink.calls == [("show", "failed", {"ename": "KeyError"}, []), ("end",)]


def test_sink_of_an_actor_ends_with_the_actor(parts: Parts) -> None:
    sink = RecordingSink()
    job = parts.submit(constructor(sink=sink))
    parts.finish(job, "ok", made())
    assert sink.calls == []
    parts.results.actor_ended(job.id, tasks.ActorDied(job.id, "killed"))
    assert sink.calls == [("end",)]


def test_inputs_are_held_until_the_task_is_over(parts: Parts) -> None:
    above, within = (parts.admission.keep(serialize.dumps(each)) for each in ("one", "two"))
    arguments = serialize.dumps(((), {}))
    arguments.references = (within,)
    job = parts.submit(call(inputs=(above,), arguments=arguments))
    for each in (above, within):
        parts.store.drop(each)
        assert parts.store.wanted(each)
    parts.results.end(job, tasks.Cancelled())
    assert not parts.store.wanted(above)
    assert not parts.store.wanted(within)


def test_inputs_of_a_constructor_are_held_while_it_may_run_again(parts: Parts) -> None:
    above = parts.admission.keep(serialize.dumps("one"))
    job = parts.submit(constructor(rules=ActorSpec(max_restarts=1), inputs=(above,)))
    parts.store.drop(above)
    parts.finish(job, "ok", made())
    assert parts.store.wanted(above)
    parts.results.actor_ended(job.id, tasks.ActorDied(job.id, "killed"))
    assert not parts.store.wanted(above)


def test_report_of_a_constructor_that_ran_again_leaves_no_job(parts: Parts) -> None:
    job = parts.submit(constructor(rules=ActorSpec(max_restarts=1)))
    parts.finish(job, "ok", made())
    parts.engine.jobs[job.id] = job  # as when the actor starts again
    process = parts.start(job, attempt=2)
    (event,) = parts.done(job, process, "ok", made())
    assert isinstance(event, ev.Finished)
    assert job.id not in parts.engine.jobs
    assert parts.engine.by_worker[event.worker] == []


def test_ranks_end_with_their_coordinator(parts: Parts) -> None:
    """The process of the coordinator may be gone before it could end its ranks."""
    job = parts.submit(call(kind="ranks"))
    parts.engine.fed.clear()
    parts.results.end(job, tasks.Crashed("it was killed"))
    assert parts.engine.fed == [ev.CancelRequested(job.id, force=True)]


def test_worker_no_longer_runs_a_settled_task(parts: Parts) -> None:
    job = parts.submit(call())
    process = parts.start(job)
    parts.finish(job, "ok", serialize.dumps(1))
    assert parts.engine.by_worker == {process.worker: []}


# ------------------------------------------------------------------------------------ ended actors


def test_ended_actor_gives_back_its_own_references(parts: Parts) -> None:
    job = parts.submit(constructor(detached=True))
    parts.finish(job, "ok", made())
    handle = (job.id, HANDLE)
    parts.store.drop(handle)
    assert parts.store.wanted(handle)
    parts.results.actor_ended(job.id, tasks.ActorDied(job.id, "killed"))
    assert not parts.store.wanted(handle)
    assert parts.engine.actors.get(job.id) is None
    assert parts.engine.actors.why(job.id, "nothing is known") == "killed"


def test_ranks_of_a_session_end_with_the_session(parts: Parts) -> None:
    session = parts.submit(constructor(name="lab", namespace=SESSIONS))
    rank = parts.submit(constructor(), parent=session.id)
    parts.submit(constructor())
    parts.engine.fed.clear()
    parts.results.actor_ended(session.id, tasks.ActorDied(session.id, "killed"))
    assert parts.engine.fed == [ev.KillRequested(rank.id, restart=False)]


def test_call_of_an_actor_names_its_end(parts: Parts) -> None:
    job = parts.submit(constructor())
    parts.finish(job, "ok", made())
    called = parts.submit(method(job.id))
    parts.results.end(called, tasks.ActorDied(job.id, "its process was killed"))
    with pytest.raises(ActorDiedError, match="its process was killed"):
        value(parts, called.results[0])


# ------------------------------------------------------------------------- shares of earlier runs


def chosen(name: str = "train", **fields: Any) -> Any:
    """A call whose share comes from earlier runs of the code with this name."""
    return call(name, demand=Demand(gpus=UNIT), auto=AutoShare(code=name), **fields)


def run_with_peak(parts: Parts, job: Job, peak: int) -> None:
    """Run a task that has this peak of device memory to its end."""
    job.choice = job.choice or Choice(Demand(gpus=UNIT), 0, "", first=True)
    process = parts.start(job, held=WHOLE)
    parts.sampler.begins(job, process.worker or 0, process, WHOLE)
    parts.sampler.used(process, msg.Used(((0, peak, peak),)))
    parts.finish(job, "ok", serialize.dumps(1))


def test_first_run_chooses_the_share_of_tasks_that_wait(parts: Parts) -> None:
    sink = RecordingSink()
    first = parts.submit(chosen(sink=sink))
    waiting, sized, other = (parts.submit(chosen(name)) for name in ("train", "train", "other"))
    sized.choice = Choice(Demand(gpus=UNIT // 2), 0, "", first=False)
    parts.engine.fed.clear()
    run_with_peak(parts, first, 4 * GIB)
    changes = {each.task: each for each in parts.engine.fed if isinstance(each, ev.Chosen)}
    assert 0 < changes[waiting.id].choice.demand.gpus < UNIT
    assert not {sized.id, other.id} & changes.keys()
    assert "first run of this function: one whole GPU; next time 0." in sink.calls[0][2]


def test_later_call_gets_the_share_that_the_first_run_showed(parts: Parts) -> None:
    run_with_peak(parts, parts.submit(chosen()), 4 * GIB)
    choice = choose_share(parts.engine, chosen(), parts.engine.peaks.runs("train"))
    assert not choice.first
    assert choice.demand.gpus == UNIT * 15 // 100


def test_choice_says_why_earlier_runs_could_not_be_read(parts: Parts) -> None:
    parts.engine.peaks.problem = "history.sqlite: disk I/O error"
    choice = choose_share(parts.engine, chosen(), [])
    assert choice.first
    assert choice.why.endswith("(history.sqlite: disk I/O error)")


def test_run_that_failed_says_nothing_of_the_next_one(parts: Parts) -> None:
    job = parts.submit(chosen())
    parts.start(job, held=WHOLE)
    parts.results.end(job, tasks.Cancelled())
    assert parts.engine.peaks.rows() == []


def test_user_hears_that_a_task_runs_again_with_more_memory(parts: Parts) -> None:
    sink = RecordingSink()
    job = parts.submit(call(sink=sink))
    job.failure = {"ename": "OutOfMemoryError"}, []
    parts.results.grown(ev.Grown(job.id, HALF, Demand(gpus=UNIT)))
    assert job.failure is None
    assert sink.calls == [
        ("text", "stderr", "gpunb: ran out of memory at 0.5 of GPU 0 (20 GiB); again with 1\n")
    ]
    assert TWO_GPUS.devices[0].memory == 40 * GIB
