"""What `init` is told, by its arguments or by the environment, checked."""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from gpunb.core.resources import parse_amount
from gpunb.exceptions import GpunbError

SHARES = ("warn", "kill", "off")
"""What may happen to a task that takes more than its share."""

METHODS = ("fork", "spawn")
"""How workers may be started."""

DEFAULT_PRELOAD = ("numpy", "IPython")
"""Imported before workers are forked, where installed. They only import, and never compute."""


def address_of(address: str | None) -> str:
    """Where the scheduler is: ``"local"``, ``"auto"`` or a name."""
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
    """Before Ray asks for more of its packages to be installed."""
    if address.startswith("ray://"):
        raise GpunbError(
            f"{name}={address!r} is an address for Ray client, which carries no streams, "
            "callbacks and live output. Run the notebook on a node of the cluster, and use "
            "gpunb.init('ray') there; RAY_ADDRESS=host:6379 says which cluster, if several run. On "
            "a machine that is to join it: ray start --address=host:6379"
        )


def check_attaching(address: str, *given: object) -> None:
    """What `init` takes beside the address is for a session of its own."""
    names = "num_cpus num_gpus max_gpus resources simulate preload start_method object_memory spill"
    plain = (*[None] * 9, "warn", True, False)
    known = zip((*names.split(), "share", "caps", "mps"), given, plain, strict=True)
    others = {name: value for name, value, default in known if value != default}
    said = [f"{name}={value!r}" for name, value in others.items()]
    if said and address == "ray":
        raise ValueError(
            f"{', '.join(said)} cannot be said with address={address!r}: Ray starts its workers "
            "and keeps its objects by itself. What ray.init takes can be said to that, before "
            "gpunb.init('ray')"
        )
    if said:
        raise ValueError(
            f"{', '.join(said)} cannot be said with address={address!r}: what a head process has "
            "is settled when it starts, as in `gpunb start --head "
            f"{' '.join(_option(*each) for each in others.items())}`"
        )


def _option(name: str, value: object) -> str:
    """An argument of `init` as `gpunb start` takes it."""
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


def check_shares(share: object, caps: object, mps: object) -> None:
    if share not in SHARES:
        known = ", ".join(map(repr, SHARES))
        raise ValueError(f"share={share!r} must be one of {known}")
    for name, value in (("caps", caps), ("mps", mps)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def preloaded(preload: Sequence[str] | None) -> tuple[tuple[str, ...], list[str]]:
    """The modules to preload, and what there is to say of those that do not exist."""
    if preload is None:
        return tuple(each for each in DEFAULT_PRELOAD if _exists(each)), []
    if isinstance(preload, str) or not all(isinstance(each, str) for each in preload):
        raise TypeError(f"preload must be a list of module names, not {preload!r}")
    missing = [each for each in preload if not _exists(each)]
    # In the words of the process that fails to import it, which says so later.
    says = "preload: {0} could not be imported: ModuleNotFoundError: No module named {1!r}"
    return tuple(preload), [says.format(each, each.partition(".")[0]) for each in missing]


def _exists(module: str) -> bool:
    """Whether a module can be found, or the package that it is said to be in."""
    name = module.partition(".")[0]
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def whole_number(value: object, name: str, variable: str) -> int | None:
    """A whole number from the argument, or else from the environment."""
    said = value
    if value is None:
        text = os.environ.get(variable)
        if not text:
            return None
        name, said = variable, text
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{variable}={text!r} must be a whole number >= 0") from None
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    number = float(value)
    if not math.isfinite(number) or number < 0 or number != int(number):
        raise ValueError(f"{name}={said!r} must be a whole number >= 0")
    return int(number)


def most_units(value: float | None) -> int | None:
    """The units of devices that the session may have at once, from the argument, or else from
    the environment."""
    if value is not None:
        return parse_amount(value, "max_gpus")
    text = os.environ.get("GPUNB_MAX_GPUS")
    if not text:
        return None
    try:
        return parse_amount(float(text), "GPUNB_MAX_GPUS")
    except ValueError:
        raise ValueError(f"GPUNB_MAX_GPUS={text!r} must be a number of devices >= 0") from None
