"""A job that prints without end is cut short; one that prints for long is not."""

from hypothesis import given
from hypothesis import strategies as st

from gpunb.notebook.output_limit import BUDGET, RATE, TAIL, Cap


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_text_within_the_budget_is_shown_unchanged():
    cap = Cap(Clock())
    assert cap.feed("a\n") == "a\n"
    assert cap.feed("b" * 1000) == "b" * 1000
    assert cap.rest() == ""


def test_a_flood_is_cut_short_and_its_end_is_shown():
    cap = Cap(Clock())
    text = "".join(cap.feed(f"{number}\n") for number in range(1_000_000)) + cap.rest()
    assert text.startswith("0\n1\n2\n")
    assert text.endswith("999998\n999999\n")
    assert len(text) <= BUDGET + TAIL + 100
    assert "million characters left out ..." in text
    lines = [line for line in text.splitlines() if line.isdigit()]
    assert [int(line) for line in lines] == sorted(int(line) for line in lines)


def test_the_number_of_characters_left_out_is_right():
    cap = Cap(Clock())
    text = "".join(f"{number:08}\n" for number in range(200_000))
    shown = cap.feed(text) + cap.rest()
    kept = sum(len(line) + 1 for line in shown.splitlines() if line.isdigit())
    assert f"{len(text) - kept:,}" in shown or "million" in shown


def test_a_progress_bar_may_go_on_for_ever():
    clock = Clock()
    cap = Cap(clock)
    line = "\r" + "#" * 99
    for _ in range(100_000):
        clock.now += 100 / RATE
        assert cap.feed(line) == line


def test_after_a_flood_it_goes_on_live():
    clock = Clock()
    cap = Cap(clock)
    for _ in range(3):
        cap.feed("x" * 79 + "\n" * BUDGET)
    clock.now += BUDGET / RATE
    assert cap.feed("later\n").endswith("later\n")
    assert cap.feed("and later\n") == "and later\n"


@given(st.lists(st.tuples(st.text(max_size=40), st.floats(0, 10)), max_size=40))
def test_little_text_is_never_changed(pieces):
    clock = Clock()
    cap, shown = Cap(clock), ""
    for text, pause in pieces:
        clock.now += pause
        shown += cap.feed(text)
    assert shown + cap.rest() == "".join(text for text, _ in pieces)
