"""``gpunb release PID``: asks one of your kernels to release devices."""

from __future__ import annotations

import argparse
import json
import os

from gpunb.control import client
from gpunb.exceptions import GpunbError
from gpunb.leases import ledger_file, report
from gpunb.leases.report import LedgerEntry

PATIENCE = 5.0
"""Seconds to wait for the reply."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", type=int, help="the process of the kernel, as `gpunb status` says")
    parser.add_argument(
        "--all",
        action="store_true",
        help="end its session: what runs in it is stopped, and all its devices are free; "
        "otherwise only workers end that hold devices and have nothing to do",
    )


def run(options: argparse.Namespace) -> int:
    request = {"do": "release", "all": options.all}
    try:
        reply = client.ask(options.pid, request, PATIENCE)
    except GpunbError as error:
        raise GpunbError(f"{error}{_hint(options.pid)}") from error
    released = reply.get("released", []) if isinstance(reply, dict) else []
    if options.json:
        print(json.dumps({"pid": options.pid, "released": released, "all": options.all}))
    elif options.all:
        print(f"the session of process {options.pid} ends, and lets go of all that it holds")
    elif released:
        count = len(released)
        print(f"process {options.pid} lets go of {count} idle worker{'s' if count > 1 else ''}")
    else:
        print(
            f"process {options.pid} holds nothing that is idle: `gpunb release --all "
            f"{options.pid}` ends its session with all that runs in it"
        )
    return 0


def _of_others() -> list[LedgerEntry]:
    """The sessions of other users in the ledger."""
    try:
        entries = report.read_entries(ledger_file.ledger_folder())
    except (GpunbError, OSError):
        return []
    return [each for each in entries if each.alive and each.record.uid != os.getuid()]


def _hint(pid: int) -> str:
    """The end of the error for a pid without a session: the pids that have one."""
    running = [each.pid for each in client.sessions()]
    if pid in running:
        return ""
    for other in _of_others():
        if other.record.pid == pid:
            return f" of yours: it is {other.about.get('user') or 'another user'}'s, who can"
    if not running:
        return ". None of your kernels has a session now"
    return f". Your kernels with a session: {', '.join(map(str, running))}"
