"""The session of the tests of waits and cancels."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest

from tests.api.control import tasks
from tests.sessions import assert_idle, session


@pytest.fixture(scope="module", params=["fork"])
def started(request: pytest.FixtureRequest, by_value: None) -> Iterator[None]:
    """Two simulated devices. The tasks for all tests travel by value, as the tests' own."""
    cloudpickle.register_pickle_by_value(tasks)
    with session(simulate="2xA100:40GiB", num_cpus=2, start_method=request.param):
        yield
    cloudpickle.unregister_pickle_by_value(tasks)


@pytest.fixture
def two(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free."""
    yield
    assert_idle()
