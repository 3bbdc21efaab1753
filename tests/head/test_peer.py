"""An attached kernel, as the head process sees it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.engine import ids
from gpunb.engine.publisher import StatusPublisher
from gpunb.exceptions import InfeasibleRequestError, ObjectLostError
from gpunb.head import peer as module
from gpunb.head.peer import Peer
from gpunb.head.retention import Retention
from gpunb.protocol import messages as msg
from gpunb.protocol import records, verbs
from gpunb.protocol.backend import HANDLE, SESSIONS, Call, ObjectId
from gpunb.protocol.channel import Channel, ChannelClosed, encode
from gpunb.protocol.plain import Malformed
from gpunb.protocol.records import Function
from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import UNIT, Demand, Machine
from tests.engine.parts import TWO_GPUS, Parts, call, constructor, method, reach_timers, turn

SINK = verbs.SinkInfo(1, (3, "cell-id"), False, False, None)
BACKGROUND = verbs.SinkInfo(2, (4, "cell-id"), True, False, None)
HERE = verbs.Surroundings({"A": "1"}, "/work", [], [])
NO_ARGUMENTS = serialize.dumps(((), {}))


class Facts:
    """Answers in place of the status of the head process."""

    def job(self, ident: int) -> None:
        return None

    def get(self, what: str, *arguments: Any) -> Any:
        return [what, *arguments]


class Control:
    """Answers in place of the control server."""

    def carry_out(self, request: Any, reply: Any) -> None:
        reply({"echo": request})


class Head:
    """The parts of a head process that an attached kernel needs, in place of a whole engine.

    Attributes:
        left: the kernels that have gone.
    """

    def __init__(self) -> None:
        self.parts = Parts()
        self.left: list[Peer] = []
        self.clients: set[Any] = set()
        engine: Any = self.parts.engine
        self.engine, self.store = engine, engine.store
        facts: Any = Facts()
        engine.admission, engine.sampler, engine.facts = (
            self.parts.admission,
            self.parts.sampler,
            facts,
        )
        engine.publisher = StatusPublisher(engine.loop, engine.faults, self.snapshot)
        engine.control_server = Control()
        self.retention = Retention(engine, facts, self.clients)
        self.queued = 0

    def snapshot(self) -> dict[str, Any]:
        lists: dict[str, Any] = {
            each: [] for each in ("running", "waiting", "actors", "devices", "finished")
        }
        return {**lists, "queued": self.queued}

    def attach(self, ident: int = 3) -> Kernel:
        return Kernel(self, ident)


class Kernel:
    """A kernel at the other end of a real socket.

    Attributes:
        peer: the side of the head process.
    """

    def __init__(self, head: Head, ident: int) -> None:
        ours, theirs = Channel.pair()
        ours.setblocking(False)
        self.channel = Channel(theirs)
        self.head = head
        about = {"pid": 4711, "notebook": "lab.ipynb"}
        self.peer = Peer(
            head.engine,
            head.retention,
            Channel(ours),
            ident=ident,
            about=about,
            left=head.left.append,
        )
        head.clients.add(self.peer)
        self._numbers = itertools.count(1)

    def close(self) -> None:
        self.channel.close()
        turn(self.head.engine.loop)

    def send(self, message: msg.Message) -> None:
        self.channel.send(message)
        turn(self.head.engine.loop)

    def request(self, number: int, verb: Any, *payloads: Payload) -> None:
        wires, segments = serialize.to_wires(payloads)
        request = msg.Request(number, 0, 0, *verbs.encode(verb), wires)
        self.channel.send(request, segments)
        turn(self.head.engine.loop)

    def received(self) -> list[Any]:
        """Return the messages that have come since the last call."""
        found = []
        while True:
            try:
                found.append(self.channel.receive(wait=False)[0])
            except (BlockingIOError, ChannelClosed):
                return found

    def ask(self, verb: Any, *payloads: Payload) -> Any:
        """Send a request, and return the value of its reply; raise the error if it failed."""
        number = next(self._numbers)
        self.request(number, verb, *payloads)
        (reply,) = self.received()
        assert reply.request == number
        if reply.failed:
            raise serialize.loads(serialize.from_wires(reply.payloads, [])[0])
        return reply.value

    def submit(
        self,
        made: Call,
        *,
        number: int = 0,
        known: bool = False,
        task: int | None = None,
        sink: verbs.SinkInfo | None = None,
        surroundings: verbs.Surroundings | None = None,
    ) -> verbs.SubmitNumbered:
        """Return the request that submits a call."""
        function = None if known else Function.of(made)
        return verbs.SubmitNumbered(
            number, function, task, made.inputs, made.actor, made.new, sink, surroundings
        )

    def submitted(self, made: Call, **more: Any) -> ObjectId:
        """Submit a call, and return its result, to which the kernel has a reference."""
        ((obj, *_), _) = self.ask(self.submit(made, **more), NO_ARGUMENTS)
        found: ObjectId = obj
        return found


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    yield head
    head.engine.publisher.close()
    head.parts.close()


@pytest.fixture
def kernel(head: Head) -> Iterator[Kernel]:
    kernel = head.attach()
    yield kernel
    if kernel.channel.fileno() >= 0:
        kernel.close()


# ----------------------------------------------------------------------------------- introduction


def test_new_kernel_learns_its_number_and_the_machine(kernel: Kernel) -> None:
    tasks, objects = ids.reached()
    number, machine = kernel.ask(verbs.Attach(HERE, (tasks + 50, objects + 60)))
    assert number == kernel.peer.ident
    assert records.read(Machine, machine) == TWO_GPUS
    assert kernel.peer.surroundings == HERE
    assert (ids.task() > tasks + 50, ids.put() > objects + 60) == (True, True)


@pytest.mark.parametrize("reached", [(-1, 0), (0, 1 << 60)])
def test_numbers_of_a_kernel_must_be_possible(kernel: Kernel, reached: tuple[int, int]) -> None:
    with pytest.raises(Malformed, match="are no numbers of tasks and objects"):
        kernel.ask(verbs.Attach(HERE, reached))


def test_numbers_for_tasks_are_reserved(kernel: Kernel) -> None:
    numbers = kernel.ask(verbs.Numbers(3))
    assert len(set(numbers)) == 3
    assert ids.task() > max(numbers)
    for count in (0, verbs.NUMBERS_AT_ONCE + 1):
        with pytest.raises(Malformed, match="numbers at once"):
            kernel.ask(verbs.Numbers(count))


# ----------------------------------------------------------------------------------------- calls


def test_call_of_a_kernel_is_its_own(kernel: Kernel, head: Head) -> None:
    obj = kernel.submitted(call("train"), sink=SINK, surroundings=HERE)
    job = head.engine.jobs[obj[0]]
    assert (job.owner, job.call.spec.owner, job.parent) == (kernel.peer, 3, None)
    assert (job.shown.place, job.shown.log is None) == ((3, "cell-id"), False)
    assert kernel.peer.surroundings == HERE
    assert head.store.held_by(kernel.peer.holder, obj) == 1


def test_function_comes_with_its_first_call(kernel: Kernel, head: Head) -> None:
    kernel.submitted(call("train"), number=7)
    obj = kernel.submitted(call("any name"), number=7, known=True)
    assert head.engine.jobs[obj[0]].call.spec.name == "train"
    with pytest.raises(KeyError):
        kernel.submitted(call("train"), number=8, known=True)


def test_function_without_a_number_is_not_remembered(kernel: Kernel) -> None:
    kernel.submitted(call("train"), number=0)
    with pytest.raises(KeyError):
        kernel.submitted(call("train"), number=0, known=True)


def test_oldest_function_is_forgotten_first(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.discovery, "KINDS", 1)
    for number in (1, 2, 3):
        kernel.submitted(call("train"), number=number)
    kernel.submitted(call("train"), number=2, known=True)
    with pytest.raises(KeyError):
        kernel.submitted(call("train"), number=1, known=True)


@pytest.mark.parametrize(("most", "soon"), [(-1, True), (5, False)])
def test_calls_may_follow_without_a_reply_unless_the_actor_limits_them(
    kernel: Kernel, most: int, soon: bool
) -> None:
    (actor, _) = kernel.submitted(constructor(max_pending=most))
    (_, may_follow) = kernel.ask(kernel.submit(method(actor)), NO_ARGUMENTS)
    assert may_follow is soon


def test_refused_call_is_an_error_of_the_request(kernel: Kernel, head: Head) -> None:
    verb = kernel.submit(call(demand=Demand(gpus=3 * UNIT)))
    with pytest.raises(InfeasibleRequestError):
        kernel.ask(verb, NO_ARGUMENTS)
    assert not head.engine.jobs


def test_refused_call_without_a_reply_has_the_error_as_its_result(
    kernel: Kernel, head: Head
) -> None:
    """The kernel has made the refs already."""
    (task,) = kernel.ask(verbs.Numbers(1))
    verb = kernel.submit(call(demand=Demand(gpus=3 * UNIT), returns=2), task=task)
    kernel.request(0, verb, NO_ARGUMENTS)
    assert kernel.received() == []
    for index in (0, 1):
        with pytest.raises(InfeasibleRequestError):
            raise serialize.loads(head.store.get((task, index)).payload)
        assert head.store.held_by(kernel.peer.holder, (task, index)) == 1


def test_call_that_wants_no_reply_gets_none(kernel: Kernel, head: Head) -> None:
    (task,) = kernel.ask(verbs.Numbers(1))
    kernel.request(0, kernel.submit(call(), task=task), NO_ARGUMENTS)
    assert kernel.received() == []
    assert task in head.engine.jobs


def test_cells_and_sessions_of_two_kernels_do_not_meet(kernel: Kernel, head: Head) -> None:
    made = constructor(name="lab", namespace=SESSIONS, origin="cell 1")
    (first, _) = kernel.submitted(made)
    other = head.attach(4)
    (second, _) = other.submitted(made)
    records_of = [head.engine.actors.get(each) for each in (first, second)]
    assert [each.new.namespace for each in records_of] == [f"{SESSIONS}3", f"{SESSIONS}4"]
    assert [each.new.origin for each in records_of] == ["3:cell 1", "4:cell 1"]
    assert other.peer.sessions == f"{SESSIONS}4"
    other.close()


def test_named_actors_are_shared(kernel: Kernel, head: Head) -> None:
    (actor, _) = kernel.submitted(constructor(name="tally"))
    other = head.attach(4)
    (obj, _) = other.ask(verbs.FindActor("tally", ""))
    assert obj == (actor, HANDLE)
    other.close()


# ------------------------------------------------------------------------------------ references


@pytest.mark.parametrize(
    "verb",
    [
        lambda obj: verbs.Fetch((obj,), 0, True),
        lambda obj: verbs.Wait((obj,), 1, 0),
        verbs.Watch,
        verbs.Take,
    ],
    ids=["fetch", "wait", "watch", "take"],
)
def test_kernel_cannot_name_an_object_of_another(kernel: Kernel, head: Head, verb: Any) -> None:
    theirs = head.parts.admission.keep(serialize.dumps("theirs"))
    own = kernel.ask(verbs.Put(False), serialize.dumps("own"))
    with pytest.raises(ObjectLostError):
        kernel.ask(verb(theirs))
    kernel.ask(verb(own))


def test_call_cannot_take_an_object_of_another_kernel(kernel: Kernel, head: Head) -> None:
    theirs = head.parts.admission.keep(serialize.dumps("theirs"))
    with pytest.raises(ObjectLostError):
        kernel.ask(kernel.submit(call(inputs=(theirs,))), NO_ARGUMENTS)
    arguments = serialize.dumps(((), {}))
    arguments.references = (theirs,)
    with pytest.raises(ObjectLostError):
        kernel.ask(kernel.submit(call()), arguments)


def test_references_of_a_kernel_are_counted(kernel: Kernel, head: Head) -> None:
    obj = kernel.ask(verbs.Put(False), serialize.dumps("own"))
    kernel.send(msg.Held(obj, 2))
    assert head.store.held_by(kernel.peer.holder, obj) == 3
    kernel.send(msg.Held(obj, -3))
    assert not head.store.wanted(obj)


def test_kernel_cannot_drop_references_that_it_does_not_have(kernel: Kernel, head: Head) -> None:
    """A reference of its earlier session may have the number of an object of another kernel."""
    theirs = head.parts.admission.keep(serialize.dumps("theirs"))
    kernel.send(msg.Held(theirs, -1))
    assert head.store.wanted(theirs)
    kernel.send(msg.Held(theirs, 1))
    kernel.send(msg.Held(theirs, -2))
    assert head.store.held_by(kernel.peer.holder, theirs) == 1


# --------------------------------------------------------------------------------- other requests


def test_log_of_a_job_is_in_the_kernel_itself(kernel: Kernel) -> None:
    assert kernel.ask(verbs.Ask("log", (3,))) is None
    assert kernel.ask(verbs.Ask("total", ())) == ["total"]


def test_request_of_the_control_socket_is_passed_on(kernel: Kernel) -> None:
    assert kernel.ask(verbs.Control({"do": "status"})) == {"echo": {"do": "status"}}


def test_nothing_is_left_at_first(kernel: Kernel) -> None:
    assert kernel.ask(verbs.ListRetained()) == []
    assert kernel.ask(verbs.FindSession("lab", SINK)) is None
    for verb in (verbs.Adopt(99_999), verbs.ReadLog(99_999, 0)):
        with pytest.raises(ValueError, match="99999"):
            kernel.ask(verb)


def test_answer_of_the_user_reaches_the_task(kernel: Kernel) -> None:
    answers: list[Any] = []
    sink = kernel.peer.sinks.sink(SINK._replace(asks=True))
    sink.ask("name? ", False, lambda *answer: answers.append(answer))
    (question,) = kernel.received()
    assert (question.kind, question.content["prompt"]) == ("ask", "name? ")
    for _ in range(2):  # the second answer comes too late
        kernel.request(0, verbs.Answer(question.content["question"], "Ada"))
    assert answers == [("Ada", None)]


def test_message_of_the_front_end_reaches_the_worker(kernel: Kernel) -> None:
    sent: list[Any] = []

    class Worker:
        token = 5
        gone = False

        def send_comm(self, kind: str, content: Any, payloads: Any, sink: Any) -> None:
            sent.append((kind, content, sink.place))

    kernel.peer.sinks.knows(Worker())
    for token in (5, 6):
        kernel.request(0, verbs.SendComm(token, "comm_msg", {"data": 1}, SINK))
    assert sent == [("comm_msg", {"data": 1}, (3, "cell-id"))]


def test_cancel_all_stops_the_tasks_of_the_kernel_that_asks(kernel: Kernel, head: Head) -> None:
    task = kernel.submitted(call())[0]
    kernel.submitted(constructor())
    head.parts.submit(call())
    head.engine.fed.clear()
    kernel.ask(verbs.CancelAll())
    assert head.engine.fed == [ev.CancelRequested(task, force=False, recursive=True)]


# ----------------------------------------------------------------------------------- the live view


def test_snapshots_come_under_the_number_of_the_watch(kernel: Kernel, head: Head) -> None:
    kernel.request(0, verbs.WatchStatus(9, 0.0))
    reach_timers(head.engine.loop)
    (output,) = kernel.received()
    assert (output.sink, output.kind, output.content["snapshot"]["queued"]) == (9, "snapshot", 0)
    kernel.request(0, verbs.Unwatch(9))
    kernel.request(0, verbs.Unwatch(9))
    head.engine.publisher.close()
    assert kernel.received() == []


def test_watcher_hears_of_the_end_of_the_session(kernel: Kernel, head: Head) -> None:
    kernel.request(0, verbs.WatchStatus(9, 0.0))
    head.engine.publisher.close()
    (output,) = kernel.received()
    assert output.content == {"snapshot": None}


def flood(kernel: Kernel, waiting: int = 1) -> None:
    """Send messages that the kernel does not read, until so many wait."""
    text = msg.Output(1, "text", {"text": "x" * 50_000})
    while len(kernel.peer.outbox.waiting) < waiting:
        kernel.peer.send(text)


def test_kernel_that_reads_slowly_gets_later_snapshots(kernel: Kernel, head: Head) -> None:
    kernel.request(0, verbs.WatchStatus(9, 0.0))
    flood(kernel)
    reach_timers(head.engine.loop)
    assert len(kernel.peer.outbox.waiting) == 1


@pytest.mark.parametrize(
    ("waiting", "owed", "behind"),
    [
        (1, (0, 0), False),
        (50, (1000, 1 << 40), False),
        (50, (49, 1 << 40), True),
        (50, (1000, 1_000_000), True),
    ],
    ids=["few", "within the limits", "many", "large"],
)
def test_kernel_that_is_far_behind_is_known(
    kernel: Kernel,
    monkeypatch: pytest.MonkeyPatch,
    waiting: int,
    owed: tuple[int, int],
    behind: bool,
) -> None:
    monkeypatch.setattr(module, "OWED", owed)
    assert not kernel.peer.behind
    flood(kernel, waiting)
    assert kernel.peer.behind is behind


def test_waiting_messages_are_sent_when_the_kernel_reads(kernel: Kernel, head: Head) -> None:
    flood(kernel, 5)
    count = 0
    while kernel.peer.outbox.waiting:
        count += len(kernel.received())
        turn(head.engine.loop)
    assert count + len(kernel.received()) >= 6


def test_many_messages_of_one_kernel_leave_others_their_turn(kernel: Kernel, head: Head) -> None:
    obj = head.parts.admission.keep(serialize.dumps("value"))
    for _ in range(module.AT_ONCE):
        kernel.channel.send(msg.Held(obj, 1))
    kernel.send(msg.Held(obj, 1))
    assert head.store.held_by(kernel.peer.holder, obj) == module.AT_ONCE
    turn(head.engine.loop)
    assert head.store.held_by(kernel.peer.holder, obj) == module.AT_ONCE + 1


# ---------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("data", [encode(msg.Ready(1)), b"garbage"], ids=["a worker's", "garbage"])
def test_kernel_that_cannot_be_understood_is_told_why(
    kernel: Kernel, head: Head, data: bytes
) -> None:
    kernel.channel.send_encoded(data)
    turn(head.engine.loop)
    (output,) = kernel.received()
    assert (output.sink, output.kind) == (0, "dismissed")
    assert "a message of this kernel could not be" in output.content["why"]
    assert head.left == [kernel.peer]
    assert kernel.peer.gone


def test_other_kernels_stay_when_one_is_sent_away(kernel: Kernel, head: Head) -> None:
    other = head.attach(4)
    other.send(msg.Ready(1))
    assert head.left == [other.peer]
    assert "kernel 4711 was sent away" in head.engine.faults.texts[0]
    assert kernel.ask(verbs.Ask("total", ())) == ["total"]
    other.channel.close()


def test_kernel_that_leaves_ends_what_nobody_else_wants(kernel: Kernel, head: Head) -> None:
    alone = kernel.submitted(call())[0]
    held = kernel.submitted(call())
    head.store.hold(held)
    (own, _), (shared, _) = (kernel.submitted(constructor()) for _ in range(2))
    head.store.hold((shared, HANDLE))
    called = kernel.submitted(method(shared))[0]
    other = head.parts.submit(call())
    head.engine.fed.clear()
    kernel.close()
    assert set(head.engine.fed) == {
        ev.CancelRequested(alone, force=True, recursive=True),
        ev.CancelRequested(called, force=False, recursive=True),
        ev.KillRequested(own, restart=False),
        ev.ReleaseRequested(3),
    }
    assert head.store.wanted(other.results[0])
    assert head.left == [kernel.peer]


def test_background_cell_goes_on_without_its_kernel(kernel: Kernel, head: Head) -> None:
    obj = kernel.submitted(call("cell", kind="cell"), sink=BACKGROUND)
    child = head.parts.submit(call("child"), parent=obj[0], owner=kernel.peer)
    head.store.drop(child.results[0])
    head.engine.fed.clear()
    kernel.close()
    assert head.engine.fed == [ev.ReleaseRequested(3)]
    assert head.store.wanted(obj)


def test_foreground_cell_ends_with_its_kernel(kernel: Kernel, head: Head) -> None:
    (task, _) = kernel.submitted(call("cell", kind="cell"), sink=SINK)
    head.engine.fed.clear()
    kernel.close()
    assert ev.CancelRequested(task, force=True, recursive=True) in head.engine.fed


def test_kernel_that_is_gone_watches_nothing(kernel: Kernel, head: Head) -> None:
    kernel.request(0, verbs.WatchStatus(9, 0.0))
    kernel.close()
    reach_timers(head.engine.loop)
    assert not head.engine.publisher.watched


def test_kernel_leaves_once(kernel: Kernel, head: Head) -> None:
    kernel.close()
    fed = len(head.engine.fed)
    kernel.peer.go()
    kernel.peer.dismiss("again")
    kernel.peer.send(msg.Output(1, "text", {}))
    assert (len(head.engine.fed), head.left) == (fed, [kernel.peer])


def test_last_messages_of_a_kernel_are_read_before_it_counts_as_gone(
    kernel: Kernel, head: Head
) -> None:
    theirs = head.parts.admission.keep(serialize.dumps("theirs"))
    kernel.peer.look()
    assert not kernel.peer.gone
    many = module.AT_ONCE + 5
    for _ in range(many):
        kernel.channel.send(msg.Held(theirs, 1))
    seen: list[int] = []
    forget = head.store.forget
    head.store.forget = lambda holder: (
        seen.append(head.store.held_by(holder, theirs)),
        forget(holder),
    )
    kernel.channel.close()
    kernel.peer.look()
    assert kernel.peer.gone
    assert seen == [many]
