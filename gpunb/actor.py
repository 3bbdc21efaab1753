"""Classes whose instances live in worker processes of their own: actors, and handles to them."""

from __future__ import annotations

import functools
import inspect
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, NoReturn, ParamSpec, Self, TypeVar

import cloudpickle

from gpunb import backend, serialize
from gpunb.backend import HANDLE, Call, ExitActor, NewActor, ObjectId
from gpunb.calls import Signature, packed, retry_of, returns_of, submitted
from gpunb.core.options import ActorOptions, MethodOptions, check_switches
from gpunb.core.resources import devices_text
from gpunb.core.tasks import ActorId, TaskSpec
from gpunb.exceptions import InfeasibleRequestError
from gpunb.runtime import output
from gpunb.signals import UNDIVIDED, interrupt_later

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__gpunb_method__"
"""The attribute of a function that holds the options which `method` gave it."""

TERMINATE, READY = "__ray_terminate__", "__ray_ready__"
"""Methods that every actor has, under the names that Ray gave them: end, and wait until made."""

_NAMESPACE = "default"


class RemoteClass(Generic[T]):
    """A class whose instances are actors. Made by `gpunb.remote`."""

    def __init__(self, cls: type[T], options: ActorOptions) -> None:
        # It may be half made yet, if it refers to this and is being unpickled.
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
        """Itself, if its methods' options fit its methods.

        Raises:
            ValueError: one is to give its results one by one, and does not yield.
        """
        self._type  # noqa: B018 - it is made now
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"the remote class {self._name} cannot be called directly: "
            f"use {self._name}.remote(...), or {self._name}.__wrapped__(...) for an object here"
        )

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise TypeError(
            f"a class cannot derive from the remote class {self._name}: derive from the plain "
            f"class ({self._name}.__wrapped__), and make the derived class remote"
        )

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        """Have an actor made with these arguments; returns its handle at once.

        It holds its devices until its process ends: when it is killed, when the last handle is
        gone and its calls are done, or when it leaves or crashes.

        Raises:
            TypeError: arguments that the constructor does not take, or that cannot be pickled.
            InfeasibleRequestError: this machine can never give what the actor asks for.
            ActorAlreadyExistsError: its name is taken; a ValueError, too.
        """
        self._signature.check(args, kwargs)
        current = backend.current()
        if self._code is None or not serialize.still_current(self._captured):
            self._captured = serialize.captured(self._class)
            noted: list[ObjectId] = []
            self._code = serialize.dumps_function(self._class, noted)
            self._held = tuple(noted)
        options = self._options
        arguments, inputs = packed(args, kwargs, self._name, self._signature.names)
        call = Call(
            options.spec(self._name),
            self._code,
            arguments,
            inputs,
            0,
            kind="create",
            sink=output.sink(self._name),
            new=NewActor(
                options.rules(concurrent=self._type.concurrent),
                self._type.packed,
                options.name,
                options.namespace or _NAMESPACE,
                options.get_if_exists,
                options.lifetime == "detached",
                options.max_pending_calls or -1,
                self._type.concurrent,
                output.origin(),
            ),
            held=self._held,
        )
        try:
            handle = self._submitted(current, call)
        except ValueError as error:
            if options.name is None or isinstance(error, InfeasibleRequestError):
                raise
            for let_go in backend.LET_GO:
                let_go()  # the name may be that of an actor which only an old output refers to
            handle = self._submitted(current, call)
        if options.get_if_exists:
            facts = current.ask("actor", handle._gpunb_id)  # None if it has ended since
            handle._gpunb_type = ActorType.unpacked(facts["type"]) if facts else self._type
        return handle

    def _submitted(self, current: backend.Backend, call: Call) -> ActorHandle:
        with UNDIVIDED:
            ((actor, _),) = current.submit(call)
            return ActorHandle(actor, self._type, held=True)

    def options(self, **changes: Any) -> RemoteClass[T]:
        """The same class with other options, such as ``Counter.options(name="c").remote()``.

        Raises:
            ValueError: an unknown option or a bad value.
            TypeError: a value of a wrong type.
        """
        return RemoteClass(self._class, self._options.updated(changes))

    def __reduce__(self) -> tuple[Any, ...]:
        return (RemoteClass, (self._class, self._options))

    def __repr__(self) -> str:
        return f"<remote class {self._name} asking for {self._options.demand()}>"


class _Method:
    """What a handle knows of a method."""

    __slots__ = ("generates", "name", "options", "signature")

    def __init__(
        self, name: str, signature: Signature, options: MethodOptions, generates: bool
    ) -> None:
        self.name = name
        self.signature = signature
        self.options = options
        self.generates = generates

    def __reduce__(self) -> tuple[Any, ...]:
        return _Method, (self.name, self.signature, self.options, self.generates)

    def returns(self, options: MethodOptions) -> int:
        probe = _generates if self.generates else _returns
        return returns_of(probe, options.num_returns, f"the method {self.name}")


def _takes_self(member: object) -> bool:
    """Whether what is in a class has the instance as its first argument when it is called."""
    without = (staticmethod, classmethod, types.ClassMethodDescriptorType)
    return hasattr(type(member), "__get__") and not isinstance(member, without)


def _generates() -> Iterator[None]:
    yield


def _returns() -> None:
    pass


class ActorType:
    """What a handle knows of the actor's class; it travels with it, without the class.

    Attributes:
        name: of the class.
        methods: by name.
        concurrent: whether its methods are coroutines, at least one of them.
        retries: its ``max_task_retries``.
    """

    def __init__(
        self, name: str, methods: Mapping[str, _Method], concurrent: bool, retries: int
    ) -> None:
        self.name = name
        self.methods = methods
        self.concurrent = concurrent
        self.retries = retries

    @classmethod
    def of(cls, actor_class: type, name: str, options: ActorOptions) -> ActorType:
        methods: dict[str, _Method] = {}
        concurrent = False
        for attribute, member in inspect.getmembers(actor_class, inspect.isroutine):
            where = next((c for c in actor_class.__mro__ if attribute in vars(c)), object)
            if where is object or attribute in ("__init__", "__new__"):
                continue
            bound = int(_takes_self(vars(where)[attribute]))
            marked = getattr(member, _MARK, None) or MethodOptions()
            generates = inspect.isgeneratorfunction(member) or inspect.isasyncgenfunction(member)
            concurrent |= inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)
            signature = Signature(member, f"{name}.{attribute}", bound=bound)
            methods[attribute] = _Method(attribute, signature, marked, generates)
            methods[attribute].returns(marked)
        for attribute in (TERMINATE, READY):
            signature = Signature(_returns, f"{name}.{attribute}")
            methods[attribute] = _Method(attribute, signature, MethodOptions(), False)
        return cls(name, methods, concurrent, options.max_task_retries or 0)

    @functools.cached_property
    def packed(self) -> bytes:
        """The type as bytes, for `unpacked`."""
        fields = (self.name, dict(self.methods), self.concurrent, self.retries)
        data: bytes = cloudpickle.dumps(fields, protocol=5)
        return data

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def unpacked(data: bytes) -> ActorType:
        """What `packed` was made from."""
        kind = ActorType(*pickle.loads(data))
        kind.__dict__["packed"] = data
        return kind


class ActorHandle:
    """A handle to an actor: ``handle.method.remote(...)`` calls a method in its process.

    Calls from one caller run in the order in which they were made. Handles can be passed to
    tasks and other actors; when the last one is gone, the actor ends after the calls it has.
    """

    def __init__(self, actor: ActorId, kind: ActorType, *, held: bool = False) -> None:
        """`held` if the backend has already counted this handle."""
        self._gpunb_type = kind
        self._gpunb_calls: dict[str, tuple[TaskSpec, int, bytes | bool]] = {}
        if held:
            self._gpunb_id = actor
            return
        with UNDIVIDED:
            backend.current().hold((actor, HANDLE))
            self._gpunb_id = actor

    def __del__(self) -> None:
        try:
            current = backend.existing()
            if current is not None:
                current.drop((self._gpunb_id, HANDLE))
        except Exception:
            pass
        except KeyboardInterrupt:
            interrupt_later()

    def __getattr__(self, name: str) -> ActorMethod:
        kind = self.__dict__.get("_gpunb_type")
        method = kind.methods.get(name) if kind is not None else None
        if method is None:
            known = "" if kind is None else f"; its methods are {', '.join(_public(kind))}"
            label = "an actor" if kind is None else f"the actor class {kind.name}"
            raise AttributeError(f"{label} has no method {name!r}{known}")
        return ActorMethod(self, method, None)

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_gpunb_"):
            raise AttributeError(
                f"{name!r} cannot be set: a handle has the methods of the actor class "
                f"{self._gpunb_type.name}, and none of the actor's attributes. Give the class a "
                "method that sets it, and call that with .remote(...)"
            )
        object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return _public(self._gpunb_type)

    @property
    def _actor_id(self) -> ActorId:
        return self._gpunb_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._gpunb_id == self._gpunb_id

    def __hash__(self) -> int:
        return hash((ActorHandle, self._gpunb_id))

    def __reduce__(self) -> tuple[Any, ...]:
        serialize.note_reference((self._gpunb_id, HANDLE))
        return _handle, (self._gpunb_id, self._gpunb_type.packed)

    def __repr__(self) -> str:
        current = backend.existing()
        try:
            facts = current.ask("actor", self._gpunb_id) if current is not None else None
        except Exception:
            facts = None
        text = f"{self._gpunb_type.name} #{self._gpunb_id}"
        if facts:
            text += f" {facts['state']}"
            if facts["devices"]:
                text += f" on {devices_text(facts['devices'], shares=False)}"
            if facts["pid"]:
                text += f", pid {facts['pid']}"
        return f"<Actor {text}>"


backend.HOLDERS[ActorHandle] = lambda each: (each._gpunb_id, HANDLE)


def _handle(actor: ActorId, kind: bytes) -> ActorHandle:
    return ActorHandle(actor, ActorType.unpacked(kind))


def _public(kind: ActorType) -> list[str]:
    return sorted(name for name in kind.methods if not name.startswith("_"))


class ActorMethod:
    """A method of an actor; `remote` calls it."""

    __slots__ = ("_handle", "_method", "_options")

    def __init__(
        self, handle: ActorHandle, described: _Method, options: MethodOptions | None
    ) -> None:
        self._handle = handle
        self._method = described
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = self._method.name
        raise TypeError(
            f"the method {name} of an actor cannot be called directly: use .{name}.remote(...)"
        )

    def options(self, **changes: Any) -> ActorMethod:
        """The method with other options, such as ``handle.split.options(num_returns=2)``.

        Raises:
            ValueError, TypeError: an unknown option or a bad value.
        """
        options = (self._options or self._method.options).updated(changes)
        self._method.returns(options)
        return ActorMethod(self._handle, self._method, options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; returns at once with an `ObjectRef`, or what `num_returns` says.

        Raises:
            TypeError: arguments that the method does not take, or that cannot be pickled.
            PendingCallsLimitExceeded: the actor has as many calls as its ``max_pending_calls``.
        """
        method, handle = self._method, self._handle
        kind = handle._gpunb_type
        method.signature.check(args, kwargs)
        prepared = handle._gpunb_calls.get(method.name) if self._options is None else None
        if prepared is None:
            prepared = self._prepared(kind)
            if self._options is None:
                handle._gpunb_calls[method.name] = prepared
        spec, returns, retry = prepared
        arguments, inputs = packed(args, kwargs, spec.name, method.signature.names)
        sink = output.sink(kind.name)
        call = Call(
            spec,
            b"",
            arguments,
            inputs,
            returns,
            retry,
            "method",
            sink,
            handle._gpunb_id,
        )
        return submitted(call, returns)

    def _prepared(self, kind: ActorType) -> tuple[TaskSpec, int, bytes | bool]:
        method = self._method
        options = self._options or method.options
        spec = options.spec(f"{kind.name}.{method.name}", method.name, kind.retries)
        return spec, method.returns(options), retry_of(options.retry_exceptions)

    def __repr__(self) -> str:
        return f"<method {self._method.name} of {self._handle!r}>"


def method(*args: Any, **options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a method of an actor's class options of its own.

    Args:
        num_returns: number of results, or ``"streaming"`` or ``"dynamic"`` for a generator.
        max_task_retries: further attempts of a call if the process of the actor crashes and
            starts again; by default the class's.
        retry_exceptions: True, or a list of exception types, to try again after those as well.
        timeout: seconds one call may run.
        name: shown in status and messages.

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
        setattr(function, _MARK, checked)
        return function

    return mark


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """The handle of the actor that was made under this name.

    Args:
        name: what ``.options(name=...)`` said.
        namespace: that one's, if it said one.

    Raises:
        ValueError: no actor has it, or not any more.
        TypeError: not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"an actor's name is a text, not {name!r}")
    if not name:
        raise ValueError("an actor's name cannot be empty")
    with UNDIVIDED:
        (actor, _), kind = backend.current().find_actor(name, namespace or _NAMESPACE)
        return ActorHandle(actor, ActorType.unpacked(kind), held=True)


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """End an actor's process at once. Its calls fail with ActorDiedError; its devices are free
    again when the process is gone.

    Args:
        actor: its handle.
        no_restart: False to let it start again, as far as its ``max_restarts`` allows.

    Raises:
        ValueError: not a handle of an actor.
        TypeError: a `no_restart` that is not True or False.
    """
    if not isinstance(actor, ActorHandle):
        raise ValueError(
            f"kill takes the handle of an actor, not {actor!r:.60} of type "
            f"{type(actor).__name__}: use cancel for a task"
        )
    check_switches(no_restart=no_restart)
    backend.current().kill(actor._gpunb_id, not no_restart)


def exit_actor() -> NoReturn:
    """In a method: end the actor, for good. The call that says so fails with ActorDiedError.

    Raises:
        TypeError: this is no actor.
    """
    if backend.current().context().actor is None:
        raise TypeError("exit_actor() is for the methods of actors, and this is none")
    raise ExitActor


def current_actor() -> ActorHandle:
    """In a method: a handle to the actor itself.

    Raises:
        RuntimeError: this is no actor.
    """
    context = backend.current().context()
    if context.actor is None:
        raise RuntimeError("there is no current actor: this is not a method of one")
    return ActorHandle(context.actor, ActorType.unpacked(context.type))
