"""Messages of the head process reach the sinks of the kernel."""

from __future__ import annotations

from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.engine.faults import Faults
from gpunb.head import output_client
from gpunb.head.output_client import KernelSinks
from gpunb.protocol import messages as msg
from gpunb.protocol import verbs
from gpunb.protocol.sink import Sink


class Recording(Sink):
    """Notes the calls of its methods; `makes` is its sink for tasks that its job submits."""

    def __init__(self, makes: Sink | None = None, **attributes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.makes = makes
        for name, value in attributes.items():
            setattr(self, name, value)

    def on(self, pid: int | None, actor: str = "") -> None:
        self.calls.append(("on", pid, actor))

    def text(self, stream: str, text: str) -> None:
        self.calls.append(("text", stream, text))

    def by(self, worker: Any) -> None:
        self.worker = worker

    def show(self, kind: str, content: Any, payloads: Any) -> None:
        self.calls.append(("show", kind, content, payloads))

    def named(self, name: str) -> Sink:
        self.calls.append(("named", name))
        return self.makes or self

    def ask(self, prompt: str | None, password: bool, answer: Any) -> None:
        self.calls.append(("ask", prompt, password))
        self.answer = answer

    def stop_sweep(self) -> None:
        self.calls.append(("stop_sweep",))

    def end(self) -> None:
        self.calls.append(("end",))


class Kernel:
    """The sinks of a kernel, and the requests that they send to the head process."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.sinks = KernelSinks(self.faults)
        self.sent: list[tuple[Any, list[Any]]] = []
        self.sinks.ask = self._ask

    def _ask(self, verb: verbs.Verb[None], payloads: Any = ()) -> None:
        self.sent.append((verb, [serialize.loads(each) for each in payloads]))

    def output(self, number: int, kind: str, payloads: Any = (), /, **content: Any) -> None:
        self.sinks.output(msg.Output(number, kind, content), payloads)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_head_process_is_told_the_attributes_of_a_sink(kernel: Kernel) -> None:
    sink = Recording(place=(3, "id"), background=True, asks=True, sweep=(1, "lr", 4))
    first, second = kernel.sinks.add(sink), kernel.sinks.add(Sink())
    assert first == verbs.SinkInfo(first.number, (3, "id"), True, True, (1, "lr", 4))
    assert second == verbs.SinkInfo(second.number, None, False, False, None)
    assert first.number != second.number


def test_text_names_the_process_and_the_actor(kernel: Kernel) -> None:
    sink = Recording()
    number = kernel.sinks.add(sink).number
    kernel.output(number, "text", stream="stdout", text="one", pid=5, actor="Counter(3)")
    kernel.output(number, "text", stream="stderr", text="two", pid=6)
    assert sink.calls == [
        ("on", 5, "Counter(3)"),
        ("text", "stdout", "one"),
        ("on", 6, ""),
        ("text", "stderr", "two"),
    ]


@pytest.mark.parametrize("worker", [None, 9])
def test_display_comes_with_its_worker(kernel: Kernel, worker: int | None) -> None:
    sink = Recording(worker=None)
    payloads = [serialize.dumps(1)]
    number = kernel.sinks.add(sink).number
    kernel.output(number, "show", payloads, kind="display_data", content={"a": 1}, worker=worker)
    assert sink.calls == [("show", "display_data", {"a": 1}, payloads)]
    assert (sink.worker is not None) is (worker is not None)


def test_other_actions_reach_their_sink(kernel: Kernel) -> None:
    sink, other = Recording(), Recording()
    number = kernel.sinks.add(sink).number
    kernel.sinks.add(other)
    kernel.output(number, "stop_sweep")
    kernel.output(number, "an action of a later version")
    kernel.output(999, "stop_sweep")
    assert (sink.calls, other.calls) == ([("stop_sweep",)], [])


def test_sink_that_has_ended_gets_nothing_more(kernel: Kernel) -> None:
    sink = Recording()
    number = kernel.sinks.add(sink).number
    for kind in ("end", "end", "stop_sweep"):
        kernel.output(number, kind)
    assert sink.calls == [("end",)]


def test_sinks_without_output_end_together(kernel: Kernel) -> None:
    first, second, third = (Recording() for _ in range(3))
    numbers = [kernel.sinks.add(each).number for each in (first, second, third)]
    kernel.output(0, "ended", sinks=(numbers[0], 999, numbers[2]))
    assert [each.calls for each in (first, second, third)] == [[("end",)], [], [("end",)]]


def test_sink_that_was_forgotten_does_not_hear_of_its_end(kernel: Kernel) -> None:
    sink = Recording()
    number = kernel.sinks.add(sink).number
    kernel.sinks.forget(number)
    kernel.sinks.forget(number)
    kernel.output(number, "end")
    assert sink.calls == []


# ------------------------------------------------------------------------- sinks within others


def test_task_within_a_job_gets_a_sink_of_its_own(kernel: Kernel) -> None:
    inner = Recording()
    outer = Recording(inner)
    number = kernel.sinks.add(outer).number
    kernel.output(number, "named", number=-1, name="inner")
    kernel.output(-1, "stop_sweep")
    kernel.output(-1, "end")
    assert outer.calls == [("named", "inner")]
    assert inner.calls == [("stop_sweep",), ("end",)]


def test_end_of_a_task_within_a_job_does_not_end_the_sink_of_the_job(kernel: Kernel) -> None:
    sink = Recording()  # tasks within use it, too
    number = kernel.sinks.add(sink).number
    kernel.output(number, "named", number=-1, name="inner")
    kernel.output(-1, "text", stream="stdout", text="inner", pid=5)
    kernel.output(-1, "end")
    kernel.output(number, "text", stream="stdout", text="outer", pid=5)
    texts = [each[2] for each in sink.calls if each[0] == "text"]
    assert texts == ["inner", "outer"]
    assert ("end",) not in sink.calls


def test_task_within_a_job_whose_sink_fails_has_a_sink(kernel: Kernel) -> None:
    class Failing(Recording):
        def named(self, name: str) -> Sink:
            raise KeyError(name)

    sink = Failing()
    number = kernel.sinks.add(sink).number
    kernel.output(number, "named", number=-1, name="inner")
    kernel.output(-1, "end")
    kernel.output(number, "end")
    assert sink.calls == [("end",)]
    assert "output is not shown any more: Failing.named" in kernel.faults.texts[0]


# --------------------------------------------------------------------------------------- questions


def question(kernel: Kernel, sink: Sink) -> None:
    number = kernel.sinks.add(sink).number
    kernel.output(number, "ask", question=7, prompt="name? ", password=True)


def test_answer_of_the_user_is_sent(kernel: Kernel) -> None:
    sink = Recording()
    question(kernel, sink)
    assert sink.calls == [("ask", "name? ", True)]
    sink.answer("Ada", None)
    assert kernel.sent == [(verbs.Answer(7, "Ada"), [])]


class Unpicklable(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not that")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (EOFError("no more input"), EOFError, "no more input"),
        (Unpicklable("odd"), RuntimeError, "Unpicklable: odd"),
    ],
)
def test_error_in_place_of_an_answer_is_sent(
    kernel: Kernel, error: Exception, kind: type[Exception], text: str
) -> None:
    sink = Recording()
    question(kernel, sink)
    sink.answer(None, error)
    ((verb, (sent,)),) = kernel.sent
    assert verb == verbs.Answer(7, None)
    assert (type(sent), str(sent)) == (kind, text)


def test_question_that_cannot_be_asked_is_answered_with_the_error(kernel: Kernel) -> None:
    question(kernel, Sink())
    ((verb, (sent,)),) = kernel.sent
    assert verb == verbs.Answer(7, None)
    assert isinstance(sent, NotImplementedError)


# ----------------------------------------------------------------------------------------- widgets


def shown_by_a_worker(kernel: Kernel) -> Any:
    """Return the worker of a display, as the sink gets it."""
    sink = Recording()
    number = kernel.sinks.add(sink).number
    kernel.output(number, "show", kind="display_data", content={}, worker=9)
    return sink.worker


def test_message_to_a_worker_names_a_lasting_sink(kernel: Kernel) -> None:
    worker, sink = shown_by_a_worker(kernel), Recording(place=(3, "id"))
    for _ in range(2):
        worker.send_comm("comm_msg", {"data": 1}, [serialize.dumps("buffer")], sink)
    (first, values), second = kernel.sent
    assert (first.worker, first.kind, first.content) == (9, "comm_msg", {"data": 1})
    assert values == ["buffer"]
    assert first.sink == second[0].sink == kernel.sinks.lasting(sink)
    kernel.output(first.sink.number, "stop_sweep")
    assert sink.calls == [("stop_sweep",)]


def test_oldest_lasting_sinks_are_forgotten(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_client, "MOST", 2)
    made = [Recording() for _ in range(3)]
    numbers = [kernel.sinks.lasting(each).number for each in made]
    for number in numbers:
        kernel.output(number, "stop_sweep")
    assert [len(each.calls) for each in made] == [0, 1, 1]
    assert kernel.sinks.lasting(made[0]).number not in numbers


def test_end_of_the_connection_ends_all_sinks(kernel: Kernel) -> None:
    worker, sinks = shown_by_a_worker(kernel), [Recording(), Recording()]
    for each in sinks:
        kernel.sinks.add(each)
    assert not worker.gone
    kernel.sinks.close()
    kernel.sinks.close()
    assert worker.gone
    assert [each.calls for each in sinks] == [[("end",)], [("end",)]]
