"""Ranks on a Ray cluster: one actor for each rank, in a placement group over the nodes."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gpunb.data import serialize
from gpunb.exceptions import GpunbError, InfeasibleRequestError
from gpunb.protocol.backend import HANDLE, Backend, Call, FailedWith, NewActor, ObjectId
from gpunb.protocol.ranks import Ranks
from gpunb.ray.kernel_link import KernelLink
from gpunb.ray.messages import GroupMade
from gpunb.ray.resources import TYPE, Cluster, needs
from gpunb.scheduler.resources import UNIT, Demand, Gang
from gpunb.scheduler.tasks import ActorSpec, TaskSpec
from gpunb.worker import jax_ranks
from gpunb.worker.cell.run import Host
from gpunb.worker.rank_setup import CHOSEN, Placed, RankPlace, environment, free_ports, is_taken
from gpunb.worker.task_runner import CALL


class Submitter(Backend, Protocol):
    """The backend of the coordinator's process."""

    cluster: Cluster
    link: KernelLink


START = 300.0
"""Seconds in which the processes of all ranks must start, once they have their resources."""

_OF_TYPE = 0.001
"""The part of the resource of a type that Ray takes for an actor that asks for the type."""


class _Process(NamedTuple):
    """The process of a rank, before its number is known.

    Attributes:
        variable: the variable that lists the devices which the process sees.
        ports: ports that are free on its node.
    """

    node: str
    address: str
    variable: str
    devices: tuple[str, ...]
    ports: tuple[int, ...]


class RayRanks(Placed):
    """A call in several ranks on the nodes of a cluster. Its group ends with `close`, or with the
    coordinator."""

    def __init__(self, worker: Submitter, call: Call, ranks: Ranks) -> None:
        """Wait until there is room for all ranks, and until their processes have started.

        Raises:
            InfeasibleRequestError: there is never room for all of them.
            GpunbError: the process of a rank does not start.
        """
        self._worker = worker
        self._call = call
        self._size = ranks.size
        self._group: Any = None
        self._address = ""
        self.actors = []
        self.ports = []
        try:
            self._start(ranks)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: Ranks) -> None:
        demand = self._reserve(self._call.spec)
        for rank in range(self._size):
            self.actors.append(self._create(demand, rank))
        processes: list[_Process] = [_Process(*each) for each in self._in_each(_describe)]
        nodes = list(dict.fromkeys(each.node for each in processes))
        order = sorted(range(self._size), key=lambda at: nodes.index(processes[at].node))
        self.actors = [self.actors[at] for at in order]
        processes = [processes[at] for at in order]
        self._address, self.ports = processes[0].address, list(processes[0].ports)
        sees = 0 if ranks.isolate else demand.gpus // UNIT
        chosen = {name for name, _ in self._call.spec.environment if name in CHOSEN}
        variables = [
            {name: text for name, text in each.items() if name not in chosen}
            for each in environments(processes, sees)
        ]
        self._in_each(_enter, variables)

    def _reserve(self, spec: TaskSpec) -> Demand:
        """Wait for a placement group; return the demand of each rank, with its type of device."""
        cluster, demand = self._worker.cluster, spec.demand
        if demand == Demand():
            self._note(b"")
            return demand
        if reason := cluster.refusal(Gang.of([demand] * self._size)):
            raise InfeasibleRequestError(f"{spec.name}: {reason}")
        demand = cluster.for_each(demand, self._size)
        bundle = {**needs(demand), **{TYPE + kind: _OF_TYPE for kind in demand.types}}
        self._group = placement_group([bundle] * self._size, strategy="PACK")
        self._note(self._group.id.binary())
        ray.wait([self._group.ready()])
        return demand

    def _note(self, group: bytes) -> None:
        """Tell the kernel about the group, which ends it if the coordinator cannot."""
        task = self._worker.context().task
        assert task is not None, "ranks are placed by a call"
        self._worker.link.report(GroupMade(task, group))
        self._worker.link.flush()

    def _create(self, demand: Demand, rank: int) -> int:
        """Start the actor of a rank."""
        call = self._call
        if call.kind != "create":
            empty = serialize.dumps(((), {}))
            spec = replace(call.spec, function="")
            call = Call(spec, pickle.dumps(Host), empty, returns=0, kind="create")
        placed: dict[str, Any] = {}
        if self._group is not None:
            placed["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, rank)
        name = f"{call.spec.name} rank {rank} of {self._size}"
        spec = replace(
            call.spec, name=name, demand=demand, max_retries=0, timeout=None, priority=0, ray=placed
        )
        new = NewActor(ActorSpec(), b"")
        ((actor, _),) = self._worker.submit(replace(call, spec=spec, new=new, sink=None))
        return actor

    def _in_each(self, function: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Call a function in the process of each rank, with its own of each of the arguments."""
        ranks = range(self._size)
        objects = [self._ask(rank, function, *(each[rank] for each in arguments)) for rank in ranks]
        try:
            over = self._worker.wait(objects, len(objects), START)
            values = [self._value(each) for each in objects if each in over]
            if late := [str(rank) for rank in ranks if objects[rank] not in over]:
                raise GpunbError(
                    f"{self._call.spec.name}: the process of rank {', '.join(late)} of "
                    f"{self._size} has not started within {START:g} s, although its node has room "
                    "for it: see Ray's logs of that node, under /tmp/ray/session_latest/logs"
                )
            return values
        finally:
            for each in objects:
                self._worker.drop(each)

    def _value(self, obj: ObjectId) -> Any:
        outcome = self._worker.fetch([obj], None)[0]
        if outcome.failed:
            raise FailedWith(outcome.payload)
        return serialize.loads(outcome.payload)

    def _ask(self, rank: int, function: Callable[..., Any], *arguments: Any) -> ObjectId:
        packed = serialize.dumps(((function, *arguments), {}))
        name = f"{self._call.spec.name} rank {rank} of {self._size}"
        spec = TaskSpec(name, function=CALL)
        call = Call(spec, b"", packed, kind="method", actor=self.actors[rank])
        return self._worker.submit(call)[0]

    def is_taken(self, port: int) -> bool:
        try:
            obj = self._ask(0, _is_taken, port, self._address)
            try:
                return bool(self._value(obj))
            finally:
                self._worker.drop(obj)
        except (FailedWith, GpunbError):
            return False  # the process of rank 0 is gone

    def close(self) -> None:
        for each in self.actors:
            self._worker.kill(each, False)
            self._worker.drop((each, HANDLE))
        self.actors = []
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(Exception):  # the cluster is gone
                remove_placement_group(group)


def environments(processes: Sequence[_Process], sees: int) -> list[dict[str, str]]:
    """Return the variables of each rank, whose processes are in this order.

    Args:
        processes: those of a node follow each other.
        sees: number of devices of each rank, if a rank sees the devices of all ranks of its node;
            else 0.
    """
    nodes: dict[str, list[_Process]] = {}
    for each in processes:
        nodes.setdefault(each.node, []).append(each)
    found: list[dict[str, str]] = []
    for at, local in enumerate(nodes.values()):
        for local_rank, process in enumerate(local):
            place = RankPlace(len(found), len(processes), local_rank, len(local), at)
            variables = environment(place, processes[0].address, processes[0].ports, sees)
            if sees:
                devices = [each.devices[n] for n in range(sees) for each in local]
                variables[process.variable] = ",".join(devices)
            found.append(variables)
    return found


def _describe(_: Any) -> tuple[Any, ...]:
    """Return the facts about this process for `_Process`."""
    address = ray.util.get_node_ip_address()
    manager: Any = ray._private.accelerators.get_accelerator_manager_for_resource("GPU")
    devices = manager.get_current_process_visible_accelerator_ids() or ()
    return (
        ray.get_runtime_context().get_node_id(),
        address,
        manager.get_visible_accelerator_ids_env_var(),
        tuple(map(str, devices)),
        tuple(free_ports(2, address)),
    )


def _enter(_: Any, variables: Mapping[str, str]) -> None:
    """Make this process a rank."""
    os.environ.update(variables)
    jax_ranks.announce()


def _is_taken(_: Any, port: int, address: str) -> bool:
    return is_taken(port, address)
