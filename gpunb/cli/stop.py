"""``gpunb stop``: end a head process, if nothing is lost with it or nobody minds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

from gpunb import linux
from gpunb.exceptions import GpunbError
from gpunb.runtime import heads

PATIENCE = 15.0
"""Seconds in which it is to end by itself; then it is killed."""

AGAIN = 0.3
"""Seconds after which it is asked again whether something would be lost."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="of the head process; needed if several run")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--wait", action="store_true", help="wait until nothing would be lost, then end it"
    )
    ways.add_argument(
        "--force", action="store_true", help="end it with all that runs or is kept in it"
    )


def run(options: argparse.Namespace) -> int:
    there = heads.running()
    known = ", ".join(f"{each.name} (pid {each.pid})" for each in there)
    chosen = [each for each in there if options.name in (None, each.name)]
    if not there:
        named = "" if options.name is None else f", and so none {options.name!r}"
        raise GpunbError(
            f"no head process runs{named}: there is nothing to stop. A kernel's own session ends "
            "with gpunb.shutdown()"
        )
    if not chosen:
        raise GpunbError(f"no head process {options.name!r} runs; those that do: {known}")
    if len(chosen) > 1:
        raise GpunbError(f"several head processes run, name one: {known}")
    (name, pid) = chosen[0]
    with _watched(pid) as process:
        if not options.force:
            _ask(name, wait=options.wait)
        killed = not _ended(process, pid, force=options.force)
    if options.json:
        print(json.dumps({"name": name, "pid": pid, "killed": killed}))
    else:
        how = f"did not end within {PATIENCE:g} s and was killed" if killed else "has ended"
        print(f"head process {name!r} (pid {pid}) {how}, with all that ran in it")
    return 0


def _ask(name: str, *, wait: bool) -> None:
    """Have it end, when nothing would be lost; with `wait` that may take its time.

    Raises:
        GpunbError: something would be, or it gives no answer.
    """
    told: list[str] = []
    while True:
        try:
            lost = heads.may_end(name)
        except OSError:
            return  # it is gone
        except GpunbError as error:
            raise GpunbError(f"{error}: `gpunb stop {name} --force` ends it all the same") from None
        if not lost:
            return
        if not wait:
            raise GpunbError(
                f"with the head process {name!r} would be lost:\n"
                + "".join(f"  {each}\n" for each in lost)
                + "Bring cells home with `%gpu wait ID` and end sessions with `%gpu stop NAME` in "
                f"an attached notebook. `gpunb stop {name} --wait` waits until nothing would be "
                f"lost, `gpunb stop {name} --force` loses it"
            )
        if lost != told:
            print(f"waiting for {'; '.join(lost)}", file=sys.stderr, flush=True)
            told = lost
        time.sleep(AGAIN)


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[int | None]:
    """What tells of a process's end; None if it is gone."""
    try:
        descriptor = linux.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _ended(process: int | None, pid: int, *, force: bool) -> bool:
    """Wait until it is gone, which it was asked for, unless by `force`; whether it did so by
    itself."""
    if process is None:
        return True
    poll = select.poll()
    poll.register(process, select.POLLIN)
    for number in (signal.SIGTERM if force else 0, signal.SIGKILL):
        try:
            linux.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return True
        if poll.poll(PATIENCE * 1000):
            return number != signal.SIGKILL
    raise GpunbError(f"process {pid} does not end, though it was killed")
