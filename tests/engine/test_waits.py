"""What the scheduler is told of the tasks that a task waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import gpunb
from gpunb.engine.engine import Engine
from gpunb.protocol import backend
from gpunb.scheduler import events as ev
from tests.waiting import PATIENCE

Start = Callable[..., Any]


def _get(refs: list[Any]) -> None:
    gpunb.get(refs)


def _get_with_timeout(refs: list[Any]) -> None:
    gpunb.get(refs, timeout=PATIENCE)


def _wait_for_one(refs: list[Any]) -> None:
    gpunb.wait(refs, num_returns=1)


def _await_one(refs: list[Any]) -> None:
    async def wait() -> None:
        await refs[0]

    asyncio.run(wait())


def _put_and_get(refs: list[Any]) -> None:
    gpunb.get([gpunb.put(1), *refs])


@pytest.mark.parametrize(
    ("wait", "count", "sure"),
    [
        (_get, 2, True),
        (_get_with_timeout, 0, False),
        (_wait_for_one, 1, True),
        (_await_one, 0, False),
        (_put_and_get, 2, True),
    ],
)
def test_every_wait_names_its_tasks(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    wait: Callable[[list[Any]], None],
    count: int,
    sure: bool,
) -> None:
    """The only CPU is not free before the wait, so no task is over by then."""
    start(num_cpus=1)
    engine: Engine = backend.current().engine  # type: ignore[attr-defined]
    events: list[ev.Event] = []
    handle = engine.scheduler.handle

    def noted(event: ev.Event, now: float) -> list[ev.Decision]:
        events.append(event)
        return handle(event, now)

    monkeypatch.setattr(engine.scheduler, "handle", noted)
    inner = gpunb.remote(lambda: None)
    gpunb.get(gpunb.remote(lambda: wait([inner.remote(), inner.remote()])).remote())
    inners = {each.task for each in events if isinstance(each, ev.Submitted) and each.parent}
    waits = [each for each in events if isinstance(each, ev.Blocked)]
    assert len(inners) == 2
    named = inners if wait is not _await_one else {min(inners)}
    assert {task for each in waits for task in each.on} == named
    assert (waits[0].count, waits[0].sure) == (count, sure)
