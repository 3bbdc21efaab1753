"""Starts and ends the session of this process."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpunb.api import init_options, ray_arguments
from gpunb.exceptions import GpunbError
from gpunb.protocol import backend
from gpunb.scheduler.explain import cpus_text, describe
from gpunb.scheduler.markup import LAYOUT, Bar, as_html, as_text, escaped
from gpunb.scheduler.resources import UNIT, Device, Machine, size_text
from gpunb.system.signals import UNDIVIDED, watch_destructors


class Session:
    """The devices and CPUs of the session. As a ``with`` block it ends with `shutdown()`.

    Attributes:
        notes: texts for the user, such as why there are no devices.
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
        """All resources of the session by name, as `cluster_resources()` returns them."""
        return self._machine.totals()

    def park(self, what: Any = None) -> list[int]:
        """Let idle actors and sessions of cells give their devices back until their next call.

        Their processes and states stay; their device memory moves to the memory of the machine.
        Experimental: so far this has run on two cards.

        Args:
            what: the handle or the name of an actor, or the name of a session of cells. By default
                all that are idle and can be parked.

        Returns the numbers of those that it has parked.

        Raises:
            GpunbError: this one cannot be parked now, or not in such a session; the text has the
                reason.
            ValueError: there is none of that name.
        """
        current = backend.current()
        if not isinstance(current, backend.ParkingBackend):
            raise GpunbError(
                "only the process that has the scheduler can park actors: not a task, and not a "
                "kernel that is attached to a head process or on Ray"
            )
        if what is not None:
            ident, label = _actor(current, what)
            if problem := current.park(ident):
                raise GpunbError(f"{label} cannot be parked: {problem}")
            return [ident]
        found = [each["id"] for each in current.ask("status")["actors"] if each["devices"]]
        return [ident for ident in found if not current.park(ident)]

    def __getitem__(self, name: str) -> str:
        """An item that programs ask Ray's context for: ``"address"``, ``"node_id"``,
        ``"node_ip_address"`` or ``"session_dir"``.

        Raises:
            KeyError: any other name.
        """
        return ray_arguments.context(name)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        shutdown()

    def __repr__(self) -> str:
        cpus = cpus_text(self._machine.cpus)
        notes = "".join(f"\n  {escaped(note, LAYOUT)}" for note in self.notes)
        return f"<gpunb session: {as_text(describe(self.devices))}; {cpus}>{notes}"

    def _repr_html_(self) -> str:
        bars = self._bars()
        rows = "".join(
            f"<tr><td>{as_html(f'{each.resource} {each.id}')}</td>"
            f"<td>{as_html(_name(each))}</td>"
            f"<td>{size_text(each.memory) if each.memory else ''}</td>"
            f"{bars.get((each.resource, each.id), '')}</tr>"
            for each in self.devices
        )
        notes = "".join(f"<div><small>{as_html(note)}</small></div>" for note in self.notes)
        head = f"<b>gpunb</b> {as_html(describe(self.devices))}; {cpus_text(self._machine.cpus)}"
        return f"<div>{head}<table>{rows}</table>{notes}</div>"

    def _bars(self) -> dict[tuple[str, int | str], str]:
        """Return the bars of the devices of which parts are in use now, also by other sessions, as
        HTML; none after the session's end."""
        try:
            devices = backend.current().ask("status")["devices"] if is_initialized() else ()
        except GpunbError:
            return {}
        used = (each for each in devices if each["free"] < 1)
        bar = {(each["resource"], each["id"]): as_html(Bar.of(each)) for each in used}
        return {device: f"<td>{html}</td>" for device, html in bar.items()}


def _name(device: Device) -> str:
    """The name of a device, with its type unless the name has it."""
    if device.type is None or device.type in device.name:
        return device.name
    return f"{device.name} ({device.type})"


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
    warm: bool | int = False,
    park_after: float | str | None = None,
    **ray: Any,
) -> Session:
    """Start a session: find the devices, start the scheduler and the first workers.

    The first `.remote()`, `put` or `%%gpu` calls it with its defaults, if there is no session.

    Args:
        address: None or ``"local"``: the scheduler runs in this process. ``"auto"`` or a name:
            attach to a head process of this machine, started with ``gpunb start --head``; its
            devices and options hold for all attached kernels. ``"ray"``: join the Ray cluster
            that runs here, or start one with `num_cpus`, `num_gpus` and `resources`. Default:
            the environment variable GPUNB_ADDRESS, or ``"local"``.
        num_cpus: number of CPUs, a whole number. Default: GPUNB_NUM_CPUS, or the CPUs of this
            machine or its cgroup.
        num_gpus: number of devices to use, from the first one on. Beyond the existing devices,
            logical ones without hardware are added. Default: GPUNB_NUM_GPUS, or all that exist.
        max_gpus: limit of the devices that this session has at once, a number such as 1.5; the
            rest stays free for other notebooks. Default: GPUNB_MAX_GPUS, or no limit.
        resources: amounts of custom resources by name.
        simulate: simulated devices in place of real ones, such as ``"2xA100:40GiB,1xV100:16GiB"``.
            Default: GPUNB_SIMULATE.
        preload: names of modules that are imported once, before workers are forked. With
            ``["torch"]`` fresh workers that use torch start as fast as others, from the first one
            on. A module that computes or touches a GPU at its import is refused. Default: numpy
            and IPython, where installed, and then the packages that tasks of this notebook have
            imported; ``["numpy", "IPython"]`` preloads only these two.
        ignore_reinit_error: True returns the running session instead of raising.
        start_method: ``"fork"`` (from a clean process, not from this one) or ``"spawn"``.
            Default: GPUNB_START_METHOD, or ``"fork"``.
        object_memory: limit of the memory of all results and `put` values, in bytes or as a text
            such as ``"10GiB"``. Default: half of the memory of the machine or its cgroup.
        spill: a folder on a disk, or True for a temporary one. Objects beyond `object_memory`,
            the least recently used first, are moved there instead of being refused.
        share: what happens to a task that takes more of a device's memory than its share:
            ``"warn"`` adds a warning, ``"kill"`` ends the task with an `OutOfMemoryError`,
            ``"off"`` does nothing.
        caps: whether PyTorch, JAX, TensorFlow, CuPy and RMM are told to keep to a task's share.
        mps: True shares devices through NVIDIA's Multi-Process Service, which limits each task to
            its share of memory and lets all tasks compute at the same time.
        warm: True, or a number of GPUs: on each of these a standby process makes a CUDA context
            before there is a task, so that the first kernel of a fresh task comes sooner.
            Experimental: so far it has run on two cards.
        park_after: actors and sessions of cells that were idle for so long give their devices
            back, and have them again for their next call or cell; seconds, or a text such as
            ``"10 min"``. Experimental: so far it has run on two cards. Default: never.
        ray: further arguments of `ray.init`. ``namespace`` is the namespace of actors' names in
            this session (default: GPUNB_NAMESPACE); ``runtime_env={"env_vars": ...}`` holds
            environment variables for its workers; ``object_store_memory`` is `object_memory`.
            Arguments for logs, the dashboard and Ray's internals have no effect but a note.
            ``local_mode=True`` and other keys of ``runtime_env`` are refused.

    Raises:
        RuntimeError: there is a session already.
        GpunbError: `mps` cannot work here; there is no head process to attach to; the folder in
            which sessions tell each other their devices cannot be used. The text has the reason.
        TypeError: an argument that neither gpunb nor Ray has.
        ValueError: a bad value; an argument of Ray that is not supported; `num_gpus` above what
            CUDA_VISIBLE_DEVICES names.
    """
    watch_destructors()
    for_ray = ray_arguments.translated(ray, object_memory)
    options = init_options.InitOptions(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_gpus=max_gpus,
        resources=resources,
        simulate=simulate,
        preload=preload,
        start_method=start_method,
        object_memory=for_ray.object_memory,
        spill=spill,
        share=share,
        caps=caps,
        mps=mps,
        warm=warm,
        park_after=park_after,
    )
    with backend.lock():
        current = backend.existing()
        if current is not None:
            if ignore_reinit_error:
                return _session or _session_of_task(current)
            if current.context().task is not None:
                raise RuntimeError("gpunb.init() was called in a task, which uses the kernel's")
            raise RuntimeError(
                "gpunb is initialised already: call gpunb.shutdown() first, "
                "or pass ignore_reinit_error=True"
            )
        address = init_options.address_of(address)
        backend.VARIABLES.clear()
        backend.VARIABLES.update(for_ray.variables)
        if address == "local":
            return _start(options, for_ray.notes)
        options.check_attaching(address)
        session = _join(options) if address == "ray" else _attach(address)
        session.notes += for_ray.notes
        return session


def _actor(current: backend.Backend, what: Any) -> tuple[int, str]:
    """The number of an actor or a session of cells, and a text that names it."""
    holder = backend.HOLDERS.get(type(what))
    if holder is not None:
        ident = holder(what)[0]
        return ident, f"the actor #{ident}"
    actors = current.ask("status")["actors"]
    names = [each["name"] for each in actors if each["name"] is not None]
    for each in actors:
        if what is not None and each["name"] == what:
            kind = "session" if each["kind"] == "session" else "actor"
            return each["id"], f"the {kind} {what!r}"
    known = ", ".join(map(repr, names)) or "none has a name"
    raise ValueError(f"no actor and no session of cells has the name {what!r}: {known}")


_session: Session | None = None


def start_with_defaults() -> backend.Backend:
    """The backend of a new session with default options; its notes go to stderr."""
    session = init()
    for note in (*backend.NOTICES, *session.notes):
        sys.stderr.write(f"gpunb: {escaped(note, LAYOUT)}\n")
    backend.NOTICES.clear()
    current = backend.existing()
    assert current is not None
    return current


def _session_of_task(current: backend.Backend) -> Session:
    """The kernel's session for a task. It lists no devices: a task may use only its own."""
    cpus = current.ask("total").get("CPU", 0)
    return Session(Machine((), int(cpus * UNIT)), ["this is a task: the session is the kernel's"])


def _start(options: init_options.InitOptions, notes: Sequence[str]) -> Session:
    """Start a session with its scheduler in this process."""
    from gpunb.engine import bootstrap

    init_options.check_may_start()
    settings = options.checked(notes)
    machine = settings.machine
    with UNDIVIDED:
        mps = importlib.import_module("gpunb.accelerators.mps") if options.mps else None
        server = mps.start(machine.devices) if mps is not None else None
        try:
            current = bootstrap.start(settings, server)
        except BaseException:
            if server is not None:
                server.stop()
            raise
        return _install(current, Session(machine, settings.notes))


def _attach(address: str) -> Session:
    from gpunb.head.backend import attach

    with UNDIVIDED:
        current = attach(address)
        notes = [f"attached to the head process {current.name!r} (pid {current.pid})"]
        return _install(current, Session(current.machine, notes))


def _join(options: init_options.InitOptions) -> Session:
    from gpunb.ray import connect

    current = connect(
        "ray",
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        resources=options.resources,
    )
    with UNDIVIDED:
        return _install(current, Session(current.machine, current.ask("notes")))


def _install(current: backend.Backend, session: Session) -> Session:
    """Make this the session of the process."""
    global _session
    backend.install(current)
    _session = session
    if "IPython" in sys.modules:
        # By name, because the layer of the notebook is above this one; only a kernel needs it.
        importlib.import_module("gpunb.notebook.shell_hooks").install()
    return session


def shutdown() -> None:
    """End the session with all its tasks and workers. Does nothing without a session; `init`
    can start another one afterwards.

    Raises:
        GpunbError: the caller is a task: only the kernel can end its session.
    """
    global _session
    with backend.lock(), UNDIVIDED:
        current, refused = backend.existing(), False
        try:
            if current is not None:
                current.shutdown()
        except GpunbError:  # this is a task, and the session is the kernel's
            refused = True
            raise
        finally:  # also after an interrupt: the session has ended, though parts may still stop
            if not refused:
                backend.install(None)
                _session = None


def is_initialized() -> bool:
    """Whether there is a session in this process."""
    return backend.existing() is not None


def current() -> Session:
    """The running session. Starts one with defaults if there is none.

    Raises:
        GpunbError: the caller is a task, which has no session of its own.
    """
    backend.current()
    if _session is None:
        raise GpunbError("a task has no session of its own; the kernel has it")
    return _session
