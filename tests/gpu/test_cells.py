"""On a real NVIDIA GPU: cells that compute with PyTorch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.utils.capture import capture_output

from tests.shells import gpunb_shell

pytestmark = pytest.mark.gpu


@pytest.fixture
def shell(session: Any) -> Iterator[Any]:
    with gpunb_shell() as made:
        yield made


def run(shell: Any, code: str) -> str:
    """Run a cell that must succeed; return what it wrote to standard output."""
    with capture_output() as captured:
        result = shell.run_cell(code, store_history=True)
    assert result.success, f"{captured.stdout}{captured.stderr}"
    return captured.stdout


def test_a_tensor_of_a_cell_is_a_tensor_on_the_host_at_home(shell: Any, torch: Any) -> None:
    shell.user_ns["rows"] = torch.ones(4)
    run(shell, "%%gpu 0.5\nimport torch\nx = rows.to('cuda') * 2\nlast = float(x.sum())")
    assert shell.user_ns["last"] == 8.0
    assert shell.user_ns["x"].device.type == "cpu"
    assert shell.user_ns["x"].tolist() == [2.0] * 4
    assert not torch.cuda.is_initialized()


def test_a_session_keeps_its_tensor_on_the_device(shell: Any) -> None:
    run(shell, "%%gpu 0.5 --session kept -o none\nimport torch\ny = torch.ones(4, device='cuda')")
    text = run(shell, "%%gpu --session kept -o none\ny = y + 1\nprint(y.device.type, float(y[0]))")
    run(shell, "%gpu stop kept")
    assert "cuda 2.0" in text


COMPILE = """
import torch
compiled = torch.compile(lambda x: torch.relu(x) * 2 + 1)
print('sum', float(compiled(torch.ones(1000, device='cuda')).sum()))
"""


def test_a_cell_compiles_a_function(shell: Any, hardware: None) -> None:
    try:
        text = run(shell, f"%%gpu 0.5 -o none{COMPILE}")
    except AssertionError:
        bare = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, check=False)
        if bare.returncode:  # it needs a compiler for C and the headers of Python, for instance
            pytest.skip(f"torch.compile fails without gpunb too: {bare.stderr.decode()[-300:]}")
        raise
    assert "sum 3000.0" in text
