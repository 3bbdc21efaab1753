"""The wheel: what is in it, and what it takes to build and to install it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import gpunb
from gpunb import server
from tests.sessions import ROOT

pytest.importorskip("hatchling")

LOCK = ROOT / "labextension/package-lock.json"
HOSTS = re.compile(r"https?://[^/\"\s]*(npm|yarn|pypi|registry|pythonhosted)")


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """The build hook's module."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves nothing to be found on the path but programs that print a text."""

    def only(**programs: str) -> None:
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\necho {text}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return only


def made(hook: ModuleType, root: Path, target: str = "wheel", version: str = "standard") -> Any:
    """What the hook adds to a build of that kind."""

    printed: list[str] = []
    app = SimpleNamespace(display_info=printed.append)
    data: dict[str, Any] = {"shared_data": {}, "sbom_files": []}
    each = hook.Labextension(str(root), {}, None, None, str(root), target, app)
    each.initialize(version, data)
    return SimpleNamespace(shared=data["shared_data"], bills=data["sbom_files"], printed=printed)


def test_without_node_the_wheel_cannot_be_built_and_that_is_said(
    hook: ModuleType, path: Callable[..., None], tmp_path: Path
) -> None:
    path()
    with pytest.raises(RuntimeError, match=r"there is no Node here.*Install Node 20"):
        made(hook, tmp_path)


def test_an_old_node_is_named(hook: ModuleType, path: Callable[..., None], tmp_path: Path) -> None:
    path(node="v16.20.2", npm="8")
    with pytest.raises(RuntimeError, match=r"Node is v16\.20\.2 here and not 20"):
        made(hook, tmp_path)


def test_an_editable_install_needs_no_node(
    hook: ModuleType, path: Callable[..., None], tmp_path: Path
) -> None:
    path()
    result = made(hook, tmp_path, version="editable")
    assert result.shared == {}
    assert "make labextension" in result.printed[0]


def test_a_source_distribution_needs_no_node(
    hook: ModuleType, path: Callable[..., None], tmp_path: Path
) -> None:
    path()
    (tmp_path / "PKG-INFO").touch()
    with pytest.raises(RuntimeError, match="lacks gpunb/labextension"):
        made(hook, tmp_path)
    (tmp_path / hook.LICENCES).parent.mkdir(parents=True)
    (tmp_path / hook.LICENCES).write_text('{"packages": []}')
    (tmp_path / hook.BUILT / "package.json").touch()
    (tmp_path / hook.SOURCES).mkdir()
    shutil.copy(LOCK, tmp_path / hook.SOURCES)
    result = made(hook, tmp_path)
    assert result.shared[hook.BUILT] == "share/jupyter/labextensions/gpunb"
    assert [(tmp_path / each).exists() for each in result.bills] == [True]


def test_jupyter_finds_what_the_wheel_brings() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    shared = settings["targets"]["wheel"]["shared-data"]
    for source in shared:
        assert (ROOT / source).is_file()
    assert gpunb._jupyter_labextension_paths() == [{"src": "labextension", "dest": "gpunb"}]
    assert server._jupyter_server_extension_points() == [{"module": "gpunb.server"}]


def test_the_lock_names_no_registry() -> None:
    """So that it holds wherever packages come from; npm fills it in."""
    text = LOCK.read_text()
    assert '"resolved"' not in text
    assert not HOSTS.search(text)


def test_the_versions_agree() -> None:
    package = json.loads((ROOT / "labextension" / "package.json").read_text())
    assert package["version"] == gpunb.__version__
    lock = json.loads(LOCK.read_text())
    assert lock["version"] == lock["packages"][""]["version"] == gpunb.__version__
    latest = re.search(r"^## \[(.+?)\] - (unreleased|20\d\d-\d\d-\d\d)$", changes(), re.MULTILINE)
    assert latest is not None
    assert latest[1] == gpunb.__version__


def test_the_changelog_keeps_its_form() -> None:
    kinds = re.findall(r"^### (.+)$", changes(), re.MULTILINE)
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def changes() -> str:
    return (ROOT / "CHANGELOG.md").read_text()


FOUND = {"name": "@scope/part", "versionInfo": "1.2.3", "licenseId": "MIT"}
LOCKED = {"version": "1.2.3", "license": "MIT", "integrity": "sha512-AAEC"}


def bill_of(hook: ModuleType, found: dict[str, Any], locked: dict[str, Any]) -> Any:
    own = {"version": "9", "license": "BSD-3-Clause"}
    lock = {"packages": {"": own, "node_modules/a/node_modules/@scope/part": locked}}
    return hook.bill({"packages": [found]}, lock)


def test_the_bill_of_materials_says_what_is_bundled(hook: ModuleType) -> None:
    bill = bill_of(hook, FOUND, LOCKED)
    (part,) = bill["components"]
    assert (part["group"], part["name"], part["version"]) == ("@scope", "part", "1.2.3")
    assert part["purl"] == "pkg:npm/%40scope/part@1.2.3"
    assert part["licenses"] == [{"license": {"id": "MIT"}}]
    assert part["hashes"] == [{"alg": "SHA-512", "content": "000102"}]
    assert bill["dependencies"][0] == {"ref": "pkg:npm/gpunb@9", "dependsOn": [part["bom-ref"]]}


@pytest.mark.parametrize(
    ("found", "locked", "message"),
    [
        (
            {"versionInfo": "1.2.4"},
            {},
            r"part 1\.2\.4 is in the extension, but not in package-lock",
        ),
        ({"name": "part"}, {}, r"part 1\.2\.3 is in the extension, but not in package-lock"),
        ({"licenseId": ""}, {"license": ""}, r"with the licence ''"),
        ({}, {"license": "GPL-3.0"}, r"with the licence 'MIT', and in .* 'GPL-3\.0'"),
    ],
)
def test_what_is_not_known_of_it_stops_the_build(
    hook: ModuleType, found: dict[str, Any], locked: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        bill_of(hook, FOUND | found, LOCKED | locked)


def test_all_that_is_bundled_is_in_the_bill(hook: ModuleType) -> None:
    """What the sources import comes from JupyterLab itself, so the build's own list is all."""
    built = ROOT / hook.BUILT
    if not (built / "package.json").exists():
        pytest.skip("`make labextension` builds it")
    (entry,) = (built / "static").glob("remoteEntry.*.js")
    shared = set(re.findall(r'shareKey:"([^"]+)",import:null', entry.read_text()))
    compiled = [each.read_text() for each in (ROOT / "labextension/lib").glob("*.js")]
    imported = set(re.findall(r"""\bfrom ['"]([^.'"][^'"]*)['"]""", "\n".join(compiled)))
    assert "@jupyterlab/application" in imported
    assert imported <= shared, "what of these is bundled?"

    found = json.loads((ROOT / hook.LICENCES).read_text())
    assert all(each["extractedText"] for each in found["packages"])
    bill = hook.bill(found, json.loads(LOCK.read_text()))
    names = {
        "/".join(filter(None, [each.get("group"), each["name"]])) for each in bill["components"]
    }
    assert names == {"@rspack/core", "css-loader", "style-loader"}
    assert not HOSTS.search(json.dumps(bill) + json.dumps(found))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_installed_wheel_brings_both_extensions_and_needs_no_node(tmp_path: Path) -> None:
    if shutil.which("npm") is None or not (ROOT / "labextension/node_modules").exists():
        pytest.skip("the wheel is built with Node 20 and what `make labextension` installs")
    pytest.importorskip("jupyterlab")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)])
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith("share/jupyter/labextensions/gpunb/install.json") for name in names)
    assert not any(name.startswith("gpunb/labextension/") for name in names), "it is there twice"
    assert not any("node_modules" in name for name in names)
    bills = [name for name in names if ".dist-info/sboms/" in name]
    assert [Path(name).name for name in bills] == ["labextension.cdx.json"]
    (licences,) = (name for name in names if name.endswith("third-party-licenses.json"))
    with zipfile.ZipFile(wheel) as archive:
        parts = json.loads(archive.read(bills[0]))["components"]
        texts = json.loads(archive.read(licences))["packages"]
    assert len(parts) == len(texts) > 0

    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")])
    python = str(tmp_path / "venv/bin/python")
    run([*pip, "--python", python, "install", "-q", "--no-deps", str(wheel)])
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "others.pth").write_text(next(each for each in sys.path if each.endswith("packages")))
    env = {
        "PATH": str(tmp_path / "venv/bin"),
        "HOME": str(tmp_path / "home"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_PATH": str(tmp_path / "venv/share/jupyter"),
    }
    where = run([python, "-c", "import gpunb; print(gpunb.__file__)"], env)
    assert where.startswith(str(site))
    servers = run([python, "-m", "jupyter_server.extension.serverextension", "list"], env)
    assert "gpunb.server enabled" in plain(servers)
    labs = run([python, "-m", "jupyterlab.labextensions", "list"], env)
    assert f"gpunb v{gpunb.__version__} enabled OK (python, gpunb)" in plain(labs)


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """What a program prints, if it does well."""
    done = subprocess.run(
        command,
        env=env,
        cwd="/",
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def plain(text: str) -> str:
    """The text without the colours of a terminal."""
    return re.sub(r" +", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))
