"""Messages between a kernel and Ray's workers come in the order in which they were sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = pytest.mark.needs_ray


class Recorded:
    """In place of Ray's handle of a mailbox."""

    def __init__(self, ident: str) -> None:
        self._actor_id = ident
        self.put = self
        self.sent: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> None:
        self.sent.append(arguments)


def test_a_sender_numbers_what_it_sends_to_each_mailbox() -> None:
    from gpunb.ray.mailbox import Sender

    sender, one, other = Sender(), Recorded("one"), Recorded("other")
    for box in (one, other, one, one, other):
        sender.send(box, "kernel", ["item"])
    assert [number for *_, number in one.sent] == [0, 1, 2]
    assert [number for *_, number in other.sent] == [0, 1]


def test_whatever_order_ray_brings_them_in() -> None:
    from gpunb.ray.mailbox import Mailbox

    async def mixed() -> list[Any]:
        box = Mailbox()
        await asyncio.gather(
            *(box.put("kernel", [number], "a", number) for number in (2, 0, 4, 1, 3)),
            *(box.put("kernel", [f"b{number}"], "b", number) for number in (1, 0)),
        )
        return await box.take("kernel", 1)

    found = asyncio.run(asyncio.wait_for(mixed(), 60))
    assert [each for each in found if isinstance(each, int)] == [0, 1, 2, 3, 4]
    assert [each for each in found if isinstance(each, str)] == ["b0", "b1"]


def test_one_that_is_lost_keeps_the_others_only_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gpunb.ray import mailbox

    monkeypatch.setattr(mailbox, "TURN", 0.01)

    async def with_a_gap() -> list[Any]:
        box = mailbox.Mailbox()
        for number in (0, 2, 3):
            await box.put("kernel", [number], "a", number)
        return await box.take("kernel", 1)

    assert asyncio.run(asyncio.wait_for(with_a_gap(), 60)) == [0, 2, 3]
