"""Placement groups: resources that are reserved together, for several tasks and actors.

A group is an actor without a process, so its handle is one of an actor: a group ends with the last
one, unless a task in it is not over.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gpunb.api.refs import Ident, ObjectRef, check_timeout
from gpunb.data import serialize
from gpunb.exceptions import GetTimeoutError, InfeasibleRequestError, ObjectLostError
from gpunb.protocol import backend
from gpunb.protocol import sink as protocol_sink
from gpunb.protocol.backend import GROUPS, HANDLE, Call, NewActor
from gpunb.scheduler.option_values import check_name
from gpunb.scheduler.options import Resources
from gpunb.scheduler.resources import Demand, Within, amount
from gpunb.scheduler.tasks import ActorId, ActorSpec, TaskSpec
from gpunb.system.signals import UNDIVIDED, whole

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus"}
_MORE = ("gpu_memory", "min_memory", "accelerator_type", "memory")

_named: dict[tuple[str, str], PlacementGroup] = {}
"""The named groups of a kernel, which live as long as its session if nothing ends them before."""


class PlacementGroup:
    """A handle to a placement group: devices, CPUs and other resources in bundles, which are
    reserved all at once.

    Handles can be passed to tasks and actors. The group ends with its last handle, when no task is
    left in it, or by `remove_placement_group`.
    """

    def __init__(
        self, actor: ActorId, bundles: tuple[Demand, ...], strategy: str, *, held: bool = False
    ) -> None:
        """`held` if the backend has already counted this handle."""
        self._bundles = bundles
        self._strategy = strategy
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

    @property
    def id(self) -> Ident:
        """The number of the group."""
        return Ident(self._gpunb_id)

    @property
    def bundle_specs(self) -> list[dict[str, Any]]:
        """The bundles, as dicts of resources."""
        return [_spec_of(bundle) for bundle in self._bundles]

    @property
    def bundle_count(self) -> int:
        """The number of bundles."""
        return len(self._bundles)

    @property
    def demands(self) -> tuple[Demand, ...]:
        """The bundles, as the scheduler knows them."""
        return self._bundles

    @property
    def is_empty(self) -> bool:
        """False; for programs written for Ray."""
        return False

    @property
    def packed(self) -> bytes:
        """A pickled function of the id that makes a handle."""
        return pickle.dumps(functools.partial(_make, self._bundles, self._strategy))

    def within(self, bundle: int = -1, *, capture: bool = False) -> Within:
        """A bundle of this group, for the demand of a task; -1 for any bundle with room."""
        return Within(self._gpunb_id, bundle, capture)

    def ready(self) -> ObjectRef[PlacementGroup]:
        """A ref that is ready when the group is placed. Its value is a handle to the group."""
        return ObjectRef((self._gpunb_id, 0))

    def wait(self, timeout_seconds: float | None = 30) -> bool:
        """Wait until the group is placed. False after `timeout_seconds`, or if it has ended."""
        check_timeout(timeout_seconds)
        try:
            outcomes = backend.current().fetch([(self._gpunb_id, 0)], timeout_seconds)
        except (GetTimeoutError, ObjectLostError):
            return False
        return not outcomes[0].failed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlacementGroup) and other._gpunb_id == self._gpunb_id

    def __hash__(self) -> int:
        return hash((PlacementGroup, self._gpunb_id))

    def __reduce__(self) -> tuple[Any, ...]:
        serialize.note_reference((self._gpunb_id, HANDLE))
        return _make, (self._bundles, self._strategy, self._gpunb_id)

    def __repr__(self) -> str:
        return f"<PlacementGroup #{self._gpunb_id} of {self.bundle_specs}>"


backend.HOLDERS[PlacementGroup] = lambda each: (int(each.id), HANDLE)


def _make(bundles: tuple[Demand, ...], strategy: str, actor: ActorId) -> PlacementGroup:
    return PlacementGroup(actor, bundles, strategy)


def placement_group(
    bundles: list[dict[str, Any]],
    strategy: str | None = "PACK",
    name: str = "",
    lifetime: str | None = None,
) -> PlacementGroup:
    """Reserve bundles of resources, all at once. Returns at once with a handle; the group waits
    until all its bundles can be placed, and holds nothing meanwhile.

    Args:
        bundles: dicts such as ``{"GPU": 0.5, "CPU": 1}``, with names of resources and amounts.
            ``"gpu_memory"``, ``"min_memory"`` and ``"accelerator_type"`` have the values of these
            options of `gpunb.remote`.
        strategy: ``"PACK"``, ``"SPREAD"`` or ``"STRICT_PACK"``, which mean the same on one machine;
            ``"STRICT_SPREAD"`` wants a node for each bundle, so it allows one bundle.
        name: name for `get_placement_group`. A group to which a notebook or a script gives a name
            does not end with its last handle, but with the session.
        lifetime: ``"detached"`` for a group that ends only with the session, or by
            `remove_placement_group`.

    Raises:
        ValueError: a bad value, or another group has the name.
        InfeasibleRequestError: this machine can never have room for all bundles at once.
    """
    if not isinstance(bundles, (list, tuple)) or not bundles:
        raise ValueError(
            f"bundles={bundles!r} must be a list of dicts of resources, such as "
            "[{'GPU': 1, 'CPU': 2}, {'GPU': 1}]"
        )
    demands = [_demand_of(bundle, at) for at, bundle in enumerate(bundles)]
    strategy = strategy or "PACK"
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(STRATEGIES)}")
    if strategy == "STRICT_SPREAD" and len(demands) > 1:
        raise InfeasibleRequestError(
            f"strategy='STRICT_SPREAD' wants a node for each of the {len(demands)} bundles, and "
            "there is one machine: use 'SPREAD', or Ray's own group on a Ray cluster"
        )
    check_name(name, "name")
    if lifetime not in (None, "detached"):
        raise ValueError(f"lifetime={lifetime!r} must be 'detached' or None")
    return gang(demands, strategy=strategy, name=name, detached=lifetime == "detached")


def gang(
    demands: Sequence[Demand],
    *,
    strategy: str = "PACK",
    name: str = "",
    detached: bool = False,
    priority: int = 0,
) -> PlacementGroup:
    """Reserve these demands all at once, as the bundles of a placement group."""
    bundles, current = tuple(demands), backend.current()
    space = GROUPS + backend.namespace()
    new = NewActor(
        ActorSpec(bundles=bundles),
        pickle.dumps(functools.partial(_make, bundles, strategy)),
        name or None,
        space,
        detached=detached,
        origin=protocol_sink.origin() if name else None,
    )
    spec = TaskSpec("placement group", max_calls=1, capturable=False, priority=priority)
    call = Call(spec, b"", serialize.dumps(((), {})), returns=1, kind="create", new=new)
    with UNDIVIDED:
        ((actor, _),) = current.submit(call)
        group = PlacementGroup(actor, bundles, strategy, held=True)
    if name and current.context().task is None:
        _named[space, name] = group
    return group


def remove_placement_group(placement_group: PlacementGroup) -> None:
    """End a placement group. Tasks in it that wait fail with TaskPlacementGroupRemoved; processes
    of tasks and actors in it are killed; then its resources are free.

    Raises:
        TypeError: `placement_group` is not a handle of one.
    """
    if not isinstance(placement_group, PlacementGroup):
        raise TypeError(f"a PlacementGroup can be removed, not {placement_group!r:.60}")
    backend.current().kill(int(placement_group.id), False)
    for key, group in list(_named.items()):
        if group == placement_group:
            del _named[key]


def get_placement_group(placement_group_name: str) -> PlacementGroup:
    """The placement group with this name.

    Raises:
        ValueError: no group has the name.
    """
    if not placement_group_name or not isinstance(placement_group_name, str):
        raise ValueError(f"{placement_group_name!r} is no name of a placement group")
    space = GROUPS + backend.namespace()
    with UNDIVIDED:
        (actor, _), kind = backend.current().find_actor(placement_group_name, space)
        bundles, strategy = pickle.loads(kind).args
        return PlacementGroup(actor, bundles, strategy, held=True)


def get_current_placement_group() -> PlacementGroup | None:
    """The placement group in which the caller runs; None if it runs in none."""
    current = backend.existing()
    if current is None:
        return None
    context = current.context()
    ident = context.task or context.actor
    found = current.ask("group_of", ident) if ident is not None else None
    return cast(PlacementGroup, pickle.loads(found[1])(found[0])) if found is not None else None


def placement_group_table(placement_group: PlacementGroup | None = None) -> dict[str, Any]:
    """The state of a placement group, or of all groups by the hexadecimal texts of their ids:
    ``"PENDING"``, ``"CREATED"`` or ``"REMOVED"``, their bundles, and why one waits."""
    known = {each["id"]: each for each in backend.current().ask("groups")}
    if placement_group is None:
        return {Ident(each).hex(): _row(facts) for each, facts in known.items()}
    ident = int(placement_group.id)
    gone: dict[str, Any] = {"id": ident, "name": None, "state": "ended", "why": None}
    gone["type"] = placement_group.packed
    return _row(known.get(ident, gone))


def _row(facts: Mapping[str, Any]) -> dict[str, Any]:
    bundles, strategy = pickle.loads(facts["type"]).args
    states = {"starting": "PENDING", "alive": "CREATED"}
    node = backend.node_id()
    return {
        "placement_group_id": Ident(facts["id"]).hex(),
        "name": facts["name"] or "",
        "bundles": {at: _spec_of(bundle) for at, bundle in enumerate(bundles)},
        "bundles_to_node_id": dict.fromkeys(range(len(bundles)), node),
        "strategy": strategy,
        "state": states.get(facts["state"], "REMOVED"),
        "why": facts["why"],
    }


def _demand_of(bundle: Mapping[str, Any], at: int) -> Demand:
    """The demand of a bundle that a user wrote.

    Raises:
        ValueError: it is no dict of resources, or asks for nothing.
    """
    if not isinstance(bundle, Mapping) or not all(isinstance(key, str) for key in bundle):
        raise ValueError(
            f"bundles[{at}]={bundle!r} must be a dict of resources, such as {{'GPU': 1, 'CPU': 2}}"
        )
    given: dict[str, Any] = {"num_cpus": 0}
    resources: dict[str, Any] = {}
    for key, value in bundle.items():
        if key in _OPTIONS or key in _MORE:
            given[_OPTIONS.get(key, key)] = value
        elif key != "object_store_memory":
            resources[key] = value
    try:
        demand = Resources(resources=resources, **given).demand()
    except (ValueError, TypeError) as error:
        raise ValueError(f"bundles[{at}]={bundle!r}: {error}") from None
    if demand == Demand():
        raise ValueError(f"bundles[{at}]={bundle!r} asks for nothing: leave it out")
    return demand


def _spec_of(demand: Demand) -> dict[str, Any]:
    """A bundle as a dict, as `placement_group` takes it."""
    amounts = {"CPU": demand.cpus, "GPU": demand.gpus, **dict(demand.resources)}
    spec: dict[str, Any] = {name: float(amount(each)) for name, each in amounts.items() if each}
    others = {
        "gpu_memory": demand.gpu_memory,
        "min_memory": demand.min_memory,
        "accelerator_type": list(demand.types),
    }
    return spec | {name: value for name, value in others.items() if value}
