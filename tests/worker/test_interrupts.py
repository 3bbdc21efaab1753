"""Interrupts of a worker: none is lost where Python, or IPython, would drop it."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.protocol import messages
from gpunb.worker import interrupts as interrupts_module
from gpunb.worker.cell import shell
from gpunb.worker.interrupts import NOTICE, Interrupts
from gpunb.worker.task_runner import TaskRunner
from tests.stepping import every_step

ATTEMPT = (7, 1)


@pytest.fixture
def interrupts() -> Iterator[tuple[Interrupts, int]]:
    """Those of this process, and where they are noticed."""
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    reported, notices = os.pipe()
    made = Interrupts(reported)
    made.listen()
    yield made, notices
    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, before)
    os.close(reported)
    os.close(notices)


class Watched:
    pass


def test_what_a_weak_reference_drops_comes_again(interrupts: tuple[Interrupts, int]) -> None:
    ours, notices = interrupts
    called = []

    def callback(_: Any) -> None:
        called.append(True)
        signal.raise_signal(signal.SIGINT)

    def attempt() -> None:
        watched = Watched()
        reference = weakref.ref(watched, callback)
        del watched
        time.sleep(30)
        reference()

    ours.begin(ATTEMPT)
    os.write(notices, NOTICE.pack(*ATTEMPT))
    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert called
    ours.end()


def test_what_others_drop_is_told_as_ever(
    interrupts: tuple[Interrupts, int], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, _ = interrupts
    reported: list[Any] = []
    sys.unraisablehook = reported.append
    ours.listen()
    ours.begin(ATTEMPT)

    def callback(_: Any) -> None:
        raise KeyboardInterrupt

    watched = Watched()
    reference = weakref.ref(watched, callback)
    del watched
    assert [each.exc_type for each in reported] == [KeyboardInterrupt], reference
    ours.end()


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_that_comes_while_notices_are_read_is_seen(
    interrupts: tuple[Interrupts, int], monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Both its notice and its signal may come when the pipe was found empty."""
    ours, notices = interrupts
    read, late = ours._notices, [True]

    def empty() -> list[tuple[int, int]]:
        found = read()
        if late:
            late.clear()
            os.write(notices, NOTICE.pack(*ATTEMPT))
            signal.raise_signal(signal.SIGINT)
        return found

    def attempt() -> None:
        if begun:
            ours.begin(ATTEMPT)
            monkeypatch.setattr(ours, "_notices", empty)
            signal.raise_signal(signal.SIGINT)
        else:
            monkeypatch.setattr(ours, "_notices", empty)
            ours.begin(ATTEMPT)

    with pytest.raises(KeyboardInterrupt):
        attempt()
    assert ours.hit
    ours.end()


@pytest.mark.parametrize("already", [False, True], ids=["none", "another"])
def test_an_interrupt_between_any_two_steps_is_seen(
    interrupts: tuple[Interrupts, int], already: bool
) -> None:
    """Whether it comes while an attempt begins or while another signal is looked at."""
    ours, notices = interrupts

    def comes() -> None:
        os.write(notices, NOTICE.pack(*ATTEMPT))
        signal.raise_signal(signal.SIGINT)

    for steps in every_step(comes, interrupts_module):
        ours._early.clear()
        if already:  # one whose notice has been read, so that its signal says nothing
            ours._unsignalled, ours._expected_until = 1, time.monotonic() + 60
        try:
            with steps.counted():
                ours.begin(ATTEMPT)
                if already:
                    signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            assert ours.hit
            assert steps.left == 0
        else:
            assert steps.left > 0, "it was lost"
        finally:
            ours.end()


def test_a_cell_that_starts_is_interrupted_once_its_shell_is_made(
    interrupts: tuple[Interrupts, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython is tried out when the shell is made, and takes an interrupt for its own."""
    ours, notices = interrupts
    swallowed: list[Any] = []

    def prepare() -> None:
        os.write(notices, NOTICE.pack(*ATTEMPT))
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            swallowed.append(error)

    monkeypatch.setattr(shell, "prepare", prepare)
    remote: Any = None
    runner = TaskRunner(remote, ours)
    ours.begin(ATTEMPT)
    with pytest.raises(KeyboardInterrupt):
        runner.call(_cell(), [])
    assert not swallowed
    assert ours.hit
    ours.end()


def _cell() -> messages.Execute:
    task, attempt = ATTEMPT
    return messages.Execute(
        task=task,
        attempt=attempt,
        name="In[1]",
        kind="cell",
        setup=None,
        function="",
        code=None,
        arguments=(serialize.dumps(((), {})).wire(), 0),
        inputs=(),
        late=(),
        returns=1,
        retry=False,
        last=True,
    )


def test_a_notice_that_could_not_be_read_at_its_signal_is_read_when_the_worker_is_woken(
    interrupts: tuple[Interrupts, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, notices = interrupts

    def fails(*_: Any) -> bytes:
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(interrupts_module.os, "read", fails)
        os.write(notices, NOTICE.pack(*ATTEMPT))
        signal.raise_signal(signal.SIGINT)  # nothing runs yet
        ours.begin(ATTEMPT)
        signal.raise_signal(interrupts_module.WAKE)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(interrupts_module.WAKE)
    assert ours.hit
    ours.end()


def test_a_worker_that_is_woken_leaves_a_task_alone_that_handles_interrupts_itself(
    interrupts: tuple[Interrupts, int],
) -> None:
    ours, notices = interrupts
    came: list[int] = []
    ours.begin(ATTEMPT)
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    os.write(notices, NOTICE.pack(*ATTEMPT))
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(interrupts_module.WAKE)
    assert came == [signal.SIGINT]
    assert not ours.hit
    ours.end()


def test_a_worker_that_is_woken_without_a_notice_goes_on(
    interrupts: tuple[Interrupts, int],
) -> None:
    ours, _ = interrupts
    ours.begin(ATTEMPT)
    signal.raise_signal(interrupts_module.WAKE)
    assert not ours.hit
    ours.end()
