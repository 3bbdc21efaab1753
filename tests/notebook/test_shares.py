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


def test_a_cell_keeps_to_its_share_unless_caps_are_off(notebook):
    text = "import os\nlimit = os.environ.get('CUPY_GPU_MEMORY_LIMIT')"
    notebook.ok(f"%%gpu 0.5\n{text}")
    assert notebook.value("limit") == str(20 * 2**30 - 2**29)
    notebook.ok(f"%%gpu 0.5 --no-caps\n{text}")
    assert notebook.value("limit") is None
    notebook.ok(f"%%gpu 0.5 --no-caps --session free\n{text}")
    assert notebook.value("limit") is None
    notebook.ok("%gpu stop free")


def test_an_out_of_memory_error_names_the_users_of_the_device(notebook):
    result = notebook(
        f"%%gpu 0.5\n{FAKE}\nraise OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')"
    )
    assert result.status == "error"
    assert "The memory of the devices when this was raised:" in result.traceback
    assert "has 1 GiB (share 0.5)" in result.traceback


def test_the_card_of_a_cell_shows_the_hint_for_a_smaller_share(notebook):
    result = notebook.ok(f"%%gpu 0.5 --bg\n{FAKE}")
    notebook.ok("%gpu wait")

    def printed() -> bool:
        cards = result.of("update_display_data")
        return bool(cards) and "used 2 of 20 GiB: 0.1 would do" in cards[-1]["data"]["text/plain"]

    notebook.late(printed)


def test_a_bad_caps_setting_is_refused(notebook):
    result = notebook("%gpu init caps=maybe")
    assert result.status == "error"
    assert "caps=maybe must be true or false" in result.stderr


TAKE = """
import os, sys
from types import SimpleNamespace

has = min({gib}, int(os.environ.get('CUPY_GPU_MEMORY_LIMIT', 40 * 2**30)) / 2**30)
pool = SimpleNamespace(total_bytes=lambda: int(has * 2**30))
cuda = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
sys.modules['cupy'] = SimpleNamespace(get_default_memory_pool=lambda: pool, cuda=cuda)
print('took', has)
if has < {gib}:
    raise MemoryError('CUDA out of memory, says the stand-in')
"""


def test_a_cell_with_auto_gets_the_share_that_its_last_run_needed(notebook, tmp_path):
    notebook.ok(f"import os; os.environ['XDG_DATA_HOME'] = {str(tmp_path)!r}")
    first = notebook.ok(f"%%gpu auto --name first{TAKE.format(gib=3)}")
    assert "first run of this cell: one whole GPU; next time 0.1" in first.stderr
    second = notebook.ok(f"%%gpu auto --name second\n# a comment\n{TAKE.format(gib=3)}")
    assert "first run" not in second.stderr
    jobs = notebook.value("gpunb.status()['finished'][:2]")
    assert [each["devices"] for each in jobs] == [[["GPU", 0, 0.1]], [["GPU", 0, 1.0]]]
    why = notebook.ok(f"%gpu why {jobs[0]['id']}").stdout
    assert "second: done; auto: 0.1 of a GPU, because it had at most 3 GiB" in why


def test_a_cell_that_outgrows_its_share_ends_well_with_grow_alone(notebook):
    grown = notebook.ok(f"%%gpu 0.25 --grow{TAKE.format(gib=12)}")
    assert "ran out of memory at 0.25 of GPU 0 (10 GiB); again with 0.5" in grown.stderr
    assert grown.stdout == "took 9.5\ntook 12\n"
    assert notebook.value("has") == 12
    result = notebook(f"%%gpu 0.25{TAKE.format(gib=12)}")
    assert result.status == "error"
    assert "says the stand-in" in result.traceback


def test_a_cell_with_a_higher_priority_starts_before_one_that_waits_longer(notebook, tmp_path):
    wait = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    notebook.ok(f"%%gpu 1 --bg --name first\n{wait}")
    notebook.ok("import time\nwhile not gpunb.status()['running']: time.sleep(0.01)")
    notebook.ok("%%gpu 1 --bg --name low\npass")
    notebook.ok("%%gpu 1 --bg --name high --priority 5\npass")
    waiting = {each["name"]: each for each in notebook.value("gpunb.status()['waiting']")}
    assert waiting["high"]["priority"] == 5
    assert "priority 5; " in notebook.ok(f"%gpu why {waiting['high']['id']}").stdout
    (tmp_path / "go").touch()
    notebook.ok("%gpu wait")
    names = [each["name"] for each in notebook.value("gpunb.status()['finished'][:3]")]
    assert names == ["low", "high", "first"]


def test_a_background_cell_shows_only_the_error_of_its_last_attempt(notebook):
    result = notebook.ok(f"%%gpu 0.5 --bg --grow{TAKE.format(gib=50)}")
    notebook("%gpu wait")
    notebook.late(lambda: "again with 1" in result.stderr and result.traceback)
    job = notebook.value("gpunb.status()['finished'][0]['id']")
    log = notebook.ok(f"%gpu logs {job}")
    assert log.stderr.count("Traceback (most recent call last)") == 1
    assert "has 40 GiB (share 1)" in log.stderr


def test_auto_and_grow_are_refused_for_sessions(notebook):
    for line, message in (
        ("auto", "the share 'auto' is for"),
        ("0.5 --grow", "--grow does not go"),
    ):
        result = notebook(f"%%gpu {line} --session s\npass")
        assert result.status == "error"
        assert message in result.stderr
