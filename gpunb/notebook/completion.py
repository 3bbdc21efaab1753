"""What Tab offers after %gpu and %%gpu."""

from __future__ import annotations

import os
import re
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from gpunb import backend
from gpunb.accelerators import detect, parse_simulate
from gpunb.notebook.words import HELP, SETTINGS

_FIRST = re.compile(r"(%%?)gpu(?:\s+(.*))?\Z")


def register(shell: Any) -> None:
    """Offer words, options, sessions and jobs in a shell."""
    completer = getattr(shell, "Completer", None)
    if completer is not None and _matcher not in completer.custom_matchers:
        completer.custom_matchers.append(_matcher)


def unregister(shell: Any) -> None:
    completer = getattr(shell, "Completer", None)
    if completer is not None and _matcher in completer.custom_matchers:
        completer.custom_matchers.remove(_matcher)


@context_matcher()
def _matcher(context: Any) -> Any:
    lines = context.full_text[: context.cursor_position].split("\n")
    line = context.line_with_cursor[: context.cursor_position]
    found = _FIRST.match(line.lstrip())
    if found is None or (found[1] == "%%" and len(lines) > 1 and context.cursor_line):
        return {"completions": []}
    *before, typed = (found[2] or "").split(" ")
    before = [each for each in before if each]
    cell = found[1] == "%%"
    if before[-1:] in (["-t"], ["--type"]) and (cell or before[0] == "on"):
        *said, typed = typed.split(",")
        choices = [each for each in _types() if each not in said]
    else:
        choices = _choices(cell, before)
    matches = [each for each in choices if each.startswith(typed)]
    return {
        "completions": [SimpleCompletion(text=each, type="gpunb") for each in matches],
        "suppress": bool(matches),
        "matched_fragment": typed,
    }


def _choices(cell: bool, before: list[str]) -> list[str]:
    last = before[-1] if before else ""
    if last in ("-s", "--session") or (not cell and before == ["stop"]):
        return _sessions()
    if not cell and before and before[0] in ("wait", "job", "cancel", "logs", "why"):
        return [*_jobs(before[0]), *(["all"] if before[0] == "cancel" else [])]
    if not cell and before[:1] == ["init"]:
        said = {each.partition("=")[0] for each in before[1:]}
        return [f"{name}=" for name in SETTINGS if name not in said]
    if cell or before[:1] == ["on"]:
        return _options()
    return list(HELP) if not before else []


def _options() -> list[str]:
    from gpunb.notebook.magics import GpuMagics

    actions = GpuMagics.gpu.parser._actions  # noqa: SLF001 - argparse has no public way
    return sorted({name for each in actions for name in each.option_strings if name[:2] == "--"})


def _types() -> list[str]:
    """The types of the devices; of those that a session would find, if there is none yet."""
    current = backend.existing()
    if current is not None:
        types = [each["type"] for each in current.ask("status")["devices"]]
    else:
        simulated = os.environ.get("GPUNB_SIMULATE")
        try:
            found = parse_simulate(simulated) if simulated else detect().devices
        except ValueError:  # as `init` will say
            found = ()
        types = [each.type for each in found]
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
    left = current.kept() if isinstance(current, backend.Keeper) else []
    jobs += [each for each in left if each["state"] != "session"]
    return [str(each) for each in dict.fromkeys(each["id"] for each in jobs)]
