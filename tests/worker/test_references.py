"""The references of a worker are counted, and the kernel hears of the changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gpunb.protocol import messages as msg
from gpunb.worker.references import References
from tests.waiting import PATIENCE

ONE, TWO, THREE = (1, 0), (2, 0), (3, 0)


class Kernel:
    """Notes the changes that are sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.references = References(self.sent.append)

    def changes(self) -> list[tuple[Any, int]]:
        """Return the changes since the last call, each as (object, change)."""
        found = [tuple(each) for each in self.sent]
        self.sent.clear()
        return found


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def change(references: References, *changes: Any) -> None:
    """Gain a reference to each of these objects, or lose one for (object, False)."""
    for each in changes:
        obj, gained = each if isinstance(each[1], bool) else (each, True)
        (references.hold if gained else references.drop)(obj)


def test_changes_are_sent_when_they_are_reported(kernel: Kernel) -> None:
    kernel.references.hold(ONE)
    assert kernel.references
    assert kernel.sent == []
    kernel.references.report()
    assert kernel.sent == [msg.Held(ONE, 1)]
    assert not kernel.references
    kernel.references.report()
    assert len(kernel.sent) == 1


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ([ONE, ONE, ONE], [(ONE, 3)]),
        ([ONE, (ONE, False)], []),
        ([(ONE, False), ONE, ONE], [(ONE, 1)]),
        ([(ONE, False), (ONE, False)], [(ONE, -2)]),
        ([ONE, TWO], [(ONE, 1), (TWO, 1)]),
    ],
)
def test_changes_of_one_object_are_one_message(
    kernel: Kernel, changes: list[Any], sent: list[Any]
) -> None:
    change(kernel.references, *changes)
    kernel.references.report()
    assert kernel.changes() == sent


def test_gains_go_before_losses(kernel: Kernel) -> None:
    """The kernel must not let go of a value before it knows who holds a value within it."""
    change(kernel.references, (ONE, False), TWO, (THREE, False), TWO)
    kernel.references.report()
    assert kernel.changes() == [(TWO, 2), (ONE, -1), (THREE, -1)]


def test_losses_may_wait(kernel: Kernel) -> None:
    change(kernel.references, (ONE, False), TWO, (ONE, False), THREE, (THREE, False))
    kernel.references.report(gains_only=True)
    assert kernel.changes() == [(TWO, 1)]
    assert kernel.references
    kernel.references.hold(ONE)
    kernel.references.report()
    assert kernel.changes() == [(ONE, -1)]


def test_references_in_garbage_are_dropped(kernel: Kernel) -> None:
    class Holder:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            kernel.references.drop(ONE)

    holder = Holder()
    del holder
    kernel.references.tidy()
    assert kernel.changes() == [(ONE, -1)]


def test_destructor_may_drop_a_reference_during_a_report() -> None:
    sent: list[Any] = []

    def send(message: Any) -> None:
        if not sent:
            references.drop(TWO)
        sent.append(tuple(message))

    references = References(send)
    references.hold(ONE)
    references.report()
    assert sent == [(ONE, 1)]
    references.report()
    assert sent == [(ONE, 1), (TWO, -1)]


def test_changes_of_another_thread_are_sent_first() -> None:
    """A request that follows may be about an object that the other thread has just gained."""
    inside, go = threading.Event(), threading.Event()
    order: list[str] = []

    def send(message: Any) -> None:
        inside.set()
        assert go.wait(PATIENCE)
        order.append("sent")

    def second() -> None:
        references.report()
        order.append("goes on")

    references = References(send)
    references.hold(ONE)
    threads = [threading.Thread(target=references.report), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(PATIENCE)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["sent", "goes on"]


def test_stock_is_not_taken_while_other_threads_change_it(kernel: Kernel) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(PATIENCE,))
    thread.start()
    kernel.references.hold(ONE)
    kernel.references.take_stock()
    done.set()
    thread.join(PATIENCE)
    assert kernel.sent == [msg.Held(ONE, 1)]


def test_report_that_failed_leaves_the_lock_open() -> None:
    failures = [OSError("no descriptor")]
    sent: list[Any] = []

    def send(message: Any) -> None:
        if failures:
            raise failures.pop()
        sent.append(message)

    references = References(send)
    references.hold(ONE)
    with pytest.raises(OSError, match="no descriptor"):
        references.report()
    references.recover()
    references.hold(TWO)
    references.report()
    assert sent == [msg.Held(TWO, 1)]
