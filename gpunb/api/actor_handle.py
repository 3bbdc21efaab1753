"""Handles to actors, and the functions that take or return one."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from gpunb.api.actor_type import ActorMethodType, ActorType, check_group
from gpunb.api.calls import encoded_retry, pack_arguments, submit
from gpunb.api.refs import Ident
from gpunb.data import serialize
from gpunb.protocol import backend
from gpunb.protocol import sink as protocol_sink
from gpunb.protocol.backend import HANDLE, Call, ExitActor
from gpunb.scheduler.option_values import check_namespace, check_switches
from gpunb.scheduler.options import MethodOptions
from gpunb.scheduler.resources import devices_text
from gpunb.scheduler.tasks import ActorId, TaskSpec
from gpunb.system.signals import UNDIVIDED, whole


class ActorHandle:
    """A handle to an actor: ``handle.method.remote(...)`` calls a method in its process.

    Calls of one caller run in the order in which they were made. Handles can be passed to tasks
    and other actors. When the last handle is gone, the actor finishes its calls and ends.
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

    @whole
    def __del__(self) -> None:
        actor = self.__dict__.pop("_gpunb_id", None)
        if actor is not None:
            backend.let_go((actor, HANDLE))

    def __getattr__(self, name: str) -> ActorMethod:
        kind = self.__dict__.get("_gpunb_type")
        method = kind.methods.get(name) if kind is not None else None
        if method is None:
            known = "" if kind is None else f"; its methods are {', '.join(kind.public_methods())}"
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
        return self._gpunb_type.public_methods()

    @property
    def _actor_id(self) -> Ident:
        return Ident(self._gpunb_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._gpunb_id == self._gpunb_id

    def __hash__(self) -> int:
        return hash((ActorHandle, self._gpunb_id))

    def __reduce__(self) -> tuple[Any, ...]:
        serialize.note_reference((self._gpunb_id, HANDLE))
        return _unpickled, (self._gpunb_id, self._gpunb_type.packed)

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


def _unpickled(actor: ActorId, kind: bytes) -> ActorHandle:
    return ActorHandle(actor, ActorType.unpacked(kind))


class ActorMethod:
    """A method of an actor. `remote` calls it."""

    __slots__ = ("_handle", "_method", "_options")

    def __init__(
        self, handle: ActorHandle, described: ActorMethodType, options: MethodOptions | None
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
        kind = self._handle._gpunb_type
        check_group(options, kind.groups, f"{kind.name}.{self._method.name}")
        return ActorMethod(self._handle, self._method, options)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method. Returns at once with an `ObjectRef`, or as `num_returns` says.

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
        arguments, inputs = pack_arguments(args, kwargs, spec.name, method.signature.names)
        sink, actor = protocol_sink.sink(kind.name), handle._gpunb_id
        call = Call(spec, b"", arguments, inputs, returns, retry, "method", sink, actor)
        return submit(call, returns)

    def _remote(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        return self.options(**options).remote(*(args or ()), **(kwargs or {}))

    def _prepared(self, kind: ActorType) -> tuple[TaskSpec, int, bytes | bool]:
        method = self._method
        options = self._options or method.options
        spec = options.spec(f"{kind.name}.{method.name}", method.name, kind.retries)
        return spec, method.returns(options), encoded_retry(options.retry_exceptions)

    def __repr__(self) -> str:
        return f"<method {self._method.name} of {self._handle!r}>"


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """The handle of the actor with this name.

    Args:
        name: the name that ``.options(name=...)`` gave the actor.
        namespace: the namespace that its options gave it; default: the session's.

    Raises:
        ValueError: no actor has the name, or the actor has ended.
        TypeError: `name` or `namespace` is not a text.
    """
    check_namespace(namespace)
    if not isinstance(name, str):
        raise TypeError(f"an actor's name is a text, not {name!r}")
    if not name:
        raise ValueError("an actor's name cannot be empty")
    with UNDIVIDED:
        (actor, _), kind = backend.current().find_actor(name, namespace or backend.namespace())
        return ActorHandle(actor, ActorType.unpacked(kind), held=True)


def kill(actor: ActorHandle, *, no_restart: bool = True) -> None:
    """Kill an actor's process at once. Its calls fail with ActorDiedError; its devices are free
    again when the process is gone.

    Args:
        actor: the handle of the actor.
        no_restart: False lets the actor start again, if its ``max_restarts`` allows that.

    Raises:
        ValueError: `actor` is not a handle of an actor.
        TypeError: `no_restart` is not True or False.
    """
    if not isinstance(actor, ActorHandle):
        raise ValueError(
            f"kill takes the handle of an actor, not {actor!r:.60} of type "
            f"{type(actor).__name__}: use cancel for a task"
        )
    check_switches(no_restart=no_restart)
    backend.current().kill(actor._gpunb_id, not no_restart)


def exit_actor() -> NoReturn:
    """End the current actor for good. The call that does this fails with ActorDiedError.

    Raises:
        TypeError: the caller is not a method of an actor.
    """
    current = backend.current()
    actor = current.context().actor
    if actor is None:
        raise TypeError("exit_actor() is for the methods of actors, and this is none")
    if _in_background_coroutine():  # no caller receives an exception of it
        if isinstance(current, backend.ExitingBackend):
            current.exit_actor(actor)
        else:
            current.kill(actor, False)
    raise ExitActor


def _in_background_coroutine() -> bool:
    """Whether the running coroutine was started by a call, and is not the call itself."""
    if "asyncio" not in sys.modules:
        return False
    import asyncio

    try:
        running = asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return False
    return running is not None and backend.CALL.get() not in (None, running)


def current_actor() -> ActorHandle:
    """A handle to the actor that runs the caller.

    Raises:
        RuntimeError: the caller is not a method of an actor.
    """
    context = backend.current().context()
    if context.actor is None:
        raise RuntimeError("there is no current actor: this is not a method of one")
    return ActorHandle(context.actor, ActorType.unpacked(context.type))
