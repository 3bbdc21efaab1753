"""Sessions: how they start, what they start with, how they end."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest

import gpunb
from gpunb.exceptions import GpunbError, ObjectLostError
from gpunb.protocol import backend
from tests.sessions import PATIENCE, assert_idle, eventually, script


def get(refs, timeout=PATIENCE):
    return gpunb.get(refs, timeout=timeout)


@gpunb.remote
def same(value):
    return value


@gpunb.remote(num_gpus=1)
def on_gpu():
    return gpunb.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]


@gpunb.remote(num_gpus=1)
def hold(path):
    path.touch()
    while path.exists():
        time.sleep(0.005)


def test_a_session_starts_and_ends(start, tmp_path):
    assert not gpunb.is_initialized()
    gpunb.shutdown()
    started = start(num_gpus=2, num_cpus=3, resources={"licence": 2})
    assert gpunb.is_initialized()
    assert started.resources == {"CPU": 3.0, "GPU": 2.0, "licence": 2.0}
    assert "2 x logical GPU; 3 CPUs" in repr(started)
    assert "logical" in "".join(started.notes)
    assert 'role="meter"' not in started._repr_html_()
    path = tmp_path / "held"
    held = hold.options(num_gpus=0.25).remote(path)
    eventually(path.exists, "it runs")
    assert started._repr_html_().count('role="meter"') == 1
    assert "</span> 0.25</td>" in started._repr_html_()
    path.unlink()
    get(held)
    with pytest.raises(RuntimeError, match="already"):
        gpunb.init()
    assert gpunb.init(ignore_reinit_error=True) is started
    gpunb.shutdown()
    gpunb.shutdown()
    assert not gpunb.is_initialized()


def test_a_session_ends_with_its_with_block(by_value):
    with gpunb.init(num_gpus=1, num_cpus=1, preload=()) as started:
        assert [each.id for each in started.devices] == [0]
        assert get(on_gpu.remote())[0] == [0]
    assert not gpunb.is_initialized()


def test_a_session_can_follow_another(start):
    start(num_gpus=1)
    old, put = on_gpu.remote(), gpunb.put("old")
    get(old)
    gpunb.shutdown()
    gpunb.init(num_gpus=1, num_cpus=1, preload=())
    new, other = [same.remote(i) for i in range(5)], gpunb.put("new")
    for ref in (put, old):
        with pytest.raises(ObjectLostError, match="session"):
            get(ref)
        with pytest.raises(ObjectLostError):
            same.remote(ref)
        with pytest.raises(ObjectLostError):
            gpunb.cancel(ref)
    del old, put, ref
    assert get(new) == list(range(5))
    assert get(other) == "new"
    del new, other
    assert_idle()


def test_shutdown_ends_running_and_waiting_work(start, tmp_path):
    start(num_gpus=1)
    path = tmp_path / "running"
    refs = [hold.remote(path) for _ in range(3)]
    eventually(path.exists)
    caught = []

    def wait():
        try:
            gpunb.get(refs)
        except GpunbError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    gpunb.shutdown()
    thread.join(PATIENCE)
    assert "shut down" in str(caught[0])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_session_that_sleeps_without_limit_wakes_up(start, method):
    start(num_gpus=1, start_method=method)
    assert get(same.remote(1)) == 1
    session = backend.current()
    loop, pool = session.loop, session.engine.pool

    def at_rest():
        prepared = len(pool._standbys) == pool._standby_count
        return prepared and all(each.ready for each in pool._all.values())

    def without_limit():
        if loop._timers:  # what wakes it from time to time
            session.on_loop(loop._timers.clear)
        return loop._asleep and loop._sleeps_until == math.inf and not loop._lingers

    eventually(at_rest, "no process will say that it has started")
    eventually(without_limit, "it sleeps without limit")
    assert get(same.remote(2)) == 2


def test_num_gpus_and_num_cpus_come_from_the_environment(start, monkeypatch):
    monkeypatch.setenv("GPUNB_NUM_GPUS", "3")
    monkeypatch.setenv("GPUNB_NUM_CPUS", "5")
    started = start(num_gpus=None, num_cpus=None)
    assert (started.resources["GPU"], started.resources["CPU"]) == (3, 5)


def test_simulate_from_the_environment(start, monkeypatch):
    monkeypatch.setenv("GPUNB_SIMULATE", "1xH100:80GiB")
    started = start(num_gpus=None)
    assert started.devices[0].type == "H100"
    assert get(on_gpu.options(gpu_memory="70GiB").remote())[0] == [0]


def test_an_empty_variable_simulates_nothing(start, monkeypatch):
    monkeypatch.setenv("GPUNB_SIMULATE", "")
    assert start(num_gpus=1).devices[0].type is None


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: gpunb.init(num_gpus=-1), ValueError, "num_gpus=-1"),
        (lambda: gpunb.init(num_gpus=1.5), ValueError, "whole number"),
        (lambda: gpunb.init(num_gpus=math.inf), ValueError, "whole number"),
        (lambda: gpunb.init(num_gpus=math.nan), ValueError, "whole number"),
        (lambda: gpunb.init(num_gpus="2"), TypeError, "num_gpus"),
        (lambda: gpunb.init(num_gpus=True), TypeError, "num_gpus"),
        (lambda: gpunb.init(num_cpus=-1), ValueError, "num_cpus"),
        (lambda: gpunb.init(resources={"CPU": 1}), ValueError, "num_cpus"),
        (lambda: gpunb.init(resources={"a": -1}), ValueError, "negative"),
        (lambda: gpunb.init(preload="torch"), TypeError, "list of module names"),
        (lambda: gpunb.init(start_method="thread"), ValueError, "start_method"),
        (lambda: gpunb.init(simulate="2xA100:40 parsecs"), ValueError, "simulate|size|40"),
        (lambda: gpunb.init(3), TypeError, "address must be a text, such as 'auto', not 3"),
        (lambda: gpunb.init("nowhere"), ValueError, "address='nowhere'"),
        (lambda: gpunb.init(gpus=1), TypeError, "gpus"),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_bad_init_starts_nothing(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert not gpunb.is_initialized()


def test_bad_numbers_in_the_environment_are_refused(monkeypatch):
    for text in ("x", "-1", "1.5"):
        monkeypatch.setenv("GPUNB_NUM_GPUS", text)
        with pytest.raises(ValueError, match=f"^GPUNB_NUM_GPUS='{text}' must be a whole number"):
            gpunb.init()


# --------------------------------------------------------------- in an interpreter of their own

MAIN = """
    import gpunb, os, sys

    BASE = 100

    def helper(x):
        return BASE + x

    @gpunb.remote(num_gpus=1)
    def f(x):
        return helper(x), gpunb.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]

    @gpunb.remote
    def g():
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    if __name__ == "__main__":
"""


def test_functions_of_main_start_a_session_by_themselves():
    done = script(
        MAIN + "        print(gpunb.get(f.remote(1)), gpunb.is_initialized())",
        env={"GPUNB_NUM_GPUS": "1", "GPUNB_NUM_CPUS": "2"},
    )
    assert done.stdout == "(101, [0], '0') True\n"
    assert "gpunb: num_gpus=1, but 0 devices found" in done.stderr.replace(
        "GPUNB_NUM_GPUS", "num_gpus"
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("visible", "gpus", "expected"),
    [
        ("1,3", None, "(101, [1], '1') [1, 3] ''"),
        ("1,3", 1, "(101, [1], '1') [1] ''"),
        (
            "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
            None,
            "['GPU-8932f937-d72c-4106-c12f-20bd9faed9f6']",
        ),
        ("", 0, "[] ''"),
        ("1,3", 3, "ValueError"),
    ],
)
def test_devices_that_are_preset(visible, gpus, expected):
    body = f"""
        try:
            s = gpunb.init(num_gpus={gpus}, num_cpus=1, preload=())
        except ValueError as error:
            print("ValueError", error)
            sys.exit()
        ids = [each.id for each in s.devices]
        print(gpunb.get(f.remote(1)) if ids else "", ids, repr(gpunb.get(g.remote())))
    """
    done = script(MAIN + body, env={"CUDA_VISIBLE_DEVICES": visible, "GPUNB_FAKE": "1"})
    if expected == "ValueError":
        assert "num_gpus=3" in done.stdout
        assert "1,3" in done.stdout or "'1', '3'" in done.stdout
    elif visible == "" or gpus is not None:
        assert expected in done.stdout, done
    # Without such devices on this machine there are none, whatever the list says.


def test_devices_may_be_left_visible():
    body = """
        gpunb.init(num_gpus=0, num_cpus=1, preload=())
        print(gpunb.get(g.remote()))
    """
    hidden = script(MAIN + body, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert hidden.stdout == "\n", hidden
    shown = script(MAIN + body, env={"CUDA_VISIBLE_DEVICES": "0", "GPUNB_EXPOSE_GPUS_ON_ZERO": "1"})
    assert shown.stdout == "0\n", shown


@pytest.mark.parametrize(
    ("value", "seen"), [("1", "4,7 4,7"), ("true", "4,7 4,7"), ("0", "0 "), ("", "0 ")]
)
def test_the_variable_of_devices_may_be_left_as_it_is(value, seen):
    body = """
        gpunb.init(simulate="2xA100", num_cpus=1, preload=())
        _, ids, variable = gpunb.get(f.remote(1))
        print(ids, variable, gpunb.get(g.remote()))
    """
    variable = {"CUDA_VISIBLE_DEVICES": "4,7", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": value}
    done = script(MAIN + body, env=variable)
    assert done.stdout == f"[0] {seen}\n", done


def test_arguments_of_ray_that_mean_nothing_are_one_note(start):
    started = start(log_to_driver=False, include_dashboard=False, _system_config={"a": 1})
    (note,) = [each for each in started.notes if "log_to_driver" in each]
    assert note.startswith("log_to_driver, include_dashboard, _system_config: taken as programs")
    gpunb.shutdown()
    started = start(cgroup_path="/sys/fs/cgroup", proxy_server_url=None)
    assert any(each.startswith("cgroup_path, proxy_server_url: taken") for each in started.notes)
    gpunb.shutdown()
    started = start(local_mode=False, job_config=None)
    assert not any("programs" in each for each in started.notes)


def test_object_store_memory_is_object_memory(start):
    start(object_store_memory=3_000_000)
    with pytest.raises(gpunb.exceptions.OutOfMemoryError, match="object_memory"):
        gpunb.put(bytes(4_000_000))


@gpunb.remote
class Named:
    def variable(self, name):
        return os.environ.get(name)


def test_namespace_and_variables_end_with_their_session(start):
    start(namespace="ours", runtime_env={"env_vars": {"OURS": "yes"}, "working_dir": "."})
    kept = Named.options(name="kept").remote()
    assert get(kept.variable.remote("OURS")) == "yes"
    assert gpunb.get_runtime_context().namespace == "ours"
    with pytest.raises(ValueError, match="kept"):
        gpunb.get_actor("kept", namespace="default")
    gpunb.shutdown()
    start()
    assert gpunb.get_runtime_context().namespace == "default"
    assert get(Named.remote().variable.remote("OURS")) is None


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"local_mode": True}, ValueError, "__wrapped__"),
        ({"job_config": object()}, ValueError, "job_config"),
        ({"runtime_env": {"pip": ["torch"]}}, ValueError, "'pip': only 'env_vars'"),
        ({"runtime_env": {"conda": "x"}}, ValueError, "Install there what they need"),
        ({"runtime_env": {"py_modules": ["x"]}}, ValueError, "'py_modules'"),
        ({"runtime_env": {"working_dir": "/elsewhere"}}, ValueError, "'working_dir'"),
        ({"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}}, ValueError, "no task can"),
        ({"namespace": ""}, ValueError, "namespace=''"),
        ({"namespace": 1}, TypeError, "namespace must be a text"),
        ({"namespace": "a\x1b[2J"}, ValueError, "control character"),
        ({"object_store_memory": 10**9, "object_memory": "1GiB"}, ValueError, "mean the same"),
        ({"log_to_drive": False}, TypeError, "did you mean 'log_to_driver'"),
        ({"colour": 1}, TypeError, "unexpected keyword argument 'colour'"),
    ],
)
def test_arguments_of_ray_that_cannot_be_followed_are_refused(settings, kind, message):
    with pytest.raises(kind, match=message):
        gpunb.init(**settings)
    assert not gpunb.is_initialized()


def test_reused_worker_has_the_threads_of_its_task(start, monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    start(num_cpus=4, preload=("numpy",))

    @gpunb.remote
    def threads():
        import numpy as np
        import threadpoolctl

        np.ones((2, 2)) @ np.ones((2, 2))
        used = {each["num_threads"] for each in threadpoolctl.threadpool_info()}
        return os.getpid(), os.environ["OMP_NUM_THREADS"], used

    asked = [2, 1, 0.25, 4, 1, 3]
    found = [get(threads.options(num_cpus=cpus).remote()) for cpus in asked]
    assert len({pid for pid, _, _ in found}) == 1
    counts = [2, 1, 1, 4, 1, 3]
    assert [printed for _, printed, _ in found] == [str(each) for each in counts]
    assert [used for _, _, used in found] == [{each} for each in counts]
