"""A Jupyter kernel for the tests of a module."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.notebook.kernels import Kernel, kernel


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test left running when it failed does not keep those after it, nor its own end."""
    report = yield
    if report.failed:
        for each in item.funcargs.values():
            if isinstance(each, Kernel):
                each.recover()
    return report


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Runs a cell in the module's kernel, where gpunb is loaded and has two logical GPUs."""
    with kernel(tmp_path_factory.mktemp("notebook")) as running:
        yield running
