"""Which functions a worker keeps."""

from __future__ import annotations

from gpunb.protocol.function_cache import MOST, Recent


def test_the_last_used_are_there() -> None:
    recent = Recent()
    assert not recent.use("first")
    assert recent.use("first")
    for number in range(MOST - 1):
        assert not recent.use(str(number))
    assert recent.use("first")  # which is the last used again
    assert not recent.use("one more")
    assert "first" in recent
    assert "0" not in recent
    assert not recent.use("0")
