"""Calls that run in several ranks at once: the call of the coordinator, and its contents.

The coordinator is a task without devices. It has the ranks placed together, submits one ordinary
call for each rank, and makes one result of their results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpunb.data.serialize import Payload
from gpunb.exceptions import InfeasibleRequestError
from gpunb.protocol import backend, plain, records
from gpunb.protocol.backend import Call
from gpunb.scheduler.resources import Demand, Gang
from gpunb.scheduler.tasks import TaskSpec

GRACE = 5.0
"""Seconds that the other ranks have to end by themselves after one has failed."""

KIND = "ranks"
"""The kind of a coordinator's call."""

RESULTS = 3
"""Results of the call that runs a cell in one rank."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the ranks of one call run.

    Attributes:
        size: number of ranks.
        isolate: whether each rank sees its own devices only.
        gather: names of a cell whose values come home as lists in rank order.
        only: ranks that run a cell of a session; all if empty.
        grace: seconds between the interrupt of a rank and the end of its process.
    """

    size: int
    isolate: bool = False
    gather: tuple[str, ...] = ()
    only: tuple[int, ...] = ()
    grace: float = GRACE

    @property
    def running(self) -> tuple[int, ...]:
        """The ranks that run the call."""
        return self.only or tuple(range(self.size))


@dataclass(frozen=True, slots=True)
class RankOfCell:
    """The part of one rank in a cell.

    Attributes:
        leads: whether the names of this rank come home, and its output is the cell's.
        runs: whether it runs the cell; else it takes in the values that came with the cell.
    """

    rank: int
    leads: bool
    runs: bool


def coordinated(call: Call, ranks: Ranks) -> Call:
    """Return the call of the coordinator that runs `call` in these ranks.

    Raises:
        InfeasibleRequestError: there is never room for all of them.
    """
    code = code_of(call, ranks)
    spec = spec_of(call)
    call = replace(call, imports=())  # the coordinator needs none
    return replace(call, spec=spec, code=code, returns=1, retry=False, kind=KIND)


def code_of(call: Call, ranks: Ranks) -> bytes:
    """Return the code of a coordinator for `of_coordinator`.

    Raises:
        InfeasibleRequestError: as `coordinated`.
    """
    current, demand = backend.current(), call.spec.demand
    if demand != Demand() and current.context().task is None:  # else the coordinator finds out
        reason = current.ask("refusal", Gang.of([demand] * ranks.size))
        if reason:
            raise InfeasibleRequestError(f"{call.spec.name}: {reason}")
    return plain.dumps((records.flat(records.Submission.of(call)), records.flat(ranks)))


def spec_of(call: Call) -> TaskSpec:
    """Return the specification of the coordinator of a call, which needs no resources."""
    spec = call.spec
    return TaskSpec(
        spec.name,
        environment=spec.environment,
        owner=spec.owner,
        ray=spec.ray,
        priority=spec.priority,
    )


def of_coordinator(code: bytes, arguments: Payload) -> tuple[Call, Ranks]:
    """Return the call that a coordinator runs, and its ranks."""
    submission, ranks = plain.loads(code)
    call = records.read(records.Submission, submission).call(arguments, None)
    return call, records.read(Ranks, ranks)


def code_for_rank(rank: RankOfCell) -> bytes:
    """Return the code of the call that runs a cell in one rank."""
    return plain.dumps(records.flat(rank))


def rank_of(code: bytes) -> RankOfCell:
    """Return the rank that `code_for_rank` was given."""
    return records.read(RankOfCell, plain.loads(code))
