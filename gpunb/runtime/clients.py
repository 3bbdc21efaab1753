"""A kernel that is attached to a head process, as that one sees it.

It asks for things as a worker does, but runs no task, and the scheduler knows nothing of it. What
it refers to is let go when it leaves, as with a worker; what it submitted and nobody else wants is
then stopped, but for its background cells and sessions.
"""

from __future__ import annotations

import pickle
import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpunb import serialize
from gpunb.backend import HANDLE, SESSIONS, Call, NewActor, ObjectId, Outcome
from gpunb.core import events as ev
from gpunb.core.resources import Machine
from gpunb.exceptions import ObjectLostError
from gpunb.objects import Segment
from gpunb.runtime import heads, numbers
from gpunb.runtime.log import Log
from gpunb.runtime.picture import Watch
from gpunb.runtime.relayed import Sinks
from gpunb.runtime.requests import Requests
from gpunb.runtime.setup import Surroundings
from gpunb.serialize import Payload
from gpunb.workers import messages as msg
from gpunb.workers.channel import Channel, ChannelClosed
from gpunb.workers.pool import Process

if TYPE_CHECKING:
    from gpunb.runtime.driver import Driver

AT_ONCE = 32
"""Messages of one client that are read before others have their turn."""

OWED = 2000, 64 << 20
"""Messages, and bytes of them, that a client may have to read yet before text is left out."""


class Client(Process):
    """One attached kernel; on the loop's thread."""

    __slots__ = ("_left", "_sinks", "about", "driver", "ident", "requests", "watches")

    def __init__(
        self,
        driver: Driver,
        channel: Channel,
        ident: int,
        about: Mapping[str, Any],
        left: Callable[[Client], object],
    ) -> None:
        """`ident` is its number among those of this head; `left` is told when it is gone."""
        super().__init__(-ident, channel, -1, -1, -1)
        self.ident = ident
        self.worker = -ident  # no worker has such a number
        self.about = about
        self.pid = about.get("pid")
        self.leave = self.go
        self.driver = driver
        self.requests = ClientRequests(driver, self)
        self.surroundings = Surroundings({}, None, [], [])
        self.watches: dict[int, Watch] = {}
        self._left = left
        self._sinks = Sinks(self)
        driver.loop.watch(channel.fileno(), self._stirs)

    @property
    def sinks(self) -> Sinks:
        """Where the output of its jobs goes."""
        return self._sinks

    def _stirs(self) -> None:
        pool = self.driver.pool
        if self.backlog:
            pool.send_backlog(self)
        for _ in range(AT_ONCE):
            if self.gone:
                return
            try:
                message, descriptors = self.channel.receive(wait=False)
            except BlockingIOError:
                return
            except (ChannelClosed, OSError):
                self.go()
                return
            self._said(message, [Segment.adopt(each) for each in descriptors])

    def look(self) -> None:
        """Hear the rest of what it has said, if it is gone."""
        ended = select.poll()
        ended.register(self.channel, 0)  # for the end of the other side alone
        while not self.gone and ended.poll(0):
            self._stirs()

    def _said(self, message: msg.Message, segments: list[Segment]) -> None:
        store = self.driver.store
        match message:
            case msg.Request():
                self.requests.handle(self, message, segments)
            case msg.Held(obj, change):
                # A reference of an earlier session may have the number of somebody else's object.
                held = store.held_by(-self.ident, obj)
                if change > 0 or held >= -change:
                    store.hold_for(-self.ident, obj, change)
            case _:
                pass

    def send(self, message: msg.Message, segments: Sequence[Segment] = ()) -> None:
        """Send it something, unless it is gone."""
        if not self.gone:
            self.driver.pool.send(self, message, list(segments))

    @property
    def behind(self) -> bool:
        """Whether it does not read what it is sent."""
        messages, size = OWED
        if len(self.backlog) < 50:
            return False
        return len(self.backlog) > messages or sum(len(data) for data, _ in self.backlog) > size

    def go(self) -> None:
        """It is gone, or to be sent away: nothing of it stays that nobody else wants."""
        if self.gone:
            return
        self.gone = True
        driver = self.driver
        driver.loop.unwatch(self.channel.fileno())
        self.channel.close()
        self.backlog.clear()
        for watch in self.watches.values():
            watch.stop()
        driver.store.forget(-self.ident)
        for job in list(driver.jobs.values()):
            if job.owner is not self or job.call.new is not None or driver.kept.keeps(job):
                continue
            if not any(map(driver.store.wanted, job.handed_out)):
                force = not job.call.actor
                driver.feed(ev.CancelRequested(job.id, force, recursive=True))
        for actor in driver.actors:
            if actor.owner is self and not driver.store.wanted((actor.id, HANDLE)):
                driver.kill(actor.id, restart=False)
        driver.kept.left(self)
        driver.feed(ev.ReleaseRequested(self.ident))
        self._left(self)

    def cancel_all(self) -> None:
        """Stop all tasks of it, but no actors."""
        for job in list(self.driver.jobs.values()):
            if job.owner is self and job.call.new is None:
                self.driver.feed(ev.CancelRequested(job.id, force=False, recursive=True))

    @property
    def sessions(self) -> str:
        """The namespace of its sessions of cells, which no other kernel can use meanwhile."""
        return f"{SESSIONS}{self.ident}"


class ClientRequests(Requests):
    """Answers an attached kernel. It can name only what it has a reference to."""

    def __init__(self, driver: Driver, client: Client) -> None:
        super().__init__(driver)
        self._client = client
        self._kinds: dict[int, tuple[Any, ...]] = {}

    def _answer(self, process: Process, request: msg.Request, payloads: list[Payload]) -> None:
        driver, client = self._driver, self._client
        match request.verb:
            case "attach":
                (
                    surroundings,
                    reached,
                ) = request.arguments
                client.surroundings = Surroundings(*surroundings)
                numbers.go_on(*reached)
                machine: Machine = driver.scheduler.machine
                self._reply(process, request, (client.ident, pickle.dumps(machine, 5)))
            case "fetch" | "wait":
                self._check(request.arguments[0])
                if request.verb == "fetch":
                    driver.kept.fetched(client, request.arguments[0])
                super()._answer(process, request, payloads)
            case "watch" | "take":
                self._check(request.arguments)
                super()._answer(process, request, payloads)
            case "ask" if request.arguments[0] == "log":
                self._reply(process, request, None)  # it has it itself
            case "numbers":
                found = tuple(numbers.task() for _ in range(*request.arguments))
                self._reply(process, request, found)
            case "answer":
                number, text = request.arguments
                client.sinks.answered(number, text, payloads)
            case "tell":
                token, kind, content, sink = request.arguments
                worker = client.sinks.workers.get(token)
                if worker is not None:
                    worker.tell(kind, content, payloads, client.sinks.sink(*sink))
            case "desk":
                assert driver.desk is not None
                driver.desk.carry_out(
                    request.arguments[0], lambda said: self._reply(process, request, said)
                )
            case "picture":
                self._picture(*request.arguments)
            case "kept" | "adopt" | "brought home" | "log" | "session" | "cancel all":
                self._reply(process, request, self._of_kernels(request))
            case "unwatch":
                watch = client.watches.pop(request.arguments[0], None)
                if watch is not None:
                    watch.stop()
            case _:
                super()._answer(process, request, payloads)

    def _of_kernels(self, request: msg.Request) -> Any:
        """What matters where there are several, some of which are gone."""
        client, kept = self._client, self._driver.kept
        match request.verb:
            case "cancel all":
                return client.cancel_all()
            case "kept":
                return kept.facts()
            case "adopt":
                return kept.adopt(client, *request.arguments)
            case "brought home":
                return kept.brought_home(client, *request.arguments)
            case "log":
                return kept.log(*request.arguments)
            case _:
                name, about = request.arguments
                return kept.session(client, name, client.sinks.sink(*about))

    def _check(self, objects: Sequence[ObjectId]) -> None:
        """Raises ObjectLostError for one that the client has no reference to."""
        for obj in objects:
            if not self._driver.store.may_name(-self._client.ident, obj):
                raise ObjectLostError(
                    f"the object {obj} is not there: it belongs to a session that was shut down, "
                    "or its last reference was dropped"
                )

    def _submit(self, process: Process, request: msg.Request, arguments: Payload) -> None:
        client = self._client
        number, kind, ident, inputs, actor, new, about, surroundings = request.arguments
        if surroundings is not None:
            client.surroundings = Surroundings(*surroundings)
        sink = client.sinks.sink(*about) if about is not None else None
        spec, code, returns, retry, what, held = self._kind(number, kind)
        lasts = what == "cell" and sink is not None and sink.background
        if sink is not None:
            sink.log = Log()
        try:
            made = self._own(pickle.loads(new)) if new is not None else None
            call = Call(
                spec, code, arguments, inputs, returns, retry, what, sink, actor, made, held
            )
            self._check(call.needed())
            job = self._hand_in(process, request, call, client, ident)
            if job is not None and lasts:
                self._driver.kept.add(job, client)
        except Exception as error:
            if sink is not None:
                sink.end()
            if not ident:
                raise
            self._failed(ident, returns, error)
            return
        if sink is not None and job is None:
            sink.end()  # there was such an actor already

    def _answer_of(self, call: Call, results: list[ObjectId]) -> Any:
        """With whether further calls of the same may be handed in without an answer."""
        actor = self._driver.actors.get(call.actor) if call.actor else None
        return results, actor is None or actor.new.max_pending < 0

    def _kind(self, number: int, kind: bytes | None) -> tuple[Any, ...]:
        """What the calls of one function have in common, which is said with the first of them."""
        if kind is None:
            return self._kinds[number]
        said: tuple[Any, ...] = pickle.loads(kind)
        if number:
            self._kinds[number] = said
            if len(self._kinds) > 2 * heads.KINDS:  # the client keeps half of that
                del self._kinds[next(iter(self._kinds))]
        return said

    def _failed(self, ident: int, returns: int, error: Exception) -> None:
        """A call cannot be handed in, and nobody waits to hear it: its results say it."""
        store, objects = self._driver.store, [(ident, index) for index in range(max(1, returns))]
        for obj in objects:
            store.create(obj, Outcome(serialize.dumps(error), failed=True))
        store.granted(-self._client.ident, objects)

    def _reply(self, process: Process, request: msg.Request, *said: Any, **more: Any) -> None:
        if request.request:  # else nobody waits
            super()._reply(process, request, *said, **more)

    def _own(self, new: NewActor) -> NewActor:
        """Keep apart what is the kernel's own: its cells, and its sessions of cells."""
        if new.namespace == SESSIONS:
            new = replace(new, namespace=self._client.sessions)
        if new.origin is not None:
            new = replace(new, origin=f"{self._client.ident}:{new.origin}")
        return new

    def _picture(self, number: int, interval: float) -> None:
        client = self._client

        def show(snapshot: dict[str, Any] | None) -> bool:
            if client.backlog and snapshot is not None:
                return False  # it reads slowly, and gets a later one instead
            client.send(msg.Output(number, "snapshot", {"snapshot": snapshot}))
            return True

        client.watches[number] = self._driver.picture.watch(show, interval)
