"""Async actors on Ray that end themselves, and calls of them that end at a time limit."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb import exceptions
from tests.sessions import alive
from tests.waiting import Gate, eventually

pytestmark = [pytest.mark.needs_ray, pytest.mark.usefixtures("by_value", "nodes")]
WITHIN = 60


@gpunb.remote
class Ends:
    def __init__(self, gate: Gate | None = None) -> None:
        if gate is not None:
            self.task = asyncio.get_running_loop().create_task(self.at(gate))

    async def begin(self, gate: Gate) -> int:
        self.task = asyncio.create_task(self.exit(gate))
        await gate.enter_async("begin")
        return os.getpid()

    async def at(self, gate: Gate) -> None:
        await gate.enter_async("at")
        gpunb.actor.exit_actor()

    async def exit(self, gate: Gate | None = None) -> None:
        if gate is not None:
            gate.note("exit")
        gpunb.actor.exit_actor()

    async def late(self) -> None:
        raise TimeoutError("its own")

    async def pid(self) -> int:
        return os.getpid()


def is_gone(actor: Any) -> bool:
    try:
        gpunb.get(actor.pid.remote(), timeout=WITHIN)
    except exceptions.ActorDiedError as error:
        assert "it left by itself" in str(error)  # noqa: PT017 - until it does
        return True
    return False


def test_a_running_call_hands_over_its_result_before_a_background_coroutine_ends_its_actor(
    tmp_path: Path,
) -> None:
    gate = Gate(tmp_path)
    actor = Ends.remote()
    running = actor.begin.remote(gate)
    gate.await_("exit")
    gate.open()
    pid = gpunb.get(running, timeout=WITHIN)
    eventually(lambda: is_gone(actor), within=WITHIN)
    eventually(lambda: not alive(pid), within=WITHIN)


def test_a_coroutine_that_the_constructor_has_started_ends_the_actor(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    actor = Ends.remote(gate)
    assert gpunb.get(actor.pid.remote(), timeout=WITHIN)
    gate.open()
    eventually(lambda: is_gone(actor), within=WITHIN)


def test_a_call_with_a_time_limit_ends_its_actor_or_raises_its_own_error() -> None:
    actor = Ends.remote()
    with pytest.raises(TimeoutError, match="its own"):
        gpunb.get(actor.late.options(timeout=60).remote(), timeout=WITHIN)
    with pytest.raises(exceptions.ActorDiedError):
        gpunb.get(actor.exit.options(timeout=60).remote(), timeout=WITHIN)
    eventually(lambda: is_gone(actor), within=WITHIN)
