"""A new worker rehearses a cell, if no task comes at once, and nothing is left of it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from gpunb.protocol import messages as msg
from gpunb.protocol.channel import Channel, decode_trusted
from gpunb.worker import main

TRACES = """
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
# Otherwise a cell would have to read all that is registered with these libraries.
assert library_state._untouched["IPython"] is not None
assert library_state._untouched["copyreg"] is not None
"""


def test_nothing_is_left_of_a_rehearsal() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TRACES], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("follows", [False, True], ids=["nothing", "a message"])
def test_a_worker_rehearses_only_if_no_message_follows_at_once(
    monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    ours, theirs = Channel.pair()
    reading, writing = os.pipe()
    rehearsed: list[Any] = []
    with theirs, ours:
        kernel = Channel(theirs)

        def rehearse() -> None:
            rehearsed.append(True)
            kernel.send(msg.Retired())

        monkeypatch.setattr(main, "rehearse_cell", rehearse)
        kernel.send(msg.Rehearse())
        if follows:
            kernel.send(msg.Retired())
        main.WorkerLoop(Channel(ours, decode_trusted), reading)._serve()
    for each in (reading, writing):
        os.close(each)
    assert bool(rehearsed) is not follows
