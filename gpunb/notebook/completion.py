"""What Tab offers after %gpu and %%gpu."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher

from gpunb import backend
from gpunb.notebook.words import HELP

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
    before = (found[2] or "").split(" ")
    choices = _choices(found[1] == "%%", before[:-1])
    matches = [each for each in choices if each.startswith(before[-1])]
    return {
        "completions": [SimpleCompletion(text=each, type="gpunb") for each in matches],
        "suppress": bool(matches),
        "matched_fragment": before[-1],
    }


def _choices(cell: bool, before: list[str]) -> list[str]:
    last = before[-1] if before else ""
    if last in ("-s", "--session") or (not cell and before == ["stop"]):
        return _sessions()
    if not cell and before and before[0] in ("wait", "job", "cancel", "logs", "why"):
        return [*_jobs(before[0]), *(["all"] if before[0] == "cancel" else [])]
    if cell or before[:1] == ["on"]:
        return _options()
    return list(HELP) if not before else []


def _options() -> list[str]:
    from gpunb.notebook.magics import GpuMagics

    actions = GpuMagics.gpu.parser._actions  # noqa: SLF001 - argparse has no public way
    return sorted({name for each in actions for name in each.option_strings if name[:2] == "--"})


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
