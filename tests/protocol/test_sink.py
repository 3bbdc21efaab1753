"""Sinks, which receive the output of tasks."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.protocol import sink as module
from gpunb.protocol.sink import TAIL, Console, LeadSink, Pipe, RankSink, SharedSink, Sink


class Recording(Sink):
    """Notes the calls of its methods, each with its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.place, self.background, self.asks = (3, "cell-id"), True, True

    def on(self, pid: int | None, actor: str = "") -> None:
        self.calls.append(("on", pid, actor))

    def text(self, stream: str, text: str) -> None:
        self.calls.append(("text", stream, text))

    def by(self, worker: Any) -> None:
        self.calls.append(("by", worker))

    def show(self, kind: str, content: Any, payloads: Any) -> None:
        self.calls.append(("show", kind, content, payloads))

    def ask(self, prompt: str | None, password: bool, answer: Any) -> None:
        self.calls.append(("ask", prompt, password, answer))

    def end(self) -> None:
        self.calls.append(("end",))


# ----------------------------------------------------------------------------------------- defaults


def test_sink_without_methods_of_its_own_shows_nothing() -> None:
    sink = Sink()
    sink.on(5, "Counter(3)")
    sink.text("stdout", "text")
    sink.show("display_data", {}, ())
    sink.stop_sweep()
    sink.end()
    assert sink.named("inner") is sink
    with pytest.raises(NotImplementedError, match="only a cell in the foreground"):
        sink.ask("name? ", False, print)


# ------------------------------------------------------------------------------------------- ranks


def test_shared_sink_passes_on_all_but_the_end() -> None:
    sink, answer = Recording(), object()
    shared = SharedSink(sink)
    worker: Any = object()
    calls: list[tuple[Any, ...]] = [
        ("on", 5, "Counter(3)"),
        ("text", "stdout", "text"),
        ("by", worker),
        ("show", "display_data", {"a": 1}, ()),
        ("ask", "name? ", True, answer),
    ]
    for name, *arguments in [*calls, ("end",)]:
        getattr(shared, name)(*arguments)
    assert sink.calls == calls
    assert shared.named("inner") is sink
    assert (shared.place, shared.background, shared.asks) == ((3, "cell-id"), True, True)


@pytest.mark.parametrize(
    ("rank", "said"), [(0, []), (2, [("show", "rank", {"rank": 2, "kind": "leads"}, ())])]
)
def test_output_of_the_rank_that_leads_is_that_of_the_cell(rank: int, said: list[Any]) -> None:
    sink = Recording()
    lead = LeadSink(sink, rank)
    lead.text("stdout", "text")
    lead.end()
    assert sink.calls == [*said, ("text", "stdout", "text")]


@pytest.mark.parametrize("kind", ["display_data", "update_display_data", "execute_result", "error"])
def test_output_of_another_rank_is_marked_with_the_rank(kind: str) -> None:
    sink = Recording()
    rank = RankSink(sink, 2)
    rank.text("stderr", "text")
    rank.show(kind, {"a": 1}, ())
    rank.end()
    assert sink.calls == [
        (
            "show",
            "rank",
            {"rank": 2, "kind": "text", "what": "stderr", "content": {"text": "text"}},
            (),
        ),
        ("show", "rank", {"rank": 2, "kind": "show", "what": kind, "content": {"a": 1}}, ()),
    ]
    assert (rank.place, rank.background, rank.asks) == ((3, "cell-id"), True, False)


@pytest.mark.parametrize("kind", ["comm_open", "comm_msg", "failed", "clear_output"])
def test_other_ranks_have_no_widgets(kind: str) -> None:
    sink = Recording()
    RankSink(sink, 2).show(kind, {}, ())
    assert sink.calls == []


@pytest.mark.parametrize("kind", [LeadSink, RankSink])
def test_the_error_of_a_rank_is_noted_and_left_to_the_coordinator(kind: Any) -> None:
    sink = Recording()
    rank = kind(sink, 0)
    rank.show("failed", {"ename": "ValueError"}, ())
    assert (rank.failed, sink.failed, sink.calls) == (True, False, [])


def test_other_ranks_cannot_ask_the_user() -> None:
    answers: list[tuple[Any, Any]] = []
    RankSink(Recording(), 2).ask("name? ", False, lambda *answer: answers.append(answer))
    ((text, error),) = answers
    assert text is None
    assert isinstance(error, NotImplementedError)
    assert "only the first rank can ask the user, not 2" in str(error)


# ----------------------------------------------------------------------------------------- console


@pytest.mark.parametrize(
    ("texts", "printed"),
    [
        (["one\ntwo\n"], "(f pid=5) one\n(f pid=5) two\n"),
        (["on", "e\n", "two"], "(f pid=5) one\n(f pid=5) two"),
        (["10%\r", "20%\r"], "(f pid=5) 10%\r(f pid=5) 20%\r"),
        (["", "one"], "(f pid=5) one"),
    ],
)
def test_each_line_names_its_task(
    capsys: pytest.CaptureFixture[str], texts: list[str], printed: str
) -> None:
    console = Console("f")
    console.on(5)
    for text in texts:
        console.text("stdout", text)
    console.text("stderr", "problem\n")
    assert capsys.readouterr() == (printed, "(f pid=5) problem\n")


def test_line_of_an_actor_names_the_actor(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("Counter.add")
    console.on(5, "Counter(3)")
    console.text("stdout", "one\n")
    inner = console.named("inner")
    inner.on(6)
    inner.text("stdout", "two\n")
    assert capsys.readouterr().out == "(Counter(3) pid=5) one\n(inner pid=6) two\n"


def test_display_is_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("f")
    console.on(5)
    console.show("display_data", {"data": {"text/plain": "<table>", "text/html": "..."}}, ())
    console.show("display_data", {"data": {"image/png": "..."}}, ())
    console.show("clear_output", {}, ())
    assert capsys.readouterr().out == "(f pid=5) <table>\n"


class Closed(io.StringIO):
    """A terminal that is gone."""

    def flush(self) -> None:
        raise OSError("no terminal")


@pytest.mark.parametrize("stream", [None, Closed()])
def test_output_without_a_terminal_is_dropped(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr(sys, "stdout", stream)
    Console("f").text("stdout", "text\n")


# -------------------------------------------------------------------------------- where jobs begin


@pytest.fixture
def factory() -> Iterator[None]:
    yield
    module.install(None)


def test_notebook_installs_the_sinks_of_its_cells(factory: None) -> None:
    assert isinstance(module.sink("f"), Console)
    assert module.origin() is None
    made: list[str] = []

    def sink_for(name: str) -> Sink:
        made.append(name)
        return Recording()

    module.install(sink_for, lambda: "cell 1")
    assert isinstance(module.sink("f"), Recording)
    assert (made, module.origin()) == (["f"], "cell 1")
    module.install(None)
    assert isinstance(module.sink("f"), Console)
    assert module.origin() is None


# ----------------------------------------------------------------------- the output of a process


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"one"], ["one"]),
        ([b"\xc3", b"\xa4"], ["", "\u00e4"]),
        ([b"a\xf0\x9f", b"\x98\x80b"], ["a", "\U0001f600b"]),
        ([b"\xff!"], ["\\xff!"]),
        (["text", b"\xc3\xa4"], ["text", "\u00e4"]),
    ],
    ids=["plain", "cut", "cut twice", "no text", "decoded before"],
)
def test_characters_that_are_cut_are_put_together(
    pieces: list[bytes | str], texts: list[str]
) -> None:
    pipe = Pipe()
    assert [pipe.feed(each) for each in pieces] == texts


def test_end_of_the_output_is_kept() -> None:
    pipe = Pipe()
    for number in range(3):
        pipe.feed(f"{number}" * (TAIL // 2))
    assert pipe.tail == b"1" * (TAIL // 2) + b"2" * (TAIL // 2)
    pipe.feed("x" + "y" * TAIL)
    assert pipe.tail == b"y" * TAIL


def test_last_lines_are_those_before_the_end() -> None:
    pipe = Pipe()
    pipe.feed("".join(f"line {number}\n" for number in range(20)))
    assert pipe.last_lines(3) == "line 17\nline 18\nline 19"
    assert pipe.last_lines().startswith("line 10\n")
    assert Pipe().last_lines() == ""


FATAL = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/home/ada/model.py", line 3 in step
  File "/home/ada/train.py", line 9 in train
"""

OURS = """\
  File "/venv/gpunb/worker/task_runner.py", line 100 in execute
  File "/venv/gpunb/worker/main.py", line 50 in serve
"""


def test_stack_of_a_fatal_signal_is_the_part_of_the_user() -> None:
    pipe = Pipe()
    pipe.feed("".join(f"line {number}\n" for number in range(20)) + FATAL + OURS)
    assert pipe.last_lines(2) == f"line 18\nline 19\n{FATAL}".rstrip()


def test_frames_of_c_do_not_push_out_the_reason() -> None:
    pipe = Pipe()
    frames = "".join(f"    @     0x7fa19144{each:04x}  tsl::f()\n" for each in range(20))
    pipe.feed(f"before\nF1128 02:32:41 client.h:80] no peer\n{frames}{FATAL}")
    assert pipe.last_lines(1) == f"F1128 02:32:41 client.h:80] no peer\n{FATAL}".rstrip()


def test_long_stack_is_cut() -> None:
    pipe = Pipe()
    frames = "".join(f'  File "/home/ada/deep.py", line {each} in f\n' for each in range(90))
    pipe.feed(FATAL + frames + OURS)
    lines = pipe.last_lines().splitlines()
    assert lines[0].startswith("Fatal Python error")
    assert 20 < len(lines) < 40
