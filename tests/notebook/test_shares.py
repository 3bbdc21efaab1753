"""Shares of devices in a notebook: caps, errors for want of memory, and what a cell had at most."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel, kernel

pytestmark = pytest.mark.kernel

FAKE = """
import sys, types

class OutOfMemoryError(RuntimeError):
    pass

OutOfMemoryError.__module__ = 'torch'
cuda = types.SimpleNamespace(
    is_initialized=lambda: True, device_count=lambda: 1, memory_reserved=lambda at: 2**30,
    max_memory_reserved=lambda at: 2**31,
)
sys.modules['torch'] = types.SimpleNamespace(cuda=cuda, OutOfMemoryError=OutOfMemoryError)
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("shares"), prepare="") as notebook:
        notebook.stdin = True
        notebook.ok("import gpunb\n%load_ext gpunb")
        notebook.ok("%gpu init simulate=1xA100:40GiB num_cpus=2 share=kill caps=true")
        yield notebook


def test_a_cell_keeps_to_its_share_unless_it_need_not(notebook):
    text = "import os\nlimit = os.environ.get('CUPY_GPU_MEMORY_LIMIT')"
    notebook.ok(f"%%gpu 0.5\n{text}")
    assert notebook.value("limit") == str(20 * 2**30 - 2**29)
    notebook.ok(f"%%gpu 0.5 --no-caps\n{text}")
    assert notebook.value("limit") is None
    notebook.ok(f"%%gpu 0.5 --no-caps --session free\n{text}")
    assert notebook.value("limit") is None
    notebook.ok("%gpu stop free")


def test_an_error_for_want_of_memory_says_who_has_it(notebook):
    result = notebook(
        f"%%gpu 0.5\n{FAKE}\nraise OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')"
    )
    assert result.status == "error"
    assert "The memory of the devices when this was raised:" in result.traceback
    assert "has 1 GiB (share 0.5)" in result.traceback


def test_the_card_of_a_cell_says_what_it_had(notebook):
    result = notebook.ok(f"%%gpu 0.5 --bg\n{FAKE}")
    notebook.ok("%gpu wait")

    def said() -> bool:
        cards = result.of("update_display_data")
        return bool(cards) and "used 2 of 20 GiB: 0.1 would do" in cards[-1]["data"]["text/plain"]

    notebook.late(said)


def test_a_bad_setting(notebook):
    result = notebook("%gpu init caps=maybe")
    assert result.status == "error"
    assert "caps=maybe must be true or false" in result.stderr
