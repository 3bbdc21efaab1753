"""The command line."""

import json

import pytest

from gpunb import accelerators, cli
from gpunb.accelerators import Detection
from gpunb.core.resources import Device

CARD = Device("GPU-1", 0, "NVIDIA A100-SXM4-40GB", "A100", 40 * 2**30, "nvidia")


@pytest.fixture
def machine(monkeypatch):
    """Pretend that this machine has these devices."""

    def pretend(*devices, notes=()):
        found = Detection(devices=devices, notes=notes)
        monkeypatch.setattr(accelerators, "detect", lambda: found)

    return pretend


def test_devices_are_listed(machine, capsys):
    machine(CARD, notes=("one thing to know",))
    assert cli.main(["devices"]) == 0
    out = capsys.readouterr().out
    assert "GPU 0: NVIDIA A100-SXM4-40GB, A100, 40 GiB, GPU-1" in out
    assert "note: one thing to know" in out


def test_devices_for_programs(machine, capsys):
    machine(CARD)
    assert cli.main(["devices", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["devices"][0]["type"] == "A100"


def test_no_device_is_said(machine, capsys):
    machine(notes=("no driver",))
    assert cli.main(["devices"]) == 0
    assert capsys.readouterr().out == "no GPUs\nnote: no driver\n"


def test_doctor_is_content_with_a_gpu(machine, capsys):
    machine(CARD)
    assert cli.main(["doctor"]) == 0
    assert "problem" not in capsys.readouterr().out


def test_doctor_says_what_is_missing_and_what_to_do(machine, capsys):
    machine(notes=("no NVIDIA driver library found",))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "problem  GPUs: 0 found; no NVIDIA driver library found" in out
    assert "init(num_gpus=2)" in out


def test_doctor_for_programs(machine, capsys):
    machine()
    assert cli.main(["doctor", "--json"]) == 1
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert not checks["GPUs"]["ok"]
    assert checks["python"]["ok"]


def test_doctor_names_a_python_without_the_calls_it_needs(machine, capsys, monkeypatch):
    machine(CARD)
    monkeypatch.delattr("os.memfd_create")
    assert cli.main(["doctor"]) == 1
    assert "os.memfd_create" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["dance"])
    assert stopped.value.code == 2
    assert "dance" in capsys.readouterr().err
