"""Sessions: workers that keep their namespace and their devices between cells."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpunb.data import serialize
from gpunb.exceptions import GpunbError
from gpunb.notebook.session_options import again, differences, lasting
from gpunb.notebook.shell import NotebookShell
from gpunb.protocol import backend, sink
from gpunb.protocol.backend import HANDLE, SESSIONS, Call, NewActor
from gpunb.protocol.ranks import Ranks, code_of, spec_of
from gpunb.scheduler.markup import as_text
from gpunb.scheduler.options import Options
from gpunb.scheduler.tasks import ActorId, ActorSpec
from gpunb.system.signals import UNDIVIDED
from gpunb.worker.cell.change_detection import Fingerprints
from gpunb.worker.cell.run import Host


class SharedNames:
    """The notebook's names of which a session has the same value.

    The session bound the name or was sent it, and the notebook has neither bound the name anew nor
    changed its object since.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Fingerprints]] = {}

    def has(self, name: str, value: Any) -> bool:
        """Whether the notebook's value is no newer than the session's."""
        known = self._known.get(name)
        return known is not None and known[0] is value and not known[1].has_changed(name)

    def sent(
        self, space: Mapping[str, Any], sent: frozenset[str], binds: Iterable[str]
    ) -> frozenset[str]:
        """Note a cell that was handed in with the values of `sent` and that may bind `binds`.

        Returns the names among `binds` whose newer value the session is presumed to have, until
        the cell is over.
        """
        presumed = frozenset(n for n in binds if n in space and not self.has(n, space[n]))
        self._now(space, sent | presumed)
        return presumed - sent

    def came_home(
        self, space: Mapping[str, Any], own: set[str], presumed: frozenset[str], unbound: set[str]
    ) -> None:
        """Note the end of a cell.

        Args:
            own: names that the worker has as the cell left them.
            presumed: names that `sent` returned for the cell.
            unbound: names whose newer value is the notebook's.
        """
        self.forget(unbound | (presumed - own))
        self._now(space, own - unbound)

    def forget(self, names: Iterable[str]) -> None:
        """Send these names again with the next cell."""
        for name in names:
            self._known.pop(name, None)

    def let_go(self, space: Mapping[str, Any]) -> None:
        """Drop the objects that the notebook does not have any more."""
        self.forget([n for n, (value, _) in self._known.items() if space.get(n) is not value])

    def _now(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in list(names):
            if name in space:
                value = space[name]
                self._known[name] = value, Fingerprints({name: value}, "compared")


class CellSession:
    """A lasting worker for cells."""

    def __init__(
        self, name: str, options: Options, current: backend.Backend, actor: ActorId
    ) -> None:
        """`options` are those with which it was started."""
        self.name = name
        self.options = options
        self.actor = actor
        self.held = SharedNames()
        self._backend = current

    @classmethod
    def started(cls, name: str, options: Options) -> CellSession:
        """Start a session; it waits for its devices like any other work.

        Raises:
            InfeasibleRequestError: this machine can never give what it asks for.
        """
        options.check_not_auto()
        spec = lasting(options).spec(f"session {name}")
        settings = pickle.dumps(options)
        new = NewActor(ActorSpec(), b"", name, SESSIONS, detached=True, settings=settings)
        call = Call(
            spec,
            pickle.dumps(Host),
            serialize.dumps(((), {})),
            returns=0,
            kind="create",
            sink=sink.sink(f"session {name}"),
            new=new,
        )
        if options.ranks is not None:
            call = _with_ranks(call, Ranks(options.ranks, bool(options.isolate)))
        current = backend.current()
        ((actor, _),) = current.submit(call)
        current.drop((actor, HANDLE))
        return cls(name, options, current, actor)

    @classmethod
    def adopted(cls, name: str) -> CellSession | None:
        """The session of that name that another kernel has left in the head process, if any."""
        current = backend.current()
        if not isinstance(current, backend.SharedBackend):
            return None
        known = current.find_session(name, sink.sink(f"session {name}"))
        if known is None:
            return None
        actor, settings, about = known
        where = f" of {as_text(about['notebook'])}" if about.get("notebook") else ""
        sys.stderr.write(
            f"gpunb: the session {name!r} goes on, with the names in it, as the kernel"
            f"{where} (pid {about.get('pid')}) has left it\n"
        )
        return cls(name, pickle.loads(settings), current, actor)

    @property
    def facts(self) -> Mapping[str, Any] | None:
        """The state of its worker; None if the worker is gone."""
        if backend.existing() is not self._backend:
            return None
        try:
            facts: Mapping[str, Any] | None = self._backend.ask("actor", self.actor)
        except GpunbError:
            return None
        return None if facts is None or facts["state"] == "ending" else facts

    def check(self, options: Options, asked: bool) -> None:
        """Raise ValueError if the process was started with other options than these of a cell;
        `asked` if the cell names a share."""
        other = list(differences(self.options, options, asked))
        if other:
            has, asks = (" and ".join(each) for each in zip(*other, strict=True))
            raise ValueError(
                f"the session {self.name!r} has {has}, and the cell asks for {asks}: leave that "
                f"out, or end the session with %gpu stop {self.name}"
            )

    def stop(self) -> None:
        """End its process; its devices are free when the process is gone."""
        if self.facts is not None:
            self._backend.kill(self.actor, False)


def _with_ranks(call: Call, ranks: Ranks) -> Call:
    """Return the call for the actor of a session with ranks; `call` makes the actor of one rank."""
    from gpunb.worker.ranks import RankHost

    one = replace(call, new=NewActor(ActorSpec(), b""), sink=None)
    arguments = serialize.dumps(((code_of(one, ranks),), {}))
    return replace(call, spec=spec_of(call), code=pickle.dumps(RankHost), arguments=arguments)


class Sessions:
    """The sessions of a notebook by name."""

    def __init__(self, _: NotebookShell) -> None:
        self._sessions: dict[str, CellSession] = {}
        self._lock = threading.Lock()

    def get(self, name: str, options: Options, asked: bool) -> CellSession:
        """The session of that name, started if there is none; `asked` if the cell names a share.
        A session that has ended by itself starts again with its options, changed by the cell's.

        Raises:
            ValueError: the session was started with other options than the cell's.
            InfeasibleRequestError: this machine can never give what it asks for.
        """
        with self._lock:
            before = session = self._sessions.get(name)
            if session is None or session.facts is None:
                session = CellSession.adopted(name)
            if session is not None:
                self._sessions[name] = session
                session.check(options, asked)
                return session
            if before is not None:
                sys.stderr.write(
                    f"gpunb: the session {name!r} had ended, with all that was in it; it starts "
                    "anew\n"
                )
                del self._sessions[name]
                options = again(before.options, options, asked)
            with UNDIVIDED:  # no command ends a session that has started and is not known here
                made = self._sessions[name] = CellSession.started(name, options)
            return made

    def stop(self, name: str) -> None:
        """End a session.

        Raises:
            ValueError: there is none of that name.
        """
        session = self._sessions.pop(name, None)
        if session is None or session.facts is None:
            session = CellSession.adopted(name) if backend.existing() is not None else None
        if session is None:
            known = ", ".join(self.names())
            rest = f"; those that there are: {known}" if known else ": there is none"
            raise ValueError(f"no session of cells has the name {name!r}{rest}")
        session.stop()

    def of_actor(self, name: str, actor: ActorId) -> CellSession:
        """The session with that actor; for a session of another kernel, a new one with its name."""
        for each in self._sessions.values():
            if each.actor == actor:
                return each
        return CellSession(name, Options(), backend.current(), actor)

    def names(self) -> list[str]:
        """The names of the sessions that are there."""
        own = {name for name, each in self._sessions.items() if each.facts is not None}
        current = backend.existing()
        left: list[dict[str, Any]] = []
        if isinstance(current, backend.SharedBackend):
            left = current.retained()
        return sorted(own | {each["session"] for each in left if each["state"] == "session"})

    def let_go(self, space: Mapping[str, Any]) -> None:
        """After a cell, drop the objects that the notebook does not have any more."""
        for each in self._sessions.values():
            each.held.let_go(space)
