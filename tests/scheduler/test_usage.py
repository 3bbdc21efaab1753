"""Who takes how much of which device, and what is said of it."""

from __future__ import annotations

import pytest

from gpunb.scheduler.resources import UNIT, Device
from gpunb.scheduler.shares import CONTEXT, allowed, hint, pool
from gpunb.scheduler.usage import BACK_AFTER, IDLE_AFTER, Book
from gpunb.scheduler.usage_types import Exceeded, Holder, Reading, Remark, Seen
from tests.scheduler.world import GiB

KERNEL = 10
CARD = Device("a", 0, "card", "A100", 40 * GiB, "acme")
SECOND = Device("b", 1, "card", "A100", 40 * GiB, "acme")


def reading(*processes: Seen, used: float | None = None, **fields: object) -> Reading:
    listed = sum(each.memory or 0 for each in processes)
    return Reading(int(used * GiB) if used is not None else listed, 40 * GiB, 0, 40, processes)


def process(pid: int, size: float | None, *line: int, **fields: str) -> Seen:
    memory = None if size is None else int(size * GiB)
    return Seen(pid, memory, (pid, *line), **fields)


def holder(worker: int = 1, share: float = 0.25, **fields: object) -> Holder:
    shares = (("a", round(share * UNIT)),)
    made = {"job": 7, "label": "#7 train", "shares": shares, "pid": 100, **fields}
    return Holder(worker, **made)  # type: ignore[arg-type]


@pytest.fixture
def book() -> Book:
    return Book([CARD, SECOND])


# ----------------------------------------------------------------------------------------- figures


def test_a_pool_leaves_room_for_the_context():
    fraction, nbytes = pool(UNIT // 4, 40 * GiB)
    assert nbytes == 10 * GiB - CONTEXT
    assert fraction == pytest.approx(9.5 / 40)


def test_the_context_takes_only_a_part_of_a_small_share():
    assert pool(UNIT // 10, 10 * GiB) == (0.0875, GiB * 7 // 8)


def test_a_pool_on_a_device_without_known_memory():
    assert pool(2500, None) == (0.25, None)


def test_a_full_pool_and_a_context_do_not_exceed_the_share():
    for share in (0.01, 0.1, 0.5):
        units = round(share * UNIT)
        _, nbytes = pool(units, 40 * GiB)
        assert nbytes is not None
        assert nbytes < 40 * GiB * share <= allowed(units, 40 * GiB)


@pytest.mark.parametrize(
    ("peak", "share", "message"),
    [
        (2.1, 0.3, "used 2.1 of 12 GiB: 0.1 would do"),
        (0.2, 1, "used 204.8 MiB of 40 GiB: 0.05 would do"),
        (15, 1, "used 15 of 40 GiB: 0.45 would do"),
        (11.9, 0.3, "used 11.9 of 12 GiB: a larger share would be safer"),
        (8, 0.3, None),
        (39.9, 1, None),
        (0, 1, None),
        (0.1, 0.05, None),
    ],
)
def test_a_better_share_is_suggested(peak, share, message):
    units = round(share * UNIT)
    assert hint(int(peak * GiB), units, 40 * GiB) == message
    early = hint(int(peak * GiB), units, 40 * GiB, ended=False)
    assert early == (message if "safer" in (message or "") else None)


# -------------------------------------------------------------------------------------- the peak


def test_the_peak_of_a_task_is_kept(book):
    book.start_task(holder())
    for size in (1, 5, 2):
        assert book.update({"a": reading(process(100, size))}, KERNEL, 0) == []
    assert book.memory(7) == {"now": 2 * GiB, "peak": 5 * GiB, "share": 10 * GiB}
    book.end_task(1, 7, last=True)
    book.remove_worker(1, 5, watched=True)
    assert book.memory(7) == {"now": None, "peak": 5 * GiB, "share": 10 * GiB}
    assert book.hint(7) == "used 5 of 10 GiB: 0.15 would do"


def test_memory_of_child_processes_counts(book):
    book.start_task(holder())
    book.update({"a": reading(process(100, 1), process(300, 2, 200, 100, 50))}, KERNEL, 0)
    assert book.memory(7)["now"] == 3 * GiB


def test_unknown_memory_is_shown_as_none(book):
    assert book.memory(7) == {"now": None, "peak": None, "share": None}
    book.start_task(holder())
    assert book.memory(7) == {"now": None, "peak": None, "share": 10 * GiB}
    book.update({"a": Reading()}, KERNEL, 0)
    assert book.memory(7)["peak"] is None


def test_reported_memory_counts_if_the_device_lists_no_processes(book):
    book.start_task(holder())
    book.update({"a": Reading(3 * GiB, 40 * GiB)}, KERNEL, 0)
    assert book.report_memory(1, "a", GiB, 2 * GiB) == []
    book.update({"a": Reading(3 * GiB, 40 * GiB)}, KERNEL, 1)
    assert book.memory(7) == {"now": GiB, "peak": 2 * GiB, "share": 10 * GiB}


def test_the_larger_of_measured_and_reported_memory_counts(book):
    book.start_task(holder())
    book.update({"a": reading(process(100, 3))}, KERNEL, 0)
    book.report_memory(1, "a", GiB, GiB)
    assert book.memory(7)["now"] == 3 * GiB


def test_a_report_of_a_removed_worker_is_ignored(book):
    assert book.report_memory(1, "a", GiB, GiB) == ()


def test_each_call_of_an_actor_has_a_peak_of_its_own(book):
    actor = holder(lasting=True)
    book.start_task(actor)
    book.update({"a": reading(process(100, 5))}, KERNEL, 0)
    book.end_task(1, 8, last=True)
    book.update({"a": reading(process(100, 1))}, KERNEL, 1)
    book.start_call(actor)
    book.update({"a": reading(process(100, 2))}, KERNEL, 2)
    book.end_task(1, 9, last=True)
    assert [book.memory(each)["peak"] for each in (7, 8, 9)] == [5 * GiB, 5 * GiB, 2 * GiB]


def test_a_reused_worker_starts_with_a_new_peak(book):
    book.start_task(holder())
    book.update({"a": reading(process(100, 5))}, KERNEL, 0)
    book.end_task(1, 7, last=True)
    book.start_task(holder(job=8, label="#8 train"))
    book.update({"a": reading(process(100, 1))}, KERNEL, 1)
    assert book.memory(8)["peak"] == GiB
    assert book.memory(7)["peak"] == 5 * GiB


@pytest.mark.parametrize("gone_first", [True, False])
def test_the_peak_is_that_of_the_last_attempt(book, gone_first):
    book.start_task(holder(1))
    book.report_memory(1, "a", GiB, 5 * GiB)
    book.start_task(holder(2))
    book.report_memory(2, "a", GiB, 3 * GiB)
    if gone_first:
        book.remove_worker(1, 0.0, watched=False)
    assert book.memory(7)["peak"] == 3 * GiB


def test_the_number_of_remembered_tasks_is_limited(book, monkeypatch):
    monkeypatch.setattr("gpunb.scheduler.usage.REMEMBERED", 3)
    for job in range(5):
        book.start_task(holder(worker=job, job=job))
        book.remove_worker(job, 0, watched=True)
    assert list(book.past) == [2, 3, 4]


# ------------------------------------------------------------------------------- beyond the share


def test_an_exceeded_share_is_found_once(book):
    book.start_task(holder())
    book.start_task(holder(worker=2, job=8, label="#8 eval", pid=101))
    seen = {"a": reading(process(100, 12), process(101, 2), process(500, 3, user="eve"), used=18)}
    (found,) = book.update(seen, KERNEL, 0)
    assert found == Exceeded(
        1,
        7,
        "#7 train has 12 GiB of GPU 0, and its share of 0.25 is 10 GiB. GPU 0 of 40 GiB: #7 train "
        "has 12 GiB (share 0.25), #8 eval has 2 GiB (share 0.25), process 500 of eve has 3 GiB, "
        "22 GiB are free",
    )
    assert book.update(seen, KERNEL, 1) == []


def test_a_small_excess_is_allowed_for_the_context(book):
    book.start_task(holder())
    assert book.update({"a": reading(process(100, 10.4))}, KERNEL, 0) == []
    assert len(book.update({"a": reading(process(100, 10.6))}, KERNEL, 0)) == 1


def test_a_whole_device_has_no_limit(book):
    book.start_task(holder(share=1))
    assert book.update({"a": reading(process(100, 40))}, KERNEL, 0) == []


def test_reported_memory_may_exceed_the_share(book):
    book.start_task(holder())
    (found,) = book.report_memory(1, "a", 11 * GiB, 11 * GiB)
    assert isinstance(found, Exceeded)


def test_a_device_of_unknown_size_has_no_limit():
    book = Book([Device("a", 0, "logical GPU", logical=True)])
    book.start_task(holder())
    assert book.report_memory(1, "a", 11 * GiB, 11 * GiB) == []


def test_use_of_a_device_that_was_not_given_is_found(book):
    book.start_task(holder())
    seen = {"a": reading(process(100, 1)), "b": reading(process(100, 1))}
    (found,) = book.update(seen, KERNEL, 0)
    assert isinstance(found, Remark)
    assert found.text.startswith("#7 train uses GPU 1, which it was not given")
    assert found.job == 7
    assert book.update(seen, KERNEL, 1) == []


def test_use_of_a_device_by_a_task_without_one_is_found(book):
    seen = {"a": reading(process(900, 1, 800, 10))}
    (found,) = book.update(seen, KERNEL, 0, {800: (9, "#9 load")})
    assert found.text.startswith("#9 load uses GPU 0, which it was not given")
    assert book.update(seen, KERNEL, 1, {800: (9, "#9 load")}) == []


# ----------------------------------------------------------------------------------------- others


def test_use_of_a_device_by_the_kernel_is_found(book):
    seen = {"a": reading(process(KERNEL, 0.5))}
    (found,) = book.update(seen, KERNEL, 0)
    assert found.text.startswith("this notebook's own process uses GPU 0 and has 512 MiB there")
    assert book.update(seen, KERNEL, 1) == []
    assert book.others["a"] == []


def test_processes_of_others_are_listed(book):
    other = process(500, 3, user="eve", name="python")
    book.start_task(holder())
    server = process(600, 0.1, name="nvidia-cuda-mps-server")
    assert book.update({"a": reading(other, server, process(100, 1))}, KERNEL, 0) == []
    assert book.others["a"] == [other]


def test_a_process_that_just_ended_is_not_listed_as_foreign(book):
    book.start_task(holder())
    book.remove_worker(1, 0.0, watched=True)
    listed = {"a": reading(process(100, 2), process(101, 1, 100))}
    book.update(listed, KERNEL, 0.1)
    assert book.others["a"] == []
    book.update(listed, KERNEL, BACK_AFTER + 0.1)
    assert [each.pid for each in book.others["a"]] == [100, 101]


def test_an_unused_device_of_an_actor_is_found(book):
    actor = holder(lasting=True, busy=False, label="#7 Model", share=1)
    book.start_task(actor)
    book.start_task(holder(worker=2, job=8, pid=101, busy=False))
    seen = {"a": reading(process(100, 1))}
    assert book.update(seen, KERNEL, 0) == []
    assert book.update(seen, KERNEL, IDLE_AFTER - 1) == []
    (found,) = book.update(seen, KERNEL, IDLE_AFTER)
    assert found.text == "#7 Model has kept GPU 0 for 10 minutes without using it"
    assert book.update(seen, KERNEL, IDLE_AFTER * 2) == []


def test_work_on_a_device_ends_its_idleness(book):
    book.start_task(holder(lasting=True, busy=False))
    idle = reading(process(100, 1))
    book.update({"a": idle}, KERNEL, 0)
    book.update({"a": Reading(0, 40 * GiB, 30, 40, ())}, KERNEL, IDLE_AFTER - 1)
    assert book.update({"a": idle}, KERNEL, IDLE_AFTER) == []
    assert len(book.update({"a": idle}, KERNEL, IDLE_AFTER * 2)) == 1


def test_a_running_call_counts_as_use_if_utilization_is_unknown(book):
    actor = holder(lasting=True)
    book.start_task(actor)
    quiet = Reading(processes=())
    book.update({"a": quiet}, KERNEL, 0)
    assert book.update({"a": quiet}, KERNEL, IDLE_AFTER) == []
    book.end_task(1, 8, last=True)
    book.update({"a": quiet}, KERNEL, IDLE_AFTER)
    assert len(book.update({"a": quiet}, KERNEL, IDLE_AFTER * 2)) == 1


# -------------------------------------------------------------------------------- memory comes back


def after_a_task(book: Book, *processes: Seen, used: float | None = None) -> list[str]:
    """What is said when a task that had 5 GiB is gone and these are there, with so much in use."""
    book.update({"a": reading(used=1)}, KERNEL, 0)
    book.start_task(holder())
    book.update({"a": reading(process(100, 5), process(300, 1, 100), used=7)}, KERNEL, 1)
    book.remove_worker(1, 2, watched=True)
    assert book.awaits_memory
    left = {"a": reading(*processes, used=used)}
    assert book.update(left, KERNEL, 2.5) == []
    found = book.update(left, KERNEL, 4.5)
    assert not book.awaits_memory
    return [each.text for each in found]


def test_returned_memory_is_no_finding(book):
    assert after_a_task(book, used=1) == []


def test_a_process_that_keeps_memory_after_the_end_is_named(book):
    message = after_a_task(book, process(300, 1, 1, user="eve", name="python"), used=2)
    had = "the memory that #7 train had on GPU 0 is not back"
    assert message == [f"{had}: process 300 (python) of eve still has it"]


def test_memory_without_a_listed_process_is_found(book):
    message = after_a_task(book, used=6)
    had = "the memory that #7 train had on GPU 0 is not back"
    assert message == [f"{had}: 5 GiB are in use that no process is listed for"]


def test_memory_that_another_process_took_is_no_finding(book):
    assert after_a_task(book, process(500, 20), used=21) == []


def test_memory_may_return_a_moment_later(book):
    book.update({"a": reading(used=1)}, KERNEL, 0)
    book.start_task(holder())
    book.update({"a": reading(process(100, 5), used=6)}, KERNEL, 1)
    book.remove_worker(1, 2, watched=True)
    assert book.update({"a": reading(process(100, 5), used=6)}, KERNEL, 2.5) == []
    assert book.update({"a": reading(used=1)}, KERNEL, 3) == []
    assert not book.awaits_memory


def test_unwatched_memory_is_not_expected_back(book):
    book.start_task(holder())
    book.report_memory(1, "a", GiB, GiB)
    book.remove_worker(1, 2, watched=False)
    assert not book.awaits_memory


# ---------------------------------------------------------------------------------------- in words


def test_a_table_with_unknown_memory(book):
    book.start_task(holder())
    assert book.table() == "GPU 0 of 40 GiB: #7 train has an unknown part (share 0.25)"
    assert book.table("b") == ""
