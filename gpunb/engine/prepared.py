"""Carries out `Prepare`: workers that make a context on their device before there is a task.

CUDA reads its environment variables when it makes a context, and PyTorch when it first uses the
device. So a task that needs others than the prepared worker had gets another process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gpunb.engine.share_checks import STANDBY
from gpunb.protocol import messages as msg
from gpunb.scheduler import events as ev
from gpunb.scheduler.resources import GPU, Device
from gpunb.scheduler.tasks import WorkerId

if TYPE_CHECKING:
    from gpunb.engine.share_checks import ShareChecks
    from gpunb.engine.state import EngineState
    from gpunb.engine.worker_setup import Setups
    from gpunb.leases.leases import Leases
    from gpunb.processes.worker_process import WorkerProcess

_VENDORS = ("nvidia", "simulated", "logical")
"""The plug-ins of devices that workers can be prepared for."""

_READ = ("CUDA_", "NVIDIA_", "PYTORCH_")
"""Beginnings of the names of variables that the driver reads, or PyTorch when it starts."""


def chosen(warm: object, mps: bool, devices: Sequence[Device]) -> tuple[str, ...]:
    """The keys of the devices on which workers are prepared, from the arguments of `init`.

    Raises:
        TypeError: `warm` is neither True, False nor a whole number.
        ValueError: there are not so many devices, or MPS is asked for too.
    """
    if not isinstance(warm, int):
        raise TypeError(f"warm must be True, False or a number of devices, not {warm!r}")
    if warm is not False and mps:
        raise ValueError(
            f"warm={warm!r} and mps=True cannot go together: under MPS a context has the limits of "
            "one share from its start. Leave one of them out"
        )
    able = [each.key for each in devices if each.resource == GPU and each.vendor in _VENDORS]
    count = len(able) if warm is True else int(warm)
    if not 0 <= count <= len(able):
        raise ValueError(
            f"warm={warm!r}: this session has {len(able)} GPUs on which a context can be made "
            "before there is a task (of NVIDIA, or simulated). Ask for at most so many, or say True"
        )
    return tuple(able[:count])


class _Record(NamedTuple):
    """The device of a prepared worker, by key, and the variables that it has set."""

    device: str
    variables: Mapping[str, str | None]


class PreparedWorkers:
    """The prepared workers of a session. On the loop's thread."""

    def __init__(
        self, engine: EngineState, setups: Setups, leases: Leases, sampler: ShareChecks
    ) -> None:
        self._engine = engine
        self._setups = setups
        self._leases = leases
        self._sampler = sampler
        self._records: dict[WorkerId, _Record] = {}
        self._devices = {each.key: each for each in engine.scheduler.machine.devices}
        self._warned: set[str] = set()

    def start(self, decision: ev.Prepare) -> None:
        """Turn a standby process into a prepared worker."""
        worker, allocation = decision.worker, decision.allocation
        if not self._leases.take(decision, STANDBY, lasting=False):
            return
        try:
            process = self._engine.pool.start(worker)
        except OSError as error:
            self._leases.gone(worker)
            self._engine.feed(ev.WorkerExited(worker, f"it could not be started: {error.strerror}"))
            return
        setup = self._setups.of(allocation, (), process.environment, self._setups.now())
        ((key, _),) = allocation.shares
        variables = _read_at_start(setup)
        self._records[worker] = _Record(key, variables)
        self._sampler.prepares(worker, process, allocation.shares)
        process.outbox.send(msg.Prepare(dict(variables), self._devices[key].vendor))

    def reported(self, process: WorkerProcess, message: msg.Prepared) -> None:
        """Handle the report of a worker. One that has a task by now goes on without a context."""
        record = self._records.get(process.worker or 0)
        if record is None or not message.problem:
            return
        assert process.worker is not None
        device = self._devices[record.device]
        text = (
            f"warm=True has no effect on {device.resource} {device.id}: no context could be made "
            f"before there was a task: {message.problem}"
        )
        if text not in self._warned:
            self._warned.add(text)
            self._sampler.warn(text)
        # Now, and not when the process is gone: a task must not get it meanwhile.
        self._engine.feed(ev.WorkerExited(process.worker, message.problem))
        self._engine.pool.kill_process(process)

    def fits(self, worker: WorkerId, process: WorkerProcess, setup: tuple[Any, ...] | None) -> bool:
        """Whether a task with this setup may have the worker. If not, the worker ends, and the task
        waits for another one."""
        record = self._records.pop(worker, None)
        if record is not None and setup is not None and record.variables == _read_at_start(setup):
            return True
        self._engine.pool.kill_process(process)
        self._engine.feed(ev.LeaseRefused(worker))
        return False

    def gone(self, worker: WorkerId) -> None:
        """Note that the process of a worker is gone."""
        self._records.pop(worker, None)

    def facts(self, key: str) -> list[dict[str, Any]]:
        """The prepared worker of a device for a snapshot, as one of those who use the device."""
        found = []
        for worker, record in self._records.items():
            process = self._engine.pool.process(worker)
            if record.device == key and process is not None:
                memory = self._sampler.memory(-worker)["now"]
                facts = dict.fromkeys(("user", "job", "share", "since"))
                found.append(
                    {
                        **facts,
                        "pid": process.pid,
                        "notebook": STANDBY,
                        "memory": memory,
                        "kind": "standby",
                    }
                )
        return found


def _read_at_start(setup: tuple[Any, ...]) -> dict[str, str | None]:
    """The variables of a `Setup` that the driver reads."""
    environment = msg.Setup(*setup).environment
    return {name: each for name, each in environment.items() if name.startswith(_READ)}
