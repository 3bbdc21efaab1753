"""The command line."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpunb
from gpunb import accelerators, cli
from gpunb.accelerators import Detection, Process, Usage
from gpunb.cli import doctor, start, status
from gpunb.cli import machine as cli_machine
from gpunb.cli.checks import Place, frameworks, hardware, jupyter, sessions, system
from gpunb.leases.ledger import Ledger
from gpunb.protocol import backend
from gpunb.scheduler.markup import control
from gpunb.scheduler.resources import Device
from gpunb.system import runtime_dir
from tests.sessions import ROOT
from tests.waiting import PATIENCE, Gate, eventually

GiB = 2**30
CARD = Device("GPU-1", 0, "NVIDIA A100-SXM4-40GB", "A100", 40 * GiB, "nvidia")


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has these devices."""

    def pretend(*devices, notes=(), usage=None, absent=()):
        found = Detection(devices=devices, notes=notes, absent=absent)
        figures = {each.key: Usage() for each in devices} | (usage or {})
        monkeypatch.setattr(accelerators, "detect", lambda: found)
        monkeypatch.setattr(accelerators, "measure", lambda devices: figures)

    return pretend


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    """Nothing of other sessions of this user is seen."""
    monkeypatch.setenv(runtime_dir.VARIABLE, str(tmp_path / "run"))
    monkeypatch.delenv("GPUNB_LEDGER_DIR", raising=False)


# -------------------------------------------------------------------------------------- devices


def test_devices_are_listed(machine, capsys):
    machine(CARD, notes=("one thing to know",))
    assert cli.main(["devices"]) == 0
    out = capsys.readouterr().out
    assert "GPU 0: NVIDIA A100-SXM4-40GB, A100, 40 GiB, GPU-1" in out
    assert "note: one thing to know" in out


def test_devices_are_listed_as_json(machine, capsys):
    machine(CARD, absent=("no AMD GPU: /dev/kfd is not there",))
    assert cli.main(["devices", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["devices"][0]["type"] == "A100"
    assert facts["absent"] == ["no AMD GPU: /dev/kfd is not there"]


def test_verbose_lists_the_vendors_without_devices(machine, capsys):
    machine(CARD, absent=("no AMD GPU: /dev/kfd is not there",))
    assert cli.main(["devices"]) == 0
    assert "AMD" not in capsys.readouterr().out
    assert cli.main(["devices", "-v"]) == 0
    assert "not here: no AMD GPU: /dev/kfd is not there\n" in capsys.readouterr().out


def test_a_machine_without_devices_is_named(machine, capsys):
    machine(notes=("no driver",))
    assert cli.main(["devices"]) == 0
    assert capsys.readouterr().out == "no GPUs\nnote: no driver\n"


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["dance"])
    assert stopped.value.code == 2
    assert "dance" in capsys.readouterr().err


def test_start_has_an_option_for_each_argument_of_init(monkeypatch, capsys, tmp_path):
    """What a head process has is settled when it starts."""
    printed = []
    facts = {"pid": 1, "devices": "", "notes": (), "log": ""}
    monkeypatch.setattr(
        start, "start_head", lambda name, settings: printed.append(settings) or facts
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["start", "--head"]) == 0
    options = "--share kill --no-caps --mps --object-memory 1GiB --spill here --start-method spawn"
    options += " --warm 2 --park-after 10min"
    assert cli.main(["start", "--head", *options.split()]) == 0
    assert cli.main(["start", "--head", "--spill", "--warm"]) == 0
    parameters = inspect.signature(gpunb.init).parameters
    defaults = {name: each.default for name, each in parameters.items()}
    assert defaults | printed[0] == defaults
    assert defaults.keys() - printed[0].keys() == {"address", "ignore_reinit_error", "ray"}
    assert {name: each for name, each in printed[1].items() if each != defaults[name]} == {
        "share": "kill",
        "caps": False,
        "mps": True,
        "warm": 2,
        "park_after": "10min",
        "object_memory": "1GiB",
        "spill": str(tmp_path / "here"),
        "start_method": "spawn",
    }
    assert printed[2]["spill"] is True
    assert printed[2]["warm"] is True


def test_the_command_can_be_run_as_a_module():
    command = [sys.executable, "-m", "gpunb", "devices", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "devices" in json.loads(done.stdout)


# --------------------------------------------------------------------------------------- status


def test_status_of_an_empty_machine(machine, capsys):
    machine()
    assert cli.main(["status"]) == 0
    assert capsys.readouterr().out == "no GPUs\nno kernel has a session of gpunb\n"


def test_status_shows_leases_and_other_processes(machine, capsys):
    processes = (Process(os.getpid(), 3 * GiB), Process(1, 8 * GiB))
    machine(CARD, usage={"GPU-1": Usage(11 * GiB, 40 * GiB, 87, 60, processes)})
    path = runtime_dir.runtime_folder() / runtime_dir.LEASES
    about = {"user": "ann", "notebook": "/data/train.ipynb"}
    kernel = Ledger(path, ["GPU-1"], about)
    try:
        assert kernel.take({"GPU-1": 5000}, lasting=False, job="train")
        assert cli.main(["status"]) == 0
        first, lease, outsider, _, session = capsys.readouterr().out.splitlines()
        assert cli.main(["status", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
    finally:
        kernel.close()
    assert first == ("GPU 0: NVIDIA A100-SXM4-40GB, 11 GiB of 40 GiB used, 87 % busy, 0.5 free")
    assert lease.split("  ")[:6] == [
        "",
        "0.5",
        f"pid {os.getpid()}",
        "ann",
        "/data/train.ipynb",
        "train",
    ]
    assert "3 GiB  since" in lease
    assert outsider.startswith("  -  pid 1  root  ")
    assert "(not of gpunb)  8 GiB" in outsider
    assert session.startswith(f"kernel pid {os.getpid()}  ann  /data/train.ipynb")
    (device,) = facts["devices"]
    assert device["leases"][0]["share"] == 0.5
    assert [each["pid"] for each in device["outsiders"]] == [1]
    assert facts["kernels"][0]["yours"]


def test_control_characters_in_the_ledger_are_escaped(machine, capsys):
    machine(CARD)
    about = {"user": "eve", "notebook": "/data/\x1b[2J\n.ipynb"}
    kernel = Ledger(runtime_dir.runtime_folder() / runtime_dir.LEASES, ["GPU-1"], about)
    try:
        assert kernel.take({"GPU-1": 5000}, lasting=False, job="\x1b]0;title\x07")
        assert cli.main(["status"]) == 0
    finally:
        kernel.close()
    out = capsys.readouterr().out
    assert "]0;title" in out
    assert control(out.replace("\n", "")) is None
    assert len(out.splitlines()) == 4


def test_control_characters_in_errors_and_findings_are_escaped(machine, capsys):
    machine(notes=("found \x1b[2J",))
    assert cli.main(["devices"]) == 0
    assert cli.main(["logs", "7", "--of", "\x1b[2J"]) == 1
    printed = capsys.readouterr()
    assert r"note: found \x1b[2J" in printed.out
    assert r"no head process '\x1b[2J' runs" in printed.err
    assert "\x1b" not in printed.out + printed.err


def test_status_asks_sessions_what_they_do(machine, capsys, start, tmp_path):
    machine()
    gate = Gate(tmp_path)
    start(simulate="1xA100:40GiB")
    hold = gpunb.remote(num_gpus=0.6, name="hold")(Gate.enter)
    refs = [hold.remote(gate, 1)]
    gate.await_(1)
    refs.append(hold.remote(gate, 2))
    eventually(lambda: gpunb.status()["waiting"], "it waits")
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    gate.open()
    gpunb.get(refs, timeout=PATIENCE)
    assert f"kernel pid {os.getpid()}" in out
    assert "1 running, 1 waiting, devices of its own, in the books only" in out
    assert "hold: running on 0.6 of GPU 0" in out
    assert "hold: needs 0.6 of one GPU; the largest free share is 0.4 on GPU 0" in out


def test_status_lists_actors_and_sessions(machine, capsys, start):
    machine()
    start(simulate="2xA100:40GiB")
    counter = gpunb.remote(num_gpus=0.5)(type("Counter", (), {"add": lambda self: 1}))
    first, second = counter.remote(), counter.options(name="sum").remote()
    gpunb.get([first.add.remote(), second.add.remote()], timeout=PATIENCE)
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    assert f"kernel pid {os.getpid()}" in out
    assert "0 running, 0 waiting, 2 actors, devices of its own" in out
    one, other = sorted(each["id"] for each in gpunb.status()["actors"])
    assert f"  #{one} Counter: idle on 0.5 of GPU 0\n" in out
    assert f"  #{other} Counter sum: idle on 0.5 of GPU 0\n" in out


def test_simulated_devices_that_sessions_share_are_shown(
    machine, capsys, start, tmp_path, monkeypatch
):
    machine()
    monkeypatch.setenv("GPUNB_LEDGER_DIR", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir(mode=0o700)
    gate = Gate(tmp_path)
    start(simulate="1xA100:40GiB")
    ref = gpunb.remote(num_gpus=0.6, name="hold")(Gate.enter).remote(gate, 1)
    gate.await_(1)
    assert cli.main(["status"]) == 0
    out = capsys.readouterr().out
    gate.open()
    gpunb.get(ref, timeout=PATIENCE)
    device, lease, *_ = out.splitlines()
    assert device == "GPU 0: simulated A100, 0.4 free"
    assert lease.startswith(f"  0.6  pid {os.getpid()}  ")
    assert "in the books only" not in out
    assert "  hold  " in lease


def test_real_devices_that_are_hidden_here_are_not_called_a_sessions_own():
    device = {"id": 0, "key": "GPU-1", "logical": False}
    (kernel,) = cli_machine._kernels([], {7: {"session": {"pid": 7}, "devices": [device]}})
    assert kernel["private"] == []


def test_status_works_without_a_usable_folder(machine, capsys):
    machine()
    runtime_dir.runtime_folder().chmod(0o755)
    assert cli.main(["status"]) == 0
    assert "may be entered by others" in capsys.readouterr().out


def test_a_time_of_another_day_has_its_date():
    each = {"since": 86_400.0}
    assert status._since(each).startswith("since 1970-01-0")
    assert status._since({"since": None}) == ""


# -------------------------------------------------------------------------------------- release


def test_release_ends_an_idle_worker(capsys, start):
    start(simulate="1xA100:40GiB")
    warm = gpunb.remote(num_gpus=1, max_calls=0)(os.getpid)
    pid = gpunb.get(warm.remote())
    assert cli.main(["release", str(os.getpid())]) == 0
    assert capsys.readouterr().out == f"process {os.getpid()} lets go of 1 idle worker\n"
    assert gpunb.get(warm.remote(), timeout=PATIENCE) != pid
    gpunb.shutdown()


def test_release_names_a_session_without_idle_workers(capsys, start):
    start(simulate="1xA100:40GiB")
    gpunb.status()  # by then it can be reached
    assert cli.main(["release", str(os.getpid()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["released"] == []
    assert cli.main(["release", str(os.getpid())]) == 0
    assert "holds nothing that is idle" in capsys.readouterr().out


def test_release_all_ends_the_session(capsys, start, monkeypatch):
    monkeypatch.setattr(backend, "NOTICES", [])  # which is for a session that begins by itself
    start(simulate="1xA100:40GiB")
    gpunb.status()  # by then it can be reached
    assert cli.main(["release", "--all", str(os.getpid())]) == 0
    assert "ends, and lets go of all" in capsys.readouterr().out
    eventually(lambda: backend.NOTICES, "it has ended")
    assert not gpunb.is_initialized()


def test_release_of_a_wrong_pid_lists_the_sessions(capsys, start):
    assert cli.main(["release", "1"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("gpunb release: process 1 has no session of gpunb. None of your")
    start(simulate="1xA100:40GiB")
    gpunb.status()  # by then it can be reached
    assert cli.main(["release", "1"]) == 1
    assert f"Your kernels with a session: {os.getpid()}" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- doctor


def quick(monkeypatch, *checks):
    monkeypatch.setattr(doctor, "CHECKS", checks)


def test_doctor_succeeds_with_a_gpu(machine, capsys, monkeypatch):
    machine(CARD)
    quick(monkeypatch, system.python, system.processes, hardware.gpus, sessions.leases)
    assert cli.main(["doctor"]) == 0
    assert "problem" not in capsys.readouterr().out


def test_doctor_says_what_is_missing_and_what_to_do(machine, capsys):
    machine(notes=("no NVIDIA driver library found",))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem  GPUs: 0 found; no NVIDIA driver library found" in out
    assert "-> " in out
    assert "init(num_gpus=2)" in out


def test_doctor_prints_json(machine, capsys):
    machine()
    assert cli.main(["doctor", "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert not checks["GPUs"]["ok"]
    assert checks["GPUs"]["cure"]
    assert checks["python"]["ok"]
    assert {"leases", "sessions", "Jupyter", "frameworks", "preload"} <= checks.keys()


def test_doctor_names_a_python_without_the_calls_it_needs(machine, capsys, monkeypatch):
    machine(CARD)
    monkeypatch.delattr("os.eventfd")
    assert cli.main(["doctor"]) == 1
    assert "os.eventfd" in capsys.readouterr().out


def test_a_failing_check_is_a_finding_and_the_others_run():
    def broken(place):
        raise RuntimeError("strange machine")

    first, second = doctor.examine(Place(), [broken, system.python])
    assert (first.level, first.name) == ("note", "broken")
    assert "strange machine" in first.text
    assert second.name == "python"


@pytest.fixture
def place(tmp_path):
    """Makes a machine of files, variables and devices."""

    def make(*devices, files=None, **environ):
        root = tmp_path / "root"
        for name, text in (files or {}).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        root.mkdir(exist_ok=True)
        return Place(root, environ, Detection(devices=devices))

    return make


def only(check, place):
    (finding,) = check(place)
    return finding


@pytest.mark.parametrize(
    ("files", "environ", "message", "cure"),
    [
        ({".dockerenv": ""}, {}, "Docker container", "--gpus all"),
        ({"run/.containerenv": ""}, {}, "Podman", "--device nvidia.com/gpu=all"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes", "nvidia.com/gpu: 1"),
        ({"proc/1/cgroup": "0::/kubepods/pod1"}, {}, "Kubernetes", "nvidia.com/gpu: 1"),
        ({}, {"APPTAINER_CONTAINER": "x.sif"}, "Apptainer", "--nv"),
        ({"proc/1/cgroup": "1:cpu:/docker/abc"}, {}, "container", "--gpus all"),
    ],
)
def test_a_container_without_gpus(place, files, environ, message, cure):
    finding = only(system.container, place(files=files, **environ))
    assert finding.level == "note"
    assert message in finding.text
    assert cure in finding.cure
    assert only(system.container, place(CARD, files=files, **environ)).level == "ok"


def test_a_machine_that_is_no_container_is_not_called_one(place):
    assert list(system.container(place())) == []
    assert list(system.wsl(place(files={"proc/version": "Linux version 6"}))) == []


def test_doctor_checks_wsl(place):
    files = {"proc/version": "Linux version 5.15.1-microsoft-standard-WSL2"}
    assert only(system.wsl, place(files=files)).level == "problem"
    files["dev/dxg"] = ""
    assert "install NVIDIA's driver on Windows" in only(system.wsl, place(files=files)).cure
    files["usr/lib/wsl/lib/libnvidia-ml.so.1"] = ""
    assert only(system.wsl, place(files=files)).level == "ok"


@pytest.mark.parametrize(
    ("files", "message", "level"),
    [
        ({}, "none by a cgroup", "ok"),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, "1.5 of the", "ok"),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, "0.5 of the", "note"),
        ({"sys/fs/cgroup/memory.max": str(8 * GiB)}, "8 GiB", "ok"),
        ({"sys/fs/cgroup/memory.max": str(GiB)}, "1 GiB", "note"),
        ({"sys/fs/cgroup/memory.max": "max"}, "none by a cgroup", "ok"),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GiB)}, "4 GiB", "ok"),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, "none", "ok"),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/memory.max": str(3 * GiB),
                "sys/fs/cgroup/user/job/memory.max": "max",
            },
            "3 GiB",
            "ok",
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            "none",
            "ok",
        ),
    ],
)
def test_doctor_shows_the_limits_of_a_cgroup(place, files, message, level):
    finding = only(system.limits, place(files=files))
    assert message in finding.text
    assert finding.level == level


@pytest.mark.parametrize(
    ("value", "level"), [("fork", "ok"), ("spawn", "note"), ("thread", "problem")]
)
def test_doctor_checks_the_start_method(place, value, level):
    assert only(system.start_method, place(GPUNB_START_METHOD=value)).level == level


def test_doctor_names_variables_that_hide_devices(place):
    assert only(hardware.visibility, place()).text == "no variable hides any"
    assert only(hardware.visibility, place(CUDA_VISIBLE_DEVICES="1,3")).level == "ok"
    hidden = only(hardware.visibility, place(CUDA_VISIBLE_DEVICES=""))
    assert (hidden.level, hidden.cure) == ("problem", "unset CUDA_VISIBLE_DEVICES")
    found = list(hardware.visibility(place(CUDA_DEVICE_ORDER="FASTEST_FIRST")))
    assert found[-1].cure == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"


def test_doctor_names_device_files_without_permission(place, monkeypatch):
    assert list(hardware.permissions(place())) == []
    there = place(files={"dev/kfd": "", "dev/dri/renderD128": "", "dev/nvidia0": ""})
    assert only(hardware.permissions, there).level == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: "renderD128" not in str(path))
    monkeypatch.setattr(hardware, "_group", lambda path: "render")
    finding = only(hardware.permissions, there)
    assert finding.text == "you may not open /dev/dri/renderD128"
    assert finding.cure == "sudo usermod -aG render $USER, and log in again"


def test_doctor_names_a_driver_whose_library_fails(place, monkeypatch):
    files = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  550.54.15  x"}
    monkeypatch.setattr(hardware, "_nvml", lambda: (None, "Driver/library version mismatch"))
    finding = only(hardware.driver, place(files=files))
    assert finding.level == "problem"
    assert "550.54.15" in finding.text
    assert "restart" in finding.cure
    monkeypatch.setattr(hardware, "_nvml", lambda: ("550.54.15", ""))
    assert only(hardware.driver, place(files=files)).text == "550.54.15, NVML answers"


def test_doctor_names_a_card_without_a_driver(place, monkeypatch):
    monkeypatch.setattr(hardware, "_nvml", lambda: (None, "no library"))
    assert list(hardware.driver(place())) == []
    card = {"sys/bus/pci/devices/0/vendor": "0x10de", "sys/bus/pci/devices/0/class": "0x030200"}
    assert "modprobe" in only(hardware.driver, place(files=card)).cure


def test_doctor_names_a_full_device(place, machine):
    machine(CARD, usage={"GPU-1": Usage(39 * GiB, 40 * GiB)})
    assert "97 % of its memory" in only(hardware.outsiders, place(CARD)).text


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder for packages that are imported by nobody."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(str(path))
    for name in frameworks.KNOWN:  # another test may have imported the real one
        monkeypatch.delitem(sys.modules, name, raising=False)
    return path


def package(site, name, files):
    (site / name).mkdir()
    for file, text in {"__init__.py": "raise ImportError('not to be imported')", **files}.items():
        (site / name / file).write_text(text)


@pytest.mark.parametrize(
    ("text", "works"),
    [
        ("__version__ = '2.5.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None", False),
        ("cuda: Optional[str] = '12.4'\nhip: Optional[str] = None", True),
        ("cuda = None\nhip: Optional[str] = '6.2'", True),
        ("__version__ = '9'", True),
    ],
)
def test_a_torch_for_cpus_only_is_found_without_importing_it(place, site, text, works):
    package(site, "torch", {"version.py": text})
    found = list(frameworks.frameworks(place(CARD)))
    assert ("torch" in [each.name for each in found]) != works
    if not works:
        assert found[-1].level == "problem"
        assert list(frameworks.frameworks(place()))[-1].level == "note"
    assert "preload=['torch']" in only(frameworks.preload, place()).text


def test_a_jax_without_its_plug_in(place, site):
    package(site, "jax", {})
    assert "no plug-in" in list(frameworks.frameworks(place(CARD)))[-1].text
    (site / "jax_cuda12_plugin-1.0.dist-info").mkdir()
    (site / "jax_cuda12_plugin-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: jax-cuda12-plugin\nVersion: 1.0\n"
    )
    assert "jax" not in [each.name for each in frameworks.frameworks(place(CARD))]


def test_doctor_names_the_leftovers_of_sessions(place):
    sockets = runtime_dir.runtime_folder() / runtime_dir.KERNELS
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(sockets / "424242.sock"))
    printed = [each.text for each in sessions.runtime(place())]
    assert printed[0].startswith("none of yours run now")
    assert "1 socket of sessions that have ended: 424242; removed" in printed[1]
    assert not (sockets / "424242.sock").exists()


def test_many_sockets_that_sessions_left_are_counted(place):
    sockets = runtime_dir.runtime_folder() / runtime_dir.KERNELS
    for each in range(100):
        (sockets / f"{4242000 + each}.sock").touch()
    printed = [each.text for each in sessions.runtime(place())][1]
    first = "4242000, 4242001, 4242002, 4242003, 4242004"
    assert printed == f"100 sockets of sessions that have ended: {first} and 95 more; removed"


def test_doctor_names_processes_whose_kernel_is_gone(place):
    stat = "(name) S {} 0"
    files = {
        "proc/1/comm": "systemd",
        "proc/7/comm": "gpunb-zygote",
        "proc/7/stat": f"7 {stat.format(1)}",
        "proc/8/comm": "gpunb-worker",
        "proc/8/stat": f"8 {stat.format(7)}",
        "proc/9/comm": "python",
        "proc/9/stat": f"9 {stat.format(1)}",
    }
    assert only(sessions.orphans, place(files=files)).cure == "kill -9 7"
    files["proc/1/comm"] = "python3"
    assert only(sessions.orphans, place(files=files)).level == "ok"


def test_doctor_names_leases_of_killed_sessions(place, monkeypatch, tmp_path):
    assert only(sessions.leases, place()).text.startswith("0 held by 0 kernels")
    text = (
        "import os, sys; from pathlib import Path; from gpunb.leases.ledger import Ledger\n"
        "Ledger(Path(sys.argv[1]), ['GPU-0'], {}).take({'GPU-0': 1}, lasting=False, job='')\n"
        "os._exit(1)"
    )
    path = runtime_dir.runtime_folder() / runtime_dir.LEASES
    subprocess.run([sys.executable, "-c", text, str(path)], check=False)
    assert "1 of sessions that were killed" in list(sessions.leases(place()))[1].text


def test_doctor_checks_jupyter(place, monkeypatch, tmp_path):
    config, data = tmp_path / "config", tmp_path / "data"
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(config))
    monkeypatch.setenv("JUPYTER_PATH", str(data))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "ipykernel" in only(jupyter.packages, place()).text
    where = config / "jupyter_server_config.d"
    where.mkdir(parents=True)
    printed = {"ServerApp": {"jpserver_extensions": {"gpunb.server": False}}}
    (where / "gpunb.json").write_text(json.dumps(printed))
    assert next(jupyter.extensions(place())).text == "disabled"
    printed["ServerApp"]["jpserver_extensions"]["gpunb.server"] = True
    (where / "gpunb.json").write_text(json.dumps(printed))
    built, installed = jupyter._missing(ROOT), jupyter._missing(tmp_path)
    assert f"`make labextension` in {ROOT}" in built.cure
    assert "Node 20" in built.cure
    assert installed.cure == "pip install --force-reinstall gpunb"
    with monkeypatch.context() as patch:
        patch.setattr("jupyter_core.paths.jupyter_path", lambda *names: [str(data)])
        assert list(jupyter.extensions(place()))[1] == built
    lab = data / "labextensions" / "gpunb"
    lab.mkdir(parents=True)
    (lab / "package.json").write_text('{"version": "1.2.3"}')
    server, extension = jupyter.extensions(place())
    assert server.level == extension.level == "ok"
    assert "1.2.3" in extension.text
    page = config / "labconfig" / "page_config.json"
    page.parent.mkdir()
    for disabled in ({"gpunb": True}, ["gpunb"]):
        page.write_text(json.dumps({"disabledExtensions": disabled}))
        assert "jupyter labextension enable gpunb" in list(jupyter.extensions(place()))[1].cure
    page.write_text(json.dumps({"disabledExtensions": {"gpunb": False}}))
    assert list(jupyter.extensions(place()))[1].level == "ok"


@pytest.mark.parametrize(
    ("versions", "reported"),
    [
        ({"jupyterlab": "3.6.8", "notebook": "6.5.7"}, ["jupyterlab", "notebook"]),
        ({"jupyterlab": "4.0.0", "notebook": "7.0.0"}, []),
    ],
)
def test_doctor_names_a_jupyterlab_without_the_panel(place, monkeypatch, versions, reported):
    versions = {"ipykernel": "7.0.0", "ipywidgets": "8.0.0", **versions}
    monkeypatch.setattr(jupyter, "_version", versions.get)
    problems = [each for each in jupyter.packages(place()) if each.level == "problem"]
    assert [each.name for each in problems] == reported
    assert all("too old" in each.text for each in problems)


@pytest.mark.parametrize(
    ("version", "reported"),
    [("6.29.5", True), ("7.3.0", True), ("7.4.0", False), ("8.0.0a1", False)],
)
def test_doctor_names_an_old_ipykernel(place, monkeypatch, version, reported):
    monkeypatch.setattr(jupyter, "_version", {"ipykernel": version, "ipywidgets": "8.1"}.get)
    notes = [each for each in jupyter.packages(place()) if each.level == "note"]
    assert [each.cure for each in notes] == ["pip install 'ipykernel>=7.4'"] * reported


def test_doctor_looks_for_the_extension_of_the_package():
    root = Path(__file__).parent.parent / "labextension"
    assert json.loads((root / "package.json").read_text())["name"] == jupyter.LAB_EXTENSION
    config = json.loads((root / "jupyter-config" / "gpunb.json").read_text())
    assert jupyter.EXTENSION in config["ServerApp"]["jpserver_extensions"]
