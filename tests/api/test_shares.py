"""Shares are kept: tasks on devices of a made-up vendor, which counts what is said in files."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import gpunb
from gpunb.accelerators import Accelerator, Lost, Process, Usage, registry
from gpunb.engine import sampler, share_checks
from gpunb.exceptions import (
    InfeasibleRequestError,
    OutOfMemoryError,
    TaskError,
    WorkerCrashedError,
)
from gpunb.leases import leases
from gpunb.scheduler import usage
from gpunb.scheduler.resources import Device
from tests.sessions import alive, session
from tests.waiting import PATIENCE, Gate, eventually

GiB = 2**30


class Acme(Accelerator):
    """Two devices of 40 GiB. A process takes memory by writing how much into a file of its own."""

    name: ClassVar[str] = "acme"
    variable: ClassVar[str | None] = "ACME_VISIBLE_DEVICES"
    folder: ClassVar[Path]
    problems: ClassVar[dict[str, str]] = {}
    stray: ClassVar[int] = 0

    def devices(self) -> Sequence[Device]:
        return [Device(f"acme-{at}", at, "Acme 40", "ACME", 40 * GiB, "acme") for at in range(2)]

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        return {each.key: self._use(each) for each in devices}

    def _use(self, device: Device) -> Usage:
        found = []
        for each in self.folder.glob(f"{device.key}.*"):
            pid = int(each.suffix[1:])
            if alive(pid):
                found.append(Process(pid, int(float(each.read_text()) * GiB)))
        used = sum(each.memory or 0 for each in found) + self.stray
        return Usage(used, 40 * GiB, 50, 40, tuple(found))

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        return {each.key: self.problems.get(each.key) for each in devices}


def take(folder: Path, size: float, device: str = "acme-0", pid: int | None = None) -> None:
    """Have so many GiB of a device from now on; `pid` for another process than this one."""
    pid = pid or os.getpid()
    new = folder / f"new.{pid}"
    new.write_text(str(size))
    new.rename(folder / f"{device}.{pid}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where processes say what they take; with little patience."""
    monkeypatch.setattr(registry, "_known", {"acme": Acme})
    monkeypatch.setattr(registry, "_entry_points", list)
    monkeypatch.setattr(registry, "_revision", registry._revision + 1)
    # These devices are this test's own, whatever other runs of it do meanwhile.
    monkeypatch.setenv("GPUNB_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(Acme, "folder", tmp_path, raising=False)
    monkeypatch.setattr(Acme, "problems", {})
    monkeypatch.setattr(Acme, "stray", 0)
    monkeypatch.setattr(sampler, "hidden", lambda: False)
    monkeypatch.setattr(sampler, "HEALTH_EVERY", 1)
    for name, value in (("PERIOD", 0.02), ("BEFORE", 0.0), ("LINGER", 0.5), ("REST", 0.02)):
        monkeypatch.setattr(share_checks, name, value)
    monkeypatch.setattr(usage, "BACK_AFTER", 0.2)
    yield tmp_path
    registry._revision += 1


@pytest.fixture
def begin(folder: Path, start: Callable[..., Any]) -> Callable[..., Any]:
    def begin(**settings: Any) -> Any:
        return start(**{"num_gpus": None, **settings})

    return begin


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    (tmp_path / "gate").mkdir()
    return Gate(tmp_path / "gate")


@gpunb.remote(num_gpus=0.25)
def takes(folder: Path, size: float, gate: Gate | None = None, device: str = "acme-0") -> int:
    take(folder, size, device)
    if gate is not None:
        gate.enter(os.getpid())
    return os.getpid()


def facts(ref: gpunb.ObjectRef) -> dict[str, Any]:
    found = gpunb.status()
    jobs = {each["id"]: each for each in (*found["running"], *found["finished"])}
    return jobs[ref.id[0]]


def sampling() -> bool:
    """Whether the thread runs that measures the devices."""
    return any(each.name == "gpunb-sampler" for each in threading.enumerate())


def warned(text: str) -> Callable[[], bool]:
    return lambda: any(text in each for each in gpunb.status()["warnings"])


# ---------------------------------------------------------------------------------------- figures


def test_status_shows_the_memory_of_a_task_now_and_its_peak(begin, folder, gate):
    begin()
    ref = takes.remote(folder, 3, gate)
    eventually(lambda: facts(ref)["memory"]["now"] == 3 * GiB, "it is seen")
    assert facts(ref)["memory"]["share"] == 10 * GiB
    gate.open()
    gpunb.get(ref)
    assert facts(ref)["memory"]["peak"] == 3 * GiB
    assert facts(ref)["hint"] == "used 3 of 10 GiB: 0.1 would do"
    device = gpunb.status()["devices"][0]
    assert device["usage"]["memory_total"] == 40 * GiB
    assert device["usage"]["temperature"] == 40


def test_sampler_thread_ends_when_nothing_runs(begin, folder):
    begin()
    gpunb.get(takes.remote(folder, 1))
    eventually(lambda: not sampling(), "the thread ends")


def test_sampler_does_not_run_for_a_task_without_a_device(begin, folder):
    begin()
    kept = gpunb.protocol.backend.existing().engine.sampler
    looking = kept._sampler

    def rests() -> bool:
        return time.monotonic() - kept._asked_at > 2 * share_checks.LINGER and not looking.running

    eventually(lambda: looking._last, "it was looked for other processes first")
    eventually(rests, "nobody looks any more")
    before = looking._last
    gpunb.get(gpunb.remote(len).remote("abc"))
    assert not looking.running
    assert looking._last == before


def test_status_shows_processes_of_others_on_a_device(begin, folder):
    begin()
    parent = os.getppid()
    take(folder, 7, "acme-1", parent)
    (found,) = eventually(lambda: gpunb.status()["devices"][1]["others"], "it is seen")
    assert (found["pid"], found["memory"], found["kind"]) == (parent, 7 * GiB, "outsider")
    assert found["user"]


def test_the_first_task_gets_a_device_that_no_other_process_uses(begin, folder, monkeypatch):
    monkeypatch.setattr(leases, "GLANCE", PATIENCE)
    take(folder, 7, "acme-0", os.getppid())
    begin()
    where = gpunb.remote(num_gpus=1)(gpunb.get_gpu_ids)
    assert gpunb.get(where.remote(), timeout=PATIENCE) == [1]


def test_the_first_task_does_not_wait_for_a_driver_that_is_slow(begin, folder, monkeypatch):
    answers = threading.Event()

    def slow(self: Acme, devices: Sequence[Device]) -> dict[str, Usage]:
        answers.wait(2 * PATIENCE)
        return {}

    monkeypatch.setattr(Acme, "usage", slow)
    begin()
    where = gpunb.remote(num_gpus=1)(gpunb.get_gpu_ids)
    try:
        assert gpunb.get(where.remote(), timeout=PATIENCE) == [0]
    finally:
        answers.set()


# ------------------------------------------------------------------------------ beyond the share


def test_a_task_above_its_share_is_warned_about_once(begin, folder, gate, capfd):
    begin()
    ref = takes.remote(folder, 12, gate)
    eventually(warned("has 12 GiB of GPU 0, and its share of 0.25 is 10 GiB"), "a warning")
    gate.open()
    gpunb.get(ref)
    assert capfd.readouterr().err.count("its share of 0.25 is 10 GiB") == 1


def test_a_task_above_its_share_is_killed_with_share_kill(begin, folder, gate):
    begin(share="kill")
    modest = takes.remote(folder, 2, gate)
    greedy = takes.options(max_retries=3).remote(folder, 12, gate)
    with pytest.raises(OutOfMemoryError) as caught:
        gpunb.get(greedy, timeout=PATIENCE)
    assert "was stopped" in str(caught.value)
    assert "has 12 GiB (share 0.25)" in str(caught.value)
    gate.open()
    assert gpunb.get(modest)
    assert gate.count() <= 2, "it was tried again"


def test_a_task_above_its_share_is_killed_on_a_simulated_device_too(gate):
    def greedy():
        import types

        size = 30 * GiB
        cuda = types.SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            memory_reserved=lambda at: size,
            max_memory_reserved=lambda at: size,
        )
        sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
        gate.enter()

    with session(simulate="1xA100:40GiB", share="kill"):
        ref = gpunb.remote(num_gpus=0.5)(greedy).remote()
        with pytest.raises(OutOfMemoryError, match=r"has 30 GiB \(share 0.5\)"):
            gpunb.get(ref, timeout=PATIENCE)


def test_nothing_is_warned_with_share_off(begin, folder, gate):
    begin(share="off")
    ref = takes.remote(folder, 12, gate)
    eventually(lambda: facts(ref)["memory"]["now"] == 12 * GiB, "it is seen")
    assert gpunb.status()["warnings"] == []
    gate.open()
    gpunb.get(ref)


def test_a_task_on_a_device_of_another_is_warned_about(begin, folder, gate):
    begin()
    ref = takes.remote(folder, 1, gate, "acme-1")
    eventually(warned("uses GPU 1, which it was not given"), "a warning")
    gate.open()
    gpunb.get(ref)


def test_the_notebooks_own_process_on_a_device_is_warned_about(begin, folder, gate):
    begin()
    take(folder, 2)
    gpunb.get(takes.remote(folder, 1))
    eventually(warned("this notebook's own process uses GPU 0 and has 2 GiB there"), "a warning")


# ------------------------------------------------------------------------------------- afterwards


def test_memory_that_stays_used_after_a_task_is_warned_about(begin, folder, gate, monkeypatch):
    begin()
    ref = takes.remote(folder, 5, gate)
    eventually(lambda: facts(ref)["memory"]["now"] == 5 * GiB, "it is seen")
    monkeypatch.setattr(Acme, "stray", 5 * GiB)
    gate.open()
    gpunb.get(ref)
    eventually(warned("is not back: 5 GiB are in use that no process is listed for"), "a warning")


def test_memory_that_is_free_after_a_task_gives_no_warning(begin, folder, gate):
    begin()
    ref = takes.remote(folder, 5, gate)
    eventually(lambda: facts(ref)["memory"]["now"] == 5 * GiB, "it is seen")
    gate.open()
    gpunb.get(ref)
    book = gpunb.protocol.backend.existing().engine.sampler._book
    eventually(lambda: not book.awaits_memory and not book.holders, "it has come back")
    assert gpunb.status()["warnings"] == []


# ------------------------------------------------------------------------------------ lost devices


def test_tasks_on_a_lost_device_fail_and_it_is_given_to_no_other(begin, folder, gate, monkeypatch):
    begin()
    ref = takes.options(num_gpus=1, max_retries=0).remote(folder, 1, gate)
    other = takes.options(num_gpus=1).remote(folder, 1, gate, "acme-1")
    waits = takes.options(num_gpus=2).remote(folder, 1)
    eventually(lambda: gate.count() == 2, "both run")
    monkeypatch.setattr(Acme, "problems", {"acme-0": "one error of its memory"})
    seen = "GPU 0 needs attention: one error of its memory"
    eventually(lambda: seen in gpunb.status()["warnings"], "it is warned of")
    assert gpunb.status()["devices"][0]["health"] == "one error of its memory"
    monkeypatch.setattr(Acme, "problems", {"acme-0": Lost("an error of its memory")})
    with pytest.raises(WorkerCrashedError, match="GPU 0 was lost: an error of its memory"):
        gpunb.get(ref, timeout=PATIENCE)
    with pytest.raises(InfeasibleRequestError, match=r"out of service: GPU 0 \(an error"):
        gpunb.get(waits, timeout=PATIENCE)
    gate.open()
    assert gpunb.get(other)
    found = gpunb.status()
    assert [each["health"] for each in found["devices"]] == ["an error of its memory", None]
    assert "GPU 0 is out of service: an error of its memory" in found["warnings"]
    eventually(lambda: gpunb.available_resources().get("GPU") == 1, "the other one is free")


# ------------------------------------------------------------------------- what workers say, caps

FAKE = """
    class OutOfMemoryError(RuntimeError):
        pass

    class cuda:
        _queued_calls = []
        peak = 0

        def is_initialized():
            return True

        def device_count():
            return 1

        def memory_reserved(at):
            return cuda.peak // 2

        def max_memory_reserved(at):
            return cuda.peak

        def set_per_process_memory_fraction(fraction, device):
            cuda.fraction = fraction
"""


def fake_torch() -> Any:
    """Make and load a stand-in for PyTorch, in a worker."""
    import importlib
    import sys
    import tempfile
    import textwrap

    folder = Path(tempfile.mkdtemp(dir=os.environ["TORCH_FOLDER"]))
    (folder / "torch.py").write_text(textwrap.dedent(FAKE))
    sys.path.insert(0, str(folder))
    return importlib.import_module("torch")


@gpunb.remote(num_gpus=0.25)
def computes(size: float) -> Any:
    torch = fake_torch()
    torch.cuda.peak = int(size * GiB)
    return getattr(torch.cuda, "fraction", None), os.environ.get("CUPY_GPU_MEMORY_LIMIT")


@gpunb.remote(num_gpus=0.25)
def fails(size: float) -> None:
    torch = fake_torch()
    torch.cuda.peak = int(size * GiB)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.fixture
def simulated(start, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FOLDER", str(tmp_path))
    for name in ("CUPY_GPU_MEMORY_LIMIT", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)

    def begin(**settings: Any) -> Any:
        return start(simulate="1xA100:40GiB", **settings)

    return begin


def test_on_simulated_devices_workers_report_their_peak(simulated):
    simulated()
    ref = computes.remote(6)
    gpunb.get(ref)
    assert facts(ref)["memory"]["peak"] == 6 * GiB
    assert not gpunb.protocol.backend.existing().engine.sampler._sampler.running


def test_frameworks_are_told_the_share_of_the_task(simulated):
    simulated()
    assert gpunb.get(computes.remote(1)) == (0.2375, str(10 * GiB - 2**29))


def test_a_task_with_a_whole_device_has_no_caps(simulated):
    simulated()
    assert gpunb.get(computes.options(num_gpus=1).remote(1)) == (None, None)


def test_caps_false_of_a_task_sets_no_caps(simulated):
    simulated()
    assert gpunb.get(computes.options(caps=False).remote(1)) == (None, None)


def test_caps_false_of_an_actor_sets_no_caps(simulated):
    simulated()

    @gpunb.remote(num_gpus=0.25)
    class Holder:
        def limit(self):
            return os.environ.get("CUPY_GPU_MEMORY_LIMIT")

    assert gpunb.get(Holder.remote().limit.remote())
    assert gpunb.get(Holder.options(caps=False).remote().limit.remote()) is None


def test_caps_false_of_a_session_sets_no_caps(simulated):
    simulated(caps=False)
    assert gpunb.get(computes.remote(1)) == (None, None)


def test_a_cap_that_the_user_has_set_stays(simulated):
    simulated()
    given = computes.options(runtime_env={"env_vars": {"CUPY_GPU_MEMORY_LIMIT": "50%"}})
    assert gpunb.get(given.remote(1))[1] == "50%"


def test_an_out_of_memory_error_names_the_users_of_the_memory(simulated):
    simulated()
    with pytest.raises(TaskError, match="CUDA out of memory") as caught:
        gpunb.get(fails.options(name="train").remote(18))
    printed = str(caught.value)
    assert "The memory of the devices when this was raised:" in printed
    assert "train has 9 GiB (share 0.25)" in printed


def test_a_report_of_a_worker_above_its_share_is_warned_about(simulated, capfd):
    simulated()
    gpunb.get(computes.options(name="train").remote(24))
    eventually(warned("train has 12 GiB of GPU 0"), "a warning")


def test_a_worker_reports_its_memory_again_where_the_device_hides_it(
    begin, folder, gate, monkeypatch
):
    monkeypatch.setattr(sampler, "hidden", lambda: True)
    monkeypatch.setenv("TORCH_FOLDER", str(folder))
    begin()

    @gpunb.remote(num_gpus=0.25)
    def long() -> None:
        torch = fake_torch()
        torch.cuda.peak = 8 * GiB
        gate.enter()

    ref = long.remote()
    eventually(lambda: facts(ref)["memory"]["now"] == 4 * GiB, "it is said")
    gate.open()
    gpunb.get(ref)


# ----------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"share": "stop"}, ValueError, "share='stop' must be one of 'warn', 'kill', 'off'"),
        ({"caps": 1}, TypeError, "caps must be True or False, not 1"),
        ({"mps": "yes"}, TypeError, "mps must be True or False, not 'yes'"),
    ],
)
def test_bad_options_of_init_about_shares_are_refused(settings, kind, message):
    with pytest.raises(kind, match=message):
        gpunb.init(**settings)
    assert not gpunb.is_initialized()


def test_a_value_of_caps_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="caps must be True or False, not 'no'"):
        gpunb.remote(caps="no")(len)


def test_mps_is_refused_without_an_nvidia_gpu(monkeypatch):
    with pytest.raises(gpunb.exceptions.GpunbError, match="this session has no NVIDIA GPU"):
        gpunb.init(simulate="1", mps=True)
    assert not gpunb.is_initialized()
