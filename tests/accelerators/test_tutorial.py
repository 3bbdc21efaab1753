"""The code of docs/add-an-accelerator.md does what the page says."""

import json
import re
import sys
from pathlib import Path

import pytest

import gpunb
from gpunb.accelerators import Usage, ailing, detect, pin_environment, register
from gpunb.accelerators.testing import AcceleratorSuite

PAGE = Path(__file__).parents[2] / "docs" / "add-an-accelerator.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
TOML = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)

pytestmark = pytest.mark.usefixtures("plugins")

DEVICES = [
    {
        "index": at,
        "uuid": f"nimbus-{letter}",
        "name": "Nimbus N2",
        "model": "N2",
        "memory": 2**35,
        "used": 2**30 * at,
        "busy": 50,
    }
    for at, letter in enumerate("abcd")
]


@pytest.fixture
def four(machine):
    """A machine with four Nimbus devices."""
    for at in range(4):
        machine.add(f"file /dev/nimbus{at}")
    machine.add("run nimbus-smi --json", json.dumps(DEVICES))


@pytest.fixture
def nimbus(tmp_path, monkeypatch):
    """The page's module, as its reader saves it."""
    (tmp_path / "nimbus_gpunb.py").write_text(CODE[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nimbus_gpunb", raising=False)
    import nimbus_gpunb

    yield nimbus_gpunb.Nimbus
    sys.modules.pop("nimbus_gpunb", None)


def test_the_plug_in_of_the_page_is_short():
    assert len(CODE) == 3
    assert len(CODE[0].splitlines()) < 100


def test_the_devices_of_the_page(nimbus, four, machine):
    machine.add("file /sys/class/nimbus/nimbus1/fault", "link down")
    machine.add("file /sys/class/nimbus/nimbus1/uuid", "nimbus-b")
    register(nimbus)
    found = detect({})
    assert [device.id for device in found.devices] == [0, 1, 2, 3]
    assert found.vendors == ("nimbus",)
    first = found.devices[0]
    assert (first.key, first.type, first.memory) == ("nimbus-a", "N2", 2**35)
    assert (first.resource, first.whole, first.counts) == ("NIMBUS", True, (1, 2, 4))
    assert nimbus().usage([found.devices[1]])["nimbus-b"] == Usage(2**30, 2**35, 50)
    assert ailing(found.devices) == {"nimbus-b": "the driver tells of a fault: link down"}
    pinned = pin_environment(found.devices[1:3], found.vendors)
    assert pinned["NIMBUS_VISIBLE_DEVICES"] == "1,2"
    assert pin_environment([], found.vendors)["NIMBUS_VISIBLE_DEVICES"] == "none"


def test_the_entry_point_of_the_page(nimbus, four, plugins):
    name, value = re.search(r'(\w+) = "(.+)"', TOML[0]).groups()
    plugins.add(name, value)
    assert [device.vendor for device in detect({}).devices] == ["nimbus"] * 4


def test_the_program_of_the_page(nimbus, four):
    try:
        exec(compile(CODE[1], str(PAGE), "exec"), {"__name__": "program"})
        assert gpunb.cluster_resources()["NIMBUS"] == 4
        assert gpunb.cluster_resources()["accelerator_type:N2"] == 4

        @gpunb.remote(resources={"NIMBUS": 3})
        def never():
            pass

        with pytest.raises(gpunb.exceptions.InfeasibleRequestError, match="one of 1, 2, 4"):
            never.remote()
    finally:
        gpunb.shutdown()


SUITE = [name for name in dir(AcceleratorSuite) if name.startswith("test_")]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("test", SUITE)
def test_the_suite_of_the_page(test, there, nimbus, machine, request):
    if there:
        request.getfixturevalue("four")
    scope = {}
    exec(compile(CODE[2], str(PAGE), "exec"), scope)
    getattr(scope["TestNimbus"](), test)()
