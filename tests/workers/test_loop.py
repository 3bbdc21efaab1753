"""The event loop: descriptors, timers and an inbox, on one thread."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest

from gpunb.workers.loop import Loop


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
