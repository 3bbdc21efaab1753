"""One session at a time on a real NVIDIA GPU, with PyTorch.

``GPUNB_TEST_RECORD`` names a file that gets one line of JSON for each test.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpunb
from gpunb import accelerators
from tests import needs
from tests.waiting import eventually

RECORD = "GPUNB_TEST_RECORD"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(RECORD)
    if path and (report.when == "call" or report.outcome != "passed"):
        facts = {
            "test": report.nodeid.removeprefix("tests/gpu/"),
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "figures": dict(report.user_properties),
            "says": _text(report),
        }
        with open(path, "a") as file:
            file.write(json.dumps(facts) + "\n")


def _text(report: pytest.TestReport) -> str:
    if report.outcome == "skipped":
        return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    return "" if report.outcome == "passed" else report.longreprtext[-4000:]


@pytest.fixture(scope="session")
def card() -> Any:
    """The device of the tests; one is enough."""
    detected = accelerators.detect()
    found = [each for each in detected.devices if each.vendor == "nvidia"]
    if not found:
        pytest.skip("no NVIDIA GPU: " + "; ".join(detected.notes))
    needs.pytorch()
    return found[0]


@pytest.fixture(scope="session")
def torch(card: Any) -> Any:
    """PyTorch in this process, which takes seconds to import."""
    return importlib.import_module("torch")


@pytest.fixture
def hardware(card: Any) -> None:
    """For a test that a stand-in for the device cannot run."""
    if "GPUNB_STAND_IN" in os.environ:
        pytest.skip("this needs the device itself")


@pytest.fixture(scope="module")
def sessions_of_module(card: Any, by_value: None) -> Iterator[Callable[..., Any]]:
    last: list[Any] = [None, None]

    def begin(**settings: Any) -> Any:
        if last[0] != settings or not gpunb.is_initialized():
            gpunb.shutdown()
            given = {"num_gpus": 1, "preload": ["numpy", "torch"], **settings}
            last[:] = settings, gpunb.init(**given)
        return last[1]

    yield begin
    gpunb.shutdown()


@pytest.fixture
def begin(sessions_of_module: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Starts a session on one device. One that has the same settings and nothing to do is used
    again, because the preload of each takes seconds."""
    yield sessions_of_module
    if gpunb.is_initialized():
        try:
            eventually(lambda: gpunb.available_resources().get("GPU") == 1.0, "it is idle", 5)
        except AssertionError:
            gpunb.shutdown()


@pytest.fixture
def session(begin: Callable[..., Any]) -> Any:
    """A session on one device."""
    return begin()
