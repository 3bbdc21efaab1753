"""``gpunb logs JOB``: prints the output of a job, in any terminal of its user."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpunb.cli.output import print_remark
from gpunb.control import client
from gpunb.exceptions import GpunbError
from gpunb.head import discovery

PERIOD = 0.3
"""Seconds between two requests for new output."""


class _JobLog(NamedTuple):
    """A session that has the job's output, and its reply to the request for it."""

    pid: int
    reply: Mapping[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", metavar="JOB", type=_number, help="its number, as `gpunb status` and `%%gpu ps` say"
    )
    parser.add_argument(
        "--of",
        metavar="SESSION",
        help="the head process, by name, or the kernel, by pid; needed if several have such a job",
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with what comes until the job is over"
    )


def run(options: argparse.Namespace) -> int:
    if options.json and options.follow:
        raise GpunbError("--json is for what there is now: leave out --follow")
    log = _find(options.job, options.of)
    if options.json:
        about = {name: log.reply[name] for name in ("name", "state", "text", "truncated")}
        print(json.dumps({"pid": log.pid, "job": options.job, **about}))
        return 0
    label = f"#{options.job} {log.reply['name']}"
    if log.reply["truncated"]:
        print_remark(f"... the beginning of what {label} has shown is left out ...")
    last = _show(log.reply["text"])
    if options.follow:
        last = _follow(log, options.job) or last
    elif not log.reply["text"]:
        print_remark(f"{label} is {log.reply['state']} and has shown nothing")
    if last and not last.endswith("\n") and sys.stdout.isatty():
        print()
    return 0


def _number(text: str) -> int:
    try:
        return int(text.removeprefix("#"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a job, such as 7") from None


def _show(text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


def _follow(log: _JobLog, job: int) -> str:
    """Print new output until the job is over. Returns the last text that was printed."""
    last, reply = "", log.reply
    while reply["state"] in ("queued", "running"):
        time.sleep(PERIOD)
        request = {"do": "logs", "job": job, "position": reply["position"]}
        reply = client.ask(log.pid, request)
        last = _show(reply["text"]) or last
    print_remark(f"#{job} {reply['name']} {reply['state']}")
    return last


def _find(job: int, of: str | None) -> _JobLog:
    """The only session that has the job's output.

    Raises:
        GpunbError: no session has it, or several have such a job.
    """
    names = {
        each.pid: f"head process {each.name!r} (pid {each.pid})" for each in discovery.running()
    }
    pids = [each.pid for each in client.sessions()] if of is None else [_pid(of)]
    if not pids:
        raise GpunbError("none of your kernels has a session now, and no head process runs")
    logs, reasons = [], {}
    for pid in pids:
        try:
            logs.append(_JobLog(pid, client.ask(pid, {"do": "logs", "job": job})))
        except GpunbError as error:
            reasons[names.get(pid) or _session_name(pid)] = str(error)
    if not logs:
        raise GpunbError("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if len(logs) > 1:
        several = ", ".join(names.get(each.pid) or _session_name(each.pid) for each in logs)
        raise GpunbError(f"several sessions have a job #{job}, name one with --of: {several}")
    return logs[0]


def _pid(of: str) -> int:
    if of.isdigit():
        return int(of)
    pid = discovery.pid_of(of)
    if pid is None:
        known = ", ".join(each.name for each in discovery.running())
        rest = f"; those that do: {known}" if known else ": name a kernel by its pid"
        raise GpunbError(f"no head process {of!r} runs{rest}")
    return pid


def _session_name(pid: int) -> str:
    try:
        notebook = client.ask(pid, {"do": "status"})["session"]["notebook"]
    except GpunbError:  # it has ended
        notebook = None
    return f"pid {pid}" + (f" ({os.path.basename(notebook)})" if notebook else "")
