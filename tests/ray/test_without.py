"""What has to hold where Ray is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import gpunb
from gpunb.exceptions import GpunbError

PACKAGE = Path(gpunb.__file__).parent


def test_it_says_how_to_install_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "ray" else find(name, *more),
    )
    with pytest.raises(GpunbError, match=r"pip install 'gpunb\[ray\]'"):
        gpunb.init("ray")
    assert not gpunb.is_initialized()


def test_ray_client_is_refused_before_anything_is_to_be_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = "ray://127.0.0.1:10001"
    with pytest.raises(GpunbError, match=r"on a node of the cluster, and use gpunb\.init\('ray'\)"):
        gpunb.init(address, num_gpus=1)
    monkeypatch.setenv("GPUNB_ADDRESS", address)
    with pytest.raises(GpunbError, match="ray start --address"):
        gpunb.init()
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(GpunbError, match=f"RAY_ADDRESS='{address}'"):
        gpunb.init("ray")
    assert not gpunb.is_initialized()


def test_what_cannot_be_said_with_it_is_named() -> None:
    with pytest.raises(ValueError, match=r"preload=\['torch'\] cannot be said .*ray\.init"):
        gpunb.init("ray", preload=["torch"])
    assert not gpunb.is_initialized()


def test_nothing_outside_its_package_imports_ray() -> None:
    inside = PACKAGE / "ray"
    for path in PACKAGE.rglob("*.py"):
        if inside not in path.parents:
            lines = [line.strip() for line in path.read_text().splitlines()]
            found = [line for line in lines if line.startswith(("import ray", "from ray"))]
            assert not found, f"{path}: {found}"


def test_a_session_of_this_machine_loads_none_of_it() -> None:
    program = (
        "import sys, gpunb\n"
        "with gpunb.init(num_gpus=1, preload=()):\n"
        "    pass\n"
        "print([name for name in sys.modules if name.startswith(('ray', 'gpunb.ray'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_options_for_ray_are_checked_and_left_alone_elsewhere() -> None:
    with pytest.raises(TypeError, match="ray must be a dict"):
        gpunb.remote(ray="SPREAD")(len)

    @gpunb.remote(ray={"scheduling_strategy": "SPREAD"})
    def one() -> int:
        return 1

    with gpunb.init(num_gpus=0, num_cpus=1, preload=()):
        assert gpunb.get(one.remote()) == 1
