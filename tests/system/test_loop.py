"""The event loop: descriptors, timers and an inbox, on one thread."""

from __future__ import annotations

import functools
import math
import os
import threading

import pytest

from gpunb.system.loop import Loop
from tests.waiting import PATIENCE, eventually


@pytest.fixture
def loop():
    loop = Loop()
    yield loop
    loop.close()


def run(loop):
    """Run the loop on a thread; posted items are called."""
    thread = threading.Thread(target=loop.run, args=(lambda item: item(),))
    thread.start()
    return thread


def test_a_post_wakes_a_loop_that_sleeps_without_limit(loop):
    thread = run(loop)
    asleep(loop)
    received = threading.Event()
    loop.post(received.set)
    assert received.wait(PATIENCE)
    loop.post(loop.stop)
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("when", [math.inf, 1e12])
def test_timer_in_the_far_future_does_not_stop_the_loop(loop, when):
    loop.after(when, lambda: None)
    thread = run(loop)
    loop.post(loop.stop)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_posts_from_many_threads_are_all_received(loop):
    received = []
    thread = run(loop)

    def post(name):
        for number in range(2000):
            loop.post(lambda: received.append((name, number)))  # noqa: B023 - called late, looked at below

    posters = [threading.Thread(target=post, args=(name,)) for name in range(4)]
    for each in posters:
        each.start()
    for each in posters:
        each.join()
    loop.post(loop.stop)
    thread.join(PATIENCE)
    assert len(received) == 8000
    names = [name for name, _ in received]
    assert [names.count(name) for name in range(4)] == [2000] * 4


def test_timers_are_called_in_order(loop):
    received = []
    loop.after(0.02, lambda: received.append(2))
    loop.after(0.01, lambda: received.append(1))
    loop.after(0.03, loop.stop)
    loop.run(lambda item: item())
    assert received == [1, 2]


def test_descriptor_is_watched_paused_and_unwatched(loop):
    reading, writing = os.pipe()
    received = []

    def readable():
        received.append(os.read(reading, 100))
        if received[-1] == b"a":
            loop.pause(reading, True)
            os.write(writing, b"b")
            loop.after(0.05, lambda: loop.pause(reading, False))
            loop.after(0.02, lambda: received.append("later"))
        else:
            loop.unwatch(reading)
            os.write(writing, b"c")
            loop.after(0.02, loop.stop)

    loop.watch(reading, readable)
    os.write(writing, b"a")
    loop.run(lambda item: item())
    os.close(reading)
    os.close(writing)
    assert received == [b"a", "later", b"b"]


def asleep(loop):
    """Wait until the loop's thread sleeps for long."""
    eventually(lambda: loop._asleep and not loop._lingers)


def test_user_callbacks_run_on_the_loops_thread_in_order_despite_errors(loop, capsys):
    reading, writing = os.pipe()
    received = []
    loop.watch(reading, lambda: (os.read(reading, 1), loop.call_user(received.append, "second")))
    thread = run(loop)
    asleep(loop)

    def assist():
        loop.call_user(lambda: received.append(threading.get_ident() == thread.ident))
        loop.call_user(lambda: 1 / 0)
        loop.call_user(received.append, "first")
        assert received == []
        os.write(writing, b".")

    loop.do(assist)
    eventually(lambda: len(received) == 3)
    loop.post(loop.stop)
    thread.join(PATIENCE)
    os.close(reading)
    os.close(writing)
    assert received == [True, "first", "second"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_do_handles_the_item_on_the_callers_thread_while_the_loop_sleeps(loop):
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
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_do_handles_earlier_posts_first(loop):
    thread = run(loop)
    asleep(loop)
    seen = []
    loop._inbox.append(lambda: seen.append("before"))
    loop.do(lambda: (seen.append("now"), loop.post(lambda: seen.append("after"))))
    eventually(lambda: len(seen) == 3)
    assert seen == ["before", "now", "after"]
    loop.post(loop.stop)
    thread.join(PATIENCE)


def test_do_posts_the_item_while_the_loop_works(loop):
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
    thread.join(PATIENCE)


def test_timer_set_by_another_thread_wakes_the_loop(loop):
    thread = run(loop)
    rung = threading.Event()
    asleep(loop)
    loop.do(lambda: loop.after(0.01, rung.set))
    assert rung.wait(PATIENCE)
    loop.post(loop.stop)
    thread.join(PATIENCE)


def test_descriptor_unwatched_by_another_thread_is_not_called(loop):
    thread = run(loop)
    asleep(loop)
    reader, writer = os.pipe()
    called = []

    def swap():
        loop.watch(reader, lambda: called.append("first"))
        os.write(writer, b"x")  # the loop's thread wakes up, and has to wait for its turn
        eventually(lambda: not loop._asleep, "the loop's thread has woken up")
        loop.unwatch(reader)
        os.read(reader, 1)
        loop.watch(reader, lambda: called.append("second"))

    loop.do(swap)
    loop.do(loop.stop)
    thread.join(PATIENCE)
    os.close(reader)
    os.close(writer)
    assert not called


class Ends(BaseException):
    """An exception that no guard catches."""


@pytest.mark.parametrize("way", ["do", "post"])
def test_only_a_base_exception_ends_the_loop(loop, way):
    raised, failed, called = [], [], []
    loop.failed = lambda error, callback: failed.append(error)

    def target():
        try:
            loop.run(lambda item: item())
        except Ends as error:
            raised.append(error)

    def ends():
        raise Ends

    thread = threading.Thread(target=target)
    thread.start()
    asleep(loop)
    hand_in = getattr(loop, way)
    hand_in(lambda: 1 / 0)
    hand_in(lambda: called.append("next"))
    eventually(lambda: called)
    assert [type(each) for each in failed] == [ZeroDivisionError]
    assert not raised
    hand_in(ends)
    thread.join(PATIENCE)
    assert len(raised) == 1


def test_a_descriptor_whose_callback_fails_is_not_watched_any_more(loop):
    failed, called = [], []
    reader, writer = os.pipe()
    other, its_writer = os.pipe()

    def fails():
        called.append("fails")
        raise ValueError("this one")

    def reads():
        called.append(os.read(other, 1))

    loop.failed = lambda error, callback: failed.append((str(error), callback))
    loop.watch(reader, fails)
    loop.watch(other, reads)
    thread = run(loop)
    os.write(writer, b"x")
    eventually(lambda: failed)
    os.write(its_writer, b"y")
    eventually(lambda: b"y" in called)
    loop.post(loop.stop)
    thread.join(PATIENCE)
    for each in (reader, writer, other, its_writer):
        os.close(each)
    assert failed == [("this one", fails)]
    assert called.count("fails") == 1


def test_failed_timer_does_not_stop_other_timers(loop):
    failed, called = [], []
    loop.failed = lambda error, callback: failed.append(error)
    thread = run(loop)
    loop.post(lambda: loop.after(0, lambda: 1 / 0))
    loop.post(lambda: loop.after(0.001, lambda: called.append("later")))
    eventually(lambda: called)
    loop.post(loop.stop)
    thread.join(PATIENCE)
    assert len(failed) == 1


def test_loop_goes_on_if_a_failure_cannot_be_reported(loop):
    called = []

    def fails(error, callback):
        raise OSError("no standard error")

    loop.failed = fails
    thread = run(loop)
    loop.post(lambda: 1 / 0)
    loop.post(lambda: called.append("next"))
    eventually(lambda: called)
    loop.post(loop.stop)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_turns_of_all_threads_exclude_each_other(loop):
    thread = run(loop)
    inside = []
    received = {name: [] for name in range(4)}

    def work(name, number):
        inside.append(name)
        assert len(inside) == 1
        received[name].append(number)
        loop.post_lazily(lambda: None)
        if number % 20 == 0:
            os.sched_yield()  # lets another thread in, if nothing else keeps it out
        inside.pop()

    def hand_in(name):
        for number in range(1500):
            give = (loop.do, loop.post, loop.post_lazily)[number * (name + 1) % 3]
            give(functools.partial(work, name, number))
            if number % 50 == 0:
                eventually(lambda: loop._asleep, "the loop has nothing to do for a moment")

    posters = [threading.Thread(target=hand_in, args=(name,)) for name in range(4)]
    for each in posters:
        each.start()
    for each in posters:
        each.join()
    eventually(lambda: all(len(each) == 1500 for each in received.values()))
    assert all(each == list(range(1500)) for each in received.values())
    loop.post(loop.stop)
    thread.join(PATIENCE)
