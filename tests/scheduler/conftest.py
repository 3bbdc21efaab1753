"""The fixture of the core tests: a scheduler in a small world, checked to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest

from gpunb.scheduler.policy import Policy
from tests.scheduler.world import World, machine

MakeWorld = Callable[..., World]


@pytest.fixture
def core() -> Iterator[MakeWorld]:
    """Makes worlds: ``core(gpus=2, cpus=4)``; policy settings are keywords too.

    Invariants are checked after every event. At the end of the test everything that still runs is
    let finish; then nothing may be left over, and the same events must lead to the same decisions.
    """
    worlds: list[World] = []

    def make(
        gpus: int | Iterable[tuple[str, int]] = 0,
        cpus: float = 2,
        resources: Mapping[str, float] | None = None,
        **policy: float,
    ) -> World:
        world = World(machine(gpus, cpus, resources), Policy(**policy))  # type: ignore[arg-type]
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        if not world.broken:
            world.drain()
            world.replay()
