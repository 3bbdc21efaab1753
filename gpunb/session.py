"""The session of this process: what it has, how it begins and how it ends."""

from __future__ import annotations

import html
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from gpunb import accelerators, backend, settings
from gpunb.core.reasons import cpus_text, describe
from gpunb.core.resources import UNIT, Device, Machine, parse_resources, type_resource
from gpunb.exceptions import GpunbError
from gpunb.runtime import folder, memory


class Session:
    """What `init` returns: the devices and CPUs in use. Ends with `shutdown()` as a ``with``.

    Attributes:
        notes: what there is to say, such as why there are no devices.
    """

    def __init__(self, machine: Machine, notes: Sequence[str]) -> None:
        self._machine = machine
        self.notes = tuple(notes)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, physical ones first."""
        return self._machine.devices

    @property
    def resources(self) -> dict[str, float]:
        """As `cluster_resources()`."""
        return self._machine.totals()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutdown()

    def __repr__(self) -> str:
        cpus = cpus_text(self._machine.cpus)
        notes = "".join(f"\n  {note}" for note in self.notes)
        return f"<gpunb session: {describe(self.devices)}; {cpus}>{notes}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{each.resource} {html.escape(str(each.id))}</td>"
            f"<td>{html.escape(each.name)}</td><td>{html.escape(each.type or '')}</td></tr>"
            for each in self.devices
        )
        notes = "".join(f"<div><small>{html.escape(note)}</small></div>" for note in self.notes)
        head = (
            f"<b>gpunb</b> {html.escape(describe(self.devices))}; {cpus_text(self._machine.cpus)}"
        )
        return f"<div>{head}<table>{rows}</table>{notes}</div>"


def init(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    max_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    simulate: str | None = None,
    preload: Sequence[str] | None = None,
    ignore_reinit_error: bool = False,
    start_method: str | None = None,
    object_memory: float | str | None = None,
    spill: bool | str | os.PathLike[str] | None = None,
    share: str = "warn",
    caps: bool = True,
    mps: bool = False,
) -> Session:
    """Start a session: find the devices, start the scheduler and the first workers.

    It is called with its defaults by the first `.remote()`, `put` or `%%gpu`.

    Args:
        address: None, or ``"local"``: the scheduler is in this process. ``"auto"`` or a name:
            attach to a head process of this machine, which ``gpunb start --head`` has started;
            the devices are then that one's, and what it was started with holds for all its
            kernels. ``"ray"``: join the Ray cluster that runs here, or start one with `num_cpus`,
            `num_gpus` and `resources`. Default from the environment variable GPUNB_ADDRESS.
        num_cpus: whole number; what this machine, or the cgroup, has by default. GPUNB_NUM_CPUS.
        num_gpus: use the first so many devices; those beyond what exists are logical, in the
            books only. All that exist by default. GPUNB_NUM_GPUS.
        max_gpus: how much of the devices this session may have at once, so that other notebooks
            find some free: a number of devices, such as 1.5. All by default. GPUNB_MAX_GPUS.
        resources: custom resources by name.
        simulate: simulated devices instead, such as ``"2xA100:40GiB,1xV100:16GiB"``.
            GPUNB_SIMULATE.
        preload: names of modules that are imported once, before workers are forked: ``["torch"]``
            makes fresh workers that use torch start as fast as others. They must only import:
            a module that computes or touches a GPU when it is imported is refused. Default:
            numpy and IPython, where installed.
        ignore_reinit_error: return the running session instead of raising.
        start_method: ``"fork"`` (from a clean process, not from this one) or ``"spawn"``.
            GPUNB_START_METHOD.
        object_memory: what results and `put` values may take together, in bytes or as a text
            such as ``"10GiB"``. Default: half of the machine's memory, or of the cgroup's.
        spill: a folder on a disk, or True for a temporary one: objects beyond `object_memory` are
            moved there, those that were not used for longest, instead of being refused.
        share: what happens to a task that takes more of a device's memory than its share:
            ``"warn"`` says so, ``"kill"`` ends it with an `OutOfMemoryError`, ``"off"`` does
            nothing.
        caps: whether PyTorch, JAX, TensorFlow, CuPy and RMM are told to keep to a task's share.
        mps: share devices through NVIDIA's Multi-Process Service, which keeps each task to its
            share of memory and computes at the same time for all.

    Raises:
        RuntimeError: there is a session already.
        GpunbError: `mps` cannot work here; no head process can be attached to. It says why.
        ValueError: a bad value; `num_gpus` above what CUDA_VISIBLE_DEVICES names.
    """
    global _session
    with backend.lock():
        current = backend.existing()
        if current is not None:
            if ignore_reinit_error:
                return _session or _of_kernel(current)
            if current.context().task is not None:
                raise RuntimeError("gpunb.init() was called in a task, which uses the kernel's")
            raise RuntimeError(
                "gpunb is initialised already: call gpunb.shutdown() first, "
                "or pass ignore_reinit_error=True"
            )
        address = settings.address_of(address)
        if address == "ray":
            settings.check_attaching(
                address,
                None,
                None,
                max_gpus,
                None,
                simulate,
                preload,
                start_method,
                object_memory,
                spill,
                share,
                caps,
                mps,
            )
            return _join(address, num_cpus=num_cpus, num_gpus=num_gpus, resources=resources)
        if address != "local":
            given = (num_cpus, num_gpus, max_gpus, resources, simulate, preload, start_method)
            settings.check_attaching(address, *given, object_memory, spill, share, caps, mps)
            return _attach(address)
        method = start_method or os.environ.get("GPUNB_START_METHOD") or "fork"
        if method not in settings.METHODS:
            raise ValueError(f"start_method={method!r} must be 'fork' or 'spawn'")
        modules, missing = settings.preloaded(preload)
        cpus = settings.whole_number(num_cpus, "num_cpus", "GPUNB_NUM_CPUS")
        gpus = settings.whole_number(num_gpus, "num_gpus", "GPUNB_NUM_GPUS")
        most = settings.most_units(max_gpus)
        extra = parse_resources(resources)
        limit, folder = memory.parse_limit(object_memory), memory.parse_spill(spill)
        settings.check_shares(share, caps, mps)
        devices, notes, vendors = _devices(
            gpus, simulate or os.environ.get("GPUNB_SIMULATE"), extra
        )
        notes = (*notes, *missing, *_alone(devices))
        if cpus is None:
            import loky

            cpus = loky.cpu_count()
        machine = Machine(devices, cpus * UNIT, tuple(sorted(extra.items())), most)
        server = importlib.import_module("gpunb.accelerators.mps").start(devices) if mps else None
        try:
            backend.install(
                backend.load(
                    "local",
                    machine=machine,
                    preload=modules,
                    method=method,
                    vendors=vendors,
                    notes=notes,
                    object_memory=limit,
                    spill=folder,
                    share=share,
                    caps=caps,
                    mps=server,
                )
            )
        except BaseException:
            if server is not None:
                server.stop()
            raise
        if "IPython" in sys.modules:
            importlib.import_module("gpunb.notebook").attach()
        _session = Session(machine, notes)
        return _session


_session: Session | None = None


def _implicit() -> backend.Backend:
    session = init()
    for note in (*backend.WORD, *session.notes):
        sys.stderr.write(f"gpunb: {note}\n")
    backend.WORD.clear()
    current = backend.existing()
    assert current is not None
    return current


backend.start_with(_implicit)


def _of_kernel(current: backend.Backend) -> Session:
    """The session as a task sees it: its devices are not the task's to use."""
    cpus = current.ask("total").get("CPU", 0)
    return Session(Machine((), int(cpus * UNIT)), ["this is a task: the session is the kernel's"])


def _attach(address: str) -> Session:
    global _session
    current = backend.load("head", address=address)
    backend.install(current)
    if "IPython" in sys.modules:
        importlib.import_module("gpunb.notebook").attach()
    machine, name, pid = (getattr(current, each) for each in ("machine", "name", "pid"))
    _session = Session(machine, [f"attached to the head process {name!r} (pid {pid})"])
    return _session


def _join(address: str, **given: object) -> Session:
    global _session
    current = backend.load("ray", address=address, **given)
    backend.install(current)
    if "IPython" in sys.modules:
        importlib.import_module("gpunb.notebook").attach()
    _session = Session(getattr(current, "machine"), current.ask("notes"))  # noqa: B009 - see Backend
    return _session


def _alone(devices: Sequence[Device]) -> list[str]:
    """Why other processes will not know of this session, or of its devices, where they will not."""
    found = []
    unknown = "which devices this one uses, and may use them too"
    named = bool(os.environ.get("GPUNB_LEDGER_DIR"))
    try:
        folder.runtime_folder()
    except GpunbError as error:
        found.append(f"other processes cannot look at this session: {error}")
        if not named and not all(each.logical for each in devices):
            found.append(f"other sessions do not know {unknown}, for the same reason")
    if named and devices:
        try:
            importlib.import_module("gpunb.runtime.ledger").ledger_folder()
        except GpunbError as error:
            found.append(f"other sessions do not know {unknown}: {error}")
    return found


def _devices(
    gpus: int | None, simulate: str | None, resources: dict[str, int]
) -> tuple[tuple[Device, ...], Sequence[str], Sequence[str]]:
    """The devices to use, notes for the user, and the vendors with hardware here."""
    if simulate is not None:
        made = accelerators.parse_simulate(simulate)
        devices, notes = accelerators.take(made, gpus, None)
        return accelerators.declared(devices, resources), notes, ()
    found = accelerators.detect()
    devices, notes = accelerators.take(found.devices, gpus, found.value, variable=found.variable)
    if all(each.logical for each in devices):
        notes = (*notes, *found.notes) if gpus is None else notes
    else:
        notes = (*found.notes, *notes)
    devices = accelerators.declared(devices, resources)
    return _declared_types(devices, resources), notes, found.vendors


def _declared_types(devices: tuple[Device, ...], resources: dict[str, int]) -> tuple[Device, ...]:
    """Logical devices have the accelerator type that the user declared as a resource."""
    declared = [kind for name in list(resources) if (kind := type_resource(name))]
    for kind in declared:
        del resources[f"accelerator_type:{kind}"]
    if not declared:
        return devices
    return tuple(replace(each, type=declared[0]) if each.logical else each for each in devices)


def shutdown() -> None:
    """End the session: all work, all workers. Idempotent; `init` works again afterwards."""
    global _session
    with backend.lock():
        current = backend.existing()
        if current is not None:
            current.shutdown()
            backend.install(None)
        _session = None


def is_initialized() -> bool:
    """Whether there is a session in this process."""
    return backend.existing() is not None


def current() -> Session:
    """The running session; started with its defaults if there is none.

    Raises:
        GpunbError: this is a worker, which has none of its own.
    """
    backend.current()
    if _session is None:
        raise GpunbError("a task has no session of its own; the kernel has it")
    return _session
