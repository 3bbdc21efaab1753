"""The session and the console of the tests of actors."""

from __future__ import annotations

from collections.abc import Iterator

import cloudpickle
import pytest

from gpunb.protocol import sink
from tests.api.actors import counter
from tests.sessions import assert_idle, session


@pytest.fixture(scope="module", params=["fork"])
def started(request: pytest.FixtureRequest, by_value: None) -> Iterator[None]:
    """Four simulated devices, two of them A100s. `Counter` travels by value, as the tests' own."""
    devices = "2xA100:40GiB,2xV100:16GiB"
    cloudpickle.register_pickle_by_value(counter)
    with session(simulate=devices, num_cpus=2, start_method=request.param):
        yield
    cloudpickle.unregister_pickle_by_value(counter)


@pytest.fixture
def four(started: None) -> Iterator[None]:
    """The shared session, in which each test leaves everything free."""
    yield
    assert_idle()


@pytest.fixture
def console() -> Iterator[list[str]]:
    """The texts that are written to the console."""
    texts: list[str] = []

    class Recorder(sink.Console):
        def write(self, stream, text):
            texts.append(text)

    sink.install(Recorder)
    yield texts
    sink.install(None)
