"""Writes the tables of the reference that come from the code: `python docs/tables.py`.

A table stands in its page between two comments that readers do not see, `<!-- table: NAME -->` and
`<!-- end -->`. A test sees to it that what stands there is what the code says.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent

_PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(\n<!-- end -->)", re.DOTALL)

Row = tuple[str, ...]


def rewritten(text: str) -> str:
    """A page's text with its tables as they should be.

    Raises:
        KeyError: a table of that name is not known.
    """

    def table(found: re.Match[str]) -> str:
        name, _, argument = found[2].partition(":")
        rows = TABLES[name](*filter(None, [argument]))
        lines = [f"| {' | '.join(row)} |" for row in rows]
        width = lines[0].count(" | ") + 1
        lines.insert(1, "|---" * width + "|")
        return found[1] + "\n" + "\n".join(lines) + "\n" + found[3]

    return _PLACE.sub(table, text)


def _cell(text: str) -> str:
    """Text as a cell of a table, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


# ------------------------------------------------------------------------------------- argparse


def _options(parser: argparse.ArgumentParser) -> Iterator[Row]:
    """What a command or a magic takes."""
    yield "", ""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to list them
        if action.dest == "help" or action.help is argparse.SUPPRESS:
            continue
        if not action.option_strings:
            optional = action.nargs == "?"
            names = [f"[{action.dest.upper()}]" if optional else action.dest.upper()]
        else:
            names = list(action.option_strings)
            if action.nargs != 0:
                names[-1] += f" {action.metavar or action.dest.upper()}"
        text = (action.help or "") % {"default": action.default}
        yield ", ".join(map(_code, names)), _cell(text)


def _magic() -> Iterator[Row]:
    from gpunb.notebook.magics import GpuMagics

    return _options(GpuMagics.gpu.parser)


def _words() -> Iterator[Row]:
    from gpunb.notebook.subcommands import HELP, TAKES

    yield "", ""
    yield "`%gpu`", "devices and jobs now"
    yield "`%gpu SHARE EXPRESSION`", "the value of an expression, computed in a worker"
    for name, text in HELP.items():
        yield _code(f"%gpu {name} {TAKES.get(name, '')}".rstrip()), _cell(text)


def _config() -> Iterator[Row]:
    from gpunb.notebook.magics import GpuMagics

    yield "", "default", ""
    for name, trait in GpuMagics.class_own_traits(config=True).items():
        yield _code(f"GpuMagics.{name}"), _code(repr(trait.default_value)), _cell(trait.help)


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command, as `gpunb.cli.main` makes it."""
    parser = argparse.ArgumentParser(prog=f"gpunb {name}")
    module = importlib.import_module(f"gpunb.cli.{name}")
    if (add_options := getattr(module, "add_options", None)) is not None:
        add_options(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _command(name: str) -> Iterator[Row]:
    return _options(command_parser(name))


def _commands() -> Iterator[Row]:
    from gpunb.cli import COMMANDS

    yield "", ""
    for each in COMMANDS:
        yield f"[`gpunb {each.name}`](#gpunb-{each.name})", _cell(each.help)


# --------------------------------------------------------------------------------------- Python


def described(function: Callable[..., object]) -> dict[str, str]:
    """The arguments that a docstring describes, with what it says."""
    text = inspect.getdoc(function) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    found = re.finditer(
        r"^    (\w+): (.*?)(?=^    \w+: |\Z)",
        section[1] if section else "",
        re.DOTALL | re.MULTILINE,
    )
    return {each[1]: each[2].strip() for each in found}


def _init() -> Iterator[Row]:
    import gpunb

    yield "argument", "default", ""
    said = described(gpunb.init)
    for name, parameter in inspect.signature(gpunb.init).parameters.items():
        text = re.sub(r"``(.+?)``", r"`\1`", said[name])
        more = parameter.kind is parameter.VAR_KEYWORD
        default = "" if more else _code(repr(parameter.default))
        yield _code(f"**{name}" if more else name), default, _cell(text)


def _types() -> Iterator[Row]:
    from gpunb.accelerators.types import CONSTANTS

    yield "constant", "value"
    for name, value in sorted(CONSTANTS.items()):
        yield _code(name), _code(repr(value))


# ------------------------------------------------------------------------------------ notebooks


def _notebooks() -> Iterator[Row]:
    """The notebooks by their titles."""
    yield "", ""
    for path in sorted((DOCS.parent / "notebooks").glob("[0-9]*.ipynb")):
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        title = "".join(first).splitlines()[0].removeprefix("# ")
        yield f"[{path.name}](../notebooks/{path.name})", _cell(title)


# -------------------------------------------------------------------------------------- states


def _states(record: str) -> Iterator[Row]:
    """The states of a record of the scheduler, and the changes that its table allows."""
    from gpunb.scheduler import state

    table = getattr(state, f"{record.upper()}_TRANSITIONS")
    yield "state", "may change to"
    for before, allowed in table.items():
        # Sets have no order: the order of the table is used.
        yield _code(before), ", ".join(_code(after) for after in table if after in allowed)


TABLES: dict[str, Callable[..., Iterator[Row]]] = {
    "magic": _magic,
    "words": _words,
    "config": _config,
    "command": _command,
    "commands": _commands,
    "init": _init,
    "types": _types,
    "notebooks": _notebooks,
    "states": _states,
}


def main() -> int:
    for path in sorted(DOCS.rglob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(DOCS.parent)} was brought up to date\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
