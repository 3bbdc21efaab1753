"""Takes the place of nvidia-ml-py for the pictures: two A100, used as `training` says."""

from __future__ import annotations

import sys
import time
from typing import Any

import training

from tests.accelerators import real_pynvml

GIB = 2**30

sys.modules["pynvml"] = real_pynvml.load(__file__)
from tests.accelerators.fake_nvml import Card, FakeNvml  # noqa: E402 - it imports the real one


class Cards(FakeNvml):
    def __getattr__(self, function: str) -> Any:
        for at, card in enumerate(self.cards):
            card.compute = dict(training.used(at))
            card.used = sum(size or 0 for size in card.compute.values())
            load = sum(0.6 * (size or 0) / (16 * GIB) for size in card.compute.values())
            wave = 4 * (int(2 * time.monotonic()) % 3)
            card.busy = min(98, round(100 * load) + wave) if card.compute else 0
            card.celsius, card.milliwatts = 33 + card.busy // 3, 58_000 + 2_700 * card.busy
        return super().__getattr__(function)


UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f{}"
_cards = Cards(*(Card(uuid=UUID.format(at), pci=(0, 7 + at, 0)) for at in range(2)))
_cards.__spec__ = __spec__
sys.modules["pynvml"] = _cards
