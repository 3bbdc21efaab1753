import subprocess
import sys
from types import ModuleType

import pytest

from gpunb.accelerators import Accelerator, find, register, registered, registry
from gpunb.accelerators.nvidia import Nvidia
from gpunb.accelerators.simulated import Logical, Simulated

pytestmark = pytest.mark.usefixtures("plugins")


class Tiny(Accelerator):
    name = "tiny"

    def devices(self):
        return []


@pytest.fixture
def package(monkeypatch):
    """An installed package with these classes in it."""
    module = ModuleType("some_package")
    monkeypatch.setitem(sys.modules, "some_package", module)
    return module


def test_nvidia_is_there_without_being_installed():
    assert registered() == (Nvidia,)
    assert find("nvidia") is Nvidia


def test_devices_without_hardware_are_pinned_but_not_detected():
    assert find("logical") is Logical
    assert find("simulated") is Simulated
    assert not {Logical, Simulated} & set(registered())


def test_registering_is_a_class_decorator():
    assert register(Tiny) is Tiny
    assert registered() == (Nvidia, Tiny)
    assert find("tiny") is Tiny


def test_registering_twice_changes_nothing():
    register(Tiny)
    before = registry.revision()
    register(Tiny)
    register(Nvidia)
    assert registered() == (Nvidia, Tiny)
    assert registry.revision() == before


def test_a_class_defined_again_replaces_the_old_one():
    register(Tiny)
    before = registry.revision()
    again = type("Tiny", (Tiny,), {"__module__": Tiny.__module__, "__qualname__": "Tiny"})
    register(again)
    assert registered() == (Nvidia, again)
    assert registry.revision() > before


@pytest.mark.parametrize("name", ["nvidia", "logical", "simulated"])
def test_a_name_belongs_to_one_plug_in(name):
    mine = type("Mine", (Tiny,), {"name": name})
    with pytest.raises(ValueError, match=rf"the plug-in name '{name}' is taken by gpunb\..*Mine"):
        register(mine)
    assert registered() == (Nvidia,)


@pytest.mark.parametrize("wrong", [None, "nvidia", Tiny(), int])
def test_only_subclasses_are_plug_ins(wrong):
    with pytest.raises(TypeError, match="a subclass of Accelerator"):
        register(wrong)


def test_a_plug_in_without_devices_is_unfinished():
    with pytest.raises(TypeError, match=r"Half does not define \['devices'\]"):
        register(type("Half", (Accelerator,), {"name": "half"}))


@pytest.mark.parametrize("members", [{"name": ""}, {"name": 3}])
def test_a_plug_in_has_a_name(members):
    with pytest.raises(ValueError, match="has no name"):
        register(type("Nameless", (Tiny,), members))


def test_a_plug_in_has_to_be_given_its_name():
    nameless = type("Nameless", (Accelerator,), {"devices": Tiny.devices})
    with pytest.raises(ValueError, match="has no name"):
        register(nameless)


def test_installed_plug_ins_are_loaded_once(plugins, package):
    package.Tiny = Tiny
    plugins.add("tiny", "some_package:Tiny")
    plugins.add("nvidia", "gpunb.accelerators.nvidia:Nvidia")  # gpunb's own
    assert registry.load_installed() == registry.load_installed() == ()
    assert registered() == (Nvidia, Tiny)


def test_they_are_not_loaded_before_they_are_needed(plugins, package):
    package.Tiny = Tiny
    plugins.add("tiny", "some_package:Tiny")
    assert find("nvidia") is Nvidia
    assert registered() == (Nvidia,)
    assert find("tiny") is Tiny


def test_a_broken_package_does_not_stop_the_others(plugins, package):
    package.Tiny = Tiny
    package.Other = type("Other", (Tiny,), {"name": "nvidia"})
    plugins.add("a", "no_such_package:Thing")
    plugins.add("b", "some_package:NoSuchName")
    plugins.add("c", "some_package:Other")
    plugins.add("d", "some_package")
    plugins.add("e", "some_package:Tiny")
    problems = registry.load_installed()
    assert registered() == (Nvidia, Tiny)
    for problem, name, words in zip(
        problems,
        "abcd",
        [
            "ModuleNotFoundError: No module named 'no_such_package'",
            "AttributeError",
            "ValueError: the plug-in name 'nvidia' is taken",
            "TypeError: an accelerator plug-in is a subclass",
        ],
        strict=True,
    ):
        assert problem.startswith(f"the accelerator plug-in {name!r} (")
        assert "update that package or remove it" in problem
        assert words in problem


def test_a_package_that_exits_when_imported_is_broken(plugins, monkeypatch, tmp_path):
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.add("exits", "exits_at_import:Thing")
    (problem,) = registry.load_installed()
    assert "SystemExit: 3" in problem


def test_metadata_that_cannot_be_read_is_a_problem(monkeypatch):
    def broken():
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(registry, "_entry_points", broken)
    (problem,) = registry.load_installed()
    assert "cannot be listed: UnicodeDecodeError" in problem


def test_a_real_installed_package_is_found(plugins, monkeypatch, tmp_path):
    info = tmp_path / "some_gpus-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-gpus\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gpunb.accelerators]\nsome = no_such_module:Some\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_entry_points", plugins.real)
    (problem,) = [each for each in registry.load_installed() if "some-gpus" in each]
    assert problem.startswith(
        "the accelerator plug-in 'some' of some-gpus (no_such_module:Some) does not load: "
    )


# ------------------------------------------------------------------------------- the built-in ones

PROGRAM = """
import sys
import gpunb.accelerators
from gpunb.accelerators import find, registered
loaded = [name for name in sys.modules if name.startswith("gpunb.accelerators.")]
assert not {"gpunb.accelerators.amd", "gpunb.accelerators.tpu", "pynvml"} & {*loaded, *sys.modules}
assert find("tpu").variable == "TPU_VISIBLE_CHIPS"
assert "gpunb.accelerators.amd" not in sys.modules
names = [plugin.name for plugin in registered()]
assert names[:3] == ["nvidia", "amd", "intel"], names
assert len(names) == len(set(names)) == 13
assert registered()[1] is find("amd")
"""


def test_built_in_plug_ins_are_loaded_when_they_are_needed():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


def test_the_name_of_a_built_in_one_is_taken(monkeypatch):
    monkeypatch.setattr(registry, "_built_in", {"amd": "Amd"})
    taken = r"'amd' is taken by gpunb\.accelerators\.amd\.Amd"
    with pytest.raises(ValueError, match=taken):
        register(type("Mine", (Tiny,), {"name": "amd"}))
