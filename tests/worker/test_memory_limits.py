"""A share as limits of the frameworks, which are stand-ins here, each in an interpreter of its own.

What PyTorch itself makes of it needs a device; that its import is not disturbed is tested where it
is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import needs
from tests.sessions import ROOT

TORCH = """
    from . import cuda

    class OutOfMemoryError(RuntimeError):
        pass
"""
CUDA = """
    _queued_calls = []
    fractions, contexts = {}, 0

    def is_initialized():
        return contexts > 0

    def init():
        global contexts
        contexts += 1
        for call, _ in _queued_calls:
            call()

    def device_count():
        return 2

    def set_per_process_memory_fraction(fraction, device):
        assert contexts, "a context would be made"
        fractions[device] = fraction
"""


class Frameworks:
    """Packages of stand-ins, and scripts that run where those are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, **modules: str) -> None:
        package = self.folder / name
        package.mkdir()
        for module, text in modules.items():
            (package / f"{module}.py").write_text(textwrap.dedent(text))

    def torch(self, version: str = "2.9.1+cu128", cuda: str | None = "12.8") -> None:
        text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
        self.add("torch", __init__=TORCH, cuda=CUDA, version=text)

    def run(self, text: str, **environment: str) -> dict[str, object]:
        """What the script leaves in `said`, with a share of a quarter of 40 GiB."""
        head = """
            import json, os, sys
            from gpunb.worker.limits import memory
            share = memory.Caps(0.2375, 10200547328)
            said = {}
        """
        tail = "print(json.dumps(said))"
        script = "\n".join(textwrap.dedent(each) for each in (head, text, tail))
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTORCH", "XLA", "CUPY", "TF_"))
        }
        path = f"{self.folder}:{ROOT}"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script],
            env={**variables, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not done.returncode, done.stderr
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return {**found, "stderr": done.stderr}


@pytest.fixture
def frameworks(tmp_path: Path) -> Frameworks:
    return Frameworks(tmp_path)


NAMES = """
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUPY_GPU_MEMORY_LIMIT",
             "TF_FORCE_GPU_ALLOW_GROWTH", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    said["environ"] = {name: os.environ[name] for name in names if name in os.environ}
"""
INSTALL = "memory.install(share)\n"
IMPORTED = """
    import torch
    before = torch.cuda.contexts
    torch.cuda.init()
    said["before"], said["fractions"] = before, torch.cuda.fractions
"""


# ------------------------------------------------------------------------------- by the environment


def test_frameworks_find_it_in_the_environment(frameworks):
    printed = frameworks.run(INSTALL + textwrap.dedent(NAMES))
    assert printed["environ"] == {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2375",
        "CUPY_GPU_MEMORY_LIMIT": "10200547328",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }


def test_what_the_user_has_set_counts(frameworks):
    theirs = {
        "XLA_CLIENT_MEM_FRACTION": ".9",
        "CUPY_GPU_MEMORY_LIMIT": "50%",
        "TF_FORCE_GPU_ALLOW_GROWTH": "false",
    }
    printed = frameworks.run(INSTALL + textwrap.dedent(NAMES), **theirs)
    assert printed["environ"] == theirs


def test_a_device_of_unknown_memory(frameworks):
    printed = frameworks.run("memory.install(memory.Caps(0.25))\n" + textwrap.dedent(NAMES))
    assert printed["environ"]["CUPY_GPU_MEMORY_LIMIT"] == "25.00%"


# ------------------------------------------------------------------------------------------ PyTorch


def test_pytorch_is_told_when_it_makes_its_context(frameworks):
    frameworks.torch()
    printed = frameworks.run(INSTALL + textwrap.dedent(IMPORTED + NAMES))
    assert printed["before"] == 0
    assert printed["fractions"] == {"0": 0.2375, "1": 0.2375}
    assert "PYTORCH_ALLOC_CONF" not in printed["environ"], "this release refuses the setting"


def test_pytorch_that_the_zygote_has_imported(frameworks):
    frameworks.torch()
    printed = frameworks.run("import torch\n" + INSTALL + textwrap.dedent(IMPORTED))
    assert printed["before"] == 0
    assert printed["fractions"] == {"0": 0.2375, "1": 0.2375}


def test_being_told_again_changes_nothing(frameworks):
    frameworks.torch()
    text = "said['calls'] = len(torch.cuda._queued_calls), len(sys.meta_path)\n"
    again = frameworks.run("import torch\n" + INSTALL * 3 + text)
    assert again["calls"] == frameworks.run("import torch\n" + INSTALL + text)["calls"]


def test_a_newer_pytorch_reads_it_from_the_environment_too(frameworks):
    frameworks.torch("2.10.0+cu130")
    printed = frameworks.run(INSTALL + textwrap.dedent(IMPORTED + NAMES))
    assert printed["environ"]["PYTORCH_ALLOC_CONF"] == "per_process_memory_fraction:0.2375"
    assert printed["fractions"] == {"0": 0.2375, "1": 0.2375}


def test_the_setting_joins_those_of_the_user(frameworks):
    frameworks.torch("2.12.0+cu130")
    printed = frameworks.run(
        INSTALL + textwrap.dedent(IMPORTED + NAMES),
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    ours = "expandable_segments:True,per_process_memory_fraction:0.2375"
    assert printed["environ"]["PYTORCH_CUDA_ALLOC_CONF"] == ours


@pytest.mark.parametrize("version", ["2.9.1+cu128", "2.12.0+cu130"])
def test_a_fraction_of_the_users_own_counts(frameworks, version):
    frameworks.torch(version)
    theirs = "per_process_memory_fraction:0.9"
    printed = frameworks.run(INSTALL + textwrap.dedent(IMPORTED + NAMES), PYTORCH_ALLOC_CONF=theirs)
    assert printed["fractions"] == {}
    assert printed["environ"]["PYTORCH_ALLOC_CONF"] == theirs


@pytest.mark.parametrize(("version", "cuda"), [("2.12.0+cpu", None), ("later", "13.0")])
def test_where_the_setting_may_not_be_known_it_is_not_made(frameworks, version, cuda):
    frameworks.torch(version, cuda)
    printed = frameworks.run(INSTALL + textwrap.dedent(IMPORTED + NAMES))
    assert "PYTORCH_ALLOC_CONF" not in printed["environ"]
    assert printed["fractions"] == {"0": 0.2375, "1": 0.2375}


def test_a_pytorch_that_cannot_be_told_works_all_the_same(frameworks):
    frameworks.torch()
    broken = "torch.cuda.set_per_process_memory_fraction = None\n"
    printed = frameworks.run(INSTALL + "import torch\n" + broken + textwrap.dedent(IMPORTED))
    assert "torch could not be told its share: TypeError" in str(printed["stderr"])


def test_what_only_looks_for_a_framework_finds_it_as_it_is(frameworks):
    frameworks.torch()
    text = """
        import importlib.util
        spec = importlib.util.find_spec("torch")
        said["loader"], said["loaded"] = type(spec.loader).__name__, "torch" in sys.modules
        said["missing"] = importlib.util.find_spec("tensorflow") is None
    """
    printed = frameworks.run(INSTALL + textwrap.dedent(text))
    assert printed == {"loader": "SourceFileLoader", "loaded": False, "missing": True, "stderr": ""}


def test_an_import_that_fails_fails_as_ever(frameworks):
    frameworks.add("torch", __init__="raise OSError('a library is missing')")
    text = """
        try:
            import torch
        except OSError as error:
            said["error"] = str(error)
    """
    assert frameworks.run(INSTALL + textwrap.dedent(text))["error"] == "a library is missing"


def test_pytorch_itself(frameworks):
    needs.pytorch()
    text = """
        import torch
        said["queued"] = torch.cuda._queued_calls[-1][0].__module__
        said["context"] = torch.cuda.is_initialized()
        said["sum"] = float(torch.ones(3).sum())
    """
    found = frameworks.run(INSTALL + textwrap.dedent(text))
    assert found["queued"] == "gpunb.worker.limits.memory"
    assert found["context"] is False
    assert found["sum"] == 3


# -------------------------------------------------------------------------------------- the others


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.4.30", "XLA_PYTHON_CLIENT_MEM_FRACTION"), ("0.7.2", "XLA_CLIENT_MEM_FRACTION")],
)
def test_jax_has_one_name_or_the_other(frameworks, version, name):
    frameworks.add("jax", __init__="", version=f'_version = "{version}"\n')
    printed = frameworks.run(INSTALL + "import jax\n" + textwrap.dedent(NAMES))
    assert {each: v for each, v in printed["environ"].items() if "XLA" in each} == {name: "0.2375"}


TENSORFLOW = """
    class config:
        devices, limits = ["GPU:0"], {}

        class LogicalDeviceConfiguration:
            def __init__(self, memory_limit):
                self.limit = memory_limit

        def list_physical_devices(kind):
            return config.devices

        def get_logical_device_configuration(device):
            return config.limits.get(device)

        def set_logical_device_configuration(device, configurations):
            config.limits[device] = [each.limit for each in configurations]
"""


def test_tensorflow_is_given_a_limit(frameworks):
    frameworks.add("tensorflow", __init__=TENSORFLOW)
    text = "import tensorflow\nsaid['limits'] = tensorflow.config.limits\n"
    assert frameworks.run(INSTALL + text)["limits"] == {"GPU:0": [9728]}


RMM = """
    class mr:
        current = "cuda"

        def get_current_device_resource():
            return mr.current

        def set_current_device_resource(resource):
            mr.current = resource

        def LimitingResourceAdaptor(upstream, limit):
            return [upstream, limit]
"""


def test_rmm_is_given_a_limit(frameworks):
    frameworks.add("rmm", __init__=RMM)
    text = "import rmm\nsaid['resource'] = rmm.mr.current\n"
    assert frameworks.run(INSTALL + text)["resource"] == ["cuda", 10200547328]
