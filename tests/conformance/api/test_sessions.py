"""How sessions begin and end."""

from __future__ import annotations

import pytest

from tests.conformance.api.backends import errors, get, here, ray, script, start, total
from tests.conformance.api.differences import differs

OWN = pytest.mark.machine(own=True)


@ray.remote
def same(value):
    return value


@ray.remote
class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count


# ---------------------------------------------------------------------------- while there is one


def test_it_is_initialized():
    assert ray.is_initialized()


def test_a_second_init_is_refused():
    with pytest.raises(RuntimeError, match="ignore_reinit_error"):
        start(num_cpus=1)


def test_a_second_init_that_does_not_mind():
    start(num_cpus=1, num_gpus=0, ignore_reinit_error=True)
    assert total() == {"CPU": 4, "GPU": 2}


def test_all_resources_are_floats():
    resources = ray.cluster_resources()
    assert (resources["CPU"], resources["GPU"]) == (4.0, 2.0)
    assert {type(each) for each in resources.values()} == {float}


def test_free_resources_are_those_of_the_machine(idle):
    free = ray.available_resources()
    assert (free["CPU"], free["GPU"]) == (4.0, 2.0)


def test_a_task_knows_that_there_is_a_session():
    assert get(ray.remote(ray.is_initialized).remote()) is True


def test_resources_as_a_task_sees_them():
    assert get(ray.remote(lambda: ray.cluster_resources()["GPU"]).remote()) == 2


# ------------------------------------------------------------------------- one after the other


@OWN
def test_nothing_is_initialized_at_first_and_shutdown_can_be_repeated():
    assert not ray.is_initialized()
    ray.shutdown()
    start(num_cpus=1, num_gpus=0)
    assert ray.is_initialized()
    ray.shutdown()
    ray.shutdown()
    assert not ray.is_initialized()


@OWN
def test_functions_and_classes_work_in_the_next_session():
    start(num_cpus=1, num_gpus=1)
    assert get(same.remote(1)) == 1
    assert get(Counter.remote().add.remote()) == 1
    assert ray.cluster_resources()["GPU"] == 1
    ray.shutdown()
    start(num_cpus=2, num_gpus=2)
    assert get(same.remote(2)) == 2
    assert get(Counter.remote().add.remote()) == 1
    assert ray.cluster_resources()["GPU"] == 2


@OWN
def test_refs_and_handles_of_the_session_before_are_of_no_use():
    start(num_cpus=1, num_gpus=0)
    ref, counter = ray.put(1), Counter.remote()
    get(counter.add.remote())
    ray.shutdown()
    start(num_cpus=1, num_gpus=0)
    with pytest.raises((errors.Any, ValueError, RuntimeError)):
        get(ref, 5)
    with pytest.raises(Exception, match=r"(?i)session|shut|actor|owner|different"):
        get(counter.add.remote(), 5)


@OWN
def test_a_session_is_a_context():
    with start(num_cpus=1, num_gpus=0):
        assert get(same.remote(1)) == 1
    assert not ray.is_initialized()


@OWN
def test_custom_resources():
    start(num_cpus=1, num_gpus=0, resources={"licence": 2})
    assert total() == {"CPU": 1, "licence": 2}


@OWN
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_gpus": -1}, id="a negative number of GPUs"),
        pytest.param({"num_gpus": 1.5}, id="one GPU and a half"),
        pytest.param({"num_cpus": -1}, id="a negative number of CPUs"),
        pytest.param({"resources": {"licence": -1}}, id="a negative custom resource"),
    ],
)
def test_init_refuses(settings):
    with pytest.raises(ValueError, match=r"."):
        start(**settings)
    assert not ray.is_initialized()


@OWN
def test_init_refuses_more_gpus_than_the_variable_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        start(num_cpus=1, num_gpus=3)


@OWN
def test_no_device_when_the_variable_is_empty(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start(num_cpus=1)
    assert "GPU" not in total()


@OWN
@differs("misuse-is-a-type-error")
def test_init_refuses_an_unknown_setting():
    with pytest.raises(here(ray=RuntimeError, gpunb=TypeError)):
        start(colour="red")


def test_arguments_of_many_programs_are_taken():
    text = """
    import os
    context = ray.init(
        num_cpus=1, num_gpus=0, log_to_driver=False, include_dashboard=False, local_mode=False,
        logging_level="ERROR", configure_logging=True, dashboard_host="127.0.0.1",
        dashboard_port=None, object_store_memory=200_000_000, namespace="colours",
        _system_config={}, _temp_dir=None,
        runtime_env={"env_vars": {"PAINT": "red", "BRUSH": "flat"}},
    )

    @ray.remote(num_cpus=0)
    class Pot:
        def paint(self):
            return os.environ["PAINT"], ray.get_runtime_context().namespace
        def found(self):
            return ray.get(ray.get_actor("pot").paint.remote())

    pot = Pot.options(name="pot").remote()
    here = ray.get(ray.get_actor("pot", namespace="colours").paint.remote())
    print(*here, *ray.get(Pot.remote().found.remote()), ray.get_runtime_context().namespace)

    @ray.remote(runtime_env={"env_vars": {"PAINT": "blue"}})
    def own():
        return os.environ["PAINT"], os.environ["BRUSH"]

    print(*ray.get(own.remote()), "PAINT" in os.environ)
    """
    lines = script(text).splitlines()
    assert lines == ["red colours red colours colours", "blue flat False"]


def test_a_session_begins_by_itself():
    printed = script(
        """
        @ray.remote
        def f():
            return 1

        print(ray.is_initialized())
        ref = f.remote()
        print(ray.is_initialized(), ray.get(ref))
        """
    )
    assert printed.splitlines()[-2:] == ["False", "True 1"]


def test_a_program_that_shuts_nothing_down_ends():
    printed = script(
        """
        import time
        ray.init(num_cpus=1, num_gpus=1)

        @ray.remote(num_gpus=1)
        class Waits:
            def wait(self):
                time.sleep(600)

        @ray.remote
        def late():
            time.sleep(600)

        waits = Waits.remote()
        refs = [waits.wait.remote(), late.remote()]
        print("the end")
        """
    )
    assert "the end" in printed
