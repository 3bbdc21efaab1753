"""Messages between a kernel and Ray's workers: their order, and how many calls they make."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.waiting import eventually

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


class Calls:
    """In place of `Sender`: the messages of each call."""

    def __init__(self) -> None:
        self.made: list[list[Any]] = []

    def send(self, mailbox: Any, to: str, items: list[Any], **options: Any) -> None:
        self.made.append(items)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    import ray

    from gpunb.ray import mailbox

    made = Calls()
    monkeypatch.setattr(mailbox, "Sender", lambda: made)
    monkeypatch.setattr(mailbox, "GATHER", (30.0, 60.0))
    monkeypatch.setattr(ray, "get", lambda *_, **__: None)
    return made


def test_the_first_message_is_sent_at_once_and_those_after_it_together(calls: Calls) -> None:
    from gpunb.ray.mailbox import BackgroundSender

    sender = BackgroundSender()
    sender.send(None, "first")
    eventually(lambda: calls.made == [["first"]])
    for number in range(5):
        sender.send(None, number)
    sender.send(None, "for a worker", "worker-1")
    assert calls.made == [["first"]]
    sender.flush(None)
    assert calls.made == [["first"], [0, 1, 2, 3, 4], ["for a worker"], []]
