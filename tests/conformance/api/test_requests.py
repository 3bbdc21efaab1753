"""What may be asked for: checked when it is written, or when it is called."""

from __future__ import annotations

import pytest

from tests.conformance.api.backends import free, get, here, ray, total
from tests.conformance.api.differences import differs
from tests.waiting import eventually


def plain():
    return "done"


class Plain:
    def say(self):
        return "done"


WRONG = [
    ("a negative number of GPUs", {"num_gpus": -1}, ValueError),
    ("a share finer than a ten-thousandth", {"num_gpus": 0.00001}, ValueError),
    ("GPUs as text", {"num_gpus": "1"}, TypeError),
    ("a negative number of CPUs", {"num_cpus": -1}, ValueError),
    ("CPUs as text", {"num_cpus": "two"}, TypeError),
    ("CPUs among the custom resources", {"resources": {"CPU": 1}}, ValueError),
    ("GPUs among the custom resources", {"resources": {"GPU": 1}}, ValueError),
    ("a negative custom resource", {"resources": {"licence": -1}}, ValueError),
    ("custom resources that are no dict", {"resources": ["licence"]}, TypeError),
    ("an accelerator type that is no text", {"accelerator_type": 3}, TypeError),
    ("a name that is no text", {"name": 3}, TypeError),
    ("an unknown option", {"num_gpu": 1}, ValueError),
]
WRONG_FOR_TASKS = [
    ("a negative number of results", {"num_returns": -1}, ValueError),
    ("an unknown word for the number of results", {"num_returns": "two"}, (TypeError, ValueError)),
    ("half a result", {"num_returns": 1.5}, TypeError),
    ("a negative number of calls", {"max_calls": -1}, ValueError),
    ("a number of calls as text", {"max_calls": "1"}, TypeError),
    ("fewer retries than without limit", {"max_retries": -2}, ValueError),
    ("retries as text", {"max_retries": "3"}, TypeError),
    ("exceptions to retry as text", {"retry_exceptions": "ValueError"}, TypeError),
    ("restarts of a function", {"max_restarts": 1}, ValueError),
    ("concurrency of a function", {"max_concurrency": 2}, ValueError),
]
WRONG_FOR_ACTORS = [
    ("fewer restarts than without limit", {"max_restarts": -2}, ValueError),
    ("restarts as text", {"max_restarts": "1"}, TypeError),
    ("fewer retries of methods than without limit", {"max_task_retries": -2}, ValueError),
    ("a concurrency below zero", {"max_concurrency": -1}, ValueError),
    ("pending calls as text", {"max_pending_calls": "1"}, TypeError),
    ("an unknown lifetime", {"lifetime": "for ever"}, ValueError),
    ("calls of a class", {"max_calls": 1}, ValueError),
    ("retries of a class", {"max_retries": 1}, ValueError),
    ("results of a class", {"num_returns": 2}, ValueError),
]


def by_words(cases):
    return [pytest.param(*rest, id=words) for words, *rest in cases]


@pytest.mark.parametrize(("options", "error"), by_words(WRONG + WRONG_FOR_TASKS))
def test_a_function_is_refused_with(options, error):
    with pytest.raises(error):
        ray.remote(**options)(plain)


@pytest.mark.parametrize(("options", "error"), by_words(WRONG + WRONG_FOR_ACTORS))
def test_a_class_is_refused_with(options, error):
    with pytest.raises(error):
        ray.remote(**options)(Plain)


@pytest.mark.parametrize(
    ("options", "error"),
    by_words([*WRONG, ("calls, which belong to the function", {"max_calls": 1}, ValueError)]),
)
def test_options_of_a_function_are_refused_with(options, error):
    function = ray.remote(plain)
    with pytest.raises(error):
        function.options(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    by_words(
        [
            ("a negative number of GPUs", {"num_gpus": -1}, ValueError),
            ("an unknown option", {"num_gpu": 1}, ValueError),
            ("an unknown lifetime", {"lifetime": "for ever"}, ValueError),
        ]
    ),
)
def test_options_of_a_class_are_refused_with(options, error):
    with pytest.raises(error):
        ray.remote(Plain).options(**options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_gpus": 0}, id="no GPU"),
        pytest.param({"num_gpus": None}, id="GPUs left open"),
        pytest.param({"num_gpus": 0.0001}, id="the smallest share of a GPU"),
        pytest.param({"num_gpus": 0.5}, id="half a GPU"),
        pytest.param({"num_gpus": 1.0}, id="one GPU as a float"),
        pytest.param({"num_gpus": 2}, id="all GPUs"),
        pytest.param({"num_cpus": 0}, id="no CPU"),
        pytest.param({"num_cpus": 1.5}, id="one CPU and a half"),
        pytest.param({"max_retries": -1}, id="retries without limit"),
        pytest.param({"retry_exceptions": [ValueError, KeyError]}, id="exceptions to retry"),
        pytest.param({"memory": 1000}, id="memory for the books"),
    ],
)
def test_a_function_runs_with(options):
    assert get(ray.remote(**options)(plain).remote()) == "done"


def test_options_leave_the_function_as_it_was():
    function = ray.remote(num_gpus=1)(ray.get_gpu_ids)
    assert len(get(function.options(num_gpus=2).remote())) == 2
    assert len(get(function.remote())) == 1


def test_a_name_for_a_function_is_no_obstacle():
    assert get(ray.remote(plain).options(name="with spaces").remote()) == "done"


@differs("fractions-above-one")
def test_one_gpu_and_a_half():
    if here(ray="by the call", gpunb="by the decorator") == "by the call":
        function = ray.remote(num_gpus=1.5)(plain)
        with pytest.raises(ValueError, match="whole"):
            function.remote()
    else:
        with pytest.raises(ValueError, match="whole"):
            ray.remote(num_gpus=1.5)


@differs("misuse-is-a-type-error")
def test_remote_without_anything():
    with pytest.raises(here(ray=AssertionError, gpunb=TypeError)):
        ray.remote()


@differs("misuse-is-a-type-error")
def test_remote_on_what_is_neither_function_nor_class():
    error = here(ray=AssertionError, gpunb=TypeError)
    with pytest.raises(error):
        ray.remote(3)
    with pytest.raises(error):
        ray.remote(plain, num_gpus=1)


# ------------------------------------------------------------------------- more than there is


IMPOSSIBLE = [
    pytest.param({"num_gpus": 3}, id="more GPUs than there are"),
    pytest.param({"num_cpus": 5}, id="more CPUs than there are"),
    pytest.param({"resources": {"licence": 1}}, id="a custom resource that there is not"),
    pytest.param({"num_gpus": 1, "accelerator_type": "A100"}, id="a type that there is not"),
]


@differs("infeasible-requests")
@pytest.mark.parametrize("options", IMPOSSIBLE)
def test_a_task_asks_for(options):
    function = ray.remote(**options)(plain)
    if here(ray="waits", gpunb="raises") == "raises":
        with pytest.raises(ValueError, match="never"):
            function.remote()
    else:
        ref = function.remote()
        assert ray.wait([ref], timeout=0.5) == ([], [ref])
        ray.cancel(ref)


@differs("infeasible-requests")
@pytest.mark.parametrize("options", IMPOSSIBLE)
def test_an_actor_asks_for(options):
    cls = ray.remote(**options)(Plain)
    if here(ray="waits", gpunb="raises") == "raises":
        with pytest.raises(ValueError, match="never"):
            cls.remote()
    else:
        actor = cls.remote()
        ref = actor.say.remote()
        assert ray.wait([ref], timeout=0.5) == ([], [ref])
        ray.kill(actor)


# ----------------------------------------------------------------------------------- what is held


@ray.remote
def hold(gate, name):
    gate.enter(name)


def held(gate, count=1, **options):
    """What is no longer free while so many tasks run."""
    refs = [hold.options(**options).remote(gate, name) for name in range(count)]
    for name in range(count):
        gate.await_(name)
    everything = total()

    def gone():
        now = free()
        return {n: round(x - now.get(n, 0), 4) for n, x in everything.items() if now.get(n) != x}

    eventually(gone, "something is held")
    return refs, gone


def test_a_task_holds_one_cpu_if_it_says_nothing(idle, gate):
    refs, gone = held(gate)
    eventually(lambda: gone() == {"CPU": 1})
    gate.open()
    get(refs)


def test_a_task_holds_the_cpus_it_asks_for(idle, gate):
    refs, gone = held(gate, num_cpus=1.5)
    eventually(lambda: gone() == {"CPU": 1.5})
    gate.open()
    get(refs)


@differs("cpus-of-gpu-tasks")
def test_a_task_with_a_gpu_holds_cpus(idle, gate):
    refs, gone = held(gate, num_gpus=1)
    expected = here(ray={"CPU": 1, "GPU": 1}, gpunb={"GPU": 1})
    eventually(lambda: gone() == expected, f"{expected} is held")
    gate.open()
    get(refs)


def test_a_task_with_a_gpu_and_cpus_holds_both(idle, gate):
    refs, gone = held(gate, num_gpus=0.5, num_cpus=2)
    eventually(lambda: gone() == {"CPU": 2, "GPU": 0.5})
    gate.open()
    get(refs)


def test_shares_add_up_exactly(idle, gate):
    names = {"a": 0.8, "b": 0.1, "c": 0.1, "d": 1}
    refs = [
        hold.options(num_gpus=share, num_cpus=0.1).remote(gate, name)
        for name, share in names.items()
    ]
    for name in names:
        gate.await_(name)
    eventually(lambda: "GPU" not in free())
    gate.open()
    get(refs)


def test_everything_is_free_again_afterwards(idle, gate):
    refs, _ = held(gate, num_gpus=2, num_cpus=3)
    gate.open()
    get(refs)
    eventually(lambda: free() == total() == {"CPU": 4, "GPU": 2})


def test_what_does_not_fit_waits_until_it_does(idle, gate):
    refs, _ = held(gate, 2, num_gpus=1, num_cpus=1)
    late = ray.remote(num_gpus=1, num_cpus=1)(plain).remote()
    assert ray.wait([late], timeout=0.3) == ([], [late])
    gate.open()
    assert get(late) == "done"
    get(refs)


def test_a_waiting_large_task_does_not_stop_a_small_one(idle, gate):
    refs, _ = held(gate, 1, num_gpus=1, num_cpus=1)
    large = ray.remote(num_gpus=2, num_cpus=1)(plain).remote()
    small = ray.remote(num_gpus=1, num_cpus=1)(plain).remote()
    assert get(small) == "done"
    assert ray.wait([large], timeout=0) == ([], [large])
    gate.open()
    assert get(large) == "done"
    get(refs)


# --------------------------------------------------------------------------------- gpunb's own


@differs("memory-of-a-gpu")
def test_memory_of_a_gpu_instead_of_a_share():
    if here(ray=True, gpunb=False):
        with pytest.raises(ValueError, match="gpu_memory"):
            ray.remote(gpu_memory="1GiB")(plain)
    else:
        with pytest.raises(ValueError, match="memory"):  # logical devices have none
            ray.remote(gpu_memory="1GiB")(plain).remote()


@differs("time-limits")
def test_a_time_limit_for_a_task():
    if here(ray=True, gpunb=False):
        with pytest.raises(ValueError, match="timeout"):
            ray.remote(timeout=1)(plain)
    else:
        assert get(ray.remote(timeout=20)(plain).remote()) == "done"
