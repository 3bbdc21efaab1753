"""Looking at files, and asking tools that fail in any way."""

import os
import subprocess

import pytest

from gpunb.accelerators import probing
from gpunb.accelerators.probing import ProbeError
from tests.waiting import eventually


def tool(machine, name, script):
    path = machine.tools / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_files_of_the_system(machine):
    machine.add("file /sys/class/thing/thing10/size", "  0x20\n")
    machine.add("file /sys/class/thing/thing9/size", "nine")
    assert probing.listed("/sys/class/thing/*/size") == [
        "/sys/class/thing/thing9/size",
        "/sys/class/thing/thing10/size",
    ]
    assert probing.read("/sys/class/thing/thing10/size") == "0x20"
    assert probing.read("/sys/class/thing") is None
    assert probing.read("/sys/class/none") is None


@pytest.mark.parametrize(
    ("text", "found"), [("17", 17), ("0x1f", 31), ("", None), (None, None), ("N/A", None)]
)
def test_numbers(text, found):
    assert probing.number(text) == found


def test_devices_on_the_bus(machine):
    for address, vendor, device, kind in (
        ("0000:c1:00.0", "0x1002", "0x74a1", "0x120000"),
        ("0000:05:00.0", "0x1002", "0x74a1", "0x120000"),
        ("0000:06:00.0", "0x1002", "0x1111", "0x040300"),
        ("0000:07:00.0", "0x8086", "0x74a1", "0x120000"),
    ):
        place = f"file /sys/bus/pci/devices/{address}"
        machine.add(f"{place}/vendor", vendor)
        machine.add(f"{place}/device", device)
        machine.add(f"{place}/class", kind)
    machine.add("link /sys/bus/pci/devices/0000:05:00.0/driver -> /sys/bus/pci/drivers/amdgpu")
    found = probing.pci("0x1002", kinds=("0x12",))
    assert [(each.address, each.driver) for each in found] == [
        ("0000:05:00.0", "amdgpu"),
        ("0000:c1:00.0", None),
    ]
    assert len(probing.pci("0x1002")) == 3
    assert [each.device for each in probing.pci("0x1002", devices=["0x1111"])] == ["0x1111"]


def test_a_tool_that_answers(machine):
    tool(machine, "smi", 'echo "$1-$2"')
    assert probing.has("smi")
    assert probing.ask("smi", "a", "b") == "a-b\n"
    tool(machine, "smi", 'echo "[1, 2]"; echo warning >&2')
    assert probing.ask_json("smi") == [1, 2]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 3", "smi failed with status 3: it said nothing"),
        ("echo first >&2; echo 'no device' >&2; exit 1", "smi failed with status 1: no device"),
        ("echo usage; exit 2", "smi failed with status 2: usage"),
        ("kill -KILL $$", "smi crashed (SIGKILL)"),
    ],
)
def test_a_tool_that_fails(machine, script, message):
    tool(machine, "smi", script)
    with pytest.raises(ProbeError) as raised:
        probing.ask("smi")
    assert str(raised.value) == message


def test_a_tool_that_is_missing_or_cannot_start(machine):
    with pytest.raises(ProbeError, match="smi is not installed"):
        probing.ask("smi")
    (machine.tools / "smi").write_text("#!/no/such/interpreter\n")
    (machine.tools / "smi").chmod(0o755)
    with pytest.raises(ProbeError, match="smi does not start: No such file"):
        probing.ask("smi")


def test_a_tool_that_prints_no_json(machine):
    tool(machine, "smi", "echo hello")
    with pytest.raises(ProbeError, match="smi --json printed no JSON"):
        probing.ask_json("smi", "--json")


def test_a_tool_that_hangs_is_ended_with_its_children(machine, monkeypatch):
    pids = machine.tools / "pids"
    communicate = subprocess.Popen.communicate

    def hangs():
        return pids.exists() and pids.read_text().count("\n") == 2

    def begins(process, **how):
        """Its time begins when it hangs: a busy machine may not even have started it before."""
        eventually(hangs, "the tool and its child run")
        return communicate(process, **how)

    monkeypatch.setattr(subprocess.Popen, "communicate", begins)
    tool(machine, "smi", f"/bin/sleep 1000 & echo $! > {pids}; echo $$ >> {pids}; wait")
    with pytest.raises(ProbeError, match=r"smi did not answer within 0\.5 s"):
        probing.ask("smi", patience=0.5)
    for pid in pids.read_text().split():
        eventually(lambda pid=pid: gone(int(pid)))


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def test_a_library_that_answers(machine):
    machine.add("python vendor", "print('a banner')\ndef count():\n    return 2")
    code = "import vendor\nprint('more')\nfound = [vendor.count()]"
    assert probing.ask_python("vendor", code) == [2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('no driver')", "vendor failed with status 1: RuntimeError: no driver"),
        ("import os; os._exit(0)", "vendor did not answer"),
        ("import os; os.abort()", "vendor crashed (SIGABRT)"),
    ],
)
def test_a_library_that_does_not(machine, body, message):
    machine.add("python vendor", body)
    with pytest.raises(ProbeError) as raised:
        probing.ask_python("vendor", "import vendor\nfound = 1")
    assert str(raised.value) == message
