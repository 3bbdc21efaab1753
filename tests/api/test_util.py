"""What Ray has under ``ray.util``."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import importlib.util
import io
import multiprocessing
import os
import re
import threading
import time

import pytest

import gpunb
from gpunb.exceptions import TaskCancelledError
from gpunb.instead import INSTEAD
from gpunb.util import ActorPool, inspect_serializability, list_named_actors, state
from gpunb.util.multiprocessing import Pool
from gpunb.util.queue import Empty, Full, Queue
from tests import sessions
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module", autouse=True)
def started(by_value):
    with sessions.session(num_cpus=2):
        yield


def get(refs, timeout=PATIENCE):
    return gpunb.get(refs, timeout=timeout)


@gpunb.remote
class Worker:
    def double(self, value):
        return 2 * value

    @gpunb.method(num_returns=2)
    def pair(self, value):
        return value, -value

    def wait(self, gate, value):
        if value == 0:
            gate.enter("first")
        return value

    def fail(self, value):
        raise LookupError(value)

    def pid(self):
        return os.getpid()


# ------------------------------------------------------------------------------------- ActorPool


def test_pool_of_actors_maps_in_order():
    pool = ActorPool([Worker.remote(), Worker.remote()])
    assert list(pool.map(lambda a, v: a.double.remote(v), range(7))) == [2 * n for n in range(7)]
    found = pool.map_unordered(lambda a, v: a.double.remote(v), range(7))
    assert sorted(found) == [2 * n for n in range(7)]
    assert not pool.has_next()


def test_pool_of_actors_gives_all_results_of_a_method_that_has_several():
    pool = ActorPool([Worker.remote()])
    found = pool.map(lambda a, v: a.pair.remote(v), range(3))
    assert list(found) == [[n, -n] for n in range(3)]


def test_pool_of_actors_gives_what_is_there_first(tmp_path):
    from tests.waiting import Gate

    gate = Gate(tmp_path)
    pool = ActorPool([Worker.remote(), Worker.remote()])
    for value in range(3):
        pool.submit(lambda a, v: a.wait.remote(gate, v), value)
    assert not pool.has_free()
    assert [pool.get_next_unordered(PATIENCE), pool.get_next_unordered(PATIENCE)] == [1, 2]
    assert pool.has_free()
    with pytest.raises(TimeoutError):
        pool.get_next(timeout=0.01)
    assert pool.has_next()
    gate.open()
    assert pool.get_next() == 0
    with pytest.raises(StopIteration):
        pool.get_next()


def test_pool_of_actors_goes_on_after_an_error():
    actors = [Worker.remote()]
    pool = ActorPool(actors)
    pool.submit(lambda a, v: a.fail.remote(v), 1)
    pool.submit(lambda a, v: a.double.remote(v), 2)
    with pytest.raises(LookupError):
        pool.get_next()
    assert pool.get_next() == 4
    with pytest.raises(ValueError, match="already"):
        pool.push(actors[0])
    assert pool.pop_idle() == actors[0]
    pool.push(Worker.remote())
    assert list(pool.map(lambda a, v: a.double.remote(v), [1])) == [2]


# ----------------------------------------------------------------------------------------- Queue


def test_queue_between_tasks():
    queue = Queue(maxsize=2)

    @gpunb.remote
    def produce(queue):
        for number in range(6):
            queue.put(number, timeout=PATIENCE)

    done = produce.remote(queue)
    assert [queue.get(timeout=PATIENCE) for _ in range(6)] == list(range(6))
    get(done)
    assert queue.empty()
    assert len(queue) == queue.size() == 0


def test_queue_that_is_full_or_empty():
    queue = Queue(maxsize=2)
    queue.put_nowait_batch([1, 2])
    assert queue.full()
    with pytest.raises(Full):
        queue.put_nowait(3)
    with pytest.raises(Full):
        queue.put(3, timeout=0.01)
    with pytest.raises(Full):
        queue.put_nowait_batch([3])
    with pytest.raises(Empty):
        queue.get_nowait_batch(3)
    assert queue.get_nowait_batch(2) == [1, 2]
    with pytest.raises(Empty):
        queue.get_nowait()
    with pytest.raises(Empty):
        queue.get(timeout=0.01)
    with pytest.raises(ValueError, match="timeout=-1"):
        queue.get(timeout=-1)


def test_queue_in_coroutines_and_with_refs():
    queue, ref = Queue(), gpunb.put("held")

    async def both():
        taken = asyncio.create_task(queue.get_async())
        await queue.put_async(ref)
        return await taken

    assert get(asyncio.run(both())) == "held"
    queue.shutdown()
    with pytest.raises(gpunb.exceptions.ActorDiedError):
        queue.put(1)


# ---------------------------------------------------------------------------------------- the rest


def test_waiting_calls_of_a_terminated_pool_are_over_with_an_error(tmp_path):
    from tests.waiting import Gate

    gate, reported = Gate(tmp_path), []
    pool = Pool(1)
    result = pool.map_async(gate.enter, ["first", "second"], error_callback=reported.append)
    gate.await_("first")
    pool.terminate()
    result.wait(PATIENCE)
    assert result.ready()
    assert not result.successful()
    with pytest.raises(TaskCancelledError):
        result.get()
    assert isinstance(reported[0], TaskCancelledError)
    pool.join()


def test_pool_of_processes():
    def add(x, y=1):
        return x + y

    def fail(x):
        raise LookupError(x)

    reported = []
    with Pool(2) as pool:
        assert pool.map(add, range(5)) == [1, 2, 3, 4, 5]
        assert pool.starmap(add, [(1, 2), (3, 4)]) == [3, 7]
        assert pool.apply(add, (1,), {"y": 5}) == 6
        assert list(pool.imap(add, range(3))) == [1, 2, 3]
        assert sorted(pool.imap_unordered(add, range(3), chunksize=2)) == [1, 2, 3]
        result = pool.map_async(add, [1, 2], callback=reported.append)
        assert result.get(PATIENCE) == [2, 3]
        assert result.successful()
        failed = pool.apply_async(fail, (1,), error_callback=reported.append)
        with pytest.raises(LookupError):
            failed.get(PATIENCE)
        assert not failed.successful()
        eventually(lambda: len(reported) == 2)
        slow = pool.apply_async(time.sleep, (PATIENCE,))
        with pytest.raises(multiprocessing.TimeoutError):
            slow.get(0.01)
        with pytest.raises(ValueError, match="still running"):
            pool.join()
    with pytest.raises(ValueError, match="closed"):
        pool.apply(add, (1,))
    pool.join()


def test_names_of_actors():
    kept = [Worker.options(name="b").remote(), Worker.options(name="a", namespace="n").remote()]
    assert list_named_actors() == ["b"]
    everywhere = list_named_actors(all_namespaces=True)
    assert everywhere == [{"name": "b", "namespace": "default"}, {"name": "a", "namespace": "n"}]
    del kept
    eventually(lambda: not list_named_actors(all_namespaces=True))


def test_what_cannot_be_pickled_is_named():
    text = io.StringIO()
    assert inspect_serializability([1], print_file=text) == (True, set())
    lock = threading.Lock()
    fine, failures = inspect_serializability({"lock": lock}, name="settings", print_file=text)
    assert not fine
    assert next(iter(failures)).name == "settings"
    assert "lock" in text.getvalue()


def test_lists_of_tasks_and_actors():
    worker = Worker.options(name="listed").remote()
    get(worker.pid.remote())
    (found,) = state.list_actors(filters=[("state", "=", "ALIVE"), ("name", "=", "listed")])
    assert (found.class_name, found["pid"]) == ("Worker", get(worker.pid.remote()))
    assert [each.name for each in state.list_tasks(filters=[("name", "=", "Worker.pid")])]
    with pytest.raises(ValueError, match="comparison"):
        state.list_actors(filters=[("state", ">", 1)])


def test_joblib_under_the_name_of_ray():
    import joblib

    gpunb.util.joblib.register_ray()
    with joblib.parallel_config("ray"):
        assert joblib.Parallel(2)(joblib.delayed(abs)(-n) for n in range(3)) == [0, 1, 2]

    def cpus():
        return gpunb.get_runtime_context().get_assigned_resources().get("CPU", 0)

    with joblib.parallel_config("ray", ray_remote_args={"num_cpus": 0.5}):
        assert set(joblib.Parallel(2)(joblib.delayed(cpus)() for _ in range(3))) == {0.5}


def test_ids_of_node_session_and_process():
    @gpunb.remote
    def ids():
        context = gpunb.get_runtime_context()
        return context.get_node_id(), context.get_job_id(), context.get_worker_id()

    context = gpunb.get_runtime_context()
    node, job, worker = get(ids.remote())
    (known,) = gpunb.nodes()
    assert (
        node
        == context.get_node_id()
        == known["NodeID"]
        == gpunb.init(ignore_reinit_error=True)["node_id"]
    )
    assert job == context.get_job_id()
    assert worker != context.get_worker_id()
    assert known["Alive"]
    assert known["Resources"]["CPU"] == 2
    assert gpunb.init(ignore_reinit_error=True)["address"] == "local"
    with pytest.raises(KeyError, match="colour"):
        gpunb.init(ignore_reinit_error=True)["colour"]


def test_refs_and_handles_have_ids_as_in_ray():
    worker = Worker.remote()
    ref = worker.double.remote(2)
    assert bytes.fromhex(ref.hex()) == ref.binary()
    assert ref.task_id() == ref.task_id == ref.id[0]
    assert ref.task_id().hex() == ref.hex()[:16]
    assert worker._actor_id.hex() == f"{worker._actor_id:016x}"
    assert get(worker.__ray_ready__.remote()) is not None

    async def waits():
        return await asyncio.wait_for(ref.as_future(), PATIENCE)

    assert asyncio.run(waits()) == 4


def test_calls_with_options_in_one():
    @gpunb.remote
    def pair(x, y=0):
        return x, y

    first, second = pair._remote(args=[1], kwargs={"y": 2}, num_returns=2)
    assert get([first, second]) == [1, 2]
    worker = Worker._remote(name="at once")
    assert get(worker.double._remote([3])) == 6
    assert gpunb.get_actor("at once") == worker


def test_generators_say_whether_more_comes(tmp_path):
    from tests.waiting import Gate

    gate = Gate(tmp_path)

    @gpunb.remote
    def two(gate):
        yield 1
        gate.enter("between")
        yield 2

    found = two.remote(gate)
    gate.await_("between")
    eventually(found.next_ready)
    assert not found.is_finished()
    assert gpunb.wait([found], timeout=0) == ([found], [])
    assert get(next(found)) == 1
    assert not found.next_ready()
    assert not found.is_finished()
    gate.open()
    eventually(found.next_ready)
    assert not found.is_finished()
    assert [get(ref) for ref in found] == [2]
    assert found.is_finished()
    assert list(found) == []


def test_timeline_is_written_to_a_file(tmp_path):
    found = gpunb.timeline(filename=tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text().startswith('{"traceEvents": [')
    assert found.spans


def test_strategies_of_scheduling_are_taken_as_far_as_they_mean_nothing():
    spread = Worker.options(scheduling_strategy="SPREAD").remote()
    assert get(spread.double.remote(1)) == 2
    with pytest.raises(ValueError, match="mean the same on one machine"):
        Worker.options(scheduling_strategy=object())


@pytest.mark.parametrize("name", ["placement_group", "label_selector"])
def test_option_that_only_ray_has_says_what_to_do(name):
    with pytest.raises(ValueError, match=f"{name}' is Ray's, and not there: "):
        Worker.options(**{name: {}})


def test_import_of_a_strategy_that_only_ray_has_says_what_to_do():
    found = importlib.import_module("gpunb.util.scheduling_strategies")
    with pytest.raises(ImportError, match=r"there is one machine; on a Ray cluster"):
        found.NodeAffinitySchedulingStrategy  # noqa: B018
    assert not hasattr(found, "__wrapped__")


@pytest.mark.parametrize(
    ("code", "kind", "use"),
    [
        ("gpunb.util.metrics", AttributeError, "gpunb.status() and"),
        ("from gpunb.util import metrics", ImportError, "gpunb.status() and"),
        ("from gpunb.util.metrics import Counter", ModuleNotFoundError, "gpunb.status() and"),
        ("import gpunb.util.collective", ModuleNotFoundError, "torch.distributed"),
        ("import gpunb.train", ModuleNotFoundError, "%%gpu --ranks"),
        ("from gpunb import train", ImportError, "%%gpu --ranks"),
        ("gpunb.train.report", AttributeError, "%%gpu --ranks"),
        ("gpunb.tune", AttributeError, "gpunb.sweep"),
        ("gpunb.serve", AttributeError, "an actor, or Ray itself"),
        ("gpunb.get_tpu_ids()", AttributeError, "gpunb.get_runtime_context().get_accelerator_ids"),
        ("gpunb.show_in_dashboard('x')", AttributeError, "gpunb.monitor()"),
        ("gpunb.exceptions.NodeDiedError", AttributeError, "WorkerCrashedError"),
        ("from gpunb.exceptions import NodeDiedError", ImportError, "WorkerCrashedError"),
        ("gpunb.util.state.list_nodes()", AttributeError, "gpunb.nodes()"),
        ("from gpunb.util.state import get_task", ImportError, "list_tasks(filters="),
        ("from gpunb.util.state import summarize_tasks", ImportError, "gpunb.status()"),
        ("gpunb.get_runtime_context().job_id", AttributeError, "get_job_id()"),
        (
            "gpunb.get_runtime_context().get_placement_group_id()",
            AttributeError,
            "gpunb.util.get_current_placement_group()",
        ),
    ],
)
def test_what_is_not_there_says_what_to_use(code, kind, use):
    with pytest.raises(kind, match=re.escape(f": use {use}")) as caught:
        exec(code, {"gpunb": gpunb})
    assert type(caught.value) is kind


def test_each_name_that_is_to_be_used_is_there():
    names = {"gpunb": gpunb}
    for place, instead in INSTEAD.items():
        found = eval(place, names)
        for name, use in instead.items():
            assert not hasattr(found, name), (place, name)
            for each in re.findall(r"\bgpunb(?:\.\w+)+", use):
                assert eval(each, names), each
            member = re.match(r"(\w+)(?:$|\()", use)
            assert not member or hasattr(found, member[1]) or hasattr(builtins, member[1]), use


def test_a_name_that_is_not_known_is_a_plain_error():
    with pytest.raises(AttributeError, match=r"'gpunb\.exceptions' has no attribute 'Other'$"):
        gpunb.exceptions.Other  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'gpunb\.other'$"):
        importlib.import_module("gpunb.other")
    assert importlib.util.find_spec("gpunb.other") is None
