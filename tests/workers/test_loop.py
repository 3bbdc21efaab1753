"""The event loop: descriptors, timers and an inbox, on one thread."""

from __future__ import annotations

import functools
import math
import os
import threading
import time

import pytest

from gpunb.workers.loop import Loop
from tests.waiting import PATIENCE, eventually


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


def run(loop):
    """Run it on a thread; what is posted is called."""
    thread = threading.Thread(target=loop.run, args=(lambda item: item(),))
    thread.start()
    return thread


def test_a_post_wakes_a_loop_that_sleeps_without_limit(loop):
    thread = run(loop)
    time.sleep(0.05)
    heard = threading.Event()
    loop.post(heard.set)
    assert heard.wait(5)
    loop.post(loop.stop)
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("when", [math.inf, 1e12])
def test_a_timer_of_the_far_future(loop, when):
    loop.after(when, lambda: None)
    thread = run(loop)
    loop.post(loop.stop)
    thread.join(5)
    assert not thread.is_alive()


def test_posts_from_many_threads_are_all_heard_in_order(loop):
    heard = []
    thread = run(loop)

    def post(name):
        for number in range(2000):
            loop.post(lambda: heard.append((name, number)))  # noqa: B023 - called late, looked at below

    posters = [threading.Thread(target=post, args=(name,)) for name in range(4)]
    for each in posters:
        each.start()
    for each in posters:
        each.join()
    loop.post(loop.stop)
    thread.join(10)
    assert len(heard) == 8000
    names = [name for name, _ in heard]
    assert [names.count(name) for name in range(4)] == [2000] * 4


def test_timers_come_in_order(loop):
    heard = []
    loop.after(0.02, lambda: heard.append(2))
    loop.after(0.01, lambda: heard.append(1))
    loop.after(0.03, loop.stop)
    loop.run(lambda item: item())
    assert heard == [1, 2]


def test_a_descriptor_is_watched_paused_and_let_go(loop):
    reading, writing = os.pipe()
    heard = []

    def readable():
        heard.append(os.read(reading, 100))
        if heard[-1] == b"a":
            loop.pause(reading, True)
            os.write(writing, b"b")
            loop.after(0.05, lambda: loop.pause(reading, False))
            loop.after(0.02, lambda: heard.append("later"))
        else:
            loop.unwatch(reading)
            os.write(writing, b"c")
            loop.after(0.02, loop.stop)

    loop.watch(reading, readable)
    os.write(writing, b"a")
    loop.run(lambda item: item())
    os.close(reading)
    os.close(writing)
    assert heard == [b"a", "later", b"b"]


def asleep(loop):
    """Wait until the loop's thread sleeps for long."""
    eventually(lambda: loop._asleep and not loop._lingers)


def test_others_are_told_on_its_thread_in_order_and_their_errors_end_nothing(loop, capsys):
    reading, writing = os.pipe()
    heard = []
    loop.watch(reading, lambda: (os.read(reading, 1), loop.tell(heard.append, "second")))
    thread = run(loop)
    asleep(loop)

    def assist():
        loop.tell(lambda: heard.append(threading.get_ident() == thread.ident))
        loop.tell(lambda: 1 / 0)
        loop.tell(heard.append, "first")
        assert heard == []
        os.write(writing, b".")

    loop.do(assist)
    eventually(lambda: len(heard) == 3)
    loop.post(loop.stop)
    thread.join(PATIENCE)
    os.close(reading)
    os.close(writing)
    assert heard == [True, "first", "second"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_is_done_while_the_loop_sleeps_is_done_at_once_by_the_caller(loop):
    thread = run(loop)
    asleep(loop)
    seen = []
    loop.post(lambda: seen.append(threading.get_ident()))
    eventually(lambda: seen)
    asleep(loop)
    loop.do(lambda: seen.append((threading.get_ident(), loop.mine())))
    assert seen == [thread.ident, (threading.get_ident(), True)]
    assert not loop.mine()
    loop.do(loop.stop)
    thread.join(5)
    assert not thread.is_alive()


def test_what_was_posted_before_is_done_before(loop):
    thread = run(loop)
    asleep(loop)
    seen = []
    loop._inbox.append(lambda: seen.append("before"))
    loop.do(lambda: (seen.append("now"), loop.post(lambda: seen.append("after"))))
    eventually(lambda: len(seen) == 3)
    assert seen == ["before", "now", "after"]
    loop.post(loop.stop)
    thread.join(5)


def test_who_works_at_the_same_time_leaves_it_to_the_loop(loop):
    thread = run(loop)
    began, go = threading.Event(), threading.Event()
    seen = []
    loop.post(lambda: (began.set(), go.wait(PATIENCE)))
    assert began.wait(PATIENCE)
    loop.do(lambda: seen.append(threading.get_ident()))
    assert not seen
    go.set()
    eventually(lambda: seen)
    assert seen == [thread.ident]
    loop.post(loop.stop)
    thread.join(5)


def test_a_timer_that_is_set_from_outside_wakes_the_loop(loop):
    thread = run(loop)
    rung = threading.Event()
    asleep(loop)
    loop.do(lambda: loop.after(0.01, rung.set))
    assert rung.wait(PATIENCE)
    loop.post(loop.stop)
    thread.join(5)


def test_a_descriptor_that_is_let_go_from_outside_is_not_called(loop):
    thread = run(loop)
    asleep(loop)
    reader, writer = os.pipe()
    called = []

    def swap():
        loop.watch(reader, lambda: called.append("first"))
        os.write(writer, b"x")  # the loop's thread wakes up, and has to wait for its turn
        time.sleep(0.05)
        loop.unwatch(reader)
        os.read(reader, 1)
        loop.watch(reader, lambda: called.append("second"))

    loop.do(swap)
    loop.do(loop.stop)
    thread.join(5)
    os.close(reader)
    os.close(writer)
    assert not called


def test_an_error_of_what_is_done_is_the_loops(loop):
    raised = []

    def target():
        try:
            loop.run(lambda item: item())
        except ZeroDivisionError as error:
            raised.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    asleep(loop)
    loop.do(lambda: 1 / 0)
    thread.join(5)
    assert len(raised) == 1


def test_turns_exclude_each_other_whoever_takes_them(loop):
    thread = run(loop)
    inside = []
    heard = {name: [] for name in range(4)}

    def work(name, number):
        inside.append(name)
        assert len(inside) == 1
        heard[name].append(number)
        loop.post_lazily(lambda: None)
        inside.pop()

    def hand_in(name):
        for number in range(1500):
            give = (loop.do, loop.post, loop.post_lazily)[number * (name + 1) % 3]
            give(functools.partial(work, name, number))
            if number % 50 == 0:
                time.sleep(0.0005)

    posters = [threading.Thread(target=hand_in, args=(name,)) for name in range(4)]
    for each in posters:
        each.start()
    for each in posters:
        each.join()
    eventually(lambda: all(len(each) == 1500 for each in heard.values()))
    assert all(each == list(range(1500)) for each in heard.values())
    loop.post(loop.stop)
    thread.join(5)
