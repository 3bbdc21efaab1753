"""Stopping tasks."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from tests.conformance.api.backends import (
    ON_RAY,
    OVER_RAY,
    alive,
    errors,
    free,
    get,
    here,
    ray,
    run,
)
from tests.conformance.api.differences import differs
from tests.waiting import PATIENCE, eventually


@ray.remote
def hold(gate, name="task"):
    gate.enter(name)
    return name


@ray.remote
class Worker:
    def hold(self, gate, name="task"):
        gate.enter(name)
        return name

    def say(self):
        return "done"


@ray.remote
class Waits:
    async def wait(self, gate, name="task"):
        gate.note(name)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            gate.note(f"{name}-cancelled")
            raise

    async def say(self):
        return "done"


@ray.remote
def same(value):
    return value


def settle():
    """Ray cancels a little later, and aborts if that is in the moment of the task's end."""
    if ON_RAY or OVER_RAY:
        time.sleep(0.3)  # by the clock: Ray does not tell when it has cancelled
    free()  # gpunb answers this when it has done what it was told before


def test_a_running_task(gate):
    ref = hold.remote(gate)
    gate.await_()
    ray.cancel(ref)
    with pytest.raises(errors.Cancelled):
        get(ref)


def test_a_task_that_is_not_told_to_stop_is_a_normal_one(gate):
    stopped, other = hold.remote(gate, "stopped"), hold.remote(gate, "other")
    gate.await_("stopped")
    ray.cancel(stopped)
    gate.open()
    assert get(other) == "other"


def test_a_running_task_gets_a_keyboard_interrupt(gate):
    @ray.remote
    def reports(gate):
        try:
            gate.enter()
        except KeyboardInterrupt:
            gate.note("interrupted")
            raise
        finally:
            gate.note("finally")

    ref = reports.remote(gate)
    gate.await_()
    ray.cancel(ref)
    with pytest.raises(errors.Cancelled):
        get(ref)
    gate.await_("finally")
    assert gate.came("interrupted")


@ray.remote
def catches(gate, then):
    try:
        gate.enter()
    except KeyboardInterrupt:
        return then()


def test_a_task_that_catches_its_interrupt_and_returns_a_value_has_it(gate):
    ref = catches.remote(gate, lambda: "what it had by then")
    gate.await_()
    ray.cancel(ref)
    assert get(ref) == "what it had by then"


@differs("errors-of-cancelled-tasks")
def test_a_task_that_catches_its_interrupt_and_raises_another_error(gate):
    def then():
        raise LookupError("no such thing")

    ref = catches.remote(gate, then)
    gate.await_()
    ray.cancel(ref)
    with pytest.raises(here(ray=LookupError, gpunb=errors.Cancelled)):
        get(ref)


def test_a_queued_task_never_runs(idle, gate):
    first = hold.options(num_cpus=4).remote(gate, "first")
    gate.await_("first")
    queued = hold.options(num_cpus=4).remote(gate, "queued")
    ray.cancel(queued)
    with pytest.raises(errors.Cancelled):
        get(queued)
    gate.open()
    assert get(first) == "first"
    assert not gate.came("queued")


@differs("cancel-before-its-argument")
def test_a_task_that_waits_for_its_argument(gate):
    done = run(
        f"""
        import pathlib, time
        ray.init(num_cpus=2, num_gpus=0)
        path = pathlib.Path({str(gate.folder / "open")!r})

        @ray.remote
        def hold():
            while not path.exists():
                time.sleep(0.01)
            return "held"

        argument = hold.remote()
        waiting = ray.remote(lambda value: value).remote(argument)
        ray.cancel(waiting)
        try:
            ray.get(waiting)
        except ray.exceptions.TaskCancelledError:
            print("cancelled")
        path.touch()
        print(ray.get(argument))
        """
    )
    assert "cancelled" in done.stdout
    assert done.returncode == 0 or here(ray=True, gpunb=False)
    assert "held" in done.stdout or here(ray=True, gpunb=False)


def test_a_task_whose_argument_is_cancelled(gate):
    argument = hold.remote(gate)
    waiting = same.remote(argument)
    gate.await_()
    ray.cancel(argument)
    with pytest.raises(errors.Any):
        get(waiting)


def test_with_force_the_process_ends(gate):
    @ray.remote(max_retries=0)
    def stubborn(gate, path):
        path.write_text(str(os.getpid()))
        gate.note("task")
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                pass

    path = gate.folder / "pid"
    ref = stubborn.remote(gate, path)
    gate.await_()
    ray.cancel(ref, force=True)
    with pytest.raises((errors.Cancelled, errors.Crashed)):
        get(ref)
    eventually(lambda: not alive(int(path.read_text())))


def test_a_finished_task_keeps_its_result():
    ref = same.remote(1)
    get(ref)
    settle()
    ray.cancel(ref)
    assert get(ref) == 1


def test_a_failed_task_keeps_its_error():
    def fail():
        raise KeyError("gone")

    ref = ray.remote(fail).remote()
    ray.wait([ref])
    settle()
    ray.cancel(ref)
    with pytest.raises(KeyError):
        get(ref)


def test_twice(gate):
    ref = hold.remote(gate)
    gate.await_()
    ray.cancel(ref)
    ray.cancel(ref)
    with pytest.raises(errors.Cancelled):
        get(ref)


def test_a_cancelled_task_is_never_tried_again(gate):
    @ray.remote(max_retries=3, retry_exceptions=True)
    def once(gate, path):
        with path.open("a") as file:
            file.write("x")
        gate.enter()

    path = gate.folder / "log"
    ref = once.remote(gate, path)
    gate.await_()
    ray.cancel(ref)
    with pytest.raises(errors.Cancelled):
        get(ref)
    # Later tasks went all the way.
    assert get([same.remote(number) for number in range(8)]) == list(range(8))
    assert path.read_text() == "x"


def test_the_tasks_that_it_started_are_cancelled_with_it(gate):
    @ray.remote
    def outer(gate):
        gate.note("outer")
        return ray.get(inner.remote(gate))

    @ray.remote
    def inner(gate):
        gate.note("inner")
        try:
            gate.enter("waits")
        except KeyboardInterrupt:
            gate.note("inner-stopped")
            raise

    ref = outer.remote(gate)
    gate.await_("waits")
    ray.cancel(ref)
    with pytest.raises(errors.Any):
        get(ref)
    gate.await_("inner-stopped")


def test_without_recursive_the_tasks_that_it_started_go_on(gate):
    @ray.remote
    def outer(gate):
        ray.get(inner.remote(gate))

    @ray.remote
    def inner(gate):
        gate.enter("inner")
        gate.note("inner-done")

    ref = outer.remote(gate)
    gate.await_("inner")
    ray.cancel(ref, recursive=False)
    with pytest.raises(errors.Cancelled):
        get(ref)
    gate.open()
    gate.await_("inner-done")


def test_a_gpu_comes_back_from_a_cancelled_task(idle, gate):
    ref = hold.options(num_gpus=2).remote(gate)
    gate.await_()
    ray.cancel(ref)
    with pytest.raises(errors.Cancelled):
        get(ref)
    assert get(ray.remote(num_gpus=2)(ray.get_gpu_ids).remote()) == [0, 1]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(3, id="a number"),
        pytest.param("ref", id="a text"),
        pytest.param([], id="a list"),
    ],
)
def test_refused_for(value):
    with pytest.raises(TypeError):
        ray.cancel(value)


def test_what_was_put():
    ref = ray.put(1)
    ray.cancel(ref)
    assert get(ref) == 1


# ------------------------------------------------------------------------------- calls of actors


@differs("cancel-of-queued-calls")
def test_a_queued_call_of_an_actor(gate):
    actor = Worker.remote()
    first, queued = actor.hold.remote(gate, "first"), actor.hold.remote(gate, "queued")
    gate.await_("first")
    ray.cancel(queued)
    settle()
    gate.open()
    with pytest.raises(errors.Cancelled):
        get(queued)
    assert get(first) == "first"
    assert not gate.came("queued") or here(ray=True, gpunb=False)


def test_a_call_of_an_async_actor_is_cancelled_at_its_await(gate):
    actor = Waits.remote()
    ref = actor.wait.remote(gate)
    gate.await_()
    ray.cancel(ref)
    with pytest.raises(errors.Cancelled):
        get(ref)
    gate.await_("task-cancelled")


def test_a_call_of_an_async_actor_that_catches_its_cancellation(gate):
    @ray.remote
    class Catches:
        async def wait(self, gate):
            gate.note("task")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return "what it had by then"

    actor = Catches.remote()
    ref = actor.wait.remote(gate)
    gate.await_()
    ray.cancel(ref)
    with pytest.raises(errors.Cancelled):
        get(ref)


def test_an_async_actor_lives_on_after_a_cancelled_call(gate):
    actor = Waits.remote()
    ref = actor.wait.remote(gate)
    gate.await_()
    ray.cancel(ref)
    assert get(actor.say.remote()) == "done"


@differs("calls-are-interrupted")
def test_a_running_call_of_a_sync_actor(gate):
    actor = Worker.remote()
    ref = actor.hold.remote(gate)
    gate.await_()
    ray.cancel(ref)
    ended, _ = ray.wait([ref], timeout=here(ray=0.5, gpunb=PATIENCE))
    assert ended == here(ray=[], gpunb=[ref])
    gate.open()
    assert get(actor.say.remote()) == "done"


@differs("calls-are-interrupted")
def test_a_running_call_of_a_sync_actor_can_ask_whether_it_is_cancelled(gate):
    @ray.remote
    class Asks:
        def wait(self, gate):
            try:
                gate.note("task")
                # The interrupt may come after the context tells of it.
                while here(ray=not ray.get_runtime_context().is_canceled(), gpunb=True):
                    time.sleep(0.01)
            except KeyboardInterrupt:
                assert here(ray=False, gpunb=True)
            assert ray.get_runtime_context().is_canceled()
            gate.note("told")

    actor = Asks.remote()
    ref = actor.wait.remote(gate)
    gate.await_()
    ray.cancel(ref)
    gate.await_("told")
    with pytest.raises(errors.Cancelled):
        get(ref)


def test_force_is_refused_for_a_call_of_an_actor(gate):
    actor = Worker.remote()
    ref = actor.hold.remote(gate)
    gate.await_()
    with pytest.raises(ValueError, match="force"):
        ray.cancel(ref, force=True)
    gate.open()
    assert get(ref) == "task"


def test_a_finished_call_of_an_actor_keeps_its_result():
    actor = Worker.remote()
    ref = actor.say.remote()
    get(ref)
    settle()
    ray.cancel(ref)
    assert get(ref) == "done"
