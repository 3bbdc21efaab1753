"""Sessions: workers that keep their namespace and their devices between cells."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpunb import backend, serialize
from gpunb.backend import HANDLE, SESSIONS, Call, NewActor
from gpunb.core.options import Options
from gpunb.core.tasks import ActorId, ActorSpec
from gpunb.exceptions import GpunbError
from gpunb.notebook.lasting import again, differences, lasting
from gpunb.runtime import output
from gpunb.workers.cells import Host
from gpunb.workers.changes import Fingerprints

if TYPE_CHECKING:
    from gpunb.notebook.arriving import Home
    from gpunb.notebook.shipping import Shipment


class Held:
    """What a session has of the notebook's names: of its own or sent to it, and neither bound anew
    in the notebook since, nor changed there."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Fingerprints]] = {}

    def has(self, name: str, value: Any) -> bool:
        """Whether the notebook's value is no newer than the session's."""
        known = self._known.get(name)
        return known is not None and known[0] is value and not known[1].has_changed(name)

    def sent(self, space: Mapping[str, Any], shipment: Shipment) -> frozenset[str]:
        """These went to it, and what the cell binds will be newer than what is bound here.

        Returns the names of which the latter is presumed, until the cell is over.
        """
        binds = shipment.binds or ()
        presumed = frozenset(n for n in binds if n in space and not self.has(n, space[n]))
        self._now(space, shipment.sent | presumed)
        return presumed - shipment.sent

    def came_home(self, space: Mapping[str, Any], home: Home, presumed: frozenset[str]) -> None:
        """The cell is over. What was bound anew here meanwhile is newer than what came home."""
        own = {*home.values, *home.ending.own, *(name for name, _ in home.kept)}
        self.forget({*home.unbound, *(presumed - own)})
        self._now(space, own - set(home.unbound))

    def forget(self, names: Iterable[str]) -> None:
        """It may have them or not."""
        for name in names:
            self._known.pop(name, None)

    def let_go(self, space: Mapping[str, Any]) -> None:
        """Keep no object alive that the notebook does not have any more."""
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
        self.held = Held()
        self._backend = current

    @classmethod
    def started(cls, name: str, options: Options) -> CellSession:
        """Start one; it waits for its devices like any other work.

        Raises:
            InfeasibleRequestError: this machine can never give what it asks for.
        """
        spec = lasting(options).spec(f"session {name}")
        settings = pickle.dumps(options)
        new = NewActor(ActorSpec(), b"", name, SESSIONS, detached=True, settings=settings)
        call = Call(
            spec,
            pickle.dumps(Host),
            serialize.dumps(((), {})),
            returns=0,
            kind="create",
            sink=output.sink(f"session {name}"),
            new=new,
        )
        current = backend.current()
        ((actor, _),) = current.submit(call)
        current.drop((actor, HANDLE))
        return cls(name, options, current, actor)

    @classmethod
    def found(cls, name: str) -> CellSession | None:
        """The one of that name that another kernel has left in the head process."""
        current = backend.current()
        if not isinstance(current, backend.Keeper):
            return None
        known = current.find_session(name, output.sink(f"session {name}"))
        if known is None:
            return None
        actor, settings, about = known
        where = f" of {about['notebook']}" if about.get("notebook") else ""
        sys.stderr.write(
            f"gpunb: the session {name!r} goes on, with the names in it, as the kernel"
            f"{where} (pid {about.get('pid')}) has left it\n"
        )
        return cls(name, pickle.loads(settings), current, actor)

    @property
    def facts(self) -> Mapping[str, Any] | None:
        """What is known of its worker; None if it is gone."""
        if backend.existing() is not self._backend:
            return None
        try:
            facts: Mapping[str, Any] | None = self._backend.ask("actor", self.actor)
        except GpunbError:
            return None
        return None if facts is None or facts["state"] == "ending" else facts

    def check(self, options: Options, asked: bool) -> None:
        """Whether a cell with these options may run in it; `asked` if it said a share.

        Raises:
            ValueError: it says of the process what that was not started with.
        """
        other = differences(self.options, options, asked)
        if other:
            has, asks = (" and ".join(each) for each in zip(*other, strict=True))
            raise ValueError(
                f"the session {self.name!r} has {has}, and the cell asks for {asks}: leave that "
                f"out, or end the session with %gpu stop {self.name}"
            )

    def stop(self) -> None:
        """End its process; its devices are free when that is gone."""
        if self.facts is not None:
            self._backend.kill(self.actor, False)


class Sessions:
    """The sessions of a notebook by name."""

    def __init__(self) -> None:
        self._sessions: dict[str, CellSession] = {}
        self._lock = threading.Lock()

    def get(self, name: str, options: Options, asked: bool) -> CellSession:
        """The session of that name, started if there is none; `asked` if the cell said a share.
        One that has ended by itself starts again as it was, but for what the cell says.

        Raises:
            ValueError: it is there, and was started with something else than the cell says.
            InfeasibleRequestError: this machine can never give what it asks for.
        """
        with self._lock:
            before = found = self._sessions.get(name)
            if found is None or found.facts is None:
                found = CellSession.found(name)
            if found is not None:
                self._sessions[name] = found
                found.check(options, asked)
                return found
            if before is not None:
                sys.stderr.write(
                    f"gpunb: the session {name!r} had ended, with all that was in it; it starts "
                    "anew\n"
                )
                del self._sessions[name]
                options = again(before.options, options, asked)
            made = self._sessions[name] = CellSession.started(name, options)
            return made

    def stop(self, name: str) -> None:
        """End a session.

        Raises:
            ValueError: there is none of that name.
        """
        found = self._sessions.pop(name, None)
        if found is None or found.facts is None:
            found = CellSession.found(name) if backend.existing() is not None else None
        if found is None:
            known = ", ".join(self.names())
            rest = f"; those that there are: {known}" if known else ": there is none"
            raise ValueError(f"no session of cells has the name {name!r}{rest}")
        found.stop()

    def hosting(self, name: str, actor: ActorId) -> CellSession:
        """The session of that number; one that is another kernel's has only its name here."""
        for each in self._sessions.values():
            if each.actor == actor:
                return each
        return CellSession(name, Options(), backend.current(), actor)

    def names(self) -> list[str]:
        """Of those that are there."""
        own = {name for name, each in self._sessions.items() if each.facts is not None}
        current = backend.existing()
        left: list[dict[str, Any]] = []
        if isinstance(current, backend.Keeper):
            left = current.kept()
        return sorted(own | {each["session"] for each in left if each["state"] == "session"})

    def let_go(self, space: Mapping[str, Any]) -> None:
        """After a cell: keep nothing for them that the notebook does not have any more."""
        for each in self._sessions.values():
            each.held.let_go(space)


_sessions: dict[int, Sessions] = {}


def of(shell: Any) -> Sessions:
    """The sessions of a shell's notebook."""
    return _sessions.setdefault(id(shell), Sessions())
