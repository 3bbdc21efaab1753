"""Requests that wait for their replies."""

from __future__ import annotations

import threading

import pytest

from gpunb.data import serialize
from gpunb.protocol import messages as msg
from gpunb.protocol.rpc import Pending, Waiter, result
from tests.waiting import PATIENCE


def test_each_thread_gets_the_reply_with_its_number() -> None:
    pending: Pending[str] = Pending()
    asked = [pending.expect() for _ in range(3)]
    found: dict[int, str | None] = {}

    def wait(waiter: Waiter[str]) -> None:
        waiter.gate.acquire()
        pending.forget(waiter.number)
        found[waiter.number] = waiter.reply

    threads = [threading.Thread(target=wait, args=(each,)) for each in asked]
    for thread in threads:
        thread.start()
    for waiter in reversed(asked):
        pending.arrived(waiter.number, f"reply {waiter.number}")
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {each.number: f"reply {each.number}" for each in asked}
    assert not pending.waits


def test_a_reply_to_a_forgotten_request_is_dropped() -> None:
    pending: Pending[str] = Pending()
    waiter = pending.expect()
    pending.forget(waiter.number)
    assert pending.arrived(waiter.number, "late") is None
    assert waiter.reply is None


def test_a_callback_gets_its_reply_once() -> None:
    pending: Pending[str] = Pending()
    found: list[str | None] = []
    number = pending.call_back(found.append)
    assert pending.calls_back
    callback = pending.arrived(number, "reply")
    assert callback is not None
    callback()
    assert pending.arrived(number, "again") is None
    assert found == ["reply"]
    assert not pending.forget(number)
    assert pending.forget(pending.call_back(found.append))


def test_the_end_of_a_connection_wakes_all_who_wait() -> None:
    pending: Pending[str] = Pending()
    found: list[str | None] = []
    one, other = pending.expect(), pending.expect()
    pending.call_back(found.append)
    pending.arrived(one.number, "reply")
    for callback in pending.close():
        callback()
    assert found == [None]
    for waiter, reply in ((one, "reply"), (other, None)):
        assert waiter.gate.acquire(blocking=False)
        assert waiter.reply == reply


def test_one_thread_at_a_time_is_woken_to_read() -> None:
    pending: Pending[str] = Pending()
    waiters = [pending.expect() for _ in range(2)]
    pending.wake_one()
    assert [each.gate.locked() for each in waiters] == [False, True]
    pending.wake_one()
    assert [each.gate.locked() for each in waiters] == [False, False]
    pending.wake_one()


def test_a_failed_reply_raises_its_error() -> None:
    payload = serialize.dumps(ValueError("no such actor"))
    wires, segments = serialize.to_wires([payload])
    with pytest.raises(ValueError, match="no such actor"):
        result((msg.Reply(1, None, wires, failed=True), segments))
    assert result((msg.Reply(1, "value"), [])) == ("value", [])
