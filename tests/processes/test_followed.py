"""When what tasks import is preloaded: the pauses, what is left out, and what ends it."""

from __future__ import annotations

from typing import Any

import pytest

from gpunb.processes.followed import FIRST_PAUSE, LONGEST_PAUSE, Follower
from gpunb.protocol.zygote import Imports


class Later:
    """A loop that only notes what it is to call later."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Any]] = []

    def after(self, seconds: float, call: Any) -> None:
        self.calls.append((seconds, call))

    def pass_time(self) -> float:
        seconds, call = self.calls.pop(0)
        call()
        return seconds


class Followed:
    """A follower, its loop and the preloads that it has started."""

    def __init__(self) -> None:
        self.loop = Later()
        self.started: list[Imports] = []
        self.awaited: list[bool] = []
        loop: Any = self.loop
        self.follower = Follower(loop, self._start)

    def _start(self, imports: Imports, awaited: bool) -> None:
        self.started.append(imports)
        self.awaited.append(awaited)

    def imported(self, *modules: str, changed: Any = None, **environment: str) -> None:
        self.follower.imported(Imports(modules, changed or {}, environment, ["/path"], []))

    def needed(self, *modules: str, **environment: str) -> bool:
        return self.follower.needed(Imports(modules, {}, environment, ["/path"], []))

    def followed(self) -> None:
        """The last preload ends well."""
        self.follower.followed(self.started[-1])

    def modules(self) -> list[tuple[str, ...]]:
        return [each.modules for each in self.started]


@pytest.fixture
def one() -> Followed:
    return Followed()


def test_reports_before_a_preload_begins_are_one_preload(one: Followed) -> None:
    one.imported("a", "a.b", changed={"X": "1"})
    one.imported("c", "a", changed={"Y": None})
    assert one.loop.pass_time() == FIRST_PAUSE
    assert one.started == [Imports(("a", "a.b", "c"), {"X": "1", "Y": None}, {}, ["/path"], [])]
    assert not one.loop.calls


def test_what_comes_during_a_preload_is_in_the_next_one_with_the_earlier(one: Followed) -> None:
    one.imported("a")
    one.loop.pass_time()
    one.imported("b")
    assert not one.loop.calls
    one.followed()
    assert one.loop.pass_time() == 2 * FIRST_PAUSE
    assert one.modules() == [("a",), ("a", "b")]
    one.followed()
    one.imported("a", "b")  # by a process that is older than the preload
    assert not one.loop.calls


def test_the_pauses_grow_to_the_longest(one: Followed) -> None:
    pauses = []
    for number in range(11):
        one.imported(f"m{number}")
        pauses.append(one.loop.pass_time())
        one.followed()
    assert pauses[:4] == [FIRST_PAUSE * each for each in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_PAUSE


def test_a_refused_package_is_left_out_and_named(one: Followed) -> None:
    one.imported("a", "b", "b.c", "d")
    one.loop.pass_time()
    one.follower.refuse("b", "it starts a thread")
    one.loop.pass_time()
    assert one.modules()[-1] == ("a", "d")
    assert one.follower.notes == ["preload: each task imports b by itself: it starts a thread"]
    one.followed()
    one.imported("b")
    assert not one.loop.calls


def test_if_only_the_refused_one_was_imported_nothing_is_preloaded(one: Followed) -> None:
    one.imported("b")
    one.loop.pass_time()
    one.follower.refuse("b", "it starts a thread")
    assert not one.loop.calls


def test_another_environment_begins_anew(one: Followed) -> None:
    one.imported("a", "b", BACKEND="x")
    one.loop.pass_time()
    one.followed()
    one.imported("a", BACKEND="y")
    one.loop.pass_time()
    assert one.started[-1] == Imports(("a",), {}, {"BACKEND": "y"}, ["/path"], [])


def test_the_environment_may_be_that_before_or_after_the_imports(one: Followed) -> None:
    one.imported("a", changed={"SET": "1", "GONE": None}, GONE="0", OTHER="x")
    one.loop.pass_time()
    one.followed()
    one.imported("b", SET="1", OTHER="x")
    one.loop.pass_time()
    assert one.modules() == [("a",), ("a", "b")]
    one.followed()
    for environment in ({"SET": "2", "OTHER": "x"}, {"SET": "1", "OTHER": "y"}, {"SET": "1"}):
        one.imported("c", **environment)
        one.loop.pass_time()
        assert one.modules()[-1] == ("c",)
        one.followed()


def test_what_a_task_needs_is_imported_at_once(one: Followed) -> None:
    assert one.needed("a")
    assert (one.modules(), one.awaited) == ([("a",)], [True])
    assert one.needed("a"), "another task waits for the same"
    assert not one.needed("b"), "it would have to wait for both"
    one.followed()
    assert not one.needed("a")
    assert one.needed("a", "b")
    assert (one.modules()[1:], one.awaited[1:]) == ([("a", "b")], [True])
    assert not one.loop.calls


def test_a_preload_in_the_background_is_begun_anew_for_a_task_that_needs_more(
    one: Followed,
) -> None:
    one.imported("a")
    one.loop.pass_time()
    assert one.needed("a"), "it has this one"
    one.follower.lost()
    one.imported("a")
    one.loop.pass_time()
    assert one.needed("b")
    assert (one.modules()[-1], one.awaited[-1]) == (("a", "b"), True)


def test_a_pause_that_ends_during_a_preload_begins_no_other(one: Followed) -> None:
    one.imported("a")
    assert one.needed("b")
    one.loop.pass_time()
    assert one.modules() == [("a", "b")]


def test_what_is_needed_is_not_awaited_if_it_was_refused_or_all_is_stopped(one: Followed) -> None:
    assert one.needed("b")
    one.follower.refuse("b", "it starts a thread")
    assert not one.needed("b.c")
    assert one.needed("a")
    one.follower.stop("a worker crashed")
    assert not one.needed("d")


def test_what_is_needed_with_another_environment_is_imported_anew(one: Followed) -> None:
    assert one.needed("a", "b")
    one.followed()
    assert one.needed("a", BACKEND="y")
    assert one.started[-1] == Imports(("a",), {}, {"BACKEND": "y"}, ["/path"], [])


def test_everything_is_imported_once_more_when_it_is_renewed(one: Followed) -> None:
    assert one.needed("a")
    one.followed()
    one.follower.renew()
    one.loop.pass_time()
    assert (one.modules()[-1], one.awaited[-1]) == (("a",), False)
    assert not one.needed("a"), "workers have it all the time"


def test_the_shell_of_cells_is_kept(one: Followed) -> None:
    one.follower.imported(Imports(("a",), {}, {}, ["/path"], [], ("ipykernel.zmqshell", "Shell")))
    one.imported("b")
    one.loop.pass_time()
    assert one.started[-1].shell == ("ipykernel.zmqshell", "Shell")


def test_once_stopped_it_preloads_nothing_more_and_says_why(one: Followed) -> None:
    one.imported("a")
    one.follower.stop("a worker crashed")
    one.loop.pass_time()
    one.imported("b")
    one.follower.stop("something else")
    assert (one.started, one.loop.calls) == ([], [])
    assert one.follower.notes == [
        "preload: what tasks import is preloaded no longer: a worker crashed"
    ]


def test_what_was_lost_is_preloaded_after_the_next_report(one: Followed) -> None:
    one.imported("a", "b")
    one.loop.pass_time()
    one.followed()
    one.follower.lost()
    assert not one.loop.calls
    one.imported("a")
    one.loop.pass_time()
    assert one.modules() == [("a", "b"), ("a", "b")]
