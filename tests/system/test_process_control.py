"""The list of child processes that the system has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpunb.system import process_control
from tests.sessions import ROOT

# Of the main thread alone: the children of this process may be those of any thread.
CHILDREN = """
import subprocess, sys
from gpunb.system import process_control
process_control._FEW = {few}
started = [subprocess.Popen(["sleep", "60"]) for _ in range(6)]
assert process_control.children() == [each.pid for each in started], process_control.children()
for each in started:
    each.kill()
    each.wait()
assert process_control.children() == []
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the list is of Linux")
@pytest.mark.parametrize("few", [1 << 12, 20], ids=["at once", "more than the first buffer holds"])
def test_all_children_are_listed(few: int) -> None:
    code = CHILDREN.format(few=few)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_without_a_list_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("os.open", missing)
    assert process_control.children() is None
