"""The site holds together: navigation, links and headings. `make docs` looks at more."""

from __future__ import annotations

import pytest
import yaml

from tests.docs.pages import DOCS, README, anchors, links, pages, without_code
from tests.sessions import ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def entries(items):
    """The pages of a navigation, in their order."""
    for item in items:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(value, str):
            yield value
        else:
            yield from entries(value)


NAVIGATION = list(entries(CONFIG["nav"]))


def test_each_page_is_in_the_navigation_once():
    assert len(NAVIGATION) == len(set(NAVIGATION))
    own = {str(each.relative_to(DOCS)) for each in pages()}
    assert own <= set(NAVIGATION)
    for name in set(NAVIGATION) - own:  # from outside: docs/hooks.py
        assert (ROOT / name).exists(), f"{name} of the navigation does not exist"


@pytest.mark.parametrize("page", [README, *pages()], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for path, anchor in links(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: there is no {path}"
        if anchor and target.suffix == ".md":
            known = anchors(target.read_text())
            assert anchor in known, f"{page.name}: {path} has no heading #{anchor}"


@pytest.mark.parametrize("page", [README, *pages()], ids=lambda page: page.name)
def test_a_page_has_one_title(page):
    titles = [line for line in without_code(page.read_text()).splitlines() if line[:2] == "# "]
    assert len(titles) == 1


def test_a_broken_link_would_be_found():
    text = "# A b, c!\n\n[x](gone.md#a) `[y](code.md)`\n\n```\n[z](code.md)\n```\n"
    assert list(links(text)) == [("gone.md", "a")]
    assert anchors(text) == {"a-b-c"}


def test_what_a_page_from_outside_links_to_is_on_the_site():
    outside = (DOCS / "hooks.py").read_text()
    for name in NAVIGATION:
        page = ROOT / name
        if (DOCS / name).exists() or page.suffix != ".md":
            continue
        for path, _ in links(page.read_text()):
            target = str((page.parent / path).resolve().relative_to(ROOT)) if path else name
            there = target.startswith(("docs/", "notebooks/")) or f'"{target}"' in outside
            assert there, f"{name}: {target} is not on the site, see OUTSIDE in docs/hooks.py"
