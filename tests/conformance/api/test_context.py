"""What code can learn of where it runs."""

from __future__ import annotations

import pytest

from tests.conformance.api.backends import get, here, ray
from tests.conformance.api.differences import differs


def context():
    return ray.get_runtime_context()


@ray.remote
def task_id():
    return context().get_task_id()


@ray.remote
class Knows:
    def __init__(self):
        self.at_first = context().get_actor_id()

    def actor_id(self):
        return self.at_first, context().get_actor_id()

    def task_id(self):
        return context().get_task_id()

    def count(self):
        self.counted = getattr(self, "counted", 0) + 1
        return self.counted

    def myself(self):
        return context().current_actor

    def calls_itself_later(self):
        return [context().current_actor.count.remote()]

    def reconstructed(self):
        return context().was_current_actor_reconstructed


def test_no_task_outside_of_tasks():
    assert context().get_task_id() is None


def test_no_actor_outside_of_actors():
    assert context().get_actor_id() is None
    assert get(ray.remote(lambda: context().get_actor_id()).remote()) is None


def test_each_task_has_an_id_of_its_own():
    ids = get([task_id.remote() for _ in range(3)])
    assert None not in ids
    assert len(set(ids)) == 3


@differs("ids-of-tasks-are-numbers")
def test_the_type_of_the_id_of_a_task():
    assert type(get(task_id.remote())) is here(ray=str, gpunb=int)


def test_the_id_of_an_actor_is_the_same_in_all_calls():
    knows = Knows.remote()
    (first, one), (_, two) = get([knows.actor_id.remote(), knows.actor_id.remote()])
    assert first is not None
    assert first == one == two


def test_two_actors_have_two_ids():
    one, other = Knows.remote(), Knows.remote()
    assert get(one.actor_id.remote()) != get(other.actor_id.remote())


def test_calls_of_an_actor_have_ids_of_their_own():
    knows = Knows.remote()
    assert len(set(get([knows.task_id.remote() for _ in range(3)]))) == 3


def test_the_name_of_a_task():
    name = ray.remote(lambda: context().get_task_name())
    assert get(name.options(name="mine").remote()) == "mine"


def test_the_name_of_a_function_or_method():
    class Named:
        def method(self):
            return context().get_task_function_name()

    @ray.remote
    def function():
        return context().get_task_function_name()

    assert context().get_task_function_name() is None
    assert get(function.options(name="mine").remote()) == f"{__name__}.function"
    assert get(ray.remote(Named).remote().method.remote()) == f"{__name__}.Named.method"


def test_an_actor_has_a_handle_to_itself():
    knows = Knows.remote()
    get(knows.count.remote())
    again = get(knows.myself.remote())
    assert get(again.count.remote()) == 2


def test_an_actor_calls_itself_later():
    knows = Knows.remote()
    assert get(get(knows.calls_itself_later.remote())) == [1]


def test_no_current_actor_outside_of_actors():
    with pytest.raises(RuntimeError):
        _ = context().current_actor


def test_an_actor_was_not_reconstructed_at_first():
    knows = Knows.remote()
    assert get(knows.reconstructed.remote()) is False


@pytest.mark.parametrize(
    ("options", "task", "actor"),
    [
        ({}, {"CPU": 1.0}, {}),
        ({"num_cpus": 0, "num_gpus": 0.5}, {"GPU": 0.5}, {"GPU": 0.5}),
        ({"num_cpus": 2}, {"CPU": 2.0}, {"CPU": 2.0}),
        ({"num_cpus": 1, "num_gpus": 2}, {"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 2.0}),
    ],
)
def test_what_a_task_or_an_actor_was_assigned(options, task, actor):
    @ray.remote
    def assigned():
        return context().get_assigned_resources()

    @ray.remote
    class Assigned:
        def assigned(self):
            return context().get_assigned_resources()

    found, maker = (assigned, Assigned)
    if options:
        found, maker = found.options(**options), maker.options(**options)
    assert get(found.remote()) == task
    kept = maker.remote()
    assert get(kept.assigned.remote()) == actor


def test_accelerator_ids_outside_of_tasks():
    assert not context().get_accelerator_ids()["GPU"]


@differs("accelerator-families")
def test_the_families_among_the_accelerator_ids():
    families = set(get(ray.remote(lambda: context().get_accelerator_ids()).remote()))
    assert "GPU" in families
    assert (families == {"GPU"}) is here(ray=False, gpunb=True)
