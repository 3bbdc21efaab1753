"""Texts that come from anybody, on terminals and in pages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.scheduler.markup import LAYOUT, Bar, as_html, as_text, control, escaped

ODD = st.text(
    st.one_of(st.characters(), st.sampled_from("\0\x1b\n\x9b\u202e\ud800<>&\"'abc")), max_size=20
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train", "train"),
        ("größe 大小 👩‍🔬", "größe 大小 👩‍🔬"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x9b2J\x07", r"\x9b2J\x07"),
        ("exe\u202etxt.", r"exe\u202etxt."),
        ("\udcff.ipynb", r"\udcff.ipynb"),
    ],
)
def test_control_characters_are_shown_as_python_writes_them(text: str, shown: str) -> None:
    assert escaped(text) == as_text(text) == shown


def test_several_lines_stay_several_lines_where_they_may() -> None:
    assert escaped("first:\n\tsecond\r\x1b[m", LAYOUT) == "first:\n\tsecond\\r\\x1b[m"


@given(ODD)
def test_no_text_reaches_a_terminal_with_a_control_character(text: str) -> None:
    shown = as_text(text)
    assert control(shown) is None
    assert escaped(shown) == shown
    shown.encode()


@given(ODD)
def test_no_text_becomes_an_element_of_a_page(text: str) -> None:
    shown = as_html(text)
    assert not re.search("[<>\"']", shown)
    assert control(shown) is None


def test_a_bar_is_drawn_in_a_page_and_a_number_on_a_terminal() -> None:
    assert [as_text(Bar(used)) for used in (0.0, 0.5, 0.33333, 1.0)] == ["0", "0.5", "0.3333", "1"]
    assert as_html(Bar(0.5)).startswith('<span class="bar" role="meter"')
    held = Bar(0.75, ((0.5, 7), (0.25, None)))
    stops = "#d55e00 0% 50%, #888 50% 75%, transparent 0"
    assert f'background: linear-gradient(90deg, {stops})"></span> 0.75' in as_html(held)
    half = as_html(Bar(0.5))
    assert 'aria-valuenow="0.5000"' in half
    assert 'background: linear-gradient(#5a9 0 0) 0 / 50% 100% no-repeat"></span> 0.5' in half
