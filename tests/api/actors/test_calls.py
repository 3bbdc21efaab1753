"""Actors: calls in order, their arguments and errors, and handles that travel."""

from __future__ import annotations

import gc
import os
import pickle
import threading

import pytest

import gpunb
from gpunb.exceptions import ActorDiedError, TaskError
from tests.api.actors.counter import Counter, get, gone, same, use
from tests.sessions import alive, both
from tests.waiting import eventually


@both
def test_an_actor_keeps_its_state_and_the_order_of_calls(four):
    counter = Counter.remote(5)
    refs = [counter.add.remote(n) for n in range(200)]
    assert get(refs)[-1] == 5 + sum(range(200))
    assert get(counter.order.remote()) == list(range(200))
    assert len({get(counter.pid.remote()) for _ in range(3)}) == 1
    assert get(counter.pid.remote()) != os.getpid()


def test_ray_call_runs_a_function_with_the_object_of_the_actor(four):
    counter = Counter.remote(5)

    def grow(self, by, *, times=1):
        return self.add(by * times)

    assert get(counter.__ray_call__.remote(grow, 2, times=3)) == 11
    assert get(counter.__ray_call__.remote(grow, by=1)) == 12
    with pytest.raises(TypeError, match="missing a required argument"):
        counter.__ray_call__.remote()


def test_calls_take_positional_and_named_arguments(four):
    counter = Counter.remote(start=1, step=10)
    assert get(counter.add.remote()) == 11
    assert get(counter.add.remote(n=2)) == 31
    assert get(counter.add.remote(1, times=3)) == 61
    assert get(counter.plus.remote(1)) == 2
    assert get(counter.plus.remote(1, b=5)) == 6
    assert get(counter.name_of_class.remote("!")) == "Counter!"
    assert get(counter.__call__.remote(1)) == 62
    assert get(counter.__len__.remote()) == 7
    assert get(counter._private.remote()) == "private"


def test_wrong_arguments_are_seen_at_once(four):
    with pytest.raises(TypeError, match=r"Counter\(start=\.\.\., \*, step=\.\.\.\)"):
        Counter.remote(1, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stop'"):
        Counter.remote(stop=1)
    counter = Counter.remote()
    for call in (
        lambda: counter.add.remote(1, 2),
        lambda: counter.add.remote(m=1),
        lambda: counter.read.remote(1),
        counter.plus.remote,
        lambda: counter.name_of_class.remote(1, 2),
    ):
        with pytest.raises(TypeError, match=r"Counter\.\w+\("):
            call()
    with pytest.raises(TypeError, match=r"argument 'n' of Counter\.add"):
        counter.add.remote(threading.Lock())
    with pytest.raises(TypeError, match="Counter"):
        Counter.remote(threading.Lock())


def test_a_handle_is_no_instance_of_the_class(four):
    counter = Counter.remote()
    with pytest.raises(AttributeError, match=r"no method 'sub'; its methods are add, call"):
        counter.sub.remote(1)
    with pytest.raises(AttributeError, match="double"):
        counter.double  # noqa: B018 - properties are not methods
    with pytest.raises(AttributeError, match="kind"):
        counter.kind  # noqa: B018
    with pytest.raises(TypeError, match=r"use \.add\.remote"):
        counter.add(1)
    with pytest.raises(TypeError, match=r"Counter\.remote"):
        Counter(1)
    with pytest.raises(TypeError, match="derive"):

        class Derived(Counter):
            pass

    with pytest.raises(TypeError, match="remote already"):
        gpunb.remote(Counter)
    with pytest.raises(TypeError, match="is an actor already"):
        gpunb.remote(counter)
    with pytest.raises(TypeError, match="ObjectRef"):
        gpunb.get(counter)
    assert not hasattr(counter, "__len__.x")
    assert Counter.__doc__ == "Counts."
    assert Counter.__name__ == "Counter"
    assert Counter.__wrapped__(3).read() == 3


def test_equality_hash_dir_and_repr(four):
    one, two = Counter.remote(), Counter.options(num_gpus=1).remote()
    again = pickle.loads(pickle.dumps(one))
    assert one == again
    assert hash(one) == hash(again)
    assert one != two
    assert one != 1
    assert {one, again, two} == {one, two}
    assert dir(one)[:2] == ["add", "call"]
    assert "_private" not in dir(one)
    get(two.read.remote())
    text = repr(two)
    assert text.startswith(f"<Actor Counter #{two._actor_id} alive on GPU 0, pid ")
    assert "\n" not in text
    assert repr(two.add).startswith("<method add of <Actor Counter")
    assert "remote class Counter" in repr(Counter)
    pid = get(two.pid.remote())
    assert str(pid) in text
    gpunb.kill(two)
    gone(pid)
    eventually(lambda: "alive" not in repr(two))


def test_top_level_refs_are_resolved_and_nested_ones_not(four):
    @gpunb.remote
    class Looks:
        def __init__(self, value, refs):
            self.first = value, [type(each).__name__ for each in refs]

        def look(self, value, refs=(), **more):
            return self.first, value, [gpunb.get(each) for each in refs], more

    looks = Looks.remote(same.remote(1), [gpunb.put(2)])
    found = get(looks.look.remote(gpunb.put("a"), [same.remote("b")], c=same.remote("d")))
    assert found == ((1, ["ObjectRef"]), "a", ["b"], {"c": "d"})


def test_a_call_waits_for_its_inputs_and_keeps_its_place(four, gate):
    counter = Counter.remote()
    slow = gpunb.remote(lambda gate: gate.enter() or 3).remote(gate)
    first, second = counter.add.remote(slow), counter.add.remote(4)
    gate.await_()
    assert gpunb.wait([second], timeout=0.05) == ([], [second])
    gate.open()
    assert get([first, second]) == [3, 7]


def test_callers_do_not_wait_for_one_another(four, gate):
    """Each has an order of its own."""

    @gpunb.remote(num_cpus=0)
    def calls(counter, gate, wait):
        late = gpunb.remote(num_cpus=0)(lambda gate: gate.enter("late") or 0).remote(gate)
        refs = [counter.add.remote(late)] if wait else []
        refs += [counter.add.remote(n) for n in range(5)]
        gate.note("submitted" if wait else "quick")
        gpunb.get(refs)

    counter = Counter.remote()
    slow = calls.remote(counter, gate, True)
    gate.await_("submitted")
    get(calls.remote(counter, gate, False))
    assert get(counter.order.remote()) == list(range(5))
    gate.open()
    get(slow)
    assert get(counter.order.remote()) == [*range(5), 0, *range(5)]


def test_a_failed_input_fails_the_call_and_nothing_else(four):
    counter = Counter.remote()
    failed = gpunb.remote(lambda: 1 / 0).remote()
    with pytest.raises(ZeroDivisionError):
        get(counter.add.remote(failed))
    assert get(counter.add.remote(1)) == 1
    broken = Counter.remote(failed)
    with pytest.raises(ActorDiedError, match="division"):
        get(broken.read.remote())


def test_errors_of_methods_are_raised_by_get(four):
    counter = Counter.remote()
    with pytest.raises(KeyError) as caught:
        get(counter.fail.remote(KeyError("gone")))
    assert isinstance(caught.value, TaskError)
    assert "Counter.fail" in str(caught.value)
    assert "raise error" in str(caught.value)
    assert "gpunb/worker" not in str(caught.value)
    with pytest.raises(TaskError, match="KeyboardInterrupt"):
        get(counter.fail.remote(KeyboardInterrupt()))
    assert get(counter.read.remote()) == 0


@both
def test_handles_can_be_passed_to_tasks_and_actors(four):
    @gpunb.remote
    class Owner:
        def __init__(self, handles):
            self.counter = handles["counter"]

        def add(self, n):
            return gpunb.get(self.counter.add.remote(n))

        def give(self):
            return [self.counter]

        def make(self):
            self.other = Counter.remote(100)
            return self.other

    counter = Counter.remote()
    assert get(use.remote(counter, 2)) == 2
    owner = Owner.remote({"counter": counter})
    assert get(owner.add.remote(3)) == 5
    (again,) = get(owner.give.remote())
    assert again == counter
    assert get(again.read.remote()) == 5
    made = get(owner.make.remote())
    assert get(made.add.remote(1)) == 101
    gpunb.kill(owner)
    assert get(made.add.remote(1)) == 102
    assert get(use.remote(made, 1)) == 103


counter_of_the_module = None


def test_handles_in_closures_globals_and_put(four):
    global counter_of_the_module
    counter = Counter.remote()

    @gpunb.remote
    def by_closure():
        return gpunb.get(counter.add.remote())

    @gpunb.remote
    def by_global():
        return gpunb.get(counter_of_the_module.add.remote())

    counter_of_the_module = counter
    assert get(by_closure.remote()) == 1
    assert get(by_global.remote()) == 2
    counter_of_the_module = None
    assert get(get(gpunb.put([counter]))[0].add.remote()) == 3
    assert get(gpunb.remote(lambda method: gpunb.get(method.remote())).remote(counter.add)) == 4


def test_objects_that_only_the_code_refers_to_stay_alive(four, gate):
    def make():
        counter, ref, held = Counter.remote(3), gpunb.put("ref"), [same.remote("same")]

        @gpunb.remote
        def look():
            gate.enter()
            return gpunb.get([counter.add.remote(), ref, *held])

        return look.remote()

    looked = make()
    gc.collect()
    gate.await_()
    assert get(same.remote("behind")) == "behind"  # the session has let go of what was dropped
    gate.open()
    assert get(looked) == [4, "ref", "same"]


def test_a_handle_that_only_a_worker_holds_keeps_the_actor(four, gate):
    @gpunb.remote
    def keep(handles, gate):
        gate.enter("task")
        return gpunb.get(handles[0].add.remote())

    @gpunb.remote
    class Box:
        def put(self, handle):
            self.handle = handle[0]

        def add(self):
            return gpunb.get(self.handle.add.remote())

    counter, box = Counter.remote(), Box.remote()
    get(box.put.remote([counter]))
    ref = keep.remote([counter], gate)
    pid = get(counter.pid.remote())
    del counter
    gate.await_()
    gate.open()
    assert get(ref) == 1
    assert get(box.add.remote()) == 2
    assert alive(pid)
    del box
    gone(pid)


def test_an_actor_made_by_a_task_outlives_it_while_there_is_a_handle(four):
    @gpunb.remote(num_gpus=1)
    def make():
        counter = Counter.options(num_gpus=1).remote(1)
        return counter, gpunb.get(counter.pid.remote())

    counter, pid = get(make.remote())
    assert get(counter.add.remote()) == 2
    del counter
    gone(pid)

    @gpunb.remote
    def make_and_forget():
        return gpunb.get(Counter.remote().pid.remote())

    gone(get(make_and_forget.remote()))
