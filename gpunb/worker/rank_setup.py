"""The place, the environment and the ports of ranks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gpunb.api.placement_group import gang
from gpunb.protocol import backend
from gpunb.protocol.backend import Call
from gpunb.protocol.ranks import Ranks
from gpunb.scheduler.resources import UNIT, Demand
from gpunb.scheduler.tasks import ActorId

HOST = "127.0.0.1"

CHOSEN = frozenset({"MASTER_ADDR", "MASTER_PORT"})
"""The variables of ranks that the user may set."""


class RankPlace(NamedTuple):
    """The place of a rank among all ranks, and among those of its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int


class Placed:
    """A call in several ranks that have their resources: all of them or none.

    Attributes:
        actors: the processes of the ranks, if these are actors.
        ports: the ports for PyTorch and for JAX.
    """

    def __init__(self, call: Call, ranks: Ranks) -> None:
        """Wait until there is room for all ranks."""
        demand = call.spec.demand
        self.actors: list[ActorId] = []
        self._call = call
        self._size = ranks.size
        # With parts of devices, several ranks may have the same device, which no list shows twice.
        self._sees = 0 if ranks.isolate else demand.gpus // UNIT
        self._group: Any = None
        if demand != Demand():
            self._group = gang([demand] * ranks.size, priority=call.spec.priority)
            ready = self._group.ready()
            backend.current().wait([ready.id], 1, None)
        self.ports = free_ports(2)

    def call_of(self, rank: int) -> Call:
        """Return the call of one rank, in a new process."""
        spec, size = self._call.spec, self._size
        place = RankPlace(rank, size, rank, size, 0)
        own = environment(place, HOST, self.ports, self._sees)
        chosen = {n: text for n, text in spec.environment if n in CHOSEN or n not in own}
        group = self._group
        demand = spec.demand if group is None else replace(spec.demand, within=group.within(rank))
        spec = replace(
            spec,
            name=f"{spec.name} rank {rank} of {size}",
            demand=demand,
            max_calls=1,
            max_retries=0,
            timeout=None,
            environment=tuple(sorted({**own, **chosen}.items())),
            sees_group=self._sees > 0,
        )
        return replace(self._call, spec=spec)

    def is_taken(self, port: int) -> bool:
        """Whether a process listens on a port where rank 0 runs."""
        return is_taken(port)

    def is_at_ports(self, pid: int) -> bool:
        """Whether a rank, by its process, listens on one of the ports or is connected to one."""
        return bool(_ports_of(pid) & set(self.ports))

    def close(self) -> None:
        """Give the resources back, once all ranks are over."""
        self._group = None


def place_ranks(call: Call, ranks: Ranks) -> Placed:
    """Return the ranks of a call with their resources, where the backend of this process has
    them."""
    place: Callable[[Call, Ranks], Placed] = getattr(backend.current(), "place_ranks", Placed)
    return place(call, ranks)


def environment(place: RankPlace, address: str, ports: Sequence[int], sees: int) -> dict[str, str]:
    """Return the variables of a rank, with the names of torchrun and JAX.

    Args:
        address: the address of rank 0.
        ports: the ports for PyTorch and for JAX, where rank 0 runs.
        sees: number of devices of each rank, if a rank sees the devices of all ranks; else 0.
    """
    rank, size, local_rank, local_size, node = place
    variables: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "MASTER_ADDR": address,
        "MASTER_PORT": ports[0],
        "JAX_COORDINATOR_ADDRESS": f"{address}:{ports[1]}",
        "JAX_NUM_PROCESSES": size,
        "JAX_PROCESS_ID": rank,
    }
    if sees:
        own = (str(local_rank + n * local_size) for n in range(sees))
        variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(own)
    return {name: str(value) for name, value in variables.items()}


def free_ports(count: int, address: str = HOST) -> list[int]:
    """Return ports of an address of this machine on which no process listens now."""
    sockets = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def is_taken(port: int, address: str = HOST) -> bool:
    """Return whether a process listens on a port of an address of this machine."""
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return True
    return False


def _ports_of(pid: int) -> set[int]:
    """Return the TCP ports of both ends of the sockets of a process of this machine."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # the process has ended
        links = [os.readlink(each.path) for each in os.scandir(f"/proc/{pid}/fd")]
        own = {each[len("socket:[") : -1] for each in links if each.startswith("socket:[")}
        for table in ("tcp", "tcp6"):
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            for _, here, there, *_, inode in (each.split()[:10] for each in rows):
                if inode in own:
                    found |= {int(each.rpartition(":")[2], 16) for each in (here, there)}
    return found
