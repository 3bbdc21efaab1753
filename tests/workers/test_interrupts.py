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

from gpunb import serialize
from gpunb.workers import interrupts as interrupts_module
from gpunb.workers import messages, shell
from gpunb.workers.interrupts import NOTICE, Interrupts
from gpunb.workers.running import Runner
from tests.stepping import every_step

ATTEMPT = (7, 1)


@pytest.fixture
def interrupts() -> Iterator[tuple[Interrupts, int]]:
    """Those of this process, and where they are noticed."""
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    told, notices = os.pipe()
    made = Interrupts(told)
    made.listen()
    yield made, notices
    sys.unraisablehook = hook
    signal.signal(signal.SIGINT, before)
    os.close(told)
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
    told: list[Any] = []
    sys.unraisablehook = told.append
    ours.listen()
    ours.begin(ATTEMPT)

    def callback(_: Any) -> None:
        raise KeyboardInterrupt

    watched = Watched()
    reference = weakref.ref(watched, callback)
    del watched
    assert [each.exc_type for each in told] == [KeyboardInterrupt], reference
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
    runner = Runner(remote, ours)
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
