"""The names of actors on Ray: what gpunb keeps about each in the cluster's key-value store."""

from __future__ import annotations

import pickle
import re
import time
from typing import Any, NamedTuple

import ray
from ray.experimental import internal_kv
from ray.util import list_named_actors

from gpunb.protocol.backend import NewActor
from gpunb.scheduler.tasks import ActorId

_FOR_US = "gpunb"

_UNNAMED = re.compile(r"#\d+")
"""The name of a detached actor to which the user gave none."""


class NamedActor(NamedTuple):
    """An actor with a name, as any process of the cluster finds it."""

    handle: Any
    id: ActorId
    new: NewActor
    class_name: str


def space(namespace: str) -> str:
    """Ray's namespace for the actors in a namespace of gpunb."""
    return f"{_FOR_US}:{namespace}"


def publish(actor: NamedActor) -> None:
    """Let other processes find the actor by its name."""
    entry = actor.id, actor.new, actor.class_name, actor.handle._actor_id.hex()
    key = _key(actor.new.name or "", actor.new.namespace)
    internal_kv._internal_kv_put(key, pickle.dumps(entry))


def find(name: str, namespace: str) -> NamedActor:
    """Return the actor with this name; wait a moment if it is being made.

    Raises:
        ValueError: there is none, or gpunb did not make it.
    """
    try:
        handle = ray.get_actor(name, space(namespace))
    except ValueError:
        raise ValueError(f"no actor has the name {name!r}") from None
    until = time.monotonic() + 2
    while True:
        data = internal_kv._internal_kv_get(_key(name, namespace))
        entry: tuple[Any, ...] = pickle.loads(data) if data else (0, None, "", "")
        actor, new, class_name, ident = entry
        if ident == handle._actor_id.hex():
            return NamedActor(handle, actor, new, class_name)
        if time.monotonic() > until:
            raise ValueError(f"the actor {name!r} was not made by gpunb")
        time.sleep(0.01)  # it is being made just now


def listed() -> list[tuple[str, str]]:
    """The names of gpunb's actors as (namespace, name), without those that only Ray needs."""
    own, found = space(""), [each.values() for each in list_named_actors(True)]
    return sorted(
        (where.removeprefix(own), name)
        for name, where in found
        if where.startswith(own) and not _UNNAMED.fullmatch(name)
    )


def _key(name: str, namespace: str) -> bytes:
    return f"{_FOR_US}:actor:{namespace}:{name}".encode()
