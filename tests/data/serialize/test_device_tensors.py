"""Tensors on a device are sent as host memory: stand-ins for the libraries, and PyTorch itself on
the host if it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpunb
from gpunb.data import serialize
from gpunb.data.serialize import Moved
from tests import needs
from tests.notebook.kernels import Kernel, kernel
from tests.sessions import PATIENCE, ROOT

FAKES = """
import sys, types


class Device:
    def __init__(self, type):
        self.type = self.platform = type


class Tensor:
    grad_fn = None

    def __init__(self, data, where="cuda"):
        self.data, self.device, self.nbytes = data, Device(where), 8 * len(data)

    @property
    def is_cuda(self):
        return self.device.type == "cuda"

    def detach(self):
        return self

    def cpu(self):
        return type(self)(self.data, "cpu")

    def __reduce_ex__(self, protocol):
        assert not self.is_cuda, "a device is touched"
        return type(self), (self.data, "cpu")


class Array(Tensor):
    def get(self):
        import numpy
        return numpy.array(self.data)

    def devices(self):
        return {self.device}

    def __array__(self, dtype=None, copy=None):
        return self.get()


class NotATensor:
    pass


def install(name, of, kind):
    module = types.ModuleType(name)
    setattr(module, of, kind)
    sys.modules[name] = module
    kind.__module__ = name
    return module
"""


def fakes() -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "fakes"}
    exec(FAKES, space)
    return space


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Hides all libraries except those that the test installs."""
    for name in ("torch", "jax", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield types.SimpleNamespace(**fakes())
    for name in ("torch", "jax", "cupy"):
        sys.modules.pop(name, None)


def trip(value: Any) -> tuple[Any, Moved]:
    moved = serialize.moving()
    assert moved is not None
    with moved:
        payload = serialize.dumps(value)
    return serialize.loads(payload), moved


# --------------------------------------------------------------------------------------- stand-ins


def test_no_library_is_imported_to_look_for_tensors(fake: Any) -> None:
    before = set(sys.modules)
    assert serialize.moving() is None
    assert not {"torch", "jax", "cupy"} & (set(sys.modules) - before)


def test_tensor_under_several_names_is_moved_once(fake: Any) -> None:
    fake.install("torch", "Tensor", fake.Tensor)
    tensor = fake.Tensor([1, 2])
    (first, second, rest), moved = trip((tensor, tensor, {"deep": [tensor]}))
    assert first is second is rest["deep"][0]
    assert (first.data, first.device.type) == ([1, 2], "cpu")
    assert str(moved) == "moved 1 tensor (16 B) from the device to host memory"
    assert tensor.is_cuda


def test_tensor_on_the_host_is_not_moved(fake: Any) -> None:
    fake.install("torch", "Tensor", fake.Tensor)
    back, moved = trip([fake.Tensor([1], "cpu")] * 2)
    assert back[0] is back[1]
    assert moved.count == 0


def test_tensors_are_moved_only_within_moving(fake: Any) -> None:
    fake.install("torch", "Tensor", fake.Tensor)
    with pytest.raises(TypeError, match="a device is touched"):
        serialize.dumps(fake.Tensor([1]))
    trip(fake.Tensor([1]))
    with pytest.raises(TypeError, match="a device is touched"):
        serialize.dumps(fake.Tensor([1]))


def test_arrays_of_cupy_and_jax_become_numpy_arrays(fake: Any) -> None:
    fake.install("cupy", "ndarray", fake.Array)
    array = fake.Array([1.0, 2.0])
    (first, second), moved = trip([array, array])
    assert type(first) is np.ndarray
    assert first is second
    assert first.tolist() == [1.0, 2.0]
    assert (moved.count, moved.nbytes) == (1, 16)
    del sys.modules["cupy"]
    fake.install("jax", "Array", fake.Array)
    back, moved = trip([fake.Array([3.0], "gpu"), fake.Array([4.0], "cpu")])
    assert type(back[0]) is np.ndarray
    assert type(back[1]) is fake.Array
    assert (back[0].tolist(), back[1].data, moved.count) == ([3.0], [4.0], 1)


def test_partly_loaded_libraries_do_no_harm(fake: Any) -> None:
    for name in ("torch", "jax", "cupy"):
        sys.modules[name] = types.ModuleType(name)
    fake.NotATensor.__module__ = "cupy"
    sys.modules["cupy"].NotATensor = fake.NotATensor  # type: ignore[attr-defined]
    fake.NotATensor.__qualname__ = "NotATensor"
    value = {"array": np.ones(3), "function": lambda: 3, "other": fake.NotATensor()}
    back, moved = trip(value)
    assert back["function"]() == 3
    assert moved.count == 0


def test_tensor_in_an_error_arrives_on_the_host(fake: Any) -> None:
    fake.install("torch", "Tensor", fake.Tensor)
    moved = serialize.moving()
    assert moved is not None
    with moved:
        payload = serialize.dump_failure(ValueError("bad", fake.Tensor([1])), task="t")
    error = serialize.load_failure(payload)
    assert isinstance(error.cause, ValueError)
    assert error.cause.args[1].device.type == "cpu"


# --------------------------------------------------------------------------------------- in workers


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that both workers and the kernel can import."""
    (tmp_path / "torch.py").write_text(FAKES + "def set_num_threads(number):\n    pass\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    yield
    sys.modules.pop("torch", None)


def get(ref: Any) -> Any:
    return gpunb.get(ref, timeout=PATIENCE)


def test_results_of_tasks_and_actors_arrive_on_the_host_with_a_note(
    start: Any, library: None, capfd: pytest.CaptureFixture[str]
) -> None:
    start(num_cpus=2)

    def tensor(length: int) -> Any:
        import torch

        return torch.Tensor([0] * length)

    @gpunb.remote
    def one() -> Any:
        made = tensor(1 << 17)
        return [made, made]

    @gpunb.remote(num_returns=2)
    def two() -> Any:
        return tensor(1), tensor(2)

    @gpunb.remote
    def several() -> Iterator[Any]:
        yield from map(tensor, (1, 2, 3))

    @gpunb.remote(max_retries=0)
    def fails() -> None:
        raise ValueError(tensor(1))

    @gpunb.remote
    class Actor:
        def hold(self) -> None:
            self.made = tensor(2)

        def give(self) -> Any:
            return self.made

        def device(self) -> str:
            return str(self.made.device.type)

    note = "moved {} from the device to host memory"

    def notes() -> list[str]:
        lines = capfd.readouterr().err.splitlines()
        return [line.partition("gpunb: ")[2] for line in lines if "moved" in line]

    first, second = get(one.remote())
    assert first is second
    assert first.device.type == "cpu"
    assert notes() == [note.format("1 tensor (1 MiB)")]
    assert [len(each.data) for each in get(list(two.remote()))] == [1, 2]
    assert notes() == [note.format("2 tensors (24 B)")]
    assert [len(get(each).data) for each in several.remote()] == [1, 2, 3]
    actor = Actor.remote()
    get(actor.hold.remote())
    assert notes() == [note.format("3 tensors (48 B)")]
    assert get(actor.give.remote()).device.type == "cpu"
    assert get(actor.device.remote()) == "cuda"
    assert notes() == [note.format("1 tensor (16 B)")]
    with pytest.raises(ValueError, match="Tensor") as caught:
        get(fails.remote())
    assert caught.value.cause.args[0].device.type == "cpu"  # type: ignore[attr-defined]


@pytest.mark.kernel
def test_values_of_cells_arrive_on_the_host_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(FAKES)
    with kernel(tmp_path) as cell:
        check_cells(cell)


def check_cells(cell: Kernel) -> None:
    result = cell.ok("%%gpu\nimport torch\na = torch.Tensor([1, 2])\nb = {'a': a}\nc = 3")
    assert result.stderr == "gpunb: moved 1 tensor (16 B) from the device to host memory\n"
    assert cell.value("(a is b['a'], a.device.type, c)") == (True, "cpu", 3)
    result = cell.ok("%%gpu\nimport torch\nd = torch.Tensor([1])\ng = (i for i in 'ab')")
    assert result.stderr.count("moved 1 tensor (8 B)") == 1
    assert "'g' stays" in result.stderr
    assert cell.value("d.device.type") == "cpu"
    result = cell.ok("x = %gpu 0 __import__('torch').Tensor([5])")
    assert cell.value("(x.data, x.device.type)") == ([5], "cpu")
    cell.ok("%%gpu 0 -s keeps\nimport torch\nkept = torch.Tensor([1])")
    assert cell.ok("%%gpu -s keeps\nkept.device.type").value == "'cuda'"
    assert cell.value("kept.device.type") == "cpu"
    cell.ok("%gpu stop keeps")


# ------------------------------------------------------------------------------------------ PyTorch


def test_tensors_of_real_pytorch_are_moved() -> None:
    """In a new interpreter, because the import of PyTorch takes time and memory."""
    needs.pytorch()
    body = Path(__file__).with_name("with_torch.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    command = [sys.executable, str(body)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_tensor_on_a_device_of_the_notebook_is_refused(fake: Any) -> None:
    assert serialize.staying() is None
    fake.install("torch", "Tensor", fake.Tensor)
    here = fake.Tensor([1, 2, 3])
    staying = serialize.staying()
    assert staying is not None
    with staying:
        assert serialize.loads(serialize.dumps(fake.Tensor([1], "cpu"))).data == [1]
        with pytest.raises(TypeError, match=r"(?s)weights.*on a device.*x\.cpu\(\)"):
            serialize.dumps({"weights": here}, what="model")
    serialize.dumps(5)


def test_error_of_a_cell_names_the_tensor_on_a_device(tmp_path: Path) -> None:
    with kernel(tmp_path) as cell:
        cell.ok(f"space = {{'__name__': 'fakes'}}\nexec({FAKES!r}, space)")
        cell.ok("space['install']('torch', 'Tensor', space['Tensor'])")
        cell.ok("weights = space['Tensor']([1.0, 2.0])")
        refused = cell("%%gpu\nprint(weights)")
        assert refused.status == "error"
        assert "weights" in refused.stderr + refused.evalue
        assert "on a device" in refused.stderr + refused.evalue
        assert ".cpu()" in refused.stderr + refused.evalue
