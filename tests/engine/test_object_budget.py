"""The limit on objects' memory: which objects fit, which move to disk, and the counts of bytes."""

from __future__ import annotations

import os
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.engine.object_budget import Budget, parse_limit, total_memory
from gpunb.exceptions import OutOfMemoryError

GIB = 1 << 30


def facts(budget):
    return tuple(budget.facts()[name] for name in ("used", "limit", "spilled"))


def full(*sizes, limit=100):
    """A budget that may spill, with objects 0, 1, ... from the oldest on."""
    budget = Budget(limit, spill=True)
    for obj, nbytes in enumerate(sizes):
        assert budget.admit([(obj, nbytes)]) == []
    return budget


# ---------------------------------------------------------------------------------- without spill


def test_what_fits_is_booked_and_what_does_not_is_refused():
    budget = Budget(100)
    assert budget.admit([("a", 60)]) == []
    assert budget.admit([("b", 40)]) == []
    with pytest.raises(OutOfMemoryError):
        budget.admit([("c", 1)])
    assert facts(budget) == (100, 100, 0)
    budget.remove("a")
    assert budget.admit([("c", 60)]) == []
    for each in "bc":
        budget.remove(each)
    assert facts(budget) == (0, 100, 0)
    assert not len(budget)


def test_a_refusal_names_the_sizes_and_the_ways_out():
    budget = Budget(2 * GIB)
    budget.admit([("a", GIB)])
    with pytest.raises(OutOfMemoryError) as info:
        budget.admit([("b", GIB), ("c", GIB // 2)], "the results of train (#7)")
    text = str(info.value)
    for part in (
        "no room for the results of train (#7) (1.5 GiB)",
        "objects take 1 GiB of the 2 GiB",
        "del ref",
        "gpunb.init(object_memory=...)",
        "gpunb.init(spill=True)",
    ):
        assert part in text
    assert facts(budget) == (GIB, 2 * GIB, 0)  # neither of the two


def test_a_block_that_several_have_counts_once():
    budget = Budget(100)
    budget.admit([("a", 60)])
    budget.add("a", 60)
    assert facts(budget)[0] == 60
    budget.remove("a")
    assert facts(budget)[0] == 60
    budget.remove("a")
    budget.remove("a")
    assert facts(budget)[0] == 0


def test_what_is_added_without_asking_takes_room_too():
    budget = Budget(100)
    budget.add("failure", 120)
    assert facts(budget)[0] == 120
    with pytest.raises(OutOfMemoryError):
        budget.admit([("a", 1)])
    assert budget.admit([]) == []  # what is small has no segment


# ------------------------------------------------------------------------------------- with spill


def test_the_least_recently_used_moves():
    budget = full(40, 30, 30)
    assert budget.admit([("new", 10)]) == [0]
    assert facts(budget) == (110, 100, 0)  # it is still there
    budget.moved(0)
    assert facts(budget) == (70, 100, 40)
    assert budget.admit([("more", 40)]) == [1]
    budget.moved(1)
    budget.remove(0)
    assert facts(budget) == (80, 100, 30)


def test_use_protects():
    budget = full(40, 30, 30)
    budget.touch(0)
    budget.touch("unknown")
    assert budget.admit([("new", 30)]) == [1]


def test_what_is_leaving_is_not_chosen_twice_and_its_room_is_given_once():
    budget = full(50, 50)
    assert budget.admit([("a", 50)]) == [0]
    assert budget.admit([("b", 50)]) == [1]
    assert budget.admit([("c", 50)]) == ["a"]


def test_no_more_moves_than_has_to():
    budget = full(1, 1, 1, 60, 37)
    assert budget.admit([("new", 20)]) == [3]
    budget = full(1, 10, 60, 29)
    assert budget.admit([("new", 61)]) == [1, 2]  # with the first it would be 71


def test_what_does_not_fit_by_itself_moves_and_nothing_else():
    budget = full(40, 30)
    assert budget.admit([("huge", 101)]) == ["huge"]
    budget.moved("huge")
    assert facts(budget) == (70, 100, 101)
    budget.remove("huge")
    assert facts(budget) == (70, 100, 0)


def test_several_new_ones_that_do_not_fit_together():
    budget = full(30)
    assert budget.admit([("a", 60), ("b", 60)]) == ["a"]
    budget.moved("a")
    assert facts(budget) == (90, 100, 60)


def test_what_somebody_uses_now_does_not_move():
    budget = full(50, 50)
    budget.pin(0)
    budget.pin(0)
    budget.unpin(0)
    assert budget.admit([("a", 10)]) == [1]
    budget.moved(1)
    assert budget.admit([("b", 60)]) == ["b"]  # "a" alone would not do
    budget.unpin(0)
    budget.unpin(0)
    budget.unpin("unknown")
    budget.pin("unknown")
    assert budget.admit([("c", 100)]) == [0, "a"]


def test_what_could_not_move_is_the_next_to_be_tried():
    budget = full(50, 50)
    assert budget.admit([("a", 10)]) == [0]
    budget.stays(0)
    assert facts(budget) == (110, 100, 0)
    budget.remove("a")
    assert budget.admit([("b", 10)]) == [0]


def test_what_is_removed_while_it_moves():
    budget = full(50, 50)
    assert budget.admit([("a", 10)]) == [0]
    budget.remove(0)
    budget.moved(0)
    budget.stays(0)
    assert facts(budget) == (60, 100, 0)
    assert budget.admit([("b", 41)]) == [1]


@given(
    st.lists(st.tuples(st.sampled_from("aarrtpump"), st.integers(0, 9), st.integers(1, 150))),
    st.booleans(),
)
def test_the_books_are_right_whatever_happens(steps, spill):
    """Against the plainest books there can be."""
    budget = Budget(100, spill=spill)
    sizes, held, leaving, disk = {}, {}, set(), set()
    for step, obj, nbytes in steps:
        if step == "a":
            size = sizes.setdefault(obj, nbytes)
            if obj in held:
                budget.add(obj, size)
                held[obj] += 1
                continue
            staying = sum(sizes[each] for each in held if each not in leaving | disk)
            try:
                chosen = budget.admit([(obj, size)])
            except OutOfMemoryError:
                assert not spill
                assert staying + size > 100
                continue
            held[obj] = 1
            assert not set(chosen) & (leaving | disk)
            assert set(chosen) <= set(held)
            left = staying + size - sum(sizes[each] for each in chosen)
            assert left <= 100 or obj in chosen  # the others are in use
            leaving |= set(chosen)
        elif step == "r" and obj in held:
            budget.remove(obj)
            held[obj] -= 1
            if not held[obj]:
                del held[obj], sizes[obj]
                leaving.discard(obj)
                disk.discard(obj)
        elif step == "m" and leaving:
            budget.moved(one := min(leaving))
            leaving.discard(one)
            disk.add(one)
        elif step == "u" and leaving:
            budget.stays(one := max(leaving))
            leaving.discard(one)
        elif step == "t":
            budget.touch(obj)
        elif step == "p":
            (budget.pin if nbytes % 2 else budget.unpin)(obj)
        sizes = {each: sizes[each] for each in held}
        on_disk = sum(sizes[each] for each in disk)
        assert facts(budget) == (sum(sizes.values()) - on_disk, 100, on_disk)
        assert len(budget) == len(held)


def test_many_threads_lose_no_byte():
    budget = Budget(1000, spill=True)

    def work(number):
        chance = random.Random(number)
        for turn in range(500):
            obj = (number, turn)
            chosen = budget.admit([(obj, chance.randint(1, 300))])
            for each in chosen:
                chance.choice([budget.moved, budget.moved, budget.stays])(each)
            budget.touch((chance.randrange(4), turn))
            budget.remove(obj)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert facts(budget) == (0, 1000, 0)
    assert not len(budget)


# ------------------------------------------------------------------------------------- the option


def test_limits():
    assert parse_limit("2GiB") == 2 * GIB
    assert parse_limit(1000) == 1000
    assert parse_limit(None) == total_memory() // 2
    for bad, error in [("two", ValueError), (0, ValueError), (-1, ValueError), ([], TypeError)]:
        with pytest.raises(error, match="object_memory"):
            parse_limit(bad)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "4000"}, 4000),
        ("0::/of/the/machine\n", {"memory.max": "3000"}, 3000),
        ("5:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "2000"}, 2000),
        ("4:memory:/a\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("4:cpu:/\n", {}, None),
    ],
)
def test_a_group_may_have_less_than_the_machine(tmp_path, groups, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "groups").write_text(groups)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total_memory(str(tmp_path), str(tmp_path / "groups")) == (expected or machine)
    assert total_memory(str(tmp_path), str(tmp_path / "none")) == machine
