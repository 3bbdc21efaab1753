"""The limit on objects' memory: what fits, what moves to disk, and what the books say of it."""

from __future__ import annotations

import errno
import gc
import os
import queue
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb import serialize
from gpunb.exceptions import OutOfMemoryError
from gpunb.objects import Segment
from gpunb.runtime import memory
from gpunb.runtime.memory import Budget, Memory, parse_limit, parse_spill, total_memory

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


# ---------------------------------------------------------------------------------- carried out


@pytest.fixture
def folder(tmp_path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield str(tmp_path)
    assert os.listdir(tmp_path) == []
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def payload(count=12_500, value=1.0):
    """100,000 bytes of array and a little pickle."""
    return serialize.dumps(np.full(count, value))


def numbers(memory):
    return tuple(memory.facts()[name] for name in ("used", "spilled"))


def on_disk(payload):
    return "memfd:" not in os.readlink(f"/proc/self/fd/{payload.segment.fileno()}")


def test_small_payloads_do_not_count():
    keeper = Memory(1)
    small = serialize.dumps("small")
    for act in (keeper.hold, keeper.touch, keeper.pin, keeper.unpin, keeper.release):
        act(small)
    keeper.admit(small, "a value")
    assert numbers(keeper) == (0, 0)


def test_moving_and_coming_back(folder):
    keeper = Memory(250_000, folder)
    payloads = [payload(value=number) for number in range(4)]
    mapped = payloads[0].segment.map()
    for each in payloads:
        keeper.admit(each, "a value")
    assert [on_disk(each) for each in payloads] == [True, True, False, False]
    size = payloads[0].segment.size
    assert numbers(keeper) == (2 * size, 2 * size)
    for number, each in enumerate(payloads):
        array = serialize.loads(each)
        assert (array == number).all()
        array += 1
        assert (serialize.loads(each) == number).all()
    assert mapped[-1] == 0
    keeper.release(*payloads)
    assert numbers(keeper) == (0, 0)


def test_a_full_disk_says_so_and_books_nothing(folder, monkeypatch):
    keeper = Memory(150_000, folder)
    first, second = payload(), payload()
    keeper.admit(first, "a value")
    used = numbers(keeper)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OutOfMemoryError) as info:
            keeper.admit(second, "the value of put")
    for part in (
        "the value of put",
        "101.7 KiB",
        "take 101.7 KiB of the 146.5 KiB",
        "No space left",
        folder,
        "object_memory=",
    ):
        assert part in str(info.value)
    assert "spill=True" not in str(info.value)
    assert numbers(keeper) == used
    assert not on_disk(first)
    keeper.admit(second, "the value of put")
    assert on_disk(first)
    keeper.release(first, second)


def test_an_interrupt_leaves_the_books_right(folder, monkeypatch):
    keeper = Memory(150_000, folder)
    first = payload()
    keeper.admit(first, "a value")
    used = numbers(keeper)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "spilled", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keeper.admit(payload(), "a value")
    assert numbers(keeper) == used


class Posts(queue.SimpleQueue):
    def one(self):
        function, argument = self.get(timeout=10)
        function(argument)


def test_what_fits_is_told_at_once_and_the_rest_later(folder):
    posts, told = Posts(), []
    keeper = Memory(250_000, folder, posts.put)
    first, *rest = [payload(value=number) for number in range(3)]
    keeper.admit_soon([first], "a result", told.append)
    assert told == [None]
    keeper.admit_soon(rest, "results", told.append)
    assert told == [None]  # not before the loop has its turn
    posts.one()
    assert told == [None, None]
    assert on_disk(first)
    keeper.release(first, *rest)
    keeper.close()
    keeper._thread.join(10)
    assert not keeper._thread.is_alive()


def test_in_order(folder):
    """The end of a generator must not overtake its values."""
    posts, told = Posts(), []
    keeper = Memory(150_000, folder, posts.put)
    one, two = payload(), payload()
    for name, each, in_order in [
        ("one", [one], True),
        ("two", [two], True),
        ("another's", [], False),
        ("end", [], True),
    ]:
        keeper.admit_soon(each, name, lambda _, name=name: told.append(name), in_order=in_order)
    assert told == ["one", "another's"]
    posts.one()
    posts.one()
    assert told == ["one", "another's", "two", "end"]
    keeper.admit_soon([], "later", told.append, in_order=True)
    assert told.pop() is None
    keeper.release(one, two)
    keeper.close()
    keeper._thread.join(10)


def test_no_room_is_told_too(folder, monkeypatch):
    told = []
    keeper = Memory(150_000)
    keeper.admit_soon([payload(), payload()], "the results of train (#7)", told.append)
    assert "the results of train (#7) (203.3 KiB)" in str(told.pop())
    assert numbers(keeper) == (0, 0)
    keeper.close()

    def broken(*_):
        raise RuntimeError("broken")

    posts = Posts()
    keeper = Memory(150_000, folder, posts.put)
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "spilled", broken)
        keeper.admit_soon([payload(), payload()], "the results", told.append)
        posts.one()
    assert "broken" in str(told.pop())
    assert numbers(keeper) == (0, 0)
    keeper.admit_soon([both := payload(25_000)], "a result", told.append)
    posts.one()
    assert told == [None]  # the thread goes on
    assert on_disk(both)
    keeper.release(both)
    keeper.close()
    keeper._thread.join(10)


# ------------------------------------------------------------------------------------ the options


def test_limits():
    assert parse_limit("2GiB") == 2 * GIB
    assert parse_limit(1000) == 1000
    assert parse_limit(None) == total_memory() // 2
    for bad, error in [("two", ValueError), (0, ValueError), (-1, ValueError), ([], TypeError)]:
        with pytest.raises(error, match="object_memory"):
            parse_limit(bad)


def test_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_file_system", lambda folder: "ext4")
    assert parse_spill(None) is parse_spill(False) is None
    assert os.path.isdir(parse_spill(True))
    assert parse_spill(tmp_path) == parse_spill(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert parse_spill(".") == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_spill("~") == str(tmp_path)
    (tmp_path / "file").touch()
    for bad in (tmp_path / "none", tmp_path / "file", str(tmp_path / "no" / "such")):
        with pytest.raises(ValueError, match="cannot be used: "):
            parse_spill(bad)
    for bad in (1, [], b"/tmp"):
        with pytest.raises(TypeError, match="True or a folder"):
            parse_spill(bad)


def test_a_folder_in_memory_is_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_file_system", lambda folder: "tmpfs")
    with pytest.raises(ValueError, match=r"memory \(tmpfs\)"):
        parse_spill(tmp_path)
    with pytest.raises(ValueError, match="spill=True found no folder"):
        parse_spill(True)
    monkeypatch.setattr(
        memory, "_file_system", lambda folder: "ext4" if folder == "/var/tmp" else "tmpfs"
    )
    assert parse_spill(True) == "/var/tmp"


def test_file_systems(tmp_path):
    assert memory._file_system("/proc") == "proc"
    assert memory._file_system("/proc", str(tmp_path / "none")) is None
    table = tmp_path / "table"
    table.write_text("broken\n")
    assert memory._file_system("/proc", str(table)) is None


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
