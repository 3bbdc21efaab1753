"""Tasks and actors that use tasks and actors."""

from __future__ import annotations

import os

import pytest

from tests.conformance.api.backends import alive, errors, get, ray
from tests.waiting import eventually


@ray.remote
def depth(n):
    return 0 if n == 0 else 1 + ray.get(depth.remote(n - 1))


@ray.remote
class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, by=1):
        self.count += by
        return self.count


def test_deeper_than_there_are_cpus():
    assert get(depth.remote(6), 60) == 6


def test_wider_than_there_are_cpus():
    @ray.remote
    def wide(n):
        return sum(ray.get([depth.remote(0) for _ in range(n)])) + n

    assert get([wide.remote(6) for _ in range(4)]) == [6] * 4


def test_a_task_that_waits_lends_its_cpus(idle):
    @ray.remote(num_cpus=4)
    def outer():
        return ray.get(ray.remote(num_cpus=4)(lambda: "inner").remote())

    assert get(outer.remote()) == "inner"


def test_a_task_that_waits_keeps_its_gpu(idle):
    @ray.remote(num_gpus=1, num_cpus=1)
    def outer():
        inner = ray.get(ray.remote(num_gpus=1, num_cpus=1)(ray.get_gpu_ids).remote())
        return ray.get_gpu_ids(), inner

    assert get(outer.remote()) == ([0], [1])


def test_a_task_returns_the_ref_of_another():
    @ray.remote
    def outer():
        return depth.remote(1)

    assert get(get(outer.remote())) == 1


def test_a_task_does_not_wait_for_those_it_started(gate):
    @ray.remote
    def inner(gate):
        gate.enter("inner")
        return "inner"

    @ray.remote
    def outer(gate):
        return [inner.remote(gate)]

    ref = get(outer.remote(gate))[0]
    gate.await_("inner")
    gate.open()
    assert get(ref) == "inner"


def test_an_actor_inside_a_task():
    @ray.remote
    def task():
        counter = Counter.remote(10)
        return ray.get([counter.add.remote(), counter.add.remote()])

    assert get(task.remote()) == [11, 12]


def test_an_actor_of_a_task_ends_with_its_last_handle():
    @ray.remote
    class Process:
        def pid(self):
            return os.getpid()

    @ray.remote
    def task():
        process = Process.remote()
        return ray.get(process.pid.remote())

    pid = get(task.remote())
    eventually(lambda: not alive(pid))


def test_an_actor_of_a_task_lives_while_its_handle_is_held():
    @ray.remote
    def make():
        counter = Counter.remote(10)
        ray.get(counter.add.remote())
        return counter

    counter = get(make.remote())
    assert get(counter.add.remote()) == 12


def test_a_handle_in_a_task():
    @ray.remote
    def use(counter):
        return ray.get(counter.add.remote())

    counter = Counter.remote()
    assert sorted(get([use.remote(counter) for _ in range(3)])) == [1, 2, 3]
    assert get(counter.add.remote()) == 4


def test_a_handle_inside_other_arguments():
    @ray.remote
    def use(box):
        return ray.get(box["counter"].add.remote())

    counter = Counter.remote()
    assert get(use.remote({"counter": counter})) == 1


def test_a_handle_in_another_actor():
    @ray.remote
    class Uses:
        def __init__(self, counter):
            self.counter = counter

        def use(self):
            return ray.get(self.counter.add.remote(5))

    counter = Counter.remote()
    uses = Uses.remote(counter)
    assert get(uses.use.remote()) == 5
    assert get(counter.add.remote()) == 6


def test_an_actor_inside_an_actor():
    @ray.remote
    class Parent:
        def __init__(self):
            self.child = Counter.remote(100)

        def add(self):
            return ray.get(self.child.add.remote())

    parent = Parent.remote()
    assert get([parent.add.remote(), parent.add.remote()]) == [101, 102]


def test_tasks_of_an_actor():
    @ray.remote
    class Submits:
        def run(self, n):
            return ray.get([depth.remote(0) for _ in range(n)])

    submits = Submits.remote()
    assert get(submits.run.remote(3)) == [0, 0, 0]


def test_a_put_inside_a_task_is_for_other_tasks():
    @ray.remote
    def outer():
        ref = ray.put(list(range(10)))
        return ray.get(ray.remote(sum_of).remote(ref))

    assert get(outer.remote()) == 45


def sum_of(values):
    return sum(values)


def test_a_gpu_task_starts_another_without(idle):
    @ray.remote(num_gpus=1)
    def outer():
        return ray.get_gpu_ids(), ray.get(ray.remote(ray.get_gpu_ids).remote())

    assert get(outer.remote()) == ([0], [])


def test_an_error_comes_through_all_layers():
    @ray.remote
    def fails():
        raise KeyError("deep")

    @ray.remote
    class Middle:
        def run(self):
            return ray.get(fails.remote())

    @ray.remote
    def outer(middle):
        return ray.get(middle.run.remote())

    middle = Middle.remote()
    with pytest.raises(KeyError) as caught:
        get(outer.remote(middle))
    assert isinstance(caught.value, errors.Task)
