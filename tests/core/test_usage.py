"""Who takes how much of which device, and what is said of it."""

from __future__ import annotations

import pytest

from gpunb.core.resources import UNIT, Device
from gpunb.core.shares import CONTEXT, allowed, hint, pool
from gpunb.core.sightings import Exceeded, Holder, Reading, Remark, Seen
from gpunb.core.usage import BACK_AFTER, IDLE_AFTER, Book
from tests.core.world import GiB

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


def test_but_not_most_of_a_small_share():
    assert pool(UNIT // 10, 10 * GiB) == (0.0875, GiB * 7 // 8)


def test_a_pool_on_a_device_without_known_memory():
    assert pool(2500, None) == (0.25, None)


def test_what_a_pool_and_a_context_take_is_allowed():
    for share in (0.01, 0.1, 0.5):
        units = round(share * UNIT)
        _, nbytes = pool(units, 40 * GiB)
        assert nbytes is not None
        assert nbytes < 40 * GiB * share <= allowed(units, 40 * GiB)


@pytest.mark.parametrize(
    ("peak", "share", "says"),
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
def test_a_hint(peak, share, says):
    assert hint(int(peak * GiB), round(share * UNIT), 40 * GiB) == says


# -------------------------------------------------------------------------------------- the peak


def test_the_peak_of_a_task_is_kept(book):
    book.begins(holder())
    for size in (1, 5, 2):
        assert book.look({"a": reading(process(100, size))}, KERNEL, 0) == []
    assert book.memory(7) == {"now": 2 * GiB, "peak": 5 * GiB, "share": 10 * GiB}
    book.ends(1, 7, last=True)
    book.gone(1, 5, watched=True)
    assert book.memory(7) == {"now": None, "peak": 5 * GiB, "share": 10 * GiB}
    assert book.hint(7) == "used 5 of 10 GiB: 0.15 would do"


def test_what_its_children_take_counts(book):
    book.begins(holder())
    book.look({"a": reading(process(100, 1), process(300, 2, 200, 100, 50))}, KERNEL, 0)
    assert book.memory(7)["now"] == 3 * GiB


def test_of_what_is_not_known_nothing_is_said(book):
    assert book.memory(7) == {"now": None, "peak": None, "share": None}
    book.begins(holder())
    assert book.memory(7) == {"now": None, "peak": None, "share": 10 * GiB}
    book.look({"a": Reading()}, KERNEL, 0)
    assert book.memory(7)["peak"] is None


def test_what_a_worker_says_counts_where_the_device_does_not_tell(book):
    book.begins(holder())
    book.look({"a": Reading(3 * GiB, 40 * GiB)}, KERNEL, 0)
    assert book.says(1, "a", GiB, 2 * GiB) == []
    book.look({"a": Reading(3 * GiB, 40 * GiB)}, KERNEL, 1)
    assert book.memory(7) == {"now": GiB, "peak": 2 * GiB, "share": 10 * GiB}


def test_of_two_figures_the_larger_one_counts(book):
    book.begins(holder())
    book.look({"a": reading(process(100, 3))}, KERNEL, 0)
    book.says(1, "a", GiB, GiB)
    assert book.memory(7)["now"] == 3 * GiB


def test_one_that_is_gone_can_say_nothing(book):
    assert book.says(1, "a", GiB, GiB) == ()


def test_each_call_of_an_actor_has_a_peak_of_its_own(book):
    actor = holder(lasting=True)
    book.begins(actor)
    book.look({"a": reading(process(100, 5))}, KERNEL, 0)
    book.ends(1, 8, last=True)
    book.look({"a": reading(process(100, 1))}, KERNEL, 1)
    book.calls(actor)
    book.look({"a": reading(process(100, 2))}, KERNEL, 2)
    book.ends(1, 9, last=True)
    assert [book.memory(each)["peak"] for each in (7, 8, 9)] == [5 * GiB, 5 * GiB, 2 * GiB]


def test_a_reused_worker_starts_anew(book):
    book.begins(holder())
    book.look({"a": reading(process(100, 5))}, KERNEL, 0)
    book.ends(1, 7, last=True)
    book.begins(holder(job=8, label="#8 train"))
    book.look({"a": reading(process(100, 1))}, KERNEL, 1)
    assert book.memory(8)["peak"] == GiB
    assert book.memory(7)["peak"] == 5 * GiB


def test_only_so_many_are_remembered(book, monkeypatch):
    monkeypatch.setattr("gpunb.core.usage.REMEMBERED", 3)
    for job in range(5):
        book.begins(holder(worker=job, job=job))
        book.gone(job, 0, watched=True)
    assert list(book.past) == [2, 3, 4]


# ------------------------------------------------------------------------------- beyond the share


def test_whoever_takes_more_than_his_share_is_told_once(book):
    book.begins(holder())
    book.begins(holder(worker=2, job=8, label="#8 eval", pid=101))
    seen = {"a": reading(process(100, 12), process(101, 2), process(500, 3, user="eve"), used=18)}
    (found,) = book.look(seen, KERNEL, 0)
    assert found == Exceeded(
        1,
        7,
        "#7 train has 12 GiB of GPU 0, and its share of 0.25 is 10 GiB. GPU 0 of 40 GiB: #7 train "
        "has 12 GiB (share 0.25), #8 eval has 2 GiB (share 0.25), process 500 of eve has 3 GiB, "
        "22 GiB are free",
    )
    assert book.look(seen, KERNEL, 1) == []


def test_a_little_more_is_the_context(book):
    book.begins(holder())
    assert book.look({"a": reading(process(100, 10.4))}, KERNEL, 0) == []
    assert len(book.look({"a": reading(process(100, 10.6))}, KERNEL, 0)) == 1


def test_a_whole_device_has_no_limit(book):
    book.begins(holder(share=1))
    assert book.look({"a": reading(process(100, 40))}, KERNEL, 0) == []


def test_what_a_worker_says_of_itself_may_be_too_much(book):
    book.begins(holder())
    (found,) = book.says(1, "a", 11 * GiB, 11 * GiB)
    assert isinstance(found, Exceeded)


def test_a_device_of_unknown_size_has_no_limit():
    book = Book([Device("a", 0, "logical GPU", logical=True)])
    book.begins(holder())
    assert book.says(1, "a", 11 * GiB, 11 * GiB) == []


def test_a_device_that_was_not_given(book):
    book.begins(holder())
    seen = {"a": reading(process(100, 1)), "b": reading(process(100, 1))}
    (found,) = book.look(seen, KERNEL, 0)
    assert isinstance(found, Remark)
    assert found.text.startswith("#7 train uses GPU 1, which it was not given")
    assert found.job == 7
    assert book.look(seen, KERNEL, 1) == []


def test_a_task_that_has_no_device_at_all(book):
    seen = {"a": reading(process(900, 1, 800, 10))}
    (found,) = book.look(seen, KERNEL, 0, {800: (9, "#9 load")})
    assert found.text.startswith("#9 load uses GPU 0, which it was not given")
    assert book.look(seen, KERNEL, 1, {800: (9, "#9 load")}) == []


# ----------------------------------------------------------------------------------------- others


def test_the_notebooks_own_process(book):
    seen = {"a": reading(process(KERNEL, 0.5))}
    (found,) = book.look(seen, KERNEL, 0)
    assert found.text.startswith("this notebook's own process uses GPU 0 and has 512 MiB there")
    assert book.look(seen, KERNEL, 1) == []
    assert book.others["a"] == []


def test_processes_of_others(book):
    other = process(500, 3, user="eve", name="python")
    book.begins(holder())
    server = process(600, 0.1, name="nvidia-cuda-mps-server")
    assert book.look({"a": reading(other, server, process(100, 1))}, KERNEL, 0) == []
    assert book.others["a"] == [other]


def test_what_has_just_ended_is_not_somebody_elses(book):
    book.begins(holder())
    book.gone(1, 0.0, watched=True)
    listed = {"a": reading(process(100, 2), process(101, 1, 100))}
    book.look(listed, KERNEL, 0.1)
    assert book.others["a"] == []
    book.look(listed, KERNEL, BACK_AFTER + 0.1)
    assert [each.pid for each in book.others["a"]] == [100, 101]


def test_an_actor_that_keeps_a_device_idle(book):
    actor = holder(lasting=True, busy=False, label="#7 Model", share=1)
    book.begins(actor)
    book.begins(holder(worker=2, job=8, pid=101, busy=False))
    seen = {"a": reading(process(100, 1))}
    assert book.look(seen, KERNEL, 0) == []
    assert book.look(seen, KERNEL, IDLE_AFTER - 1) == []
    (found,) = book.look(seen, KERNEL, IDLE_AFTER)
    assert found.text == "#7 Model has kept GPU 0 for 10 minutes without using it"
    assert book.look(seen, KERNEL, IDLE_AFTER * 2) == []


def test_work_on_a_device_ends_its_idleness(book):
    book.begins(holder(lasting=True, busy=False))
    idle = reading(process(100, 1))
    book.look({"a": idle}, KERNEL, 0)
    book.look({"a": Reading(0, 40 * GiB, 30, 40, ())}, KERNEL, IDLE_AFTER - 1)
    assert book.look({"a": idle}, KERNEL, IDLE_AFTER) == []
    assert len(book.look({"a": idle}, KERNEL, IDLE_AFTER * 2)) == 1


def test_where_the_device_does_not_tell_a_call_counts_as_work(book):
    actor = holder(lasting=True)
    book.begins(actor)
    quiet = Reading(processes=())
    book.look({"a": quiet}, KERNEL, 0)
    assert book.look({"a": quiet}, KERNEL, IDLE_AFTER) == []
    book.ends(1, 8, last=True)
    book.look({"a": quiet}, KERNEL, IDLE_AFTER)
    assert len(book.look({"a": quiet}, KERNEL, IDLE_AFTER * 2)) == 1


# -------------------------------------------------------------------------------- memory comes back


def after_a_task(book: Book, *processes: Seen, used: float | None = None) -> list[str]:
    """What is said when a task that had 5 GiB is gone and these are there, with so much in use."""
    book.look({"a": reading(used=1)}, KERNEL, 0)
    book.begins(holder())
    book.look({"a": reading(process(100, 5), process(300, 1, 100), used=7)}, KERNEL, 1)
    book.gone(1, 2, watched=True)
    assert book.waits
    left = {"a": reading(*processes, used=used)}
    assert book.look(left, KERNEL, 2.5) == []
    found = book.look(left, KERNEL, 4.5)
    assert not book.waits
    return [each.text for each in found]


def test_memory_that_is_back(book):
    assert after_a_task(book, used=1) == []


def test_a_process_that_still_has_it_is_named(book):
    says = after_a_task(book, process(300, 1, 1, user="eve", name="python"), used=2)
    had = "the memory that #7 train had on GPU 0 is not back"
    assert says == [f"{had}: process 300 (python) of eve still has it"]


def test_memory_that_nobody_is_listed_for(book):
    says = after_a_task(book, used=6)
    had = "the memory that #7 train had on GPU 0 is not back"
    assert says == [f"{had}: 5 GiB are in use that no process is listed for"]


def test_what_somebody_else_takes_meanwhile_is_not_held_against_it(book):
    assert after_a_task(book, process(500, 20), used=21) == []


def test_it_may_take_a_moment(book):
    book.look({"a": reading(used=1)}, KERNEL, 0)
    book.begins(holder())
    book.look({"a": reading(process(100, 5), used=6)}, KERNEL, 1)
    book.gone(1, 2, watched=True)
    assert book.look({"a": reading(process(100, 5), used=6)}, KERNEL, 2.5) == []
    assert book.look({"a": reading(used=1)}, KERNEL, 3) == []
    assert not book.waits


def test_where_nobody_looks_nothing_is_expected(book):
    book.begins(holder())
    book.says(1, "a", GiB, GiB)
    book.gone(1, 2, watched=False)
    assert not book.waits


# ---------------------------------------------------------------------------------------- in words


def test_a_table_of_what_is_not_known(book):
    book.begins(holder())
    assert book.table() == "GPU 0 of 40 GiB: #7 train has an unknown part (share 0.25)"
    assert book.table("b") == ""
