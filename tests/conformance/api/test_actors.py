"""Actors: workers with a state."""

from __future__ import annotations

import os
import threading

import pytest

from tests.conformance.api.backends import alive, errors, free, get, here, ray, total
from tests.conformance.api.differences import differs
from tests.waiting import eventually


@ray.remote
class Counter:
    """Counts."""

    step = 1

    def __init__(self, start=0, *, double=False):
        self.count = start * (2 if double else 1)

    def add(self, by=None):
        self.count += self.step if by is None else by
        return self.count

    def pid(self):
        return os.getpid()

    def fail(self, kind=ValueError):
        raise kind("from the actor")

    def two(self):
        return 1, 2

    @staticmethod
    def twice(value):
        return 2 * value

    @classmethod
    def name(cls):
        return cls.__name__

    def __len__(self):
        return 7

    def hold(self, gate, name="call"):
        gate.enter(name)
        return name

    def crash(self):
        os._exit(1)

    def ids(self):
        return ray.get_gpu_ids()


# --------------------------------------------------------------------------------- making them


@pytest.mark.parametrize(
    ("args", "named", "count"),
    [
        pytest.param((), {}, 1, id="none"),
        pytest.param((5,), {}, 6, id="one by place"),
        pytest.param((), {"start": 5}, 6, id="one by name"),
        pytest.param((5,), {"double": True}, 11, id="one that is by name only"),
    ],
)
def test_arguments_of_the_constructor(args, named, count):
    counter = Counter.remote(*args, **named)
    assert get(counter.add.remote()) == count


def test_refs_as_arguments_of_the_constructor():
    counter = Counter.remote(ray.put(5))
    assert get(counter.add.remote()) == 6


def test_wrong_arguments_of_the_constructor_are_refused_by_the_call():
    with pytest.raises(TypeError):
        Counter.remote(1, 2, 3)


def test_a_class_without_a_constructor():
    class Bare:
        def say(self):
            return "done"

    actor = ray.remote(Bare).remote()
    assert get(actor.say.remote()) == "done"


def test_each_has_a_process_and_a_state_of_its_own():
    one, other = Counter.remote(), Counter.remote()
    assert get([one.add.remote(), one.add.remote(), other.add.remote()]) == [1, 2, 1]
    processes = set(get([one.pid.remote(), other.pid.remote()]))
    assert len(processes | {os.getpid()}) == 3


def test_all_calls_run_in_one_process():
    counter = Counter.remote()
    assert len(set(get([counter.pid.remote() for _ in range(5)]))) == 1


def test_the_constructor_runs_once(tmp_path):
    @ray.remote
    class Notes:
        def __init__(self, path):
            with path.open("a") as file:
                file.write("x")

        def say(self):
            return "done"

    actor = Notes.remote(tmp_path / "log")
    get([actor.say.remote() for _ in range(3)])
    assert (tmp_path / "log").read_text() == "x"


def test_remote_does_not_wait_for_the_constructor(gate):
    @ray.remote
    class Slow:
        def __init__(self, gate):
            gate.enter()

        def say(self):
            return "done"

    actor = Slow.remote(gate)
    ref = actor.say.remote()
    assert ray.wait([ref], timeout=0) == ([], [ref])
    gate.open()
    assert get(ref) == "done"


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(Counter, id="the class is called"),
        pytest.param(lambda: type("Derived", (Counter,), {}), id="the class is derived from"),
    ],
)
def test_a_type_error_when(use):
    with pytest.raises(TypeError):
        use()


def test_a_type_error_when_a_method_is_called():
    counter = Counter.remote()
    with pytest.raises(TypeError, match="remote"):
        counter.add(1)


def test_an_attribute_error_for_a_method_that_there_is_not():
    counter = Counter.remote()
    with pytest.raises(AttributeError, match="subtract"):
        counter.subtract.remote()


def test_data_of_the_instance_is_no_attribute_of_the_handle():
    counter = Counter.remote()
    with pytest.raises(AttributeError):
        counter.count  # noqa: B018


def test_a_derived_class_that_is_made_remote():
    class Base:
        def __init__(self):
            self.count = 10

        def add(self):
            self.count += 1
            return self.count

    class Derived(Base):
        def add(self):
            return super().add() * 2

        def only_here(self):
            return "here"

    derived = ray.remote(Derived).remote()
    assert get([derived.add.remote(), derived.only_here.remote()]) == [22, "here"]


def test_an_inherited_method():
    class Base:
        def say(self):
            return "from the base"

    class Derived(Base):
        pass

    assert get(ray.remote(Derived).remote().say.remote()) == "from the base"


def test_the_repr_of_a_handle_names_the_class():
    assert "Counter" in repr(Counter.remote())


# ----------------------------------------------------------------------------------- calling them


def test_calls_of_one_caller_run_in_their_order():
    counter = Counter.remote()
    assert get([counter.add.remote() for _ in range(50)]) == list(range(1, 51))


def test_a_call_waits_for_its_argument_and_holds_up_the_later_ones(gate):
    @ray.remote
    def late(gate):
        gate.enter()
        return 10

    counter = Counter.remote()
    first = counter.add.remote(late.remote(gate))
    second = counter.add.remote(1)
    gate.await_()
    gate.open()
    assert get([first, second]) == [10, 11]


def test_one_call_at_a_time(gate):
    counter = Counter.remote()
    first, second = counter.hold.remote(gate, "first"), counter.hold.remote(gate, "second")
    gate.await_("first")
    get(Counter.remote().add.remote())  # a later call, of another actor, went all the way
    assert not gate.came("second")
    gate.open()
    assert get([first, second]) == ["first", "second"]


def test_wrong_arguments_of_a_method_are_refused_by_the_call():
    counter = Counter.remote()
    with pytest.raises(TypeError):
        counter.add.remote(1, 2, 3)


def test_a_static_method():
    assert get(Counter.remote().twice.remote(4)) == 8


def test_a_class_method():
    assert get(Counter.remote().name.remote()) == "Counter"


def test_a_special_method():
    assert get(Counter.remote().__len__.remote()) == 7


def test_attributes_of_the_class_are_there():
    class Stepped:
        step = 3

        def say(self):
            return self.step

    assert get(ray.remote(Stepped).remote().say.remote()) == 3


def test_globals_of_a_process_are_shared_by_the_calls():
    @ray.remote
    class Keeps:
        def set(self, value):
            os.environ["KEPT"] = value

        def look(self):
            return os.environ.get("KEPT")

    keeps = Keeps.remote()
    keeps.set.remote("value")
    assert get(keeps.look.remote()) == "value"


def test_an_error_of_a_method_is_of_both_types():
    counter = Counter.remote()
    for kind in (ValueError, errors.Task):
        with pytest.raises(kind, match="from the actor"):
            get(counter.fail.remote())


def test_an_actor_lives_on_after_an_error():
    counter = Counter.remote()
    with pytest.raises(ValueError, match="from the actor"):
        get(counter.fail.remote())
    assert get(counter.add.remote()) == 1


def test_a_call_whose_argument_failed_does_not_run():
    counter = Counter.remote()
    with pytest.raises(ValueError, match="from the actor"):
        get(counter.add.remote(counter.fail.remote()))
    assert get(counter.add.remote()) == 1


@pytest.mark.parametrize("how", ["the method decorator", "options of the method"])
def test_several_results_of_a_method(how):
    @ray.remote
    class Pairs:
        @ray.method(num_returns=2)
        def pair(self):
            return 1, 2

        def plain(self):
            return 1, 2

    pairs = Pairs.remote()
    method = pairs.pair if how == "the method decorator" else pairs.plain.options(num_returns=2)
    first, second = method.remote()
    assert get([second, first]) == [2, 1]
    assert get(pairs.plain.remote()) == (1, 2)


def test_no_result_of_a_method():
    counter = Counter.remote()
    assert counter.add.options(num_returns=0).remote() is None
    assert get(counter.add.remote()) == 2


def test_results_of_one_are_arguments_of_another():
    one, other = Counter.remote(), Counter.remote()
    assert get(other.add.remote(one.add.remote(5))) == 5


def test_an_actor_handle_is_put():
    counter = Counter.remote()
    again = get(ray.put(counter))
    get(again.add.remote())
    assert get(counter.add.remote()) == 2


def test_large_arguments_and_results():
    @ray.remote
    class Keeps:
        def keep(self, value):
            self.value = value

        def give(self):
            return self.value

    keeps = Keeps.remote()
    keeps.keep.remote(bytes(2_000_000))
    assert get(keeps.give.remote()) == bytes(2_000_000)


# ---------------------------------------------------------------------------------- what they hold


@pytest.mark.parametrize(
    ("options", "held"),
    [
        pytest.param({}, {}, id="nothing by default"),
        pytest.param({"num_cpus": 2}, {"CPU": 2}, id="CPUs"),
        pytest.param({"num_gpus": 1, "num_cpus": 1}, {"GPU": 1, "CPU": 1}, id="a GPU and a CPU"),
        pytest.param({"num_gpus": 0.5, "num_cpus": 0}, {"GPU": 0.5}, id="a share of a GPU"),
    ],
)
def test_an_actor_holds(idle, options, held):
    actor = Counter.options(**options).remote()
    get(actor.add.remote())
    everything = total()
    eventually(lambda: free() == {n: x - held.get(n, 0) for n, x in everything.items()})
    ray.kill(actor)
    eventually(lambda: free() == everything)


@differs("cpus-of-gpu-tasks")
def test_an_actor_with_a_gpu_holds_cpus(idle):
    actor = Counter.options(num_gpus=1).remote()
    get(actor.add.remote())
    expected = {"CPU": here(ray=3, gpunb=4), "GPU": 1}
    eventually(lambda: free() == expected)


def test_options_leave_the_class_as_it_was(idle):
    big = Counter.options(num_gpus=2)
    assert get(Counter.remote().ids.remote()) == []
    assert get(big.remote().ids.remote()) == [0, 1]


def test_an_actor_waits_for_its_gpu(idle):
    first, second = (Counter.options(num_gpus=2).remote() for _ in range(2))
    get(first.add.remote())
    ref = second.add.remote()
    assert ray.wait([ref], timeout=0.3) == ([], [ref])
    ray.kill(first)
    assert get(ref) == 1


def test_a_gpu_is_free_when_the_last_handle_is_gone(idle):
    actor = Counter.options(num_gpus=2).remote()
    get(actor.add.remote())
    del actor
    assert get(ray.remote(num_gpus=2)(ray.get_gpu_ids).remote()) == [0, 1]


def test_a_gpu_is_free_after_a_crash(idle):
    actor = Counter.options(num_gpus=2).remote()
    with pytest.raises(errors.Actor):
        get(actor.crash.remote())
    assert get(ray.remote(num_gpus=2)(ray.get_gpu_ids).remote()) == [0, 1]


# ------------------------------------------------------------------------------------ how they end


def test_kill():
    counter = Counter.remote()
    process = get(counter.pid.remote())
    ray.kill(counter)
    with pytest.raises(errors.Actor):
        get(counter.add.remote())
    eventually(lambda: not alive(process))


def test_kill_fails_the_calls_that_run_and_wait(gate):
    counter = Counter.remote()
    running, waiting = counter.hold.remote(gate), counter.add.remote()
    gate.await_("call")
    ray.kill(counter)
    for ref in (running, waiting):
        with pytest.raises(errors.Actor):
            get(ref)


def test_calls_after_death_raise_the_error_of_the_dead():
    counter = Counter.remote()
    get(counter.add.remote())
    ray.kill(counter)
    eventually(lambda: _is_dead(counter))
    with pytest.raises(errors.ActorDied):
        get(counter.add.remote())


def test_a_second_kill_changes_nothing():
    counter, other = Counter.remote(), Counter.remote()
    ray.kill(counter)
    eventually(lambda: _is_dead(counter))
    ray.kill(counter)
    with pytest.raises(errors.ActorDied):
        get(counter.add.remote())
    assert get(other.add.remote()) == 1


@pytest.mark.parametrize(
    "value", [pytest.param(3, id="a number"), pytest.param("actor", id="a text")]
)
def test_kill_refuses(value):
    with pytest.raises(ValueError, match="actor"):
        ray.kill(value)


def test_the_class_is_not_killed():
    with pytest.raises(ValueError, match="actor"):
        ray.kill(Counter)


def test_a_crash():
    counter = Counter.remote()
    with pytest.raises(errors.Actor):
        get(counter.crash.remote())
    with pytest.raises(errors.ActorDied):
        get(counter.add.remote())


def test_the_error_of_the_constructor_is_in_the_error_of_each_call():
    @ray.remote
    class Fails:
        def __init__(self):
            raise ValueError("not today")

        def say(self):
            return "done"

    fails = Fails.remote()
    for _ in range(2):
        with pytest.raises(errors.ActorDied, match=r"(?s)ValueError.*not today"):
            get(fails.say.remote())


def test_a_constructor_whose_argument_failed():
    def fail():
        raise KeyError("gone")

    counter = Counter.remote(ray.remote(fail).remote())
    with pytest.raises(errors.Any, match="gone"):
        get(counter.add.remote())


def test_an_actor_ends_itself():
    @ray.remote
    class Ends:
        def end(self):
            ray.actor.exit_actor()

        def say(self):
            return "done"

    ends = Ends.remote()
    assert get(ends.say.remote()) == "done"
    with pytest.raises(errors.Actor):
        get(ends.end.remote())
    with pytest.raises(errors.ActorDied):
        get(ends.say.remote())


def test_an_actor_that_ended_itself_is_not_restarted():
    @ray.remote(max_restarts=-1)
    class Ends:
        def end(self):
            ray.actor.exit_actor()

        def say(self):
            return "done"

    ends = Ends.remote()
    with pytest.raises(errors.Actor):
        get(ends.end.remote())
    with pytest.raises(errors.ActorDied):
        get(ends.say.remote())


def test_an_actor_is_asked_to_end_after_the_calls_before(gate):
    counter = Counter.remote()
    before = counter.hold.remote(gate)
    counter.__ray_terminate__.remote()
    gate.open()
    assert get(before) == "call"
    eventually(lambda: _is_dead(counter))


def _is_dead(actor):
    try:
        get(actor.add.remote())
    except errors.Actor:
        return True
    return False


def test_the_process_ends_with_the_last_handle():
    counter = Counter.remote()
    process = get(counter.pid.remote())
    del counter
    eventually(lambda: not alive(process))


def test_calls_that_were_made_are_carried_out_after_the_last_handle_is_gone(gate):
    counter = Counter.remote()
    first, second = counter.hold.remote(gate, "first"), counter.add.remote()
    del counter
    gate.open()
    assert get([first, second]) == ["first", 1]


def test_an_actor_without_a_name_for_its_handle():
    assert get(Counter.remote(5).add.remote()) == 6


def test_results_outlive_the_actor():
    counter = Counter.remote()
    ref = counter.add.remote()
    get(ref)
    ray.kill(counter)
    assert get(ref) == 1


# ------------------------------------------------------------------------------------- restarts


@ray.remote
class Fragile:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count

    def crash(self):
        os._exit(1)

    def crash_once(self, path):
        if not path.exists():
            path.touch()
            os._exit(1)
        return "done"

    def fail_once(self, path):
        if not path.exists():
            path.touch()
            raise ValueError("once")
        return "done"

    def restarted(self):
        return ray.get_runtime_context().was_current_actor_reconstructed


def add_again(actor):
    """Adds as soon as the actor can be reached."""

    def tries():
        try:
            return get(actor.add.remote())
        except errors.ActorUnavailable:
            return None

    return eventually(tries, "the actor is back")


def test_an_actor_is_not_restarted_by_default():
    actor = Fragile.remote()
    with pytest.raises(errors.Actor):
        get(actor.crash.remote())
    with pytest.raises(errors.ActorDied):
        get(actor.add.remote())


def test_a_restarted_actor_begins_anew():
    actor = Fragile.options(max_restarts=1).remote()
    assert get([actor.add.remote(), actor.add.remote()]) == [1, 2]
    with pytest.raises(errors.Actor):
        get(actor.crash.remote())
    assert add_again(actor) == 1


def test_a_restarted_actor_knows():
    actor = Fragile.options(max_restarts=1).remote()
    assert get(actor.restarted.remote()) is False
    with pytest.raises(errors.Actor):
        get(actor.crash.remote())
    add_again(actor)
    assert get(actor.restarted.remote()) is True


def test_restarts_are_used_up():
    actor = Fragile.options(max_restarts=1).remote()
    for _ in range(2):
        with pytest.raises(errors.Actor):
            get(actor.crash.remote())
        try:
            add_again(actor)
        except errors.ActorDied:
            break
    with pytest.raises(errors.ActorDied):
        get(actor.add.remote())


def test_a_restarted_actor_has_a_gpu_again(idle):
    @ray.remote(num_gpus=2, max_restarts=1)
    class Sees:
        def ids(self):
            return ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

        def add(self):
            return 1

        def crash(self):
            os._exit(1)

    actor = Sees.remote()
    assert get(actor.ids.remote()) == ([0, 1], "0,1")
    with pytest.raises(errors.Actor):
        get(actor.crash.remote())
    add_again(actor)
    assert get(actor.ids.remote()) == ([0, 1], "0,1")


def test_a_call_is_tried_again_after_a_crash(tmp_path):
    actor = Fragile.options(max_restarts=1, max_task_retries=1).remote()
    assert get(actor.crash_once.remote(tmp_path / "crashed")) == "done"


def test_a_call_is_not_tried_again_by_default(tmp_path):
    actor = Fragile.options(max_restarts=1).remote()
    with pytest.raises(errors.Actor):
        get(actor.crash_once.remote(tmp_path / "crashed"))


def test_a_call_is_tried_again_after_an_exception(tmp_path):
    actor = Fragile.options(max_task_retries=1).remote()
    method = actor.fail_once.options(retry_exceptions=True)
    assert get(method.remote(tmp_path / "failed")) == "done"


def test_an_exception_is_not_tried_again_by_default(tmp_path):
    actor = Fragile.options(max_task_retries=1).remote()
    with pytest.raises(ValueError, match="once"):
        get(actor.fail_once.remote(tmp_path / "failed"))


def test_kill_without_no_restart_lets_it_come_back():
    actor = Fragile.options(max_restarts=1).remote()
    get(actor.add.remote())
    ray.kill(actor, no_restart=False)
    eventually(lambda: add_again(actor) == 1)


def test_kill_ends_an_actor_that_could_be_restarted():
    actor = Fragile.options(max_restarts=-1).remote()
    get(actor.add.remote())
    ray.kill(actor)
    eventually(lambda: _is_dead(actor))


# ------------------------------------------------------------------------------- pending calls


def test_more_pending_calls_than_allowed_are_refused(gate):
    counter = Counter.options(max_pending_calls=2).remote()
    get(counter.add.remote())
    refs = [counter.hold.remote(gate, "first")]
    gate.await_("first")
    with pytest.raises(errors.TooManyPending):
        refs.extend(counter.add.remote() for _ in range(5))
    gate.open()
    get(refs)


def test_calls_are_taken_again_when_others_are_done(gate):
    counter = Counter.options(max_pending_calls=1).remote()
    for number in range(5):
        assert get(counter.add.remote()) == number + 1


def test_handles_of_one_process_count_pending_calls_together(gate):
    counter = Counter.options(max_pending_calls=1, name="counted").remote()
    get(counter.add.remote())
    refs = [counter.hold.remote(gate, "first")]
    gate.await_("first")
    with pytest.raises(errors.TooManyPending):
        refs.extend(ray.get_actor("counted").add.remote() for _ in range(5))
    gate.open()
    get(refs)


def test_pending_calls_are_counted_for_each_caller(gate):
    counter = Counter.options(max_pending_calls=2).remote()
    get(counter.add.remote())
    refs = [counter.hold.remote(gate, "first"), counter.add.remote()]
    gate.await_("first")

    @ray.remote(num_cpus=0)
    def other(counter):
        return [counter.add.remote() for _ in range(2)]

    refs += get(other.remote(counter))
    gate.open()
    assert sorted(get(refs[1:])) == [2, 3, 4]


def test_stop_iteration_of_a_method_arrives_as_such():
    @ray.remote
    class Stops:
        def next(self):
            raise StopIteration

    stops = Stops.remote()
    with pytest.raises(StopIteration):
        get(stops.next.remote())
    with pytest.raises(errors.Task):
        get([stops.next.remote()])


# ------------------------------------------------------------------------------------ the class


@ray.remote
class Model:
    LIMIT = 7

    def __init__(self):
        self.double = "an attribute"

    @staticmethod
    def parse(text):
        return int(text)

    @classmethod
    def name(cls):
        return cls.__name__

    def double(self, value):
        return 2 * value

    def limit(self):
        return Model.LIMIT, Model.parse("5")


def test_attributes_and_static_and_class_methods_are_those_of_the_class():
    assert (Model.LIMIT, Model.parse("7"), Model.name()) == (7, 7, "Model")
    assert get(Model.remote().limit.remote()) == (7, 5)
    with pytest.raises(AttributeError):
        Model.nothing  # noqa: B018


def test_an_attribute_of_the_instance_does_not_hide_a_method():
    assert get(Model.remote().double.remote(4)) == 8


def test_exit_in_a_coroutine_that_a_method_has_started():
    import asyncio

    @ray.remote
    class Ends:
        async def begin(self):
            self.task = asyncio.create_task(self.later())
            return "begun"

        async def later(self):
            ray.actor.exit_actor()

        async def add(self):
            return "still there"

    ends = Ends.remote()
    assert get(ends.begin.remote()) == "begun"
    eventually(lambda: _is_dead(ends))


# -------------------------------------------------------------------------------------- threads


@ray.remote(max_concurrency=3)
class Threads:
    def __init__(self):
        self.barrier = threading.Barrier(3)

    def meet(self):
        self.barrier.wait(20)
        return threading.get_ident()

    def say(self):
        return "done"


def test_calls_meet_in_a_threaded_actor():
    actor = Threads.remote()
    assert len(set(get([actor.meet.remote() for _ in range(3)]))) == 3


def test_threads_share_one_process():
    @ray.remote(max_concurrency=2)
    class Pids:
        def pid(self):
            return os.getpid()

    actor = Pids.remote()
    assert len(set(get([actor.pid.remote() for _ in range(6)]))) == 1


def test_no_more_calls_at_once_than_allowed(gate):
    @ray.remote(max_concurrency=2)
    class Two:
        def hold(self, gate, name):
            gate.enter(name)

    two = Two.remote()
    refs = [two.hold.remote(gate, name) for name in range(4)]
    eventually(lambda: gate.count() == 2)
    get(Counter.remote().add.remote())  # a later call, of another actor, went all the way
    assert gate.count() == 2
    gate.open()
    get(refs)


def test_an_error_in_a_thread_is_one_of_its_call():
    @ray.remote(max_concurrency=2)
    class Fails:
        def fail(self):
            raise KeyError("gone")

        def say(self):
            return "done"

    fails = Fails.remote()
    bad, good = fails.fail.remote(), fails.say.remote()
    with pytest.raises(KeyError):
        get(bad)
    assert get(good) == "done"


def test_ids_in_the_threads_of_an_actor(idle):
    @ray.remote(max_concurrency=2, num_gpus=2)
    class Sees:
        def ids(self):
            return ray.get_gpu_ids()

    actor = Sees.remote()
    assert get([actor.ids.remote() for _ in range(3)]) == [[0, 1]] * 3
