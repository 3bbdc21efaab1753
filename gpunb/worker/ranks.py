"""Runs a call in several ranks at once, in the process of their coordinator.

The first rank that fails ends the others: they are interrupted, and after a grace period their
processes are ended, so that none waits for ever in a collective operation for a rank that is gone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

from gpunb.api.refs import ObjectRef, value_of
from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.exceptions import ActorDiedError, GpunbError, TaskError, WorkerCrashedError
from gpunb.protocol import backend
from gpunb.protocol.backend import Call, ExitActor, FailedWith, Outcome
from gpunb.protocol.ranks import RESULTS, RankOfCell, Ranks, code_for_rank, of_coordinator
from gpunb.scheduler.tasks import ActorId
from gpunb.system.signals import UNDIVIDED
from gpunb.worker.cell.cell_types import CellResult
from gpunb.worker.rank_setup import CHOSEN, Placed, place_ranks
from gpunb.worker.streams import flush

PORTS = 3
"""Ports that are tried, if another process takes the port before rank 0 does."""

_NEW_PORT = (
    "end the session with %gpu stop NAME, and the next cell has other ports; or choose a free one "
    "with the variable MASTER_PORT, as in --env MASTER_PORT=29500"
)

Retryable: TypeAlias = Callable[[BaseException, bytes | bool], bool]

_TAKEN = (b"EADDRINUSE", b"ddress already in use")
"""Texts of errors for a port that another process has."""

_WAITED = (
    b"clients joined",
    b"wait timeout after",
    b"while trying to connect to",
    b"DEADLINE_EXCEEDED",
)
"""Texts of errors of PyTorch and JAX for ranks that have not come to the port of rank 0 in time."""


class RankHost:
    """The actor of a session of cells with several ranks. It has one actor for each rank.

    Attributes:
        results: the parts of the last result, which keep the objects that they refer to.
    """

    def __init__(self, code: bytes) -> None:
        """`code` is that of a coordinator, for the call that makes the actor of a rank."""
        call, ranks = of_coordinator(code, serialize.dumps(((), {})))
        self.results: list[Payload] = []
        self.placed = place_ranks(call, ranks)
        if not self.placed.actors:
            calls = map(self.placed.call_of, range(ranks.size))
            handles = [backend.current().submit(each)[0] for each in calls]
            self.placed.actors = [actor for actor, _ in handles]
            # After an interrupt the worker counts its references anew: they must exist.
            self._references = [ObjectRef[Any](each, held=True) for each in handles]


@dataclass(frozen=True, slots=True)
class _Failure:
    """How a rank failed.

    Attributes:
        payload: the failure, for `value_of`; of a cell that raised, for `load_failure`.
        shown: of a cell that raised, the content of the message that shows its error; else None.
    """

    rank: int
    payload: Payload
    shown: dict[str, Any] | None = None

    def error(self) -> BaseException | None:
        """Return the error that a caller would get; None for the error of a cell."""
        if self.shown is None:
            try:
                value_of(Outcome(self.payload, failed=True))
            except BaseException as error:
                return error
        return None

    @property
    def raised(self) -> bool:
        """Whether the code of the rank raised the error by itself."""
        return self.rank >= 0 and (self.shown or {}).get("ename") != "KeyboardInterrupt"

    @property
    def is_crash(self) -> bool:
        """Whether the process of the rank ended before the rank did."""
        return isinstance(self.error(), (WorkerCrashedError, ActorDiedError))


def _has(failure: _Failure | None, texts: Iterable[bytes]) -> bool:
    """Whether the error of a rank has one of these texts."""
    if failure is None:
        return False
    stream = serialize.inlined(failure.payload).stream
    return any(each in stream for each in texts)


def run(
    code: bytes, arguments: Payload, host: RankHost | None, label: str, retryable: Retryable
) -> Any:
    """Run the call of a coordinator.

    Args:
        host: the actor of the session whose cell it is.
        label: the coordinator's task in words, for errors.
        retryable: tells for an exception and the field `retry` of a call whether it may run again.

    Returns:
        The list of the ranks' results; for a cell the payload of its result.

    Raises:
        FailedWith: a rank failed.
        TimeoutError: the time limit of a function is over.
        ExitActor: a rank of the session is gone, and with it the session.
    """
    call, ranks = of_coordinator(code, arguments)
    retries = call.spec.max_retries
    lost: list[int] = []
    while True:
        with _Attempt(call, ranks, host) as attempt:
            attempt.run()
            if (port := attempt.lost_port()) is not None:
                lost.append(port)
            elif retries and attempt.may_retry(retryable):
                retries -= 1
            else:
                return attempt.value(label)
        if len(lost) == PORTS:
            raise GpunbError(
                f"{call.spec.name}: another process took the port before rank 0 could listen, "
                f"{PORTS} times ({', '.join(map(str, lost))}): choose a free one with the "
                "variable MASTER_PORT, as in --env MASTER_PORT=29500"
            )


class _Attempt:
    """One attempt to run a call in several ranks."""

    def __init__(self, call: Call, ranks: Ranks, host: RankHost | None) -> None:
        self._call = call
        self._ranks = ranks
        self._host = host
        self._remote: Any = backend.current()
        self._is_cell = call.kind == "cell"
        self._refs: list[list[ObjectRef[Any]]] = []
        self._placed: Placed | None = None if host is None else host.placed
        self._failure: _Failure | None = None
        self._late: list[int] = []  # ranks that have not finished within the time limit
        self._apart: list[int] = []  # those of them that have not joined the others
        self._killed: list[int] = []  # ranks that did not stop
        self._stop: KeyboardInterrupt | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the results: the traceback of an error may keep this object."""
        self._refs.clear()
        if self._host is None and self._placed is not None:
            self._placed.close()

    def run(self) -> None:
        """Start the ranks, and wait until all are over."""
        try:
            self._start()
            self._follow()
        except KeyboardInterrupt as error:  # the user's Stop, or a cancel
            self._stop = error
            self._end(range(len(self._refs)))

    def _start(self) -> None:
        ranks = self._ranks
        if self._placed is None:
            self._placed = place_ranks(self._call, ranks)
        for rank in range(ranks.size):
            actors = self._placed.actors
            own = self._call_of_actor(actors[rank], rank) if actors else self._placed.call_of(rank)
            if self._is_cell:
                place = RankOfCell(rank, rank == ranks.running[0], rank in ranks.running)
                own = replace(own, code=code_for_rank(place), returns=RESULTS)
            with UNDIVIDED:  # a rank that is started and not known here would never be stopped
                self._refs.append([ObjectRef(each, held=True) for each in self._remote.submit(own)])

    def _call_of_actor(self, actor: ActorId, rank: int) -> Call:
        spec = self._call.spec
        name = f"{spec.name} rank {rank} of {self._ranks.size}"
        spec = replace(spec, name=name, timeout=None, max_retries=0)
        return replace(self._call, spec=spec, actor=actor)

    def _follow(self) -> None:
        """Wait until all ranks are over, or one has failed, or the time is over."""
        timeout = self._call.spec.timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        running = set(range(len(self._refs)))
        while running and self._failure is None and not self._late:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            over = self._wait(running, 1, left)
            running -= over
            self._failure = self._first_failure(over)
            self._late = [] if over else sorted(running)
        if self._late or _has(self._failure, _WAITED):
            self._apart = self._not_joined(sorted(running))
        self._end(running)
        # Rank 0 may have given up by now, and its port is closed.
        waited = [each for each in self._apart if _has(self._failure_of(each), _WAITED)]
        self._apart = [each for each in self._apart if each not in waited]
        if self._apart and self._failure is not None and self._failure.is_crash:  # as JAX gives up
            error = WorkerCrashedError(f"{self._failure.error()}\n{self._text_of_apart()}")
            self._failure = replace(self._failure, payload=serialize.dumps(error))

    def _not_joined(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that are not at the ports."""
        jobs = [self._remote.ask("job", self._refs[rank][0].id[0]) or {} for rank in ranks]
        pids = {rank: job.get("pid") for rank, job in zip(ranks, jobs, strict=True)}
        at = self._placed.is_at_ports if self._placed is not None else None
        return [rank for rank, pid in pids.items() if at is not None and pid and not at(pid)]

    def _end(self, running: Iterable[int]) -> None:
        """Interrupt these ranks, and end the processes of those that do not stop."""
        running, over = set(running), set[int]()
        try:
            for rank in running:
                self._remote.interrupt(self._refs[rank][0].id)
            over = self._wait(running, len(running), self._ranks.grace)
        except KeyboardInterrupt as error:  # the second Stop
            self._stop = error
        self._killed = sorted(running - over)
        for rank in self._killed:
            if self._placed is not None and self._placed.actors:
                self._remote.kill(self._placed.actors[rank], False)
            else:
                self._remote.cancel(self._refs[rank][0].id, True, True)
        self._wait(self._killed, len(self._killed), None)
        # A process that dies takes its connections along, so that others fail, perhaps before it.
        crashes = [each for rank in sorted(over) if (each := self._failure_of(rank)) is not None]
        self._failure = next((each for each in crashes if each.is_crash), self._failure)

    def _wait(self, ranks: Iterable[int], count: int, timeout: float | None) -> set[int]:
        """Wait until so many of these ranks are over; return those that are."""
        objects = {self._refs[rank][0].id: rank for rank in ranks}
        over = self._remote.wait(list(objects), count, timeout) if objects else ()
        return {objects[each] for each in over}

    def _first_failure(self, ranks: Iterable[int]) -> _Failure | None:
        return next(filter(None, map(self._failure_of, sorted(ranks))), None)

    def _failure_of(self, rank: int) -> _Failure | None:
        """Return how a rank that is over failed; None if it did not."""
        result, *more = (each.id for each in self._refs[rank])
        outcome = self._remote.fetch([result], 0)[0]
        if outcome.failed:
            failure = _Failure(rank, outcome.payload)
            error = failure.error() if self._host is None else None
            if isinstance(error, ActorDiedError):  # the rank's process, of which nothing is kept
                failure = replace(failure, payload=serialize.dumps(WorkerCrashedError(str(error))))
            return failure
        failed = value_of(self._remote.fetch(more[:1], 0)[0]) if more else None
        return None if failed is None else _Failure(rank, *failed)

    # ------------------------------------------------------------------------- when all are over

    def lost_port(self) -> int | None:
        """Return the port that another process took before rank 0; None if none did."""
        chosen = dict(self._call.spec.environment)
        if self._stop or self._host is not None or CHOSEN & chosen.keys():
            return None
        return self._taken_port()

    def _taken_port(self) -> int | None:
        """Return the port that another process has, if a rank failed for that."""
        if self._placed is None or not _has(self._failure, _TAKEN):
            return None
        return next(filter(self._placed.is_taken, self._placed.ports), None)

    def may_retry(self, retryable: Retryable) -> bool:
        """Whether the call may run again after this failure."""
        if self._failure is None or self._stop or self._host is not None:
            return False
        error = self._failure.error()
        if isinstance(error, TaskError):
            return error.cause is not None and retryable(error.cause, self._call.retry)
        return isinstance(error, WorkerCrashedError)

    def value(self, label: str) -> Any:
        """Return the result of the call, or raise its error, as `run`."""
        self._check_session()
        if self._is_cell:
            return self._result_of_cell(label)
        if self._stop is not None:
            raise self._stop
        if self._late:
            raise TimeoutError(self._text_of_late())
        if self._failure is not None:
            raise FailedWith(self._failure.payload)
        results = [refs[0].id for refs in self._refs]
        return [value_of(each) for each in self._remote.fetch(results, None)]

    def _check_session(self) -> None:
        """Raise ExitActor if ranks of the session are gone."""
        if self._host is None:
            return
        if self._failure is not None and self._failure.is_crash:
            raise ExitActor(f"{self._names([self._failure.rank])}: {self._failure.error()}")
        if self._killed:
            late = f"{self._names(self._killed)} did not stop within {self._ranks.grace:g} s"
            raise ExitActor(f"{late}{self._why_ended()}")

    def _why_ended(self) -> str:
        """Return in words why the ranks were interrupted, and show the error that was the reason;
        empty if the user stopped them."""
        failure = self._failure
        if self._stop is not None:
            return ""
        if self._late:
            return f" after the end of their time: {self._text_of_late()}"
        if failure is None or failure.shown is None:
            return ""
        sys.stderr.write("\n".join(failure.shown["traceback"]) + "\n")
        flush()
        error = f"{failure.shown['ename']}: {failure.shown['evalue']}"
        return f" after {self._names([failure.rank])} had failed: {error}"

    def _result_of_cell(self, label: str) -> Payload:
        """Return the result of the first rank that ran the cell, with the failure of the cell and
        the values that were gathered.

        Raises:
            FailedWith: the cell of a rank ended without a result.
        """
        running = self._ranks.running
        failure = self._failure_of_late(label) if self._late else self._failure
        if self._stop is not None:
            failure = self._first_failure(running)
        if failure is not None and failure.shown is None:
            raise FailedWith(failure.payload)
        lead = self._remote.fetch([self._refs[running[0]][0].id], 0)[0]
        if failure is None and not self._ranks.gather:
            payload: Payload = lead.payload
            return payload
        home = None if lead.failed else serialize.inlined(lead.payload)
        values = [] if failure is not None else [self._refs[rank][2].id for rank in running]
        gathered = [serialize.inlined(e.payload) for e in self._remote.fetch(values, 0)]
        result = CellResult(home=home, gathered=tuple(gathered))
        if failure is not None and failure.shown is not None:
            lines = failure.shown["traceback"]
            if failure.raised:
                lines = [*lines, self._text_of_failure(failure)]
            self._remote.show("failed", {**failure.shown, "traceback": lines})
            result = replace(result, failure=failure.payload, traceback=tuple(lines))
        payload = serialize.dumps((result, {}), what="names of the cell", way="home")
        inner = [each for each in (home, *gathered) if each is not None]
        payload.references = tuple(ref for each in inner for ref in each.references)
        if self._host is not None:
            self._host.results = inner
        return payload

    def _text_of_failure(self, failure: _Failure) -> str:
        """Return the last line of the traceback of a rank's error."""
        ended = "ended" if self._host is None else "interrupted"
        text = f"raised in {self._names([failure.rank])}; the others were {ended}"
        if self._apart:
            text += f"; {self._text_of_apart()}"
        if (port := self._taken_port()) is not None:
            text += f"; another process has port {port}: {_NEW_PORT}"
        return text

    def _failure_of_late(self, label: str) -> _Failure:
        """Return the end of the time limit as the failure of a cell."""
        error = TimeoutError(self._text_of_late())
        lines = [f"TimeoutError: {error}"]
        shown = {"ename": "TimeoutError", "evalue": str(error), "traceback": lines}
        return _Failure(-1, serialize.dump_failure(error, task=label), shown)

    def _text_of_late(self) -> str:
        spec = self._call.spec
        limit = f"{spec.name} ran longer than its timeout of {spec.timeout or 0:g} s"
        late = f"{limit} and was stopped: {self._names(self._late)} had not finished"
        if len(self._apart) == len(self._late) and 0 in self._apart:
            return f"{late}, and rank 0 had not opened MASTER_PORT"
        some = 0 < len(self._apart) < len(self._late)
        return f"{late}, and {self._text_of_apart()}" if some else late

    def _text_of_apart(self) -> str:
        return f"{self._names(self._apart)} had not joined the others at MASTER_PORT"

    def _names(self, ranks: Sequence[int]) -> str:
        """Return some ranks in words, such as "ranks 1, 3 of 4"."""
        word = "rank" if len(ranks) == 1 else "ranks"
        return f"{word} {', '.join(map(str, ranks))} of {self._ranks.size}"
