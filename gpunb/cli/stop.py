"""``gpunb stop``: end a head process with all that runs in it."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal

from gpunb.exceptions import GpunbError
from gpunb.runtime import heads

PATIENCE = 15.0
"""Seconds in which it is to end by itself; then it is killed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="of the head process; needed if several run")


def run(options: argparse.Namespace) -> int:
    there = heads.running()
    known = ", ".join(f"{each.name} (pid {each.pid})" for each in there) or "none"
    chosen = [each for each in there if options.name in (None, each.name)]
    if not chosen:
        which = "no head process runs" if options.name is None else f"no {options.name!r} runs"
        raise GpunbError(f"{which}; those that do: {known}")
    if len(chosen) > 1:
        raise GpunbError(f"several head processes run, name one: {known}")
    (name, pid) = chosen[0]
    killed = not _ended(pid)
    if options.json:
        print(json.dumps({"name": name, "pid": pid, "killed": killed}))
    else:
        how = f"did not end within {PATIENCE:g} s and was killed" if killed else "has ended"
        print(f"head process {name!r} (pid {pid}) {how}, with all that ran in it")
    return 0


def _ended(pid: int) -> bool:
    """End a process, and wait until it is gone; whether it did so by itself."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                return True
            if poll.poll(PATIENCE * 1000):
                return number == signal.SIGTERM
        raise GpunbError(f"process {pid} does not end, though it was killed")
    finally:
        os.close(descriptor)
