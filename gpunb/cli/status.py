"""``gpunb status``: prints the kernels of this machine, their shares, and other processes."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from gpunb.cli.machine import gather
from gpunb.cli.output import print_text
from gpunb.scheduler.resources import size_text
from gpunb.scheduler.snapshot import actor_text


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show it live, until Ctrl-C; with --json, a line for each change",
    )


def run(options: argparse.Namespace) -> int:
    if options.watch:
        from gpunb.cli.watch import watch

        return watch(as_json=options.json)
    facts = gather()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        for line in lines(facts):
            print_text(line)
    return 0


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The lines of the report on the state that `gather` returned."""
    for device in facts["devices"]:
        yield from _device(device)
    if not facts["devices"]:
        yield "no GPUs"
    if facts["kernels"]:
        yield ""
    for kernel in facts["kernels"]:
        yield from _kernel(kernel)
    if not facts["kernels"]:
        yield "no kernel has a session of gpunb"
    for note in facts["notes"]:
        yield f"note: {note}"


def _device(device: Mapping[str, Any]) -> Iterator[str]:
    usage = device["usage"]
    figures = [device["name"]]
    if usage["memory_used"] is not None and usage["memory_total"]:
        used, total = size_text(usage["memory_used"]), size_text(usage["memory_total"])
        figures.append(f"{used} of {total} used")
    if usage["utilization"] is not None:
        figures.append(f"{usage['utilization']} % busy")
    free = 1 - sum(each["share"] for each in device["leases"])
    figures.append(f"{max(0, free):.4g} free")
    yield f"{device.get('resource') or 'GPU'} {device['id']}: {', '.join(figures)}"
    for each in device["leases"]:
        parts = [f"{each['share']:.4g}", *_owner(each), each["job"], _memory(each), _since(each)]
        yield "  " + "  ".join(part for part in parts if part)
    for each in device["outsiders"]:
        name = f"{each['name'] or 'a process'} (not of gpunb)"
        parts = ["-", f"pid {each['pid']}", each["user"], name, _memory(each), _since(each)]
        yield "  " + "  ".join(part for part in parts if part)


def _kernel(kernel: Mapping[str, Any]) -> Iterator[str]:
    state = []
    if "running" in kernel:
        state.append(f"{len(kernel['running'])} running")
        state.append(f"{kernel['queued']} waiting")
        kinds = Counter(each["kind"] for each in kernel["actors"])
        state += [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.items()]
        if kernel["private"]:
            state.append("devices of its own, in the books only")
    elif kernel["waits"]:
        state.append("waits for devices")
    kind = f"head process {kernel['head']!r}" if kernel.get("head") else "kernel"
    yield f"{kind} {'  '.join(_owner(kernel))}  {', '.join(state)}  {_since(kernel)}".rstrip()
    for actor in kernel.get("actors", ()):
        alive = f"runs {actor['running']}" if actor["running"] else "idle"
        does = alive if actor["state"] == "alive" else actor["state"]
        yield f"  #{actor['id']} {actor_text(actor)}: {does}{_on(actor)}"
    for job in kernel.get("running", ()):
        yield f"  #{job['id']} {job['name']}: running{_on(job)}"
    for job in kernel.get("waiting", ()):
        yield f"  #{job['id']} {job['name']}: {job['waits_for']}"
    if (more := kernel.get("queued", 0) - len(kernel.get("waiting", ()))) > 0:
        yield f"  and {more} more that wait"


def _on(holder: Mapping[str, Any]) -> str:
    held = [f"{share:.4g} of {name} {ident}" for name, ident, share in holder["devices"] or ()]
    return f" on {', '.join(held)}" if held else ""


def _owner(each: Mapping[str, Any]) -> list[str]:
    notebook = each.get("notebook")
    home = os.path.expanduser("~")
    if notebook and notebook.startswith(home + os.sep):
        notebook = "~" + notebook.removeprefix(home)
    return [str(part) for part in (f"pid {each['pid']}", each["user"], notebook) if part]


def _memory(each: Mapping[str, Any]) -> str | None:
    return size_text(each["memory"]) if each["memory"] is not None else None


def _since(each: Mapping[str, Any]) -> str:
    if not each.get("since"):
        return ""
    then = time.localtime(each["since"])
    days = time.time() - each["since"] > 86_400
    return time.strftime("since %Y-%m-%d %H:%M" if days else "since %H:%M", then)
