"""A new worker rehearses tasks and a cell, if no task comes at once; nothing is left of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from gpunb.data import segments
from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, decode_trusted
from gpunb.worker import main
from gpunb.worker.interrupts import NOTICE, WAKE
from gpunb.worker.task_runner import TaskRunner

TRACES_OF_CELL = """
import random, sys, warnings
import IPython, numpy
from gpunb.worker import import_hooks, library_state
from gpunb.worker.cell import run, shell

def traces():
    return (
        list(warnings.filters), random.getstate(), list(sys.meta_path), dict(import_hooks._waiting),
        dict(library_state._applied), IPython.get_ipython(), dict(shell.prepare().user_ns),
    )

shell.rehearse()
before = traces()
run.rehearse()
assert traces() == before
started = []
run._thread.start_new_thread = lambda *given: started.append(given)
run.rehearse(forks=True)
assert not started
run.rehearse()
assert len(started) == 1
# Otherwise a cell would have to read all that is registered with these libraries.
assert library_state._untouched["IPython"] is not None
assert library_state._untouched["copyreg"] is not None
"""

TRACES_OF_TASKS = """
import os, sys
import numpy
from gpunb.worker import main
from gpunb.worker.limits import usage

def traces():
    return (
        dict(os.environ), sys.path, list(sys.path), sys.argv, list(sys.argv), list(sys.meta_path),
        os.getcwd(), usage._devices, os.listdir("/proc/self/fd"),
    )

for full in (False, True):
    before = traces()
    main.rehearse(full=full)
    assert traces() == before, (full, before, traces())
"""


@pytest.mark.parametrize("traces", [TRACES_OF_CELL, TRACES_OF_TASKS], ids=["cell", "tasks"])
def test_nothing_is_left_of_a_rehearsal(traces: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", traces], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_zygote_without_shared_memory_warms_up_for_small_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[str] = []

    def no_file() -> int:
        failed.append("a file")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(segments, "memory_file", no_file)
    main.warm_up(1)
    assert failed


@pytest.mark.parametrize(
    ("messages", "rehearsed"),
    [
        ((), ["task", "large task"]),
        ((msg.Rehearse(),), ["task", "large task", "cell"]),
        ((msg.Rehearse(), msg.Retired()), []),
        ((msg.Retired(),), []),
    ],
    ids=["nothing", "a request", "a request and more", "another"],
)
def test_a_worker_rehearses_only_while_no_message_comes(
    monkeypatch: pytest.MonkeyPatch, messages: tuple[Any, ...], rehearsed: list[str]
) -> None:
    ours, theirs = Channel.pair()
    reading, writing = os.pipe()
    done: list[str] = []
    with theirs, ours:
        kernel = Channel(theirs)

        def note(what: str) -> None:
            done.append(what)
            if done == rehearsed:
                kernel.send(msg.Retired())
            raise ValueError("a rehearsal that fails does no harm")

        monkeypatch.setattr(
            main, "rehearse", lambda full=False: note("large task" if full else "task")
        )
        monkeypatch.setattr(main, "rehearse_cell", lambda: note("cell"))
        for each in messages:
            kernel.send(each)
        main.WorkerLoop(Channel(ours, decode_trusted), reading)._serve()
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert done == rehearsed


def test_an_interrupt_during_a_rehearsal_is_kept_for_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = Channel.pair()
    reading, writing = os.pipe()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, WAKE)}
    with theirs, ours:
        kernel = Channel(theirs)
        loop = main.WorkerLoop(Channel(ours, decode_trusted), reading)
        call = TaskRunner.call

        def interrupted(*arguments: Any) -> Any:
            os.write(writing, NOTICE.pack(7, 1))
            os.kill(os.getpid(), signal.SIGINT)
            kernel.send(msg.Retired())
            return call(*arguments)

        monkeypatch.setattr(TaskRunner, "call", interrupted)
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
        try:
            loop._interrupts.listen()
            loop._serve()
            assert loop._interrupts.was_early((7, 1))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    for descriptor in (reading, writing):
        os.close(descriptor)
