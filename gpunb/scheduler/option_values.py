"""The values of options: each is checked, and converted to the type that the scheduler uses."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping

from gpunb.scheduler.markup import control

MOST_PRIORITY = 100

PINNING = frozenset(
    {
        "ASCEND_RT_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "FURIOSA_DEVICES",
        "HABANA_VISIBLE_MODULES",
        "HIP_VISIBLE_DEVICES",
        "NEURON_RT_VISIBLE_CORES",
        "QBRUNTIME_VISIBLE_DEVICES",
        "RBLN_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "TPU_CHIPS_PER_HOST_BOUNDS",
        "TPU_HOST_BOUNDS",
        "TPU_VISIBLE_CHIPS",
        "TT_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "ZE_ENABLE_PCI_ID_DEVICE_ORDER",
        "ZE_FLAT_DEVICE_HIERARCHY",
    }
)
"""Environment variables that pin a worker to its devices."""


def check_returns(returns: object) -> None:
    """Raises ValueError or TypeError unless it is a number of results, or a word for many."""
    if isinstance(returns, str):
        if returns not in ("streaming", "dynamic"):
            raise ValueError(
                f"num_returns={returns!r} must be a whole number, 'streaming' or 'dynamic'"
            )
        return
    whole_number(returns, "num_returns", 0)


def check_retry(retry: object) -> None:
    """Raises TypeError unless it is a value of `retry_exceptions`."""
    if retry is None or isinstance(retry, bool):
        return
    if not isinstance(retry, (list, tuple)) or not all(
        isinstance(each, type) and issubclass(each, BaseException) for each in retry
    ):
        raise TypeError(
            f"retry_exceptions must be True, False or a list of exception types, not {retry!r}"
        )


def check_switches(**switches: object) -> None:
    """Raises TypeError unless each is True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def check_name(value: object, option: str) -> None:
    """Raises TypeError or ValueError unless it is None, or a text that can be shown anywhere."""
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{option} must be a text, not {value!r}")
    if (found := control(value)) is not None:
        raise ValueError(
            f"{option}={value!r} has the control character {found!r}, which would change what "
            "terminals and pages show around it: leave it out"
        )


def check_namespace(value: object) -> None:
    """Raises TypeError or ValueError unless it is None, or a name."""
    check_name(value, "namespace")
    if value == "":
        raise ValueError("namespace='' is no name: leave it out for the usual one")


def or_default(value: int | None, default: int) -> int:
    """Return the value, or the default for None."""
    return default if value is None else value


def whole_number(value: object, name: str, least: float) -> int | None:
    """Return a whole number that is at least `least`; None stays None.

    Raises:
        TypeError: another type.
        ValueError: a smaller number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        allowed = "-1 (without limit), 0 or more" if least < 0 else f"{least} or more"
        raise ValueError(f"{name}={value!r} must be {allowed}")
    return int(value)


def priority_of(value: object) -> int:
    """Return a priority; 0 for None.

    Raises:
        TypeError: another type.
        ValueError: a number that is too far from 0.
    """
    priority = whole_number(value, "priority", -math.inf) or 0
    if abs(priority) > MOST_PRIORITY:
        raise ValueError(
            f"priority={value!r} must be between -{MOST_PRIORITY} and {MOST_PRIORITY}: one step "
            "counts as ten minutes of waiting"
        )
    return priority


def seconds_of(value: object) -> float | None:
    """Return a time limit in seconds; None stays None.

    Raises:
        TypeError: no number.
        ValueError: not a finite number above 0.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"timeout must be a number of seconds, not {value!r}")
    seconds = float(value)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"timeout={value!r} must be a number of seconds above 0")
    return seconds


def groups_of(value: object) -> tuple[tuple[str, int], ...]:
    """The option `concurrency_groups` as pairs of a name and a number of calls.

    Raises:
        ValueError, TypeError: a bad name or number.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise TypeError(
            f"concurrency_groups must be a dict of names and numbers of calls, not {value!r}"
        )
    for name in value:
        check_name(name, "the name of a concurrency group")
        if not name:
            raise ValueError(
                f"concurrency_groups has the name {name!r}: each group needs a name of its own; "
                "max_concurrency= is for the methods in no group"
            )
    numbers_of_calls = {
        name: whole_number(calls, f"concurrency_groups[{name!r}]", 1)
        for name, calls in value.items()
    }
    return tuple([(name, or_default(calls, 1)) for name, calls in numbers_of_calls.items()])


def environment_of(value: object) -> tuple[tuple[str, str], ...]:
    """Return the variables of the option `runtime_env` as sorted pairs of name and text.

    Raises:
        TypeError: no dict of texts.
        ValueError: something other than `env_vars`, or a variable that no task can choose.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise TypeError(f"runtime_env must be a dict, not {value!r}")
    unknown = sorted(set(value) - {"env_vars"})
    if unknown:
        raise ValueError(
            f"runtime_env has {', '.join(map(repr, unknown))}: only 'env_vars' is supported, "
            "because tasks run in the kernel's own environment. Install there what they need"
        )
    pairs = value.get("env_vars") or {}
    if not isinstance(pairs, Mapping):
        raise TypeError(f"runtime_env['env_vars'] must be a dict, not {pairs!r}")
    for name, text in pairs.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"runtime_env['env_vars'] must hold texts, not {name!r}: {text!r}")
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(
                f"runtime_env['env_vars'] has {name!r}: {text!r}, which no environment can hold"
            )
        if name in PINNING:
            raise ValueError(
                f"runtime_env['env_vars'] has {name!r}: {text!r}, which no task can choose: the "
                "worker sees the devices that it was given. Say which by num_gpus, gpu_memory or "
                "accelerator_type. To limit a whole session, set it before gpunb.init"
            )
    return tuple(sorted(pairs.items()))
