"""``gpunb logs JOB``: what a job has shown, from any terminal of its user."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpunb.exceptions import GpunbError
from gpunb.runtime import heads, kernels

PERIOD = 0.3
"""Seconds between two looks for what is new."""


class _Known(NamedTuple):
    """A session that knows the job, and what it says of it."""

    pid: int
    said: Mapping[str, Any]


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
    known = _find(options.job, options.of)
    if options.json:
        about = {name: known.said[name] for name in ("name", "state", "text", "truncated")}
        print(json.dumps({"pid": known.pid, "job": options.job, **about}))
        return 0
    label = f"#{options.job} {known.said['name']}"
    if known.said["truncated"]:
        print(f"... the beginning of what {label} has shown is left out ...", file=sys.stderr)
    last = _show(known.said["text"])
    if options.follow:
        last = _follow(known, options.job) or last
    elif not known.said["text"]:
        print(f"{label} is {known.said['state']} and has shown nothing", file=sys.stderr)
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


def _follow(known: _Known, job: int) -> str:
    """Show what comes; the last of it."""
    last, said = "", known.said
    while said["state"] in ("queued", "running"):
        time.sleep(PERIOD)
        request = {"do": "logs", "job": job, "position": said["position"]}
        said = kernels.ask(known.pid, request)
        last = _show(said["text"]) or last
    print(f"#{job} {said['name']} {said['state']}", file=sys.stderr)
    return last


def _find(job: int, of: str | None) -> _Known:
    """The one session that has kept what the job has shown.

    Raises:
        GpunbError: none has, or several.
    """
    names = {each.pid: f"head process {each.name!r} (pid {each.pid})" for each in heads.running()}
    pids = [each.pid for each in kernels.sessions()] if of is None else [_pid(of)]
    if not pids:
        raise GpunbError("none of your kernels has a session now, and no head process runs")
    found, reasons = [], {}
    for pid in pids:
        try:
            found.append(_Known(pid, kernels.ask(pid, {"do": "logs", "job": job})))
        except GpunbError as error:
            reasons[names.get(pid) or _named(pid)] = str(error)
    if not found:
        raise GpunbError("; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if len(found) > 1:
        several = ", ".join(names.get(each.pid) or _named(each.pid) for each in found)
        raise GpunbError(f"several sessions have a job #{job}, name one with --of: {several}")
    return found[0]


def _pid(of: str) -> int:
    if of.isdigit():
        return int(of)
    pid = heads.pid_of(of)
    if pid is None:
        known = ", ".join(each.name for each in heads.running())
        rest = f"; those that do: {known}" if known else ": name a kernel by its pid"
        raise GpunbError(f"no head process {of!r} runs{rest}")
    return pid


def _named(pid: int) -> str:
    try:
        notebook = kernels.ask(pid, {"do": "status"})["session"]["notebook"]
    except GpunbError:  # it has ended
        notebook = None
    return f"pid {pid}" + (f" ({os.path.basename(notebook)})" if notebook else "")
