"""Carries out `Park` and `Restore`: the device memory of an idle actor moves to the host and back.

The worker itself moves it, with the checkpoint functions of CUDA's driver.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpunb.protocol import messages as msg
from gpunb.scheduler import events as ev
from gpunb.scheduler.parking import why_not
from gpunb.scheduler.resources import size_text
from gpunb.scheduler.tasks import ActorId, Succeeded, WorkerId

if TYPE_CHECKING:
    from gpunb.engine.actors import ActorRecord
    from gpunb.engine.share_checks import ShareChecks
    from gpunb.engine.state import EngineState
    from gpunb.leases.leases import Leases
    from gpunb.processes.worker_process import WorkerProcess

_VENDORS = ("nvidia", "simulated", "logical")
"""The plug-ins of devices whose memory can be moved. Those without hardware have none."""

_SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(s|min|h)?\s*")

_LOOK = 0.1
"""Seconds between two looks whether a device has room for memory that is to come back."""

Callback = Callable[[str], object]


def parse_time(value: object, name: str) -> float:
    """Seconds from a number of seconds or a text such as ``"10 min"``.

    Raises:
        TypeError: neither a number nor a text.
        ValueError: a text of another form, or not more than 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"{name} must be a number of seconds or a text, not {value!r}")
    found = _TIME.fullmatch(str(value))
    seconds = float(found[1]) * _SECONDS[found[2] or ""] if found else 0.0
    if seconds <= 0:
        raise ValueError(
            f"{name}={value!r} is no time: write seconds, or as '30 s', '10 min', '1 h'"
        )
    return seconds


class ParkedActors:
    """Parks and restores the actors of a session. On the loop's thread."""

    def __init__(
        self, engine: EngineState, leases: Leases, sampler: ShareChecks, *, mps: bool
    ) -> None:
        self._engine = engine
        self._leases = leases
        self._sampler = sampler
        self._mps = mps
        self._devices = {each.key: each for each in engine.scheduler.machine.devices}
        self._callbacks: dict[WorkerId, Callback] = {}
        self._memory: dict[WorkerId, int] = {}
        self._restores: dict[WorkerId, ev.Restore] = {}

    def request(self, ident: ActorId, callback: Callback) -> None:
        """Park an actor. `callback` is called once, with the reason if it cannot be parked."""
        problem = self._why_not(ident)
        worker = self._engine.scheduler.state.actors[ident].worker if problem is None else None
        if worker is None:
            callback(problem or "it has no process")
            return
        self._callbacks[worker] = callback
        self._engine.feed(ev.ParkRequested(ident))

    def _why_not(self, ident: ActorId) -> str | None:
        known = self._engine.scheduler.state.actors.get(ident)
        record = self._engine.actors.get(ident)
        if known is None or record is None:
            return "it is not there any more"
        return why_not(known) or self._why_not_able(record)

    def _why_not_able(self, record: ActorRecord) -> str | None:
        """Why the driver or the use of the devices does not allow it."""
        if not record.held:
            return "it has no devices"
        names = [self._devices[key].vendor for key, _ in record.held]
        if others := sorted(set(names) - set(_VENDORS)):
            return f"this is possible for NVIDIA's devices only, not for those of {others[0]!r}"
        if self._mps:
            return "the session uses MPS, and a process under MPS cannot be parked"
        if record.new.concurrent:
            return "it has coroutines, which may use its devices at any time"
        process = record.process
        if process is not None and process.worker is not None:
            children = self._sampler.pids(process.worker) - {process.pid}
            if children:
                return f"process {min(children)}, which it has started, uses its devices too"
        return None

    def carry_out(self, decision: ev.Park | ev.Restore) -> None:
        """Tell the worker to move its memory."""
        process = self._engine.pool.process(decision.worker)
        record = self._engine.actors.on(decision.worker)
        if process is None or record is None:  # an `on_exit` is on its way
            return
        if isinstance(decision, ev.Restore):
            if self._leases.take(decision, record.class_name, lasting=True):
                self._restore(decision, time.monotonic())
        elif (problem := self._why_not_able(record)) is not None:
            self._call_back(decision.worker, problem)
            self._engine.feed(ev.Parked(decision.worker, problem))
        else:
            used = self._sampler.memory(record.id)["now"]
            if used is not None:
                self._memory[decision.worker] = used
            process.outbox.send(msg.Park(self._vendor(record), back=False))

    def _vendor(self, record: ActorRecord) -> str:
        shares = record.held or self._engine.scheduler.state.actors[record.id].parked
        return self._devices[shares[0][0]].vendor

    def _restore(self, decision: ev.Restore, since: float) -> None:
        """Send the request once the device has room: the driver never restores a process again
        whose memory did not fit the first time."""
        process = self._engine.pool.process(decision.worker)
        record = self._engine.actors.on(decision.worker)
        if process is None or record is None or process.gone:
            return
        need, record.lacks = self._memory.get(decision.worker), ""
        keys = [key for key, _ in decision.allocation.shares]
        if need and (free := self._sampler.free(keys, since)) is not None and free < need:
            devices = [self._devices[key] for key in keys]
            names = " and ".join(f"{each.resource} {each.id}" for each in devices)
            if free >= 0:
                record.lacks = (
                    f"{size_text(need)} of its memory come back to {names}, where "
                    f"{size_text(free)} are free: programs outside gpunb, or jobs beyond their "
                    "shares, have the rest"
                )
            self._engine.loop.after(_LOOK, lambda: self._restore(decision, since))
            return
        self._restores[decision.worker] = decision
        process.outbox.send(msg.Park(self._vendor(record), back=True))

    def replied(self, process: WorkerProcess, reply: msg.ParkReply) -> None:
        """Handle the reply of a worker."""
        worker = process.worker or 0
        record = self._engine.actors.on(worker)
        if reply.back:
            decision = self._restores.pop(worker, None)
            if reply.problem:
                why = f"its device memory could not be restored: {reply.problem}"
                self._engine.pool.banish(process, why)
            elif decision is not None and record is not None:
                shares = decision.allocation.shares
                record.held = shares
                record.gpus = tuple(self._devices[key].id for key, _ in shares)
                self._sampler.holds(worker, shares)
                done = ev.Finished(decision.task, decision.attempt, worker, Succeeded())
                self._engine.feed(done)
            return
        if not reply.problem and record is not None:
            record.held, record.gpus = (), ()
            self._sampler.holds(worker, ())
            self._leases.gone(worker)
        self._engine.feed(ev.Parked(worker, reply.problem))
        self._call_back(worker, reply.problem)

    def _call_back(self, worker: WorkerId, problem: str) -> None:
        callback = self._callbacks.pop(worker, None)
        if callback is not None:
            callback(problem)

    def gone(self, worker: WorkerId) -> None:
        """Note that the process of a worker is gone."""
        self._call_back(worker, "its process has ended")
        self._memory.pop(worker, None)
        self._restores.pop(worker, None)
