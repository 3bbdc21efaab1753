"""What the zygote does for libraries before workers use them."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARED = """
import os, sys
from gpunb.worker import first_use
first_use.prepare()
assert "matplotlib" not in sys.modules, "nothing is loaded for it"

import matplotlib.figure
from matplotlib import font_manager, mathtext, rcParams
settings, descriptors = dict(rcParams), len(os.listdir("/proc/self/fd"))
first_use.prepare()
assert dict(rcParams) == settings
assert mathtext.MathTextParser._parser is not None
found = font_manager.fontManager._findfont_cached.cache_info().currsize
assert found
first_use.prepare()
assert font_manager.fontManager._findfont_cached.cache_info().currsize == found
if os.fork() == 0:
    # Forks must not read fonts through files that they share.
    os._exit(font_manager._get_font.cache_info().currsize)
assert os.wait()[1] == 0
"""


def test_figures_are_prepared_once_and_leave_no_trace() -> None:
    pytest.importorskip("matplotlib")
    ended = subprocess.run(
        [sys.executable, "-c", PREPARED], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_release_of_a_library_that_differs_is_no_problem() -> None:
    code = (
        "import sys, types\n"
        "sys.modules['matplotlib.figure'] = types.ModuleType('matplotlib.figure')\n"
        "sys.modules['matplotlib'] = sys.modules['PIL'] = None\n"
        "from gpunb.worker import first_use\n"
        "first_use.prepare()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
