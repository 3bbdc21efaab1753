"""The lines for the output of ranks, without a notebook."""

from __future__ import annotations

from typing import Any

from gpunb.engine.job_log import Item
from gpunb.notebook.rank_output import FIRST, PERIOD, Folds, folded, none, of_rank


def marked(rank: int, text: str) -> dict[str, Any]:
    return {"rank": rank, "kind": "text", "what": "stdout", "content": {"text": text}}


def lines(items: list[Item]) -> list[str]:
    return [item[2]["data"]["text/plain"] for item in items]


def test_the_lines_of_a_long_cell_come_in_order_and_are_updated_once_a_period() -> None:
    now = [0.0]
    folds = Folds(none, live=True, clock=lambda: now[0])
    assert not folds.take(marked(2, "a\n"))
    now[0] += FIRST
    first, other = folds.take(marked(1, "a\n"))
    assert (first[1], lines([first, other])) == (
        "display_data",
        ["rank 1: 1 line", "rank 2: 1 line"],
    )
    assert not folds.take(marked(1, "b\n"))
    now[0] += PERIOD
    (second,) = folds.take(marked(1, "no end"))
    assert (second[1], lines([second])) == ("update_display_data", ["rank 1: 3 lines"])
    assert second[2]["transient"] == first[2]["transient"]
    folds.take(marked(1, "\nlast\n"))
    assert lines(folds.rest()) == ["rank 1: 4 lines"]
    assert not folds.rest()


def test_text_behind_a_line_is_no_html_and_has_no_colours() -> None:
    folds = Folds(none, live=True)
    folds.take(marked(1, "\x1b[31m<b>&\x1b[0m\n"))
    (item,) = folds.rest()
    assert "<pre>&lt;b&gt;&amp;\n</pre>" in item[2]["data"]["text/html"]


def test_a_terminal_gets_one_line_for_each_rank_at_the_end() -> None:
    log: list[Item] = [("show", "rank", marked(each, "x\n")) for each in (2, 1, 2)]
    shown = [item[2]["text"] for item in folded(log, Folds(none, live=False))]
    assert shown == ["rank 1: 1 line\n", "rank 2: 2 lines\n"]


def test_lines_that_come_in_pieces_have_their_rank_once() -> None:
    folds = Folds({0, 1}.__contains__, live=True)
    pieces = [folds.take(marked(1, text))[0][2]["text"] for text in ("a", "b\nc\n", "d")]
    assert "".join(pieces) == "[1] ab\n[1] c\n[1] d"
    assert folds.lead("stdout", "x\n") == "[0] x\n"


def test_the_log_of_a_rank_has_its_items_alone() -> None:
    own: Item = ("text", "stdout", {"text": "lead\n"})
    log: list[Item] = [
        ("show", "rank", {"rank": 2, "kind": "leads"}),
        own,
        ("show", "rank", marked(3, "other\n")),
    ]
    assert list(of_rank(log, 2)) == [own]
    assert list(of_rank(log, 3)) == [("text", "stdout", {"text": "other\n"})]
    assert not list(of_rank(log, 0))


def test_text_behind_a_line_is_what_a_terminal_would_show() -> None:
    folds = Folds(none, live=True)
    folds.take(marked(1, "\r 0/3\r 1/3\r 3/3\nend\r\n"))
    (item,) = folds.rest()
    assert "<pre> 3/3\nend\n</pre>" in item[2]["data"]["text/html"]


def test_a_bar_that_is_drawn_again_has_its_rank_each_time() -> None:
    folds = Folds({0, 1}.__contains__, live=True)
    pieces = [
        folds.take(marked(1, text))[0][2]["text"] for text in ("\r0/2", "\r1/2", "\r2/2\n", "x")
    ]
    assert "".join(pieces) == "\r[1] 0/2\r[1] 1/2\r[1] 2/2\n[1] x"
