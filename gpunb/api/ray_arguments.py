"""The arguments and the results of `init` that are there for programs written for Ray."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunb.protocol import backend
from gpunb.scheduler.option_values import check_namespace, environment_of

WITHOUT_MEANING = frozenset(
    """cgroup_path configure_logging dashboard_host dashboard_port enable_resource_isolation
    include_dashboard labels log_to_driver logging_config logging_format logging_level
    proxy_server_url system_reserved_cpu system_reserved_memory""".split()
)
"""Arguments of Ray's `init` that have no effect; neither have those that begin with "_"."""

_WITH_MEANING = ("job_config", "local_mode", "namespace", "object_store_memory", "runtime_env")


@dataclass(frozen=True, slots=True)
class RayArguments:
    """The effect of the arguments of `init` that only Ray has.

    Attributes:
        variables: environment variables for the session's workers.
        object_memory: the argument ``object_memory`` of `init`, in bytes or as a text.
        notes: notes for the user about arguments without effect.
    """

    variables: Mapping[str, str]
    object_memory: float | str | None
    notes: tuple[str, ...] = ()


def translated(given: Mapping[str, Any], object_memory: float | str | None) -> RayArguments:
    """Translate the arguments of `init` that only Ray has.

    Raises:
        TypeError: an argument that Ray does not have either, or a value of a wrong type.
        ValueError: an argument that would change what the program does, and is not supported.
    """
    ignored = [name for name in given if name in WITHOUT_MEANING or name.startswith("_")]
    for name in given:
        if name not in _WITH_MEANING and name not in ignored:
            near = difflib.get_close_matches(name, [*WITHOUT_MEANING, *_WITH_MEANING], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"init() got an unexpected keyword argument {name!r}{hint}")
    if given.get("local_mode"):
        raise ValueError(
            "local_mode=True would run tasks in this process, which gpunb never does. Leave it "
            "out; to debug a function f here, call f.__wrapped__(...)"
        )
    if given.get("job_config") is not None:
        raise ValueError(
            "job_config cannot be followed: say namespace= and runtime_env={'env_vars': ...} "
            "to gpunb.init instead"
        )
    store = given.get("object_store_memory")
    if store is not None and object_memory is not None:
        raise ValueError(
            f"object_store_memory={store!r} and object_memory={object_memory!r} mean the same: "
            "say one of them"
        )
    variables = dict(_variables(given.get("runtime_env")))
    if (namespace := given.get("namespace")) is not None:
        check_namespace(namespace)
        variables[backend.NAMESPACE] = namespace
    note = f"{', '.join(ignored)}: taken as programs for Ray say so, and without a meaning here"
    return RayArguments(
        variables, object_memory if store is None else store, (note,) if ignored else ()
    )


def _variables(runtime_env: object) -> Sequence[tuple[str, str]]:
    """The environment variables in the session's ``runtime_env``."""
    if isinstance(runtime_env, Mapping):
        folder = runtime_env.get("working_dir")
        same = isinstance(folder, str) and os.path.realpath(folder) == os.path.realpath(".")
        plain = ("config", "excludes", "working_dir") if same else ("config",)
        runtime_env = {name: each for name, each in runtime_env.items() if name not in plain}
    return environment_of(runtime_env)


def context(name: str) -> str:
    """The item `name` of the session, for programs that ask Ray's context for it.

    Raises:
        KeyError: an item that only Ray has.
    """
    from tempfile import gettempdir  # its import is slower than that of this module

    known = {
        "address": os.environ.get("GPUNB_ADDRESS") or "local",
        "node_id": backend.node_id(),
        "node_ip_address": "127.0.0.1",
        "session_dir": gettempdir(),
    }
    if name not in known:
        raise KeyError(f"{name!r} is not known here, only {', '.join(known)}")
    return known[name]
