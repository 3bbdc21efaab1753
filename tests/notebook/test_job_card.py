"""The line below a background cell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gpunb.notebook.background_cell import BackgroundCell
from gpunb.notebook.job_card import Card

FACTS = {"name": "train", "state": "running", "devices": []}


def test_the_card_of_a_long_job_changes_once_a_minute() -> None:
    now, sent = 0.0, []
    job = cast("Any", BackgroundCell)(
        SimpleNamespace(
            obj=(7, 0),
            name="train",
            number=1,
            backend=SimpleNamespace(ask=lambda *_: {**FACTS, "seconds": now}),
            request=SimpleNamespace(session=None),
        ),
        SimpleNamespace(failed=False),
    )
    cell = SimpleNamespace(send_now=lambda kind, content: sent.append(content["data"]))
    card = Card(job.describe, cast("Any", cell))
    for half_seconds in range(2 * 200):
        now = half_seconds / 2
        card.update()
    texts = [each["text/plain"] for each in sent]
    assert texts[1] == "<Job #7 train running, 0.5 s>"
    assert texts[120:] == [f"<Job #7 train running, {n} min>" for n in (1, 2, 3)]
    assert repr(job) == "<Job #7 train running, 3:19>"
