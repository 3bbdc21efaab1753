"""The driver's functions that a worker calls, on a stand-in for the library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from gpunb.worker import cuda_driver
from gpunb.worker.cuda_driver import CudaDriver, CudaError


class Library:
    """A library in which these functions fail with these numbers. Notes the calls."""

    def __init__(self, **statuses: int) -> None:
        self.statuses = statuses
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> int:
            self.calls.append(name)
            return self.statuses.get(name, 0)

        return call

    def cuGetErrorName(self, status: int, name: Any) -> int:  # noqa: N802 - the driver's name
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0


def test_a_context_is_made_on_the_first_visible_device():
    library = Library()
    CudaDriver(library).make_context()
    assert library.calls == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_an_error_names_the_function_and_the_reason():
    library = Library(cuDevicePrimaryCtxRetain=2)
    with pytest.raises(CudaError, match=r"PrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaDriver(library).make_context()


def test_a_driver_without_a_function_is_named():
    with pytest.raises(CudaError, match="the driver has no function cuInit"):
        CudaDriver(SimpleNamespace()).make_context()


def test_a_missing_library_is_an_error_with_its_reason(monkeypatch):
    monkeypatch.setattr(cuda_driver, "LIBRARY", "no-such-library.so.1")
    with pytest.raises(CudaError, match=r"does not load: no-such-library\.so\.1"):
        CudaDriver()


def test_a_process_is_locked_before_its_memory_moves_and_unlocked_when_it_is_back():
    library = Library()
    assert CudaDriver(library).park(7)
    CudaDriver(library).restore(7)
    steps = ["Lock", "Checkpoint", "Restore", "Unlock"]
    assert library.calls == [f"cuCheckpointProcess{each}" for each in steps]


def test_a_process_whose_memory_cannot_move_is_unlocked():
    library = Library(cuCheckpointProcessCheckpoint=801)
    with pytest.raises(CudaError, match=r"ProcessCheckpoint failed: .*\(801\): .*CUDA IPC"):
        CudaDriver(library).park(7)
    assert library.calls[-1] == "cuCheckpointProcessUnlock"


def test_work_that_does_not_end_is_named_as_the_reason():
    library = Library(cuCheckpointProcessLock=600)
    with pytest.raises(CudaError, match=r"ProcessLock failed: .*: work .* did not end within 10 s"):
        CudaDriver(library).park(7)
    assert library.calls == ["cuCheckpointProcessLock"]


def test_a_process_without_cuda_has_nothing_to_move():
    assert not CudaDriver(Library(cuCheckpointProcessLock=3)).park(7)


def test_an_old_driver_is_named():
    with pytest.raises(CudaError, match="cuCheckpointProcessLock: driver 570 or newer has it"):
        CudaDriver(SimpleNamespace()).park(7)


def test_a_library_that_is_not_loaded_is_not_loaded_for_parking(monkeypatch):
    monkeypatch.setattr(cuda_driver, "LIBRARY", "no-such-library.so.1")
    assert not CudaDriver(loaded=True).park(7)
