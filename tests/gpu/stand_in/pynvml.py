"""Takes the place of nvidia-ml-py: one H200, with the memory that `card_memory` counts."""

from __future__ import annotations

import sys
from typing import Any

import card_memory as memory

from tests.accelerators import real_pynvml

sys.modules["pynvml"] = real_pynvml.load(__file__)
from tests.accelerators.fake_nvml import Card, FakeNvml  # noqa: E402 - it imports the real one


class StandIn(FakeNvml):
    def __getattr__(self, function: str) -> Any:
        (card,) = self.cards
        card.compute = dict(memory.used())
        card.used = sum(size or 0 for size in card.compute.values())
        return super().__getattr__(function)


_card = Card(memory.NAME, memory.UUID, total=memory.TOTAL)
_card.answers["nvmlDeviceGetCudaComputeCapability"] = [9, 0]
_stand_in = StandIn(_card)
_stand_in.__spec__ = __spec__
sys.modules["pynvml"] = _stand_in
