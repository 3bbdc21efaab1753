"""Warm standbys in sessions: on simulated devices, and on a stand-in for a device."""

from __future__ import annotations

import os
import textwrap

import pytest

import gpunb
from tests import sessions
from tests.waiting import eventually

STAND_IN = sessions.ROOT / "tests" / "gpu" / "stand_in"


@pytest.fixture(scope="module", autouse=True)
def _by_value(by_value):
    """Functions of this module travel as a notebook's."""


def standby(device: int = 0) -> int | None:
    """The process of the standby on a device, once it is there."""
    kinds = gpunb.status()["devices"][device]["others"]
    pids = [each["pid"] for each in kinds if each["kind"] == "standby"]
    return pids[0] if pids else None


@gpunb.remote(num_gpus=1)
def look():
    return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"]


def test_a_task_runs_in_the_standby_of_its_device_and_another_one_follows(start):
    start(simulate="2xA100:40GiB", warm=1)
    pid = eventually(standby, "there is a standby")
    assert standby(1) is None
    assert gpunb.available_resources()["GPU"] == 2
    assert gpunb.get(look.remote()) == (pid, "0")
    other = eventually(standby, "there is another one")
    assert other != pid
    (device, _) = gpunb.status()["devices"]
    assert device["free"] == 1
    assert "gpunb's warm standby" in device["others"][0]["notebook"]


def test_a_task_with_variables_of_cuda_gets_another_process(start):
    start(simulate="1xA100:40GiB", warm=True)
    pid = eventually(standby, "there is a standby")
    debug = look.options(runtime_env={"env_vars": {"CUDA_LAUNCH_BLOCKING": "1"}})
    assert gpunb.get(debug.remote())[0] != pid
    eventually(lambda: not sessions.alive(pid), "the first standby is gone")


@gpunb.remote(num_gpus=1)
def modules():
    import sys

    return {"numpy", "decimal"} & set(sys.modules)


def test_a_standby_has_the_modules_of_the_preload(start):
    start(simulate="1xA100:40GiB", warm=True, preload=["numpy", "decimal"])
    eventually(standby, "there is a standby")
    eventually(lambda: gpunb.status()["preload"], "the preload is done")
    assert gpunb.get(modules.remote()) == {"numpy", "decimal"}


def test_standbys_make_room_for_a_task_with_all_devices(start):
    start(simulate="2xA100:40GiB", warm=True)
    eventually(lambda: standby(0) and standby(1), "there are two standbys")
    assert gpunb.get(look.options(num_gpus=2).remote())[1] == "0,1"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"warm": 3}, ValueError, "warm=3: this session has 2 GPUs"),
        ({"warm": -1}, ValueError, "warm=-1: this session has 2 GPUs"),
        ({"warm": "yes"}, TypeError, "not 'yes'"),
        ({"warm": True, "mps": True}, ValueError, "cannot go together"),
    ],
)
def test_a_bad_value_of_warm_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        gpunb.init(simulate="2", **settings)


TORCH = {
    "on_card.py": "install = id",
    "torch/__init__.py": """
        class cuda:
            _queued_calls = []
            started = []
            is_available = staticmethod(lambda: True)
            is_initialized = staticmethod(lambda: bool(cuda.started))
            empty_cache = staticmethod(lambda: cuda.started.append("emptied"))

        class default_generator:
            seed = staticmethod(lambda: 0)

        set_num_threads = id

        class ones:
            def __init__(self, n, device):
                cuda.started.append(device)
            sum = item = lambda self: self
    """,
    "torch/_dynamo.py": "",
}
"""What gpunb uses of PyTorch when it starts, in place of the package, which takes seconds."""

WITH_TORCH = """
    import gpunb
    from tests.api.test_warm import standby
    from tests.waiting import eventually

    @gpunb.remote(num_gpus=1)
    def look():
        import os, sys
        return os.getpid(), "torch._dynamo" in sys.modules, sys.modules["torch"].cuda.started

    with gpunb.init(warm=True, preload=["torch"]):
        eventually(lambda: gpunb.status()["preload"], "the preload is done")
        gpunb.get(look.remote())  # a standby from before that is gone now
        pid = eventually(standby, "there is another one")
        worker, later, started = gpunb.get(look.remote())
        print(worker == pid, later, started, gpunb.status()["warnings"])
"""


def test_pytorch_has_run_its_first_kernel_in_a_standby_and_has_what_an_optimizer_imports(tmp_path):
    for name, text in TORCH.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    (tmp_path / "card").mkdir()
    path = os.pathsep.join([str(tmp_path), str(STAND_IN), str(sessions.ROOT)])
    env = {"PYTHONPATH": path, "GPUNB_STAND_IN": str(tmp_path / "card")}
    done = sessions.script(WITH_TORCH, env=env)
    assert done.stdout == "True True ['cuda', 'emptied'] []\n", done.stderr


SCRIPT = """
    import gpunb
    from gpunb.engine import share_checks
    from tests.waiting import eventually

    share_checks.hidden = lambda devices: False  # the stand-in knows this namespace's processes

    def seen():
        status = gpunb.status()
        (device,) = status["devices"]
        return status["warnings"] or (device["others"] and device["others"][0]["memory"])

    with gpunb.init(warm=True, preload=[]):
        print(eventually(seen))
"""


def run(folder, **env):
    path = os.pathsep.join([str(STAND_IN), str(sessions.ROOT)])
    done = sessions.script(SCRIPT, env={"PYTHONPATH": path, "GPUNB_STAND_IN": str(folder), **env})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_memory_of_a_standby_is_shown(tmp_path):
    assert run(tmp_path) == f"{400 * 2**20}\n"


def test_a_context_that_cannot_be_made_is_a_warning(tmp_path):
    printed = run(tmp_path, GPUNB_STAND_IN_FAILS="cuInit")
    assert "warm=True has no effect on GPU 0: no context could be made" in printed
    assert "cuInit failed: error (999)" in printed
