"""A Jupyter kernel for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel, kernel


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Runs a cell in the module's kernel, where gpunb is loaded and has two logical GPUs."""
    with kernel(tmp_path_factory.mktemp("notebook")) as running:
        yield running
