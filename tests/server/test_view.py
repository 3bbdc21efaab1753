"""What is news, and to whom."""

from __future__ import annotations

from typing import Any

from gpunb.server.view import News, View


def snapshot(**parts: Any) -> dict[str, Any]:
    return {"time": 10.0, "devices": [], "running": [], "waiting": [], "finished": [], **parts}


def job(ident: int, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"id": ident, "seconds": seconds, **more}


def test_a_new_session_is_told_whole() -> None:
    view, first = View(), snapshot(running=[job(1)])
    assert view.told(7, first).sessions == {7: first}


def test_only_the_parts_that_changed_are_told() -> None:
    view = View()
    view.told(7, snapshot(running=[job(1)]))
    news = view.told(7, snapshot(time=11.0, running=[job(1)], finished=[job(2)]))
    assert news.sessions == {7: {"time": 11.0, "finished": [job(2)]}}


def test_that_time_has_passed_is_no_news() -> None:
    view = View()
    view.told(7, snapshot(running=[job(1, 1.0)], waiting=[job(2, 0.5)]))
    assert not view.told(7, snapshot(time=11.0, running=[job(1, 2.0)], waiting=[job(2, 1.5)]))


def test_somebody_new_is_told_how_old_jobs_are_by_now() -> None:
    view = View()
    view.told(7, snapshot(running=[job(1, 1.0)], actors=[{"id": 2, "seconds": None}]))
    told = view.whole(13.0).sessions[7]
    assert told["running"] == [job(1, 4.0)]
    assert told["actors"] == [{"id": 2, "seconds": None}]
    assert told["time"] == 13.0


def test_a_job_with_other_facts_is_news() -> None:
    view = View()
    view.told(7, snapshot(running=[job(1, memory=1)]))
    assert view.told(7, snapshot(time=11.0, running=[job(1, 1.0, memory=2)])).sessions[7][
        "running"
    ] == [job(1, 1.0, memory=2)]


def test_a_session_that_ends_is_gone_once() -> None:
    view = View()
    view.told(7, snapshot())
    assert view.left(7).gone == {7}
    assert not view.left(7)
    assert view.whole(0.0).sessions == {}


def test_the_machine_is_told_when_it_has_changed() -> None:
    view = View()
    assert view.measured({"devices": [1]}).machine == {"devices": [1]}
    assert not view.measured({"devices": [1]})
    assert view.whole(0.0).machine == {"devices": [1]}


def test_pieces_of_news_become_one() -> None:
    news = News({1: {"running": [1], "waiting": [1]}, 2: {"running": []}})
    news.add(News({1: {"running": [2]}}, {2}))
    assert news.sessions == {1: {"running": [2], "waiting": [1]}}
    assert news.gone == {2}


def test_a_session_that_comes_back_under_its_number_is_gone_and_there() -> None:
    news = News({}, {1})
    news.add(News({1: {"running": [3]}}))
    said = news.as_dict()
    assert said["gone"] == [1]
    assert said["sessions"] == {"1": {"running": [3]}}


def test_everything_makes_what_came_before_void() -> None:
    news = News({1: {"running": [1]}}, {2}, {"devices": []})
    news.add(News({3: {"running": []}}, whole=True))
    assert news.as_dict() == {"sessions": {"3": {"running": []}}, "gone": [], "whole": True}
