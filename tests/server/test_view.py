"""The changes in sessions that listeners get."""

from __future__ import annotations

from typing import Any

from gpunb.server.view import MachineView, News


def snapshot(**parts: Any) -> dict[str, Any]:
    return {"time": 10.0, "devices": [], "running": [], "waiting": [], "finished": [], **parts}


def job(ident: int, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"id": ident, "seconds": seconds, **more}


def test_a_new_session_is_sent_whole() -> None:
    view, first = MachineView(), snapshot(running=[job(1)])
    assert view.update(7, first).sessions == {7: first}


def test_only_changed_parts_are_sent() -> None:
    view = MachineView()
    view.update(7, snapshot(running=[job(1)]))
    news = view.update(7, snapshot(time=11.0, running=[job(1)], finished=[job(2)]))
    assert news.sessions == {7: {"time": 11.0, "finished": [job(2)]}}


def test_growing_seconds_are_no_news() -> None:
    view = MachineView()
    view.update(7, snapshot(running=[job(1, 1.0)], waiting=[job(2, 0.5)]))
    assert not view.update(7, snapshot(time=11.0, running=[job(1, 2.0)], waiting=[job(2, 1.5)]))


def test_a_new_listener_gets_the_present_seconds_of_jobs() -> None:
    view = MachineView()
    view.update(7, snapshot(running=[job(1, 1.0)], actors=[{"id": 2, "seconds": None}]))
    reported = view.whole(13.0).sessions[7]
    assert reported["running"] == [job(1, 4.0)]
    assert reported["actors"] == [{"id": 2, "seconds": None}]
    assert reported["time"] == 13.0


def test_a_job_with_other_facts_is_news() -> None:
    view = MachineView()
    view.update(7, snapshot(running=[job(1, memory=1)]))
    assert view.update(7, snapshot(time=11.0, running=[job(1, 1.0, memory=2)])).sessions[7][
        "running"
    ] == [job(1, 1.0, memory=2)]


def test_a_session_that_ends_is_gone_once() -> None:
    view = MachineView()
    view.update(7, snapshot())
    assert view.remove(7).gone == {7}
    assert not view.remove(7)
    assert view.whole(0.0).sessions == {}


def test_the_machine_is_sent_when_it_has_changed() -> None:
    view = MachineView()
    assert view.set_machine({"devices": [1]}).machine == {"devices": [1]}
    assert not view.set_machine({"devices": [1]})
    assert view.whole(0.0).machine == {"devices": [1]}


def test_pieces_of_news_are_merged() -> None:
    news = News({1: {"running": [1], "waiting": [1]}, 2: {"running": []}})
    news.add(News({1: {"running": [2]}}, {2}))
    assert news.sessions == {1: {"running": [2], "waiting": [1]}}
    assert news.gone == {2}


def test_merged_news_have_the_seconds_of_one_moment() -> None:
    news = News({1: {"time": 10.0, "running": [job(1, 3.0)]}})
    news.add(News({1: {"time": 19.0, "finished": []}}))
    assert news.sessions == {1: {"time": 19.0, "running": [job(1, 12.0)], "finished": []}}


def test_a_new_session_with_an_old_pid_replaces_it() -> None:
    news = News({}, {1})
    news.add(News({1: {"running": [3]}}))
    printed = news.as_dict()
    assert printed["gone"] == [1]
    assert printed["sessions"] == {"1": {"running": [3]}}


def test_the_whole_state_replaces_earlier_news() -> None:
    news = News({1: {"running": [1]}}, {2}, {"devices": []})
    news.add(News({3: {"running": []}}, whole=True))
    assert news.as_dict() == {"sessions": {"3": {"running": []}}, "gone": [], "whole": True}
