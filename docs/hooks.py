"""What MkDocs does beyond its configuration, for `make docs`.

Pages link to each other as files of the repository, so that they can be read there as well. Here
those links are made to fit the site, and the few files from outside `docs/` join it. At the end
the site is searched for whatever it would load from the network.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent

OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/RESULTS.md",
)
"""Files of the repository, besides its notebooks, that are part of the site."""

_LINK = re.compile(r"(?<!!)\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([\w/]+)-light\.png\)")
_COMMENT = re.compile(r"^<!--.*?-->\n?", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(^```.*?^```[ \t]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)

_LOADED = re.compile(
    r"""<(?:script|img|iframe|source|embed)\b[^>]*\bsrc\s*=\s*["']?(?:https?:)?//[^"'\s>]+
    |<link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*\bhref\s*=\s*["']?(?:https?:)?//[^"'\s>]+
    |@import\s+["'](?:https?:)?//[^"']+
    |url\(\s*["']?(?:https?:)?//[^)]+""",
    re.VERBOSE,
)


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside `docs/`."""
    names = [*OUTSIDE, *(f"notebooks/{each.name}" for each in (ROOT / "notebooks").glob("*.ipynb"))]
    for name in names:
        if (ROOT / name).exists():
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Take out the comments for the tests, turn links around, and show the picture of the reader's
    theme, where there are two."""
    source = page.file.src_uri
    place = source if page.file.generated_by else f"docs/{source}"

    def turned(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), found[1]))
        inside = target.removeprefix("docs/")
        if files.get_file_from_path(inside) is None:
            return found[0]  # MkDocs says that there is no such page
        return f"]({posixpath.relpath(inside, posixpath.dirname(source) or '.')}{found[2] or ''})"

    def themed(found: re.Match[str]) -> str:
        dark = f"{found[2]}-dark.png"
        if dark in markdown or files.get_file_from_path(dark) is None:
            return found[0]
        both = (f"![{found[1]}]({found[2]}-{each}.png#only-{each})" for each in ("light", "dark"))
        return "\n".join(both)

    pieces = _CODE.split(markdown)
    pieces[::2] = [_LINK.sub(turned, _COMMENT.sub("", each)) for each in pieces[::2]]
    return _PICTURE.sub(themed, "".join(pieces))


def on_post_build(config: Any) -> None:
    """Nothing is loaded from the network by who reads the site.

    Raises:
        PluginError: a page would.
    """
    found = [
        f"{path.relative_to(config.site_dir)}: {match[0]:.120}"
        for path in sorted(Path(config.site_dir).rglob("*"))
        if path.suffix in (".html", ".css", ".svg")
        for match in _LOADED.finditer(path.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError("these would be loaded from the network:\n" + "\n".join(found))
