"""Fixtures that start real sessions."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from hypothesis import settings

from tests import needs, sessions

# The same examples in each run, unless `make stress` asks for others.
settings.register_profile(
    "same", deadline=None, database=None, derandomize="GPUNB_EXAMPLES" not in os.environ
)
settings.load_profile("same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in what a shell runs in the background; programs that the tests start would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONG = ("browser", "programs", "chaos", "notebooks", "packaging", "scheduler/test_machine.py")
"""What takes minutes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long ones first: of several processes none is to be left with them when the others end."""
    here = config.rootpath / "tests"
    long = [here / each for each in LONG]
    items.sort(key=lambda item: not any(item.path.is_relative_to(each) for each in long))


def pytest_collection_finish() -> None:
    """To look through all that the tests themselves are made of takes a quarter of a second, and
    many tests collect garbage to see that nothing is left."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """After the last line of pytest itself."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and (printed := needs.left_out(reporter.getreports("skipped"))):
        reporter.write_line(printed, red=True)


@pytest.fixture(scope="session", autouse=True)
def _runtime_folder() -> Iterator[None]:
    """Sessions of tests do not meet those of the user, nor those of tests beside these."""
    with (
        tempfile.TemporaryDirectory(prefix="gpunb-") as folder,
        pytest.MonkeyPatch.context() as own,
    ):
        own.setenv("GPUNB_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="module")
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Functions of the test's module travel by value, as a notebook's do."""
    module = sys.modules[request.module.__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def start(by_value: None) -> Iterator[Callable[..., Any]]:
    """Starts a session of the test's own, checked to have left nothing behind at its end."""
    contexts: list[Any] = []

    def make(**settings: Any) -> Any:
        context = sessions.session(**settings)
        contexts.append(context)
        return context.__enter__()

    yield make
    for context in contexts:
        context.__exit__(None, None, None)
