"""What tasks and actors see of their devices."""

from __future__ import annotations

import os

import pytest

from tests.conformance.api.backends import get, here, ray
from tests.conformance.api.differences import differs
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("idle")


def seen():
    return ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")


def visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


@ray.remote
class Sees:
    def __init__(self):
        self.first = seen()

    def at_first(self):
        return self.first

    def now(self):
        return seen()


class NotesItsUnpickling:
    """Knows what the variable was when it arrived."""

    def __reduce__(self):
        return visible, ()


# ------------------------------------------------------------------------------------------ ids


def test_ids_of_a_task_with_one_gpu():
    assert get(ray.remote(num_gpus=1)(seen).remote()) == ([0], "0")


def test_ids_of_a_task_with_two_gpus_ascend():
    assert get(ray.remote(num_gpus=2)(seen).remote()) == ([0, 1], "0,1")


def test_ids_of_a_task_with_a_share():
    assert get(ray.remote(num_gpus=0.25)(seen).remote()) == ([0], "0")


def test_ids_are_whole_numbers():
    kinds = ray.remote(num_gpus=1)(lambda: [type(each) for each in ray.get_gpu_ids()])
    assert get(kinds.remote()) == [int]


def test_ids_of_a_task_without_gpus():
    assert get(ray.remote(ray.get_gpu_ids).remote()) == []


def test_ids_outside_of_tasks():
    assert ray.get_gpu_ids() == []


def test_ids_of_an_actor():
    actor = Sees.options(num_gpus=1).remote()
    assert get([actor.at_first.remote(), actor.now.remote()]) == [([0], "0")] * 2


def test_ids_of_an_actor_with_two_gpus():
    actor = Sees.options(num_gpus=2).remote()
    assert get(actor.now.remote()) == ([0, 1], "0,1")


def test_ids_of_an_actor_without_gpus():
    actor = Sees.remote()
    assert get(actor.now.remote())[0] == []


def test_an_actor_keeps_its_ids_between_calls():
    actor = Sees.options(num_gpus=1).remote()
    first = get(actor.now.remote())
    other = ray.remote(num_gpus=1)(seen)
    assert get(other.remote()) == ([1], "1")
    assert get(actor.now.remote()) == first == ([0], "0")


def test_accelerator_ids_of_the_runtime_context_are_texts():
    def ids():
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    assert get(ray.remote(num_gpus=2)(ids).remote()) == ["0", "1"]
    assert get(ray.remote(ids).remote()) == []


# --------------------------------------------------------------------------------- the variable


def test_the_variable_is_set_before_arguments_are_unpickled():
    arrived = ray.remote(num_gpus=1)(lambda value: value)
    assert get(arrived.remote(NotesItsUnpickling())) == "0"


def test_the_variable_is_set_before_the_constructor_runs():
    actor = Sees.options(num_gpus=1).remote()
    assert get(actor.at_first.remote())[1] == "0"


def test_the_variable_is_set_before_modules_are_imported(tmp_path):
    (tmp_path / "looks_at_import.py").write_text(
        "import os\nseen = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
    )

    @ray.remote(num_gpus=1)
    def look(folder):
        import sys

        sys.path.insert(0, folder)
        import looks_at_import

        return looks_at_import.seen

    assert get(look.remote(str(tmp_path))) == "0"


def test_the_variable_reaches_child_processes():
    @ray.remote(num_gpus=1)
    def child():
        import subprocess

        return subprocess.check_output(["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"], text=True)

    assert get(child.remote()) == "0\n"


def test_what_a_task_does_to_the_variable_stays_with_it():
    @ray.remote(num_gpus=1)
    def spoil():
        os.environ["CUDA_VISIBLE_DEVICES"] = "7"

    get(spoil.remote())
    eventually(lambda: ray.available_resources().get("GPU") == 2)
    assert get(ray.remote(num_gpus=1)(seen).remote()) == ([0], "0")


@differs("hidden-gpus")
def test_a_task_without_gpus_sees():
    assert get(ray.remote(visible).remote()) == here(ray=None, gpunb="")


@differs("hidden-gpus")
def test_an_actor_without_gpus_sees():
    actor = Sees.remote()
    assert get(actor.now.remote()) == ([], here(ray=None, gpunb=""))


@differs("order-of-devices")
def test_the_order_in_which_cuda_counts():
    order = ray.remote(num_gpus=1)(lambda: os.environ.get("CUDA_DEVICE_ORDER"))
    assert get(order.remote()) == here(ray=None, gpunb="PCI_BUS_ID")


def test_the_variables_of_a_runtime_env_are_set():
    look = ray.remote(lambda: os.environ.get("COLOUR"))
    assert get(look.options(runtime_env={"env_vars": {"COLOUR": "red"}}).remote()) == "red"
    assert get(look.remote()) is None


# ---------------------------------------------------------------- devices named before the session


def inherited(depth):
    """The variables of a task, and of those that it submits."""
    own = tuple(os.environ.get(name) for name in ("KEPT", "CHANGED"))
    if not depth:
        return [own]
    inner = ray.remote(inherited)
    if depth == 1:
        inner = inner.options(runtime_env={"env_vars": {"CHANGED": "in between"}})
    return [own, *ray.get(inner.remote(depth - 1))]


@ray.remote
class Submits:
    def inner(self):
        return ray.get(ray.remote(inherited).remote(1))


def test_variables_are_inherited_by_what_a_task_submits():
    env = {"env_vars": {"KEPT": "yes", "CHANGED": "first"}}
    found = get(ray.remote(inherited).options(runtime_env=env).remote(2))
    assert found == [("yes", "first"), ("yes", "first"), ("yes", "in between")]


def test_variables_are_inherited_by_what_an_actor_submits():
    env = {"env_vars": {"KEPT": "yes", "CHANGED": "first"}}
    actor = Submits.options(runtime_env=env).remote()
    assert get(actor.inner.remote()) == [("yes", "first"), ("yes", "in between")]


def test_variables_are_not_inherited_by_others():
    assert get(ray.remote(inherited).remote(0)) == [(None, None)]


@differs("ids-are-numbers")
@pytest.mark.machine(num_gpus=2, visible="1,3")
def test_ids_when_the_variable_was_set_before():
    ids, _ = get(ray.remote(num_gpus=2)(seen).remote())
    assert sorted(ids) == here(ray=["1", "3"], gpunb=[1, 3])


@differs("order-of-ids")
@pytest.mark.machine(num_gpus=2, visible="1,3")
def test_the_order_of_ids_when_the_variable_was_set_before():
    ids, variable = get(ray.remote(num_gpus=2)(seen).remote())
    in_order = [str(each) for each in ids] == ["1", "3"]
    assert in_order or here(ray=True, gpunb=False)
    assert variable == ",".join(map(str, ids))


@pytest.mark.machine(num_gpus=2, visible="1,3")
def test_accelerator_ids_when_the_variable_was_set_before():
    context = ray.remote(num_gpus=2)(lambda: ray.get_runtime_context().get_accelerator_ids())
    assert sorted(get(context.remote())["GPU"]) == ["1", "3"]


@pytest.mark.machine(num_gpus=2, visible="1,3")
def test_an_actor_when_the_variable_was_set_before():
    actor = Sees.options(num_gpus=1).remote()
    assert get(actor.now.remote())[1] == "1"
    other = Sees.options(num_gpus=1).remote()
    assert get(other.now.remote())[1] == "3"


@pytest.mark.machine(num_gpus=2, visible="GPU-aaaa,GPU-bbbb")
def test_ids_that_are_names_stay_texts():
    ids, variable = get(ray.remote(num_gpus=2)(seen).remote())
    assert sorted(ids) == sorted(variable.split(",")) == ["GPU-aaaa", "GPU-bbbb"]


@pytest.mark.machine(num_gpus=2, visible="GPU-aaaa,GPU-bbbb")
def test_a_share_of_a_named_device():
    assert get(ray.remote(num_gpus=0.5)(seen).remote()) == (["GPU-aaaa"], "GPU-aaaa")


@pytest.mark.machine(num_gpus=1, visible="5,6,7")
def test_fewer_devices_than_the_variable_names():
    assert ray.cluster_resources()["GPU"] == 1
    assert get(ray.remote(num_gpus=1)(visible).remote()) == "5"


def test_devices_are_given_back_after_the_variable_was_spoilt():
    @ray.remote(num_gpus=2)
    def spoil():
        del os.environ["CUDA_VISIBLE_DEVICES"]

    get(spoil.remote())
    eventually(lambda: ray.available_resources().get("GPU") == 2)
