"""Joins the scripts of a widget to one module, as it travels to the front end as a text."""

from __future__ import annotations

import importlib.resources
import re

_FILES = importlib.resources.files("gpunb.live")
_LINK = re.compile(r'^(?:import|export)\b[^;]*? from "(?:\./)?([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=function|const|class)", re.MULTILINE)


def joined(name: str) -> str:
    """The script of that name in this folder with all that it imports, each once, below its own
    imports. Only its default export remains."""
    texts: dict[str, str] = {}

    def add(path: str) -> None:
        if path in texts:
            return
        text = (_FILES / path).read_text("utf-8")
        folder = path.rpartition("/")[0]
        texts[path] = ""  # two that import each other
        for link in _LINK.findall(text):
            add(f"{folder}/{link}" if folder else link)
        del texts[path]
        texts[path] = _EXPORT.sub("", _LINK.sub("", text))

    add(name)
    return "\n".join(texts.values())
