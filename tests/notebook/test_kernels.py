"""The kernels of tests: a test that fails does not hold up the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook.kernels import Kernel, kernel

pytestmark = pytest.mark.kernel


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel without gpunb."""
    with kernel(tmp_path, prepare="") as running:
        yield running


def test_what_a_failed_test_left_running_is_stopped(bare: Kernel) -> None:
    left = [bare.start("print('runs', flush=True)\nwhile True: pass") for _ in range(2)]
    bare.shows(left[0], "runs")
    bare.recover()
    assert all(each.idle for each in left)
    assert not any(left)
    assert bare.ok("1 + 1").value == "2"
    bare.recover()
    assert bare.ok("2 + 2").value == "4"


def test_no_test_waits_for_a_kernel_that_cannot_be_stopped(bare: Kernel) -> None:
    stubborn = bare.start(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "print('runs', flush=True)\nwhile True: pass"
    )
    bare.shows(stubborn, "runs")
    bare.recover(within=0.1)
    with pytest.raises(AssertionError, match=r"since an earlier test.*busy"):
        bare.ok("1 + 1")
    bare.recover()


def test_a_dead_kernel_is_noticed(bare: Kernel) -> None:
    bare.start("import os; os._exit(1)")
    bare.recover()
    with pytest.raises(AssertionError, match=r"since an earlier test.*dead"):
        bare.start("1 + 1")
