"""How tasks fail, and what is said of it."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading

import pytest

from tests.conformance.api.backends import errors, get, here, ray
from tests.conformance.api.differences import differs


class NeedsTwo(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.one, self.two = one, two


class OfTheUser(Exception):
    def __init__(self, text, number):
        super().__init__(text, number)
        self.number = number


class CannotTravel(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


@ray.remote
def fail(kind=ValueError, *args):
    raise kind(*args)


@ray.remote
def same(value):
    return value


# ------------------------------------------------------------------------------ both types at once


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        pytest.param(ValueError, ("a value",), id="a value error"),
        pytest.param(KeyError, ("key",), id="a key error"),
        pytest.param(ZeroDivisionError, ("by zero",), id="an arithmetic error"),
        pytest.param(OSError, (2, "no such file"), id="an operating system error"),
        pytest.param(FileNotFoundError, (2, "no such file"), id="a subclass of it"),
        pytest.param(NotImplementedError, (), id="one without arguments"),
        pytest.param(AssertionError, ("never",), id="a failed assertion"),
        pytest.param(OfTheUser, ("text", 2), id="a class of the user's own"),
    ],
)
def test_an_error_is_of_both_types(kind, args):
    ref = fail.remote(kind, *args)
    with pytest.raises(kind):
        get(ref)
    with pytest.raises(errors.Task):
        get(ref)
    with pytest.raises(errors.Any):
        get(ref)


def test_the_cause_is_the_exception_itself():
    with pytest.raises(errors.Task) as caught:
        get(fail.remote(ValueError, "a value"))
    assert type(caught.value.cause) is ValueError
    assert caught.value.cause.args == ("a value",)


def test_attributes_of_the_cause_are_there():
    with pytest.raises(OfTheUser) as caught:
        get(fail.remote(OfTheUser, "text", 2))
    assert caught.value.number == caught.value.cause.number == 2


@differs("any-exception-travels")
def test_an_exception_whose_constructor_takes_other_arguments_than_it_keeps():
    ref = fail.remote(NeedsTwo, 1, 2)
    if here(ray="does not travel", gpunb="travels") == "travels":
        with pytest.raises(NeedsTwo, match="1 and 2") as caught:
            get(ref)
        assert (caught.value.one, caught.value.two) == (1, 2)
    else:
        with pytest.raises(errors.Any, match="1 and 2") as caught:
            get(ref)
        assert not isinstance(caught.value, NeedsTwo)


def test_the_text_has_the_traceback_of_the_task():
    @ray.remote
    def outer():
        def deep_inside():
            raise ValueError("from within")

        deep_inside()

    with pytest.raises(ValueError, match="from within") as caught:
        get(outer.remote())
    text = str(caught.value)
    assert "deep_inside" in text
    assert "Traceback" in text or "File" in text


def test_the_text_names_the_task():
    with pytest.raises(errors.Task, match="fail"):
        get(fail.remote())


def test_an_error_is_raised_at_every_get():
    ref = fail.remote(KeyError, "gone")
    for _ in range(3):
        with pytest.raises(KeyError):
            get(ref)


def test_an_error_that_is_caught_in_the_task_is_none():
    @ray.remote
    def caught():
        try:
            raise ValueError
        except ValueError:
            return "caught"

    assert get(caught.remote()) == "caught"


def test_an_exception_that_is_returned_is_a_value():
    assert isinstance(get(ray.remote(lambda: ValueError("value")).remote()), ValueError)


@differs("any-exception-travels")
def test_the_error_of_a_task_can_be_pickled():
    with pytest.raises(KeyError) as caught:
        get(fail.remote(KeyError, "gone"))
    if here(ray=False, gpunb=True):
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), KeyError)
    else:
        with pytest.raises(pickle.PicklingError):
            pickle.dumps(caught.value)


def test_get_of_a_list_raises_the_error_in_it():
    with pytest.raises(KeyError):
        get([same.remote(1), fail.remote(KeyError, "gone"), same.remote(2)])


def test_an_error_that_cannot_be_pickled():
    @ray.remote
    def odd():
        raise CannotTravel("it went wrong")

    with pytest.raises(errors.Any, match="it went wrong"):
        get(odd.remote())


def test_an_exception_group():
    @ray.remote
    def group():
        raise ExceptionGroup("both", [ValueError("one"), KeyError("two")])

    with pytest.raises(errors.Task) as caught:
        get(group.remote())
    assert [type(each) for each in caught.value.cause.exceptions] == [ValueError, KeyError]


def test_the_cause_of_the_cause():
    @ray.remote
    def chain():
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        get(chain.remote())
    assert "first" in str(caught.value)


# ------------------------------------------------------------------------------------ chains


def test_a_task_whose_argument_failed_fails_like_it():
    with pytest.raises(KeyError):
        get(same.remote(fail.remote(KeyError, "gone")))


def test_a_chain_of_dependents_fails_like_the_first():
    ref = fail.remote(KeyError, "gone")
    for _ in range(4):
        ref = same.remote(ref)
    with pytest.raises(KeyError):
        get(ref)


def test_a_task_whose_argument_failed_does_not_run(tmp_path):
    @ray.remote
    def note(value, path):
        path.touch()

    with pytest.raises(KeyError):
        get(note.remote(fail.remote(KeyError, "gone"), tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()


def test_an_error_inside_of_nested_tasks():
    @ray.remote
    def outer(depth):
        return ray.get(outer.remote(depth - 1) if depth else fail.remote(KeyError, "gone"))

    with pytest.raises(KeyError) as caught:
        get(outer.remote(2))
    assert isinstance(caught.value, errors.Task)


def test_a_task_can_catch_the_error_of_another():
    @ray.remote
    def outer():
        try:
            ray.get(fail.remote(KeyError, "gone"))
        except KeyError:
            return "caught"

    assert get(outer.remote()) == "caught"


# ---------------------------------------------------------------------------------- processes


def test_a_task_that_kills_its_process():
    with pytest.raises(errors.Crashed):
        get(ray.remote(max_retries=0)(lambda: os._exit(3)).remote())


def test_a_task_that_is_killed_by_a_signal():
    with pytest.raises(errors.Crashed):
        get(ray.remote(max_retries=0)(lambda: os.kill(os.getpid(), signal.SIGKILL)).remote())


def test_the_next_task_runs_after_a_crash():
    with pytest.raises(errors.Crashed):
        get(ray.remote(max_retries=0)(lambda: os._exit(3)).remote())
    assert get(same.remote(1)) == 1


@differs("exits-are-errors")
def test_a_task_that_calls_sys_exit():
    task = ray.remote(max_retries=0)(lambda: sys.exit(4))
    with pytest.raises(here(ray=errors.Crashed, gpunb=errors.Task)):
        get(task.remote())


def test_a_gpu_comes_back_after_a_crash(idle):
    crash = ray.remote(max_retries=0, num_gpus=2)(lambda: os._exit(3))
    with pytest.raises(errors.Crashed):
        get(crash.remote())
    assert get(ray.remote(num_gpus=2)(ray.get_gpu_ids).remote()) == [0, 1]


# ------------------------------------------------------------------------------------ retries


def attempts(path):
    """One more; how many there were before."""
    with path.open("a") as file:
        file.write("x")
    return len(path.read_text()) - 1


@pytest.mark.parametrize(
    ("options", "made"),
    [
        pytest.param({"num_cpus": 1}, 4, id="three times by default"),
        pytest.param({"max_retries": 1}, 2, id="once"),
        pytest.param({"max_retries": 0}, 1, id="never"),
    ],
)
def test_a_crash_is_tried_again(tmp_path, options, made):
    @ray.remote(**options)
    def crash(path):
        attempts(path)
        os._exit(1)

    with pytest.raises(errors.Crashed):
        get(crash.remote(tmp_path / "log"))
    assert len((tmp_path / "log").read_text()) == made


@pytest.mark.parametrize("limit", [3, -1], ids=["within three", "without limit"])
def test_a_crash_is_tried_again_until_it_works(tmp_path, limit):
    @ray.remote(max_retries=limit)
    def crash_twice(path):
        if attempts(path) < 2:
            os._exit(1)
        return "done"

    assert get(crash_twice.remote(tmp_path / "log")) == "done"


@pytest.mark.parametrize(
    ("options", "made"),
    [
        pytest.param({"num_cpus": 1}, 1, id="not by default"),
        pytest.param({"retry_exceptions": True}, 4, id="with True"),
        pytest.param({"retry_exceptions": True, "max_retries": 1}, 2, id="as often as told"),
        pytest.param({"retry_exceptions": [ValueError]}, 4, id="of a listed type"),
        pytest.param({"retry_exceptions": [Exception]}, 4, id="of a type above"),
        pytest.param({"retry_exceptions": [KeyError]}, 1, id="not of a type that is not listed"),
    ],
)
def test_an_exception_is_tried_again(tmp_path, options, made):
    @ray.remote(**options)
    def raises(path):
        attempts(path)
        raise ValueError("again")

    with pytest.raises(ValueError, match="again"):
        get(raises.remote(tmp_path / "log"))
    assert len((tmp_path / "log").read_text()) == made


def test_an_exception_is_tried_again_until_it_works(tmp_path):
    @ray.remote(retry_exceptions=True, max_retries=3)
    def fail_twice(path):
        if attempts(path) < 2:
            raise ValueError("again")
        return "done"

    assert get(fail_twice.remote(tmp_path / "log")) == "done"


def test_retries_as_an_option_of_the_call(tmp_path):
    @ray.remote
    def raises(path):
        attempts(path)
        raise ValueError("again")

    with pytest.raises(ValueError, match="again"):
        get(raises.options(retry_exceptions=True, max_retries=2).remote(tmp_path / "log"))
    assert len((tmp_path / "log").read_text()) == 3
