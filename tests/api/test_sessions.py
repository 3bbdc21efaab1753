"""Sessions: how they start, what they start with, how they end."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest

import gpunb
from gpunb.exceptions import GpunbError, ObjectLostError
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


def test_start_and_end(start):
    assert not gpunb.is_initialized()
    gpunb.shutdown()
    started = start(num_gpus=2, num_cpus=3, resources={"licence": 2})
    assert gpunb.is_initialized()
    assert started.resources == {"CPU": 3.0, "GPU": 2.0, "licence": 2.0}
    assert "2 x logical GPU; 3 CPUs" in repr(started)
    assert "logical" in "".join(started.notes)
    assert "<table>" in started._repr_html_()
    with pytest.raises(RuntimeError, match="already"):
        gpunb.init()
    assert gpunb.init(ignore_reinit_error=True) is started
    gpunb.shutdown()
    gpunb.shutdown()
    assert not gpunb.is_initialized()


def test_as_a_context(by_value):
    with gpunb.init(num_gpus=1, num_cpus=1, preload=()) as started:
        assert [each.id for each in started.devices] == [0]
        assert get(on_gpu.remote())[0] == [0]
    assert not gpunb.is_initialized()


def test_one_session_after_the_other(start):
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


def test_ending_with_work_in_flight(start, tmp_path):
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


def test_a_session_that_slept_wakes_up(start):
    start(num_gpus=1)
    time.sleep(0.6)  # longer than any timer of a start: the loop sleeps without limit now
    assert get(same.remote(1), timeout=5) == 1


def test_the_numbers_of_init(start, monkeypatch):
    monkeypatch.setenv("GPUNB_NUM_GPUS", "3")
    monkeypatch.setenv("GPUNB_NUM_CPUS", "5")
    started = start(num_gpus=None, num_cpus=None)
    assert (started.resources["GPU"], started.resources["CPU"]) == (3, 5)


def test_simulate_from_the_environment(start, monkeypatch):
    monkeypatch.setenv("GPUNB_SIMULATE", "1xH100:80GiB")
    started = start(num_gpus=None)
    assert started.devices[0].type == "H100"
    assert get(on_gpu.options(gpu_memory="70GiB").remote())[0] == [0]


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


def test_bad_numbers_in_the_environment(monkeypatch):
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


def test_functions_of_main_and_an_implicit_start():
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
