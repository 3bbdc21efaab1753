"""``gpunb stop``: ends a head process, unless results or sessions would be lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator

from gpunb.cli.output import print_remark, print_text
from gpunb.exceptions import GpunbError
from gpunb.head import discovery
from gpunb.system import linux

PATIENCE = 15.0
"""Seconds until a head process that does not end is killed."""

RETRY = 0.3
"""Seconds between two requests to end, with ``--wait``."""


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
    running = discovery.running()
    known = ", ".join(f"{each.name} (pid {each.pid})" for each in running)
    chosen = [each for each in running if options.name in (None, each.name)]
    if not running:
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
    with _pidfd(pid) as process:
        if not options.force:
            _request_end(name, wait=options.wait)
        killed = not _wait_for_end(process, pid, force=options.force)
    if options.json:
        print(json.dumps({"name": name, "pid": pid, "killed": killed}))
    else:
        how = f"did not end within {PATIENCE:g} s and was killed" if killed else "has ended"
        print_text(f"head process {name!r} (pid {pid}) {how}, with all that ran in it")
    return 0


def _request_end(name: str, *, wait: bool) -> None:
    """Ask the head process to end, if nothing would be lost; with `wait`, as soon as that is so.

    Raises:
        GpunbError: something would be lost, or the head process does not reply.
    """
    shown: list[str] = []
    while True:
        try:
            lost = discovery.may_end(name)
        except OSError:
            return  # the process is gone
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
        if lost != shown:
            print_remark(f"waiting for {'; '.join(lost)}")
            shown = lost
        time.sleep(RETRY)


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    """A file descriptor of the process; None if it is gone."""
    try:
        descriptor = linux.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_end(process: int | None, pid: int, *, force: bool) -> bool:
    """Wait for the end of the process, after SIGTERM with `force`. Returns False if it had to be
    killed.

    Raises:
        GpunbError: the process does not end after SIGKILL.
    """
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
