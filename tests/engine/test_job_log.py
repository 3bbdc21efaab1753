"""The log of a job."""

from __future__ import annotations

import json

import pytest

from gpunb.engine.job_log import TAIL, Log


@pytest.mark.parametrize(
    ("texts", "done"),
    [
        ([], None),
        (["45 % of it\n"], None),
        (["\r  0%|          | 0/20\r 45%|####      | 9/20"], 0.45),
        ([" 45%|####      | 9/20", "loss 0.3\n"], 0.45),
        (["100%|##########| 20/20\n", "\r  5%|          | 1/20"], 0.05),
        (["900%|"], 1.0),
        ([" 45%|" + "x" * TAIL], None),
    ],
)
def test_a_log_tells_how_far_the_last_progress_bar_is(texts: list[str], done: float | None) -> None:
    log = Log()
    for text in texts:
        log.add(("text", "stderr", {"text": text}))
    assert log.progress() == done


def test_a_log_tells_how_far_a_bar_is_that_is_a_widget() -> None:
    log = Log()
    message = {"data": {"method": "open", "state": {"width": "100%", "value": ""}}}
    for text, done in (
        ("", None),
        ('fit \u2007"a": \u200745%', 0.45),
        ("\u20079/20 [00:01&lt;00:01]", 0.45),
        ("100%", 1.0),
    ):
        message["data"]["state"]["value"] = text
        log.note_widget({"message": json.dumps(message)})
        assert log.progress() == done
    assert not log, "its messages are not kept"
