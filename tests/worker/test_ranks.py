"""The coordinator of ranks stops every rank that it has started, whenever an interrupt comes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpunb.data import serialize
from gpunb.protocol import backend
from gpunb.protocol.backend import Call, ObjectId, Outcome
from gpunb.protocol.ranks import Ranks, coordinated
from gpunb.scheduler.tasks import TaskSpec
from gpunb.worker import ranks
from gpunb.worker.ranks import RankHost


class Kernel:
    """Starts ranks that run until they are interrupted, and sends an interrupt with one of them."""

    def __init__(self, interrupted_at: int) -> None:
        self._interrupted_at = interrupted_at
        self.running: set[ObjectId] = set()

    def submit(self, call: Call) -> list[ObjectId]:
        started = (call.actor, 0)
        self.running.add(started)
        if call.actor == self._interrupted_at:
            os.kill(os.getpid(), signal.SIGINT)
        return [started]

    def interrupt(self, obj: ObjectId) -> None:
        self.running.remove(obj)

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        over = set(objects) - self.running
        assert len(over) >= count, "this would wait for ever"
        return over

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        payload = serialize.dump_failure(KeyboardInterrupt(), task="a rank")
        return [Outcome(payload, failed=True)] * len(objects)

    def context(self) -> SimpleNamespace:
        return SimpleNamespace(task=7)

    def drop(self, obj: ObjectId) -> None:
        """Nobody counts here."""


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_interrupt_while_a_rank_is_started_leaves_none_running(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(interrupted_at=rank)
    monkeypatch.setattr(backend, "current", lambda: kernel)
    arguments = serialize.dumps(((), {}))
    call = coordinated(Call(TaskSpec("train"), b"", arguments, kind="method"), Ranks(3))
    host: Any = SimpleNamespace(placed=SimpleNamespace(actors=[0, 1, 2]))
    with pytest.raises(KeyboardInterrupt):
        ranks.run(call.code, arguments, cast(RankHost, host), "train (#1)", lambda *_: False)
    assert not kernel.running
