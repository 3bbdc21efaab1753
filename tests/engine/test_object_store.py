"""The objects of a session: what is told when one is there, and who may let go of one."""

from __future__ import annotations

import pytest

from gpunb.data.serialize import dumps
from gpunb.engine.object_memory import Memory
from gpunb.engine.object_store import Store
from gpunb.protocol.backend import Outcome


@pytest.fixture
def store() -> Store:
    return Store(Memory(1 << 30))


def test_whoever_waits_is_told_although_another_one_fails(store: Store) -> None:
    reported: list[str] = []

    def fails() -> None:
        raise OSError("no descriptor is left")

    store.create((1, 0))
    store.notify((1, 0), lambda: reported.append("first"))
    store.notify((1, 0), fails)
    store.notify((1, 0), lambda: reported.append("last"))
    with pytest.raises(OSError, match="no descriptor"):
        store.settle((1, 0), Outcome(dumps(5)))
    assert reported == ["first", "last"]


def test_who_has_stopped_waiting_meanwhile_is_not_told(store: Store) -> None:
    reported: list[str] = []

    def second() -> None:
        reported.append("second")

    def first() -> None:
        reported.append("first")
        entry.forget(second)

    store.create((1, 0))
    entry = store.entry((1, 0))
    entry.notify(first)
    entry.notify(second)
    store.settle((1, 0), Outcome(dumps(5)))
    assert reported == ["first"]
    entry.notify(second)
    assert reported == ["first", "second"]


def test_a_worker_cannot_let_go_of_what_others_have(store: Store) -> None:
    store.create((1, 0), Outcome(dumps(5)))
    store.hold_for(7, (1, 0), 1)
    store.hold_for(7, (1, 0), -3)
    assert store.wanted((1, 0))
    store.hold_for(7, (1, 0), -1)
    assert store.wanted((1, 0))
    store.drop((1, 0))
    assert not store.wanted((1, 0))
