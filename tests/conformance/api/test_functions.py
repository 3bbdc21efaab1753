"""Functions in processes of their own."""

from __future__ import annotations

import os

import pytest

from tests.conformance.api.backends import errors, get, here, ray
from tests.conformance.api.differences import differs


@ray.remote
def add(a, b=10, *more, **named):
    return a + b + sum(more) + sum(named.values())


def in_order(*args, **named):
    return args, named


def pid():
    return os.getpid()


FACTOR = 3


def multiply(value):
    return value * FACTOR


@pytest.mark.parametrize(
    ("args", "named", "result"),
    [
        pytest.param((1,), {}, 11, id="a default"),
        pytest.param((1, 2), {}, 3, id="all by place"),
        pytest.param((1,), {"b": 2}, 3, id="one by name"),
        pytest.param((), {"a": 1, "b": 2}, 3, id="all by name"),
        pytest.param((1, 2, 3, 4), {}, 10, id="more by place"),
        pytest.param((1, 2), {"c": 3, "d": 4}, 10, id="more by name"),
    ],
)
def test_arguments_with(args, named, result):
    assert get(add.remote(*args, **named)) == result


@pytest.mark.parametrize(
    ("args", "named"),
    [
        pytest.param((), {}, id="an argument that is missing"),
        pytest.param((1,), {"a": 1}, id="an argument given twice"),
    ],
)
def test_the_call_is_refused_for(args, named):
    with pytest.raises(TypeError):
        add.remote(*args, **named)


def test_too_many_arguments_are_refused_by_the_call():
    with pytest.raises(TypeError):
        ray.remote(lambda: 1).remote(1)


def test_an_unknown_name_is_refused_by_the_call():
    with pytest.raises(TypeError):
        ray.remote(lambda a: a).remote(b=1)


def test_a_direct_call_is_refused():
    with pytest.raises(TypeError, match="directly"):
        add(1)


def test_bare_and_with_options():
    assert get(ray.remote(multiply).remote(2)) == 6
    assert get(ray.remote(num_cpus=1)(multiply).remote(2)) == 6


def test_a_lambda():
    assert get(ray.remote(lambda x: x + 1).remote(1)) == 2


def test_a_closure():
    step = 5
    assert get(ray.remote(lambda x: x + step).remote(1)) == 6


def test_globals_and_other_functions_of_the_module_come_along():
    @ray.remote
    def task():
        return multiply(FACTOR)

    assert get(task.remote()) == 9


def test_a_function_that_calls_itself():
    @ray.remote
    def factorial(n):
        return 1 if n == 0 else n * ray.get(factorial.remote(n - 1))

    assert get(factorial.remote(3)) == 6


@differs("names-of-functions")
def test_the_name_and_the_doc_of_a_function():
    @ray.remote
    def documented():
        """What it does."""

    found = getattr(documented, "__name__", None), documented.__doc__ == "What it does."
    assert found == here(ray=(None, False), gpunb=("documented", True))


def test_a_function_runs_in_another_process():
    assert get(ray.remote(pid).remote()) != os.getpid()


@differs("builtin-functions")
def test_a_builtin_function():
    if here(ray="refuses", gpunb="takes") == "refuses":
        with pytest.raises(TypeError):
            ray.remote(len)
    else:
        assert get(ray.remote(len).remote("four")) == 4


def test_a_task_that_returns_nothing():
    assert get(ray.remote(lambda: None).remote()) is None


def test_calls_that_are_many():
    assert get([add.remote(number, 0) for number in range(200)]) == list(range(200))


def test_an_async_function_is_refused():
    async def later():
        pass

    with pytest.raises(ValueError, match="async"):
        ray.remote(later)


def test_an_argument_that_cannot_be_pickled_is_refused_by_the_call():
    import threading

    with pytest.raises(TypeError, match="lock"):
        add.remote(threading.Lock())


def test_a_function_that_cannot_be_pickled_is_refused_by_the_call():
    import threading

    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        ray.remote(lambda: lock).remote()


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_task():
    @ray.remote
    def lock():
        import threading

        return threading.Lock()

    with pytest.raises(errors.Any):
        get(lock.remote())


def test_a_remote_function_as_an_argument():
    @ray.remote
    def call(function, value):
        return ray.get(function.remote(value))

    assert get(call.remote(ray.remote(multiply), 2)) == 6


def test_an_argument_is_a_copy():
    mine = [1]

    @ray.remote
    def grow(values):
        values.append(2)
        return values

    assert get(grow.remote(mine)) == [1, 2]
    assert mine == [1]


# --------------------------------------------------------------------------------- several results


def test_two_results_are_two_refs():
    first, second = ray.remote(num_returns=2)(lambda: (1, 2)).remote()
    assert get([second, first]) == [2, 1]


def test_results_may_be_a_list():
    assert get(ray.remote(num_returns=3)(lambda: [1, 2, 3]).remote()) == [1, 2, 3]


def test_the_number_of_results_as_an_option_of_the_call():
    refs = ray.remote(lambda: (1, 2)).options(num_returns=2).remote()
    assert get(refs) == [1, 2]


def test_one_result_may_be_a_tuple():
    assert get(ray.remote(num_returns=1)(lambda: (1, 2)).remote()) == (1, 2)


def test_no_result_is_no_ref():
    assert ray.remote(num_returns=0)(lambda: None).remote() is None


@pytest.mark.parametrize("made", [1, 3])
def test_another_number_of_results_than_was_said(made):
    task = ray.remote(num_returns=2)(lambda: list(range(made)))
    for ref in task.remote():
        with pytest.raises(ValueError, match="2"):
            get(ref)


def test_an_error_is_in_every_result():
    @ray.remote(num_returns=2)
    def fail():
        raise KeyError("both")

    for ref in fail.remote():
        with pytest.raises(KeyError):
            get(ref)


def test_several_results_go_to_other_tasks():
    first, second = ray.remote(num_returns=2)(lambda: (1, 2)).remote()
    assert get(add.remote(first, second)) == 3


# ----------------------------------------------------------------------------- refs as arguments


def test_a_ref_arrives_as_its_value():
    assert get(add.remote(ray.put(1), b=add.remote(1, 1))) == 3


def test_a_ref_by_name_arrives_as_its_value():
    assert get(add.remote(a=ray.put(1), b=ray.put(2))) == 3


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda ref: [ref], id="a list"),
        pytest.param(lambda ref: {"key": ref}, id="a dict"),
        pytest.param(lambda ref: (1, (2, ref)), id="a tuple in a tuple"),
    ],
)
def test_a_ref_stays_a_ref_inside(wrap):
    @ray.remote
    def kinds(value):
        while not isinstance(value, ray.ObjectRef):
            value = list(value.values())[-1] if isinstance(value, dict) else value[-1]
        return ray.get(value)

    assert get(kinds.remote(wrap(ray.put("inner")))) == "inner"


def test_a_chain_of_tasks():
    ref = ray.put(0)
    for _ in range(10):
        ref = add.remote(ref, 1)
    assert get(ref) == 10


def test_a_task_waits_for_its_arguments_without_a_cpu(idle, gate):
    @ray.remote(num_cpus=0.1)
    def enter(gate):
        gate.enter()
        return 1

    first = enter.remote(gate)
    waiting = [add.remote(first) for _ in range(8)]
    assert get(add.options(num_cpus=3).remote(1, 1)) == 2
    gate.open()
    assert get(waiting) == [11] * 8


# ------------------------------------------------------------------------------- calls per process


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        pytest.param({"num_cpus": 1}, 1, id="no limit by default"),
        pytest.param({"max_calls": 1}, 4, id="one"),
        pytest.param({"max_calls": 2}, 2, id="two"),
        pytest.param({"num_gpus": 1}, 4, id="one by default with a GPU"),
        pytest.param({"num_gpus": 0.5}, 4, id="one by default with a share"),
        pytest.param({"num_gpus": 1, "max_calls": 0}, 1, id="no limit with a GPU and max_calls=0"),
        pytest.param({"num_gpus": 1, "max_calls": 2}, 2, id="two with a GPU"),
    ],
)
def test_calls_that_a_process_serves(idle, options, processes):
    task = ray.remote(**options)(pid)
    found = {get(task.remote()) for _ in range(4 if processes > 1 else 8)}
    assert len(found) == processes if processes > 1 else len(found) < 8


def test_calls_that_fail_count_as_well(idle):
    @ray.remote(max_calls=1)
    def fail():
        raise ValueError(os.getpid())

    found = set()
    for _ in range(3):
        with pytest.raises(ValueError, match=r"\d") as caught:
            get(fail.remote())
        found.add(caught.value.args[0])
    assert len(found) == 3


def test_the_result_of_a_process_that_ended_stays(idle):
    from tests.conformance.api.backends import alive
    from tests.waiting import eventually

    task = ray.remote(max_calls=1)(lambda: (os.getpid(), list(range(100_000))))
    ref = task.remote()
    process, _ = get(ref)
    eventually(lambda: not alive(process))
    assert len(get(ref)[1]) == 100_000


@differs("fresh-process-by-option")
def test_a_gpu_that_comes_from_an_option(idle):
    task = ray.remote(pid)
    found = {get(task.options(num_gpus=1).remote()) for _ in range(3)}
    assert len(found) == here(ray=1, gpunb=3)


def test_a_gpu_task_never_runs_in_a_process_that_served_others(idle):
    others = set(get([ray.remote(pid).remote() for _ in range(4)]))
    assert get(ray.remote(num_gpus=1)(pid).remote()) not in others
