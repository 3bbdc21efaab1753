"""Tab completion after %gpu and %%gpu."""

from __future__ import annotations

import os
import re
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from gpunb.accelerators import detect, parse_simulate
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.subcommands import HELP, SETTINGS
from gpunb.protocol import backend

_FIRST = re.compile(r"(%%?)gpu(?:\s+(.*))?\Z")

_options: list[str] = []
"""The long options of %%gpu."""


def register(shell: NotebookShell, options: list[str]) -> None:
    """Complete subcommands, `options` of %%gpu, sessions and jobs in a shell."""
    completer = getattr(shell.ip, "Completer", None)
    _options[:] = options
    if completer is not None and _matcher not in completer.custom_matchers:
        completer.custom_matchers.append(_matcher)


def unregister(shell: NotebookShell) -> None:
    """Complete nothing any more."""
    completer = getattr(shell.ip, "Completer", None)
    if completer is not None and _matcher in completer.custom_matchers:
        completer.custom_matchers.remove(_matcher)


@context_matcher()
def _matcher(context: Any) -> Any:
    line = context.line_with_cursor[: context.cursor_position]
    match = _FIRST.match(line.lstrip())
    cell = match is not None and match[1] == "%%"
    below = "\n" in context.full_text[: context.cursor_position] and context.cursor_line
    if match is None or (cell and below):
        return {"completions": []}
    *before, typed = (match[2] or "").split(" ")
    choices, typed = _choices(cell, [each for each in before if each], typed)
    matches = [each for each in choices if each.startswith(typed)]
    return {
        "completions": [SimpleCompletion(text=each, type="gpunb") for each in matches],
        "suppress": bool(matches),
        "matched_fragment": typed,
    }


def _choices(cell: bool, before: list[str], typed: str) -> tuple[list[str], str]:
    """The words that may follow these, and the part of the last one that they complete."""
    if not cell and before[:1] != ["on"]:
        return _after_subcommand(before), typed
    if before[-1:] in (["-t"], ["--type"]):
        *earlier, typed = typed.split(",")
        return [each for each in _types() if each not in earlier], typed
    return _sessions() if before[-1:] in (["-s"], ["--session"]) else _options, typed


def _after_subcommand(before: list[str]) -> list[str]:
    """The words that may follow these after %gpu."""
    match before:
        case []:
            return list(HELP)
        case ["stop" | "park"] | [*_, "-s" | "--session"]:
            return _sessions()
        case ["wait" | "job" | "logs" | "why" as word, *_]:
            return _jobs(word)
        case ["cancel", *_]:
            return [*_jobs("cancel"), "all"]
        case ["init", *settings]:
            earlier = {each.partition("=")[0] for each in settings}
            return [f"{name}=" for name in SETTINGS if name not in earlier]
    return []


def _types() -> list[str]:
    """The types of the devices of the session, or of the devices that a session would find."""
    current = backend.existing()
    if current is not None:
        types = [each["type"] for each in current.ask("status")["devices"]]
    else:
        simulated = os.environ.get("GPUNB_SIMULATE")
        try:
            devices = parse_simulate(simulated) if simulated else detect().devices
        except ValueError:  # `init` will raise it
            devices = ()
        types = [each.type for each in devices]
    return sorted({each for each in types if each})


def _sessions() -> list[str]:
    current = backend.existing()
    actors = current.ask("status")["actors"] if current is not None else []
    return [each["name"] for each in actors if each.get("class", "").startswith("session ")]


def _jobs(word: str) -> list[str]:
    current = backend.existing()
    if current is None:
        return []
    facts = current.ask("status")
    jobs = [*facts["running"], *facts["waiting"]]
    if word == "logs":
        jobs += facts["finished"]
    left = current.retained() if isinstance(current, backend.SharedBackend) else []
    jobs += [each for each in left if each["state"] != "session"]
    return [str(each) for each in dict.fromkeys(each["id"] for each in jobs)]
