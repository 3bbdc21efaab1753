"""The description of an actor's class that travels with each handle, without the class."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import cloudpickle

from gpunb.api.calls import Signature, encoded_returns, is_generator
from gpunb.scheduler.options import ActorOptions, MethodOptions

P = ParamSpec("P")
R = TypeVar("R")

_OPTIONS = "__gpunb_method__"
"""The attribute of a function that holds the options which `method` gave it."""

OF_ALL: Mapping[str, Callable[..., None]] = {
    "__ray_terminate__": lambda: None,
    "__ray_ready__": lambda: None,
    "__ray_call__": lambda function, /, *args, **kwargs: None,  # noqa: ARG005 - a signature
}
"""Signatures of the methods that every actor has, with Ray's names: end the actor, wait until it
is made, and call a function with the actor's object and arguments."""


class ActorMethodType(NamedTuple):
    """The description of one method; `generates` if it yields its results."""

    name: str
    signature: Signature
    options: MethodOptions
    generates: bool

    def returns(self, options: MethodOptions) -> int:
        """The number of results of a call with these options, as `encoded_returns` encodes it."""
        return encoded_returns(self.generates, options.num_returns, f"the method {self.name}")


@dataclass(eq=False)
class ActorType:
    """The description of an actor's class.

    Attributes:
        name: name of the class.
        methods: its methods by name.
        concurrent: whether at least one method is a coroutine function or an async generator.
        retries: its ``max_task_retries``.
        groups: the names of its concurrency groups.
    """

    name: str
    methods: Mapping[str, ActorMethodType]
    concurrent: bool
    retries: int
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, actor_class: type, name: str, options: ActorOptions) -> ActorType:
        """The description of a class.

        Raises:
            ValueError: a method has a ``num_returns`` for generators, and does not yield; or a
                ``concurrency_group`` that the class does not have.
        """
        methods: dict[str, ActorMethodType] = {}
        concurrent = False
        groups = tuple(options.concurrency_groups or ())
        for attribute, member in inspect.getmembers(actor_class, inspect.isroutine):
            owner = next((c for c in actor_class.__mro__ if attribute in vars(c)), object)
            if owner is object or attribute in ("__init__", "__new__"):
                continue
            bound = int(_takes_self(vars(owner)[attribute]))
            marked = getattr(member, _OPTIONS, None) or MethodOptions()
            generates = is_generator(member)
            concurrent |= inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
            signature = Signature(member, f"{name}.{attribute}", bound=bound)
            methods[attribute] = ActorMethodType(attribute, signature, marked, generates)
            methods[attribute].returns(marked)
            check_group(marked, groups, f"{name}.{attribute}")
        for attribute, like in OF_ALL.items():
            signature = Signature(like, f"{name}.{attribute}")
            methods[attribute] = ActorMethodType(attribute, signature, MethodOptions(), False)
        return cls(name, methods, concurrent, options.max_task_retries or 0, groups)

    def public_methods(self) -> list[str]:
        """The sorted names of the methods that do not begin with an underscore."""
        return sorted(name for name in self.methods if not name.startswith("_"))

    @functools.cached_property
    def packed(self) -> bytes:
        """The description as bytes, for `unpacked`."""
        fields = (self.name, dict(self.methods), self.concurrent, self.retries, self.groups)
        data: bytes = cloudpickle.dumps(fields, protocol=5)
        return data

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def unpacked(data: bytes) -> ActorType:
        """The description that `packed` was made from."""
        kind = ActorType(*pickle.loads(data))
        kind.__dict__["packed"] = data
        return kind


def check_group(options: MethodOptions, groups: tuple[str, ...], method: str) -> None:
    """Raises ValueError if the options name a concurrency group that the class does not have."""
    group = options.concurrency_group
    if group is not None and group not in groups:
        known = f"its class has {', '.join(map(repr, groups))}" if groups else "its class has none"
        raise ValueError(
            f"{method} has concurrency_group={group!r}, and {known}: give the class "
            f"concurrency_groups={{{group!r}: 2}}, for example"
        )


def _takes_self(member: object) -> bool:
    """Whether a call of this class member gets the instance as its first argument."""
    without = (staticmethod, classmethod, types.ClassMethodDescriptorType)
    return hasattr(type(member), "__get__") and not isinstance(member, without)


def method(*args: Any, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that gives a method of an actor's class its own options.

    Args:
        num_returns: number of results, or ``"streaming"`` or ``"dynamic"`` for a generator.
        max_task_retries: further attempts of a call after a crash and restart of the actor's
            process; default: the class's ``max_task_retries``.
        retry_exceptions: True, or a list of exception types after which a call is tried again.
        timeout: seconds that one call may run.
        name: name of the method's calls in status and messages.
        concurrency_group: the group of the class's ``concurrency_groups`` in which calls run.

    Raises:
        ValueError, TypeError: an unknown option or a bad value.
    """
    if args or not options:
        given = f", and got {args[0]!r:.60}" if args else ""
        raise TypeError(
            f"gpunb.method takes options by name, as in @gpunb.method(num_returns=2){given}. "
            "Methods without it can be called as well"
        )
    checked = MethodOptions().updated(options)

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        setattr(function, _OPTIONS, checked)
        return function

    return mark
