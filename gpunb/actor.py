"""Actors: the module `ray.actor` under gpunb's name."""

from gpunb.api.actor_class import RemoteClass
from gpunb.api.actor_handle import (
    ActorHandle,
    ActorMethod,
    current_actor,
    exit_actor,
    get_actor,
    kill,
)
from gpunb.api.actor_type import method

__all__ = [
    "ActorHandle",
    "ActorMethod",
    "RemoteClass",
    "current_actor",
    "exit_actor",
    "get_actor",
    "kill",
    "method",
]
