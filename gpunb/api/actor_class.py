"""Classes whose instances live in worker processes of their own, as actors."""

from __future__ import annotations

import functools
from typing import Any, Generic, NoReturn, Self, TypeVar

from gpunb.api.actor_handle import ActorHandle
from gpunb.api.actor_type import ActorType
from gpunb.api.calls import Signature, pack_arguments
from gpunb.data import serialize
from gpunb.exceptions import InfeasibleRequestError
from gpunb.protocol import backend
from gpunb.protocol import sink as protocol_sink
from gpunb.protocol.backend import Call, NewActor, ObjectId
from gpunb.scheduler.options import ActorOptions
from gpunb.system.signals import UNDIVIDED

T = TypeVar("T")


class RemoteClass(Generic[T]):
    """A class whose instances are actors. Made by `gpunb.remote`."""

    def __init__(self, cls: type[T], options: ActorOptions) -> None:
        # The class may be incomplete here: a class that refers to itself is unpickled in steps.
        self._class = cls
        self._options = options
        self._name = cls.__qualname__.rpartition("<locals>.")[2]
        self._code: bytes | None = None
        self._held: tuple[ObjectId, ...] = ()
        self._captured: Any = ()
        self.__doc__ = cls.__doc__
        self.__name__ = self._name
        self.__qualname__ = cls.__qualname__
        self.__module__ = cls.__module__
        self.__wrapped__ = cls

    @functools.cached_property
    def _signature(self) -> Signature:
        return Signature(self._class, self._name)

    @functools.cached_property
    def _type(self) -> ActorType:
        return ActorType.of(self._class, self._name, self._options)

    def checked(self) -> Self:
        """This object, after a check of its methods' options.

        Raises:
            ValueError: a method has a ``num_returns`` for generators, and does not yield.
        """
        self._type  # noqa: B018 - the check happens when the cached description is made
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"the remote class {self._name} cannot be called directly: "
            f"use {self._name}.remote(...), or {self._name}.__wrapped__(...) for an object here"
        )

    def __getattr__(self, name: str) -> Any:
        """The attribute of the class itself, such as a static or class method."""
        if not name.startswith(("__", "_gpunb", "_repr_", "_ipython_")) and "_class" in vars(self):
            return getattr(self._class, name)
        raise AttributeError(f"the remote class {vars(self).get('_name', '')} has no {name!r}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise TypeError(
            f"a class cannot derive from the remote class {self._name}: derive from the plain "
            f"class ({self._name}.__wrapped__), and make the derived class remote"
        )

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Create an actor with these arguments. Returns its handle at once.

        The actor holds its devices until its process ends: after `kill`, after the last handle is
        gone and its calls are done, after `exit_actor`, or after a crash.

        Raises:
            TypeError: arguments that the constructor does not take, or that cannot be pickled.
            InfeasibleRequestError: this machine can never give what the actor asks for.
            ActorAlreadyExistsError: another actor has its name; also a ValueError.
        """
        self._signature.check(args, kwargs)
        current = backend.current()
        if self._code is None or not serialize.still_current(self._captured):
            self._captured = serialize.captured(self._class)
            noted: list[ObjectId] = []
            self._code = serialize.dumps_function(self._class, noted)
            self._held = tuple(noted)
        options = self._options
        arguments, inputs = pack_arguments(args, kwargs, self._name, self._signature.names)
        new = NewActor(
            options.rules(concurrent=self._type.concurrent),
            self._type.packed,
            options.name,
            options.namespace or backend.namespace(),
            options.get_if_exists,
            options.lifetime == "detached",
            options.max_pending_calls or -1,
            self._type.concurrent,
            protocol_sink.origin(),
        )
        spec, sink, code = options.spec(self._name), protocol_sink.sink(self._name), self._code
        call = Call(
            spec, code, arguments, inputs, 0, kind="create", sink=sink, new=new, held=self._held
        )
        try:
            handle = self._create(current, call)
        except ValueError as error:
            if options.name is None or isinstance(error, InfeasibleRequestError):
                raise
            for let_go in backend.LET_GO:
                let_go()  # only an old output may refer to the actor that has the name
            handle = self._create(current, call)
        if options.get_if_exists:
            facts = current.ask("actor", handle._gpunb_id)  # None if the actor has ended since
            handle._gpunb_type = ActorType.unpacked(facts["type"]) if facts else self._type
        return handle

    def _create(self, current: backend.Backend, call: Call) -> ActorHandle:
        with UNDIVIDED:
            ((actor, _),) = current.submit(call)
            return ActorHandle(actor, self._type, held=True)

    def options(self, **changes: Any) -> RemoteClass[T]:
        """The same class with other options, such as ``Counter.options(name="c").remote()``.

        Raises:
            ValueError: an unknown option or a bad value.
            TypeError: a value of a wrong type.
        """
        if "concurrency_groups" in changes:
            raise ValueError("concurrency_groups belongs to the class: give it to gpunb.remote")
        return RemoteClass(self._class, self._options.updated(changes))

    def _remote(self, args: Any = None, kwargs: Any = None, **options: Any) -> ActorHandle:
        return self.options(**options).remote(*(args or ()), **(kwargs or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteClass, (self._class, self._options))

    def __repr__(self) -> str:
        return f"<remote class {self._name} asking for {self._options.demand()}>"
