"""What is lost between a notebook and a cell is said: graphs of tensors, and all with --check."""

from __future__ import annotations

import pytest

from tests import needs
from tests.notebook.kernels import Kernel

pytestmark = pytest.mark.kernel

GRAPH = "import torch\nw = torch.ones(2, requires_grad=True)\nloss = (w * 3).sum()"


def test_a_lost_graph_is_said_once_for_each_name_and_way(cell: Kernel) -> None:
    needs.pytorch()
    first = cell.ok(f"%%gpu 0.5\n{GRAPH}\nother = w * w")
    assert "'loss', 'other' came home without their graphs" in first.stderr
    assert "--session NAME" in first.stderr
    assert cell.ok(f"%%gpu 0.5\n{GRAPH}").stderr == ""
    refused = cell("loss.backward()")
    assert "does not require grad" in refused.evalue
    cell.ok(f"{GRAPH}\n")
    assert "'loss' went to the cell without its graph" in cell.ok("%%gpu 0.5\nprint(loss)").stderr
    assert cell.ok("%%gpu 0.5\nprint(loss)").stderr == ""
    cell.ok("loss.backward()")
    assert cell.ok("%%gpu 0.5\nprint(loss, w)").stderr == ""
    assert cell.value("w.grad.tolist()") == [3.0, 3.0]


def test_a_session_keeps_graphs_without_a_word(cell: Kernel) -> None:
    needs.pytorch()
    assert cell.ok(f"%%gpu 0.5 --session graphs\n{GRAPH.replace('loss', 'kept')}").stderr == ""
    assert cell.ok("%%gpu --session graphs\nkept.backward()\nprint(w.grad.tolist())").stdout == (
        "[3.0, 3.0]\n"
    )
    cell.ok("%gpu stop graphs")


def test_check_lists_what_is_lost_on_both_ways(cell: Kernel) -> None:
    cell.ok("import numpy as np\na = np.zeros(4)\nb = a[1:]\nclass Part:\n    pass")
    code = "def drop(self):\n    return {}\nPart.__getstate__ = drop\nc = Part()\nc.x = a, b"
    seen = cell.ok(f"%%gpu 0.5 --check\n{code}").stderr.splitlines()
    rows = [line.removeprefix("gpunb: ").split(maxsplit=1) for line in seen]
    assert rows[0] == ["--check", "lost on the way  what"]
    assert ["b", "to the cell      it no longer shares memory with a"] in rows
    assert ["c", "home             its attributes x"] in rows
    nothing = cell.ok("%%gpu 0.5 --check\nnumber = 1").stderr
    assert "nothing is lost on the way to the cell, and nothing on the way home" in nothing


def test_check_does_not_go_with_a_sweep(cell: Kernel) -> None:
    refused = cell("%%gpu 0.5 --check --sweep x=1,2\ny = x")
    assert "check the cell for one value first" in refused.stderr + refused.evalue
