"""One suite for two libraries: sessions that tests share, and marks for where they differ.

Tests say with ``machine(num_gpus=3)`` on what they run, and are ordered so that a session serves
all that ask for the same. ``machine(own=True)`` is for those that start and end sessions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import waiting
from tests.conformance.api import backends
from tests.conformance.api.backends import cloudpickle, ray
from tests.conformance.api.differences import ON_THE_BACKEND, TESTS_ON_THE_BACKEND
from tests.waiting import Gate, eventually

HERE = Path(__file__).parent
MACHINE: dict[str, Any] = {"num_cpus": 4, "num_gpus": 2}
NAMED = ("CUDA_VISIBLE_DEVICES", "GPUNB_SIMULATE", "GPUNB_NUM_GPUS", "GPUNB_NUM_CPUS")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (
        backends.ON_RAY or backends.OVER_RAY
    ):  # it leaves processes and sockets to the garbage collector
        config.addinivalue_line("filterwarnings", "ignore")
    for item in items if backends.OVER_RAY else ():
        name = TESTS_ON_THE_BACKEND.get(getattr(item, "originalname", item.name))
        if name is not None and HERE in item.path.parents:
            reason = f"{name}: {ON_THE_BACKEND[name]}"
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    mine = sorted((items[place] for place in places), key=lambda item: repr(_machine(item)))
    for place, item in zip(places, mine, strict=True):
        items[place] = item


def _machine(item: pytest.Item) -> dict[str, Any]:
    marker = item.get_closest_marker("machine")
    if marker is not None and marker.kwargs.get("own"):
        return {"z": "the last, since they end what others share"}
    return {**MACHINE, **(marker.kwargs if marker is not None else {})}


class Shared:
    """The session that runs now."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] | None = None

    def use(self, settings: dict[str, Any]) -> None:
        if self.settings == settings and ray.is_initialized():
            return
        self.end()
        settings = dict(settings)
        self.settings = dict(settings)
        visible = settings.pop("visible", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        backends.start(**settings)

    def end(self) -> None:
        self.settings = None
        ray.shutdown()
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Other tests find no session."""
    if nextitem is None or HERE not in nextitem.path.parents:
        ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Functions of the test module travel by value, as a notebook's do; only while it runs, as it
    changes how a later test's functions travel."""
    modules = (sys.modules[request.module.__name__], backends, waiting)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="session")
def shared() -> Iterator[Shared]:
    saved = {name: os.environ.pop(name, None) for name in NAMED}
    shared = Shared()
    yield shared
    shared.end()
    backends.end()
    os.environ.update({name: value for name, value in saved.items() if value is not None})


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest, shared: Shared) -> Iterator[None]:
    """The machine that the test asks for."""
    marker = request.node.get_closest_marker("machine")
    if marker is not None and marker.kwargs.get("own"):
        shared.end()
        yield
        shared.end()
    else:
        shared.use(_machine(request.node))
        yield


@pytest.fixture
def idle(machine: None, shared: Shared, request: pytest.FixtureRequest) -> None:
    """The machine with nothing on it; a new one if something does not go away."""
    try:
        eventually(backends.idle, "idle", within=5)
    except AssertionError:
        shared.end()
        shared.use(_machine(request.node))


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.open()
