"""What frameworks say of their memory, and errors for want of it; with stand-ins for them."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.exceptions import TaskError
from gpunb.protocol import backend
from gpunb.worker.limits import usage
from gpunb.worker.limits.usage import ProcessMemory
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def device(monkeypatch) -> Iterator[None]:
    for name in ("torch", "jax", "jax._src.xla_bridge", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    usage.begin([3])
    yield
    usage.begin([])


def module(monkeypatch: Any, name: str, **names: Any) -> Any:
    made: Any = types.ModuleType(name)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def torch(
    monkeypatch: Any, now: int = 5, peak: int = 9, *, begun: bool = True, name: str = "cuda"
) -> Any:
    part = types.SimpleNamespace(
        is_initialized=lambda: begun,
        device_count=lambda: 1,
        memory_reserved=lambda at: now,
        max_memory_reserved=lambda at: peak,
    )
    return module(monkeypatch, "torch", **{name: part})


def test_nothing_is_known_where_no_framework_is_loaded():
    assert usage.measured() == {}


def test_without_a_device_nobody_is_asked(monkeypatch):
    module(monkeypatch, "torch", cuda=None)
    usage.begin([])
    assert usage.measured() == {}


def test_pytorch(monkeypatch):
    torch(monkeypatch)
    assert usage.measured() == {0: ProcessMemory(5, 9)}


@pytest.mark.parametrize("name", ["xpu", "npu"])
def test_pytorch_on_other_devices(monkeypatch, name):
    made = torch(monkeypatch, name=name)
    made.cuda = types.SimpleNamespace(is_initialized=lambda: False)
    assert usage.measured() == {0: ProcessMemory(5, 9)}


def test_pytorch_on_a_mac(monkeypatch):
    made = module(monkeypatch, "torch")
    made.backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: True))
    made.mps = types.SimpleNamespace(driver_allocated_memory=lambda: 7)
    assert usage.measured() == {0: ProcessMemory(7, 7)}


def test_pytorch_that_has_no_context_is_not_made_to_make_one(monkeypatch):
    torch(monkeypatch, begun=False)
    assert usage.measured() == {}


def test_jax(monkeypatch):
    stats = {"bytes_in_use": 5, "peak_bytes_in_use": 9}
    cpu = types.SimpleNamespace(platform="cpu")
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    module(monkeypatch, "jax", local_devices=lambda: [cpu, gpu])
    assert usage.measured() == {}, "its backends are not there yet"
    module(monkeypatch, "jax._src.xla_bridge", backends_are_initialized=lambda: True)
    assert usage.measured() == {0: ProcessMemory(5, 9)}


def test_frameworks_side_by_side(monkeypatch):
    torch(monkeypatch)
    pool = types.SimpleNamespace(total_bytes=lambda: 3)
    runtime = types.SimpleNamespace(getDevice=lambda: 0)
    cuda = types.SimpleNamespace(runtime=runtime)
    module(monkeypatch, "cupy", get_default_memory_pool=lambda: pool, cuda=cuda)
    assert usage.measured() == {0: ProcessMemory(8, 12)}


def test_one_that_is_half_loaded_says_nothing(monkeypatch):
    torch(monkeypatch)
    module(monkeypatch, "cupy")
    assert usage.measured() == {0: ProcessMemory(5, 9)}


def test_a_reporter_says_what_has_changed(monkeypatch):
    torch(monkeypatch)
    received_reports: list[dict[int, ProcessMemory]] = []
    reporter = usage.Reporter(0.001, received_reports.append)
    reporter.start()
    eventually(lambda: received_reports == [{0: ProcessMemory(5, 9)}], "it is told")
    torch(monkeypatch, now=6)
    eventually(lambda: received_reports[1:] == [{0: ProcessMemory(6, 9)}], "the change is told")
    reporter._stop.set()


def test_a_reporter_ends_with_the_kernel(monkeypatch):
    torch(monkeypatch)
    received_reports = []

    def gone(found: object) -> None:
        received_reports.append(found)
        torch(monkeypatch, now=len(received_reports))
        raise BrokenPipeError

    reporter = usage.Reporter(0.001, gone)
    reporter._run()
    assert len(received_reports) == 1


# -------------------------------------------------------------------------------- out of memory


class OutOfMemoryError(RuntimeError):
    """As PyTorch's."""


class XlaRuntimeError(RuntimeError):
    """As JAX's."""


OutOfMemoryError.__module__ = "torch"
OfCuPy = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})
OfTensorFlow = type(
    "ResourceExhaustedError",
    (Exception,),
    {"__module__": "tensorflow.python.framework.errors_impl"},
)


def caused(error: BaseException) -> ValueError:
    outer = ValueError("training failed")
    outer.__cause__ = error
    return outer


SHORT = [
    OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 5.1 GB)"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes"),
    MemoryError("std::bad_alloc: out_of_memory: CUDA error at: cuda_memory_resource.hpp"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    OfCuPy("Out of memory allocating 1,024 bytes"),
    OfTensorFlow("OOM when allocating tensor with shape[8]"),
    caused(RuntimeError("HIP out of memory")),
    ExceptionGroup("two", [ValueError("no"), RuntimeError("CUDA out of memory")]),
]
OTHERS = [
    ValueError("CUDA out of memory"),
    RuntimeError("shapes do not match"),
    MemoryError(),
    caused(KeyError("memory")),
]


@pytest.mark.parametrize("error", SHORT, ids=str)
def test_errors_for_want_of_memory(error):
    assert usage.is_short(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_errors_of_other_kinds(error):
    assert not usage.is_short(error)


def test_a_chain_of_errors_that_bites_its_tail():
    first, second = ValueError(), ValueError()
    first.__context__, second.__context__ = second, first
    assert not usage.is_short(first)


class Kernel:
    """Answers what a worker asks."""

    def __init__(self, table: str) -> None:
        self.table = table
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, *what: Any) -> str:
        self.asked.append(what)
        return self.table


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    before, made = backend.existing(), Kernel("GPU 0: #7 train has 9 GiB")
    backend.install(made)  # type: ignore[arg-type]
    yield made
    backend.install(before)


def test_the_error_says_who_has_how_much(kernel, monkeypatch):
    torch(monkeypatch)
    error = RuntimeError("CUDA out of memory")
    usage.explain(error)
    usage.explain(error)
    assert error.__notes__ == [
        "The memory of the devices when this was raised:\nGPU 0: #7 train has 9 GiB"
    ]
    assert kernel.asked == [("memory", ((0, ProcessMemory(5, 9)),))]


def test_other_errors_are_left_alone(kernel):
    error = ValueError("no")
    usage.explain(error)
    usage.explain(None)
    assert not hasattr(error, "__notes__")
    assert not kernel.asked


def test_without_an_answer_the_error_is_as_it_was(kernel, monkeypatch):
    monkeypatch.setattr(Kernel, "ask", lambda *_: 1 / 0)
    error = RuntimeError("CUDA out of memory")
    usage.explain(error)
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("name", ["cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_the_drivers_name_of_the_error_counts_in_an_error_of_any_type(name):
    assert usage.is_short(caused(KeyError(f"{name}: out of memory")))


def test_a_task_ends_short_of_memory_only_by_an_error_of_its_own():
    usage.ended_with(MemoryError("CUDA out of memory"))
    assert usage.took_short()
    assert not usage.took_short(), "it counts for one task"
    theirs = RuntimeError("a task failed")
    theirs.__cause__ = TaskError("CUDA_ERROR_OUT_OF_MEMORY", MemoryError("CUDA out of memory"))
    usage.ended_with(theirs)
    assert not usage.took_short()
    usage.begin([])
    usage.ended_with(MemoryError("CUDA out of memory"))
    assert not usage.took_short()
