"""The pages of the documentation as text: their blocks of code, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.sessions import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.md"

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"^<!--(.*?)-->", re.DOTALL | re.MULTILINE)
_PIECE = re.compile(f"{_FENCE.pattern}|{_COMMENT.pattern}", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def pages() -> list[Path]:
    """Those of the site that lie in `docs/`."""
    return sorted(DOCS.rglob("*.md"))


@dataclass(frozen=True)
class Example:
    """A block of Python in a page.

    Attributes:
        line: its number in the page.
        code: what it says.
        prints: what the page says that it prints; None if it says nothing.
        before: what has to be there first, from a comment that readers do not see.
    """

    line: int
    code: str
    prints: str | None
    before: str


def examples(text: str) -> Iterator[Example]:
    """The blocks of Python that can be run.

    A comment ``<!-- before`` above a block has code that runs first; ``<!-- not run: why -->``
    leaves the next block out. A block without a language right below is what it prints.
    """
    pieces = list(_PIECE.finditer(text))
    before, run = "", True
    for at, piece in enumerate(pieces):
        language, code, comment = piece[1], piece[2], piece[3]
        if comment is not None:
            word, _, rest = comment.strip().partition("\n")
            if word == "before":
                before += rest + "\n"
            elif word.startswith("not run:"):
                run = False
            continue
        if language != "python":
            continue
        follows = pieces[at + 1] if at + 1 < len(pieces) else None
        shown = None
        if follows and follows[1] == "" and not text[piece.end() : follows.start()].strip():
            shown = follows[2]
        if run:
            line = text.count("\n", 0, piece.start()) + 1
            yield Example(line, code, shown, before)
            before = ""
        run = True


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]+`", "", _COMMENT.sub("", _FENCE.sub("", text)))


def links(text: str) -> Iterator[tuple[str, str]]:
    """Links to other files, as (path, anchor); each may be empty."""
    for found in _LINK.finditer(without_code(text)):
        yield found[1], found[2] or ""


def anchors(text: str) -> set[str]:
    """The names by which headings can be linked to."""
    names: dict[str, int] = {}
    found = set()
    for heading in _HEADING.findall(_COMMENT.sub("", _FENCE.sub("", text))):
        plain = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found.add(name if name not in names else f"{name}_{names[name]}")
        names[name] = names.get(name, 0) + 1
    found |= set(re.findall(r"^::: ([\w.]+)", text, re.MULTILINE))
    return found


def tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a page: rows of cells, without the line below the head."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in block.splitlines()]
        yield [[cell.strip() for cell in row] for row in rows if not set("".join(row)) <= set("-:")]
