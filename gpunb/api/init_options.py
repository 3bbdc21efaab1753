"""Checks the arguments of `init` and the variables of the environment that stand for them."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from gpunb import accelerators
from gpunb.engine import object_budget, object_memory
from gpunb.engine.settings import EngineSettings
from gpunb.exceptions import GpunbError
from gpunb.scheduler.resources import (
    UNIT,
    Device,
    Machine,
    parse_amount,
    parse_resources,
    type_resource,
)
from gpunb.system import runtime_dir

SHARES = ("warn", "kill", "off")
"""Values of ``share``: what happens to a task that takes more device memory than its share."""

METHODS = ("fork", "spawn")
"""Values of ``start_method``."""

DEFAULT_PRELOAD = ("numpy", "IPython")
"""Modules imported before workers are forked, where installed. Their import computes nothing."""

_FOLLOW = 8
"""The part of the machine's memory, an eighth, that a process with preloaded modules may have."""


def address_of(address: str | None) -> str:
    """The place of the scheduler: ``"local"``, ``"auto"``, ``"ray"`` or a head process's name.

    Raises:
        TypeError: `address` is not a text.
        ValueError: an address of another form.
        GpunbError: an address of Ray client.
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(
            f"address must be a text, such as 'auto', not {address!r}; None is a scheduler in "
            "this process"
        )
    address = address or os.environ.get("GPUNB_ADDRESS") or "local"
    _check_no_client("address", address)
    if address == "ray":
        _check_no_client("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
    if ":" in address or "/" in address:
        raise ValueError(
            f"address={address!r} is not known: 'local' is a scheduler in this process, 'auto' or "
            "a name is a head process of this machine that `gpunb start --head` has started, and "
            "'ray' is a Ray cluster of any number of machines, the one that runs here or that the "
            "environment variable RAY_ADDRESS names"
        )
    return address


def _check_no_client(name: str, address: str) -> None:
    """Refuse addresses of Ray client, before Ray asks to install the packages that they need."""
    if address.startswith("ray://"):
        raise GpunbError(
            f"{name}={address!r} is an address for Ray client, which carries no streams, "
            "callbacks and live output. Run the notebook on a node of the cluster, and use "
            "gpunb.init('ray') there; RAY_ADDRESS=host:6379 says which cluster, if several run. On "
            "a machine that is to join it: ray start --address=host:6379"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """The arguments of `init` for a session in this process, as the user gave them."""

    num_cpus: int | None = None
    num_gpus: int | None = None
    max_gpus: float | None = None
    resources: Mapping[str, float] | None = None
    simulate: str | None = None
    preload: Sequence[str] | None = None
    start_method: str | None = None
    object_memory: float | str | None = None
    spill: bool | str | os.PathLike[str] | None = None
    share: str = "warn"
    caps: bool = True
    mps: bool = False
    warm: bool | int = False
    park_after: float | str | None = None

    def check_attaching(self, address: str) -> None:
        """Refuse arguments that only a session of this process can follow.

        Raises:
            ValueError: such an argument differs from its default.
        """
        allowed = ("num_cpus", "num_gpus", "resources") if address == "ray" else ()
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        others = {
            each.name: values[each.name]
            for each in fields(self)
            if values[each.name] != each.default and each.name not in allowed
        }
        if not others:
            return
        given = ", ".join(f"{name}={value!r}" for name, value in others.items())
        if address == "ray":
            raise ValueError(
                f"{given} cannot be said with address={address!r}: Ray starts its workers "
                "and keeps its objects by itself. What ray.init takes can be said to that, before "
                "gpunb.init('ray')"
            )
        raise ValueError(
            f"{given} cannot be said with address={address!r}: what a head process has "
            "is settled when it starts, as in `gpunb start --head "
            f"{' '.join(_option(*each) for each in others.items())}`"
        )

    def checked(self, notes: Sequence[str] = ()) -> EngineSettings:
        """Check the arguments, and find the devices and CPUs of the session.

        Args:
            notes: further notes for the user.

        Raises:
            GpunbError: the folder in which sessions tell each other their devices cannot be used.
            TypeError: an argument has a wrong type.
            ValueError: an argument has a bad value.
        """
        method = self.start_method or os.environ.get("GPUNB_START_METHOD") or "fork"
        if method not in METHODS:
            raise ValueError(f"start_method={method!r} must be 'fork' or 'spawn'")
        preload, missing = _preloaded(self.preload)
        cpus = _whole_number(self.num_cpus, "num_cpus", "GPUNB_NUM_CPUS")
        gpus = _whole_number(self.num_gpus, "num_gpus", "GPUNB_NUM_GPUS")
        most = _max_units(self.max_gpus)
        extra = parse_resources(self.resources)
        limit = object_budget.parse_limit(self.object_memory)
        spill = object_memory.parse_spill(self.spill)
        _check_shares(self.share, self.caps, self.mps)
        simulate = self.simulate or os.environ.get("GPUNB_SIMULATE") or None
        devices, found, vendors = _devices(gpus, simulate, extra)
        notes = (*found, *missing, *_visibility_notes(devices), *notes)
        prepare, park_after = (), None
        if self.warm is not False:
            prepared = importlib.import_module("gpunb.engine.prepared")
            prepare = prepared.chosen(self.warm, self.mps, devices)
        if self.park_after is not None:
            parking = importlib.import_module("gpunb.engine.parking")
            park_after = parking.parse_time(self.park_after, "park_after")
        if cpus is None:
            import loky

            cpus = loky.cpu_count()
        return EngineSettings(
            machine=Machine(devices, cpus * UNIT, tuple(sorted(extra.items())), most),
            method=method,
            preload=preload,
            own_preload=(f"{__package__}.public",),  # tasks that call gpunb need not import it
            follow=object_budget.total_memory() // _FOLLOW if self.preload is None else 0,
            vendors=tuple(vendors),
            notes=notes,
            object_memory=limit,
            spill=spill,
            share=self.share,
            caps=self.caps,
            park_after=park_after,
            prepare=prepare,
        )


def _option(name: str, value: object) -> str:
    """An argument of `init` as the option of `gpunb start`."""
    if name == "caps":
        return "--no-caps"
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={each}" for key, each in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        value = ",".join(map(str, value))
    return f"{option} {shlex.quote(str(value))}"


def check_may_start() -> None:
    """Raise GpunbError in a daemonic process of multiprocessing, which may have no children."""
    import multiprocessing  # slow to import, and needed only when a session starts

    if multiprocessing.current_process().daemon:
        raise GpunbError(
            "gpunb cannot start in a worker process of multiprocessing, which may have no child "
            "processes. Submit the work from the main process with gpunb.remote or gpunb.Executor, "
            "or attach to a head process: `gpunb start --head`, and gpunb.init('auto') here"
        )


def _check_shares(share: object, caps: object, mps: object) -> None:
    if share not in SHARES:
        known = ", ".join(map(repr, SHARES))
        raise ValueError(f"share={share!r} must be one of {known}")
    for name, value in (("caps", caps), ("mps", mps)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def _preloaded(preload: Sequence[str] | None) -> tuple[tuple[str, ...], list[str]]:
    """The modules to preload, and notes about those that do not exist."""
    if preload is None:
        return tuple(each for each in DEFAULT_PRELOAD if _exists(each)), []
    if isinstance(preload, str) or not all(isinstance(each, str) for each in preload):
        raise TypeError(f"preload must be a list of module names, not {preload!r}")
    missing = [each for each in preload if not _exists(each)]
    # The same text as from the process that later fails to import it.
    note = "preload: {0} could not be imported: ModuleNotFoundError: No module named {1!r}"
    return tuple(preload), [note.format(each, each.partition(".")[0]) for each in missing]


def _exists(module: str) -> bool:
    """Whether the top-level package of a module can be found."""
    name = module.partition(".")[0]
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _whole_number(value: object, name: str, variable: str) -> int | None:
    """A whole number from the argument `name`, or from the environment variable.

    Raises:
        TypeError, ValueError: not a whole number, or a negative one.
    """
    given = value
    if value is None:
        text = os.environ.get(variable)
        if not text:
            return None
        name, given = variable, text
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{variable}={text!r} must be a whole number >= 0") from None
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise ValueError(f"{name}={given!r} must be a whole number >= 0")
    return int(number)


def _max_units(value: float | None) -> int | None:
    """The limit of the session's devices in units, from ``max_gpus`` or from GPUNB_MAX_GPUS."""
    if value is not None:
        return parse_amount(value, "max_gpus")
    text = os.environ.get("GPUNB_MAX_GPUS")
    if not text:
        return None
    try:
        return parse_amount(float(text), "GPUNB_MAX_GPUS")
    except ValueError:
        raise ValueError(f"GPUNB_MAX_GPUS={text!r} must be a number of devices >= 0") from None


def _visibility_notes(devices: Sequence[Device]) -> list[str]:
    """A note if other processes cannot look at this session.

    Raises:
        GpunbError: the folder in which sessions tell each other their devices cannot be used.
    """
    if devices and (
        os.environ.get("GPUNB_LEDGER_DIR") or not all(each.logical for each in devices)
    ):
        importlib.import_module("gpunb.leases.ledger_file").check()
    try:
        runtime_dir.runtime_folder()
    except GpunbError as error:
        return [f"other processes cannot look at this session: {error}"]
    return []


def _devices(
    gpus: int | None, simulate: str | None, resources: dict[str, int]
) -> tuple[tuple[Device, ...], Sequence[str], Sequence[str]]:
    """The devices to use, notes for the user, and the vendors with hardware on this machine.

    Takes the entries that declare devices and accelerator types out of `resources`.
    """
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
    """The devices; logical ones get the accelerator type that `resources` declares."""
    declared = [kind for name in list(resources) if (kind := type_resource(name))]
    for kind in declared:
        del resources[f"accelerator_type:{kind}"]
    if not declared:
        return devices
    return tuple(replace(each, type=declared[0]) if each.logical else each for each in devices)
