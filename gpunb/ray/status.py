"""The status of a session on Ray as plain values: the snapshot, and answers to requests."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from gpunb.engine.device_history import DeviceHistory
from gpunb.exceptions import GpunbError
from gpunb.protocol.backend import ObjectId
from gpunb.protocol.facts import Fact
from gpunb.ray.ended_jobs import EndedJobs
from gpunb.ray.jobs import RayActor, RayJob, RayJobs
from gpunb.ray.resources import Cluster
from gpunb.scheduler.resources import UNIT, merged
from gpunb.scheduler.snapshot import VERSION
from gpunb.system import process_info

FINISHED = 50

_NOTHING = {"now": None, "peak": None, "share": None}
_UNMEASURED = dict.fromkeys(("memory_used", "memory_total", "utilization", "temperature", "power"))


class StatusSource(Protocol):
    """The parts of a kernel that its status needs."""

    cluster: Cluster
    ended_jobs: EndedJobs
    jobs: RayJobs

    def ask(self, what: Fact, *arguments: Any) -> Any: ...
    def cancel(self, obj: ObjectId, force: bool, recursive: bool) -> None: ...
    def interrupt(self, obj: ObjectId) -> None: ...
    def is_over(self, actor: RayActor) -> bool: ...
    def kill(self, actor: int, restart: bool) -> None: ...


class RayStatus:
    """Answers questions, from any thread."""

    def __init__(self, kernel: StatusSource) -> None:
        self._kernel = kernel
        self._session = {**process_info.about(), "kernel": None, "head": None}
        self._history = DeviceHistory()
        self._noting = threading.Lock()

    def session(self) -> dict[str, Any]:
        return dict(self._session)

    def notes(self) -> list[str]:
        nodes = self._kernel.cluster.nodes()
        return [f"on a Ray cluster of {len(nodes)} node{'s' * (len(nodes) != 1)}"]

    def memory(self, *_: Any) -> list[Any]:
        """Ray does not say what its tasks have of a device."""
        return []

    def why(self, ident: int) -> str | None:
        """Why a job waits."""
        job = self._kernel.jobs.open.get(ident)
        return self._reason(job) if job is not None and not self._runs(job) else None

    def timeline(self) -> dict[str, Any]:
        raise GpunbError(
            "on Ray the timeline is Ray's: ray.timeline('trace.json') writes it for "
            "chrome://tracing"
        )

    def carry_out(self, request: dict[str, Any]) -> Any:
        """Carry out a request of the monitor; return its result."""
        kernel, what = self._kernel, request.get("do")
        match what:
            case "status":
                return self.status()
            case "cancel" | "interrupt":
                job = kernel.jobs.open.get(request.get("job", 0))
                if job is None:
                    raise GpunbError(f"there is no job #{request.get('job')} that is not over")
                if what == "cancel":
                    kernel.cancel((job.id, 0), request.get("force") is True, True)
                else:
                    kernel.interrupt((job.id, 0))
                return None
            case "kill":
                kernel.kill(int(request.get("actor", 0)), False)
                return None
            case "logs":
                log = kernel.ask("log", request.get("job", 0))
                if log is None:
                    raise GpunbError(f"nothing is kept of what job #{request.get('job')} has shown")
                return log.read_from()
            case _:
                raise GpunbError(f"{what!r} cannot be asked for on Ray")

    def status(self) -> dict[str, Any]:
        """The snapshot, in its schema."""
        kernel = self._kernel
        kernel.ended_jobs.look()
        known = [job for job in list(kernel.jobs.open.values()) if not job.of_ranks]
        jobs = [job for job in known if job.kind != "create"]
        made = [job for job in known if job.kind == "create"]
        actors = [each for each in list(kernel.jobs.actors.values()) if not kernel.is_over(each)]
        running = [job for job in jobs if self._runs(job)]
        waiting = [job for job in jobs if not self._runs(job)]
        waiting += [job for job in made if job.began is None]
        waiting = [each for each in waiting if each.kind != "create" or not self._over(each)]
        total, free = kernel.ask("total"), kernel.ask("available")
        past = [job for job in list(kernel.jobs.past.values()) if not job.of_ranks]
        finished = [self._past(each) for each in reversed(past[-FINISHED:])]
        now, devices = time.time(), self._devices()
        with self._noting:
            self._history.note(now, devices)
            for device in devices:
                device["history"] = self._history.of(device["key"])
        return {
            "version": VERSION,
            "time": now,
            "session": self.session(),
            "devices": devices,
            "cpus": total.get("CPU", 0),
            "cpus_free": free.get("CPU", 0),
            "total": total,
            "available": free,
            "running": [self._job(each) for each in running],
            "waiting": [self._job(each) for each in waiting],
            "finished": finished,
            "actors": [self._actor(each) for each in actors],
            "groups": [],
            "queued": len(waiting),
            "counts": {
                "running": len(running),
                "waiting": len(waiting),
                "finished": kernel.jobs.counts["ended"],
                "actors": len(actors),
            },
            "totals": {
                "jobs": kernel.jobs.counts["ended"],
                "gpu_seconds": round(sum(map(self._gpu_seconds, past)), 3),
                "waited": round(sum(each.waited for each in past), 3),
                "peak": None,
            },
            "unmet": {},
            "objects": {},
            "preload": None,
            "notes": self.notes(),
            "warnings": self._warnings(waiting),
        }

    def _ranks(self, job: RayJob) -> list[RayJob]:
        """The ranks of a coordinator, or their processes of a session, in order."""
        kinds = {"ranks": ("call", "cell"), "create": ("create",)}.get(job.kind)
        if kinds is None:
            return []
        known = [*list(self._kernel.jobs.open.values()), *list(self._kernel.jobs.past.values())]
        own = [each for each in known if each.of_ranks and each.parent == job.id]
        return sorted((each for each in own if each.kind in kinds), key=lambda each: each.id)

    def _runs(self, job: RayJob) -> bool:
        """Whether a job has begun; a coordinator waits as long as its ranks do."""
        return job.began is not None and (job.kind != "ranks" or bool(self._ranks(job)))

    def _facts_of_ranks(self, job: RayJob) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                **{name: each.facts()[name] for name in ("id", "state", "seconds", "pid")},
                "devices": self._holds(each)["devices"],
                "memory": dict(_NOTHING),
            }
            for rank, each in enumerate(self._ranks(job) if job.kind == "ranks" else ())
        ]

    def _gpu_seconds(self, job: RayJob) -> float:
        """The GPU-seconds of a job. A call of an actor has none: its actor holds the devices."""
        if job.actor not in (0, job.id):
            return 0.0
        held = sum(each.demand.gpus for each in self._ranks(job) or [job] if each.gpus)
        return job.seconds * held / UNIT

    def _over(self, job: RayJob) -> bool:
        actor = self._kernel.jobs.actors.get(job.id)
        return actor is None or actor.ended

    def _warnings(self, waiting: list[RayJob]) -> list[str]:
        """Of what can only wait for nodes that are not there."""
        cluster = self._kernel.cluster
        return [
            f"{job.label} {cluster.never(job.demand)}"
            for job in waiting
            if job.kind != "method" and not job.actor and not cluster.feasible(job.demand)
        ][:5]

    def _reason(self, job: RayJob) -> str:
        """Why a job waits, as far as one can tell from outside Ray."""
        if job.kind == "ranks" and job.began is not None:
            return f"Ray to give each of its ranks {job.demand}"
        if job.kind == "method" or (job.actor and job.kind != "create"):
            return f"its turn at the actor #{job.actor}"
        cluster = self._kernel.cluster
        if not cluster.feasible(job.demand):
            return cluster.never(job.demand)
        return f"Ray to give it {job.demand}, or its arguments"

    def _devices(self) -> list[dict[str, Any]]:
        """The GPUs of all nodes, with what of this session is on them."""
        held: dict[tuple[str, Any], dict[int, float]] = {}
        jobs = [job for job in list(self._kernel.jobs.open.values()) if job.began is not None]
        for job in jobs:
            if job.gpus and (job.kind == "create" or not job.actor):
                owner = job.parent if job.of_ranks and job.parent is not None else job.id
                for _, gpu, share in job.devices:
                    there = held.setdefault((job.node_id, gpu), {})
                    there[owner] = round(there.get(owner, 0.0) + share, 4)
        rows = []
        for node in self._kernel.cluster.nodes():
            count = int(node.total.get("GPU", 0))
            taken = {gpu for where, gpu in held if where == node.id}
            ids: list[Any] = list(range(count))
            if not taken <= set(ids):
                ids = [*sorted(taken, key=str), *(f"? {n}" for n in range(count - len(taken)))]
            kind = node.types[0] if node.types else None
            for index, gpu in enumerate(ids):
                shares = held.get((node.id, gpu), {})
                rows.append(
                    {
                        "id": self._id(node.id, gpu),
                        "key": f"{node.id}:{index}",
                        "name": f"{kind or 'GPU'} {gpu} of {node.name} ({node.address})",
                        "type": kind,
                        "memory": None,
                        "logical": False,
                        "free": round(max(0.0, 1 - sum(shares.values())), 4),
                        "held": [list(each) for each in shares.items()],
                        "resource": "GPU",
                        "vendor": "ray",
                        "capability": None,
                        "kept": None,
                        "usage": dict(_UNMEASURED),
                        "others": [],
                        "health": None,
                    }
                )
        return rows

    def _id(self, node: str, gpu: Any) -> Any:
        """A device of the cluster: its id, with the end of the node's address if there are more."""
        nodes = {each.id: each.address for each in self._kernel.cluster.nodes()}
        if len(nodes) == 1 and node in nodes:
            return gpu
        address = nodes.get(node, "?")
        alone = list(nodes.values()).count(address) == 1
        return f"{address.rpartition('.')[2] if alone else node[:4]}:{gpu}"

    def _holds(self, job: RayJob | None) -> dict[str, Any]:
        """The devices that a job has, with their ids in the cluster."""
        jobs = [job, *self._ranks(job)] if job is not None else []
        devices = merged(
            [kind, self._id(each.node_id, at), share]
            for each in jobs
            for kind, at, share in each.devices
        )
        return {"gpus": [[ident, share] for _, ident, share in devices], "devices": devices}

    def _place(self, job: RayJob | None) -> dict[str, Any]:
        sink = job.sink if job is not None else None
        number, cell = (sink.place if sink is not None else None) or (None, None)
        return {"cell": number, "cell_id": cell}

    def _job(self, job: RayJob) -> dict[str, Any]:
        return {
            **job.facts(),
            **self._holds(job),
            "state": "running" if self._runs(job) else "queued",
            "ranks": self._facts_of_ranks(job),
            "kind": job.kind,
            "actor": job.actor or None,
            **self._place(job),
            "memory": dict(_NOTHING),
            "waits_for": None if self._runs(job) else self._reason(job),
            "waited": round(job.waited, 3),
            "has_log": job.sink is not None and job.sink.log is not None,
            "background": job.sink is not None and job.sink.background,
            "attempt": job.attempt,
            "parent": job.parent,
            "worker": None,
            "cpus": job.demand.cpus / UNIT,
            "priority": 0,
        }

    def _past(self, job: RayJob) -> dict[str, Any]:
        ended, devices = job.ended or time.monotonic(), self._holds(job)["devices"]
        actor = self._kernel.jobs.actors.get(job.id)
        lived = actor if actor is not None and actor.made else None
        return {
            **job.facts(),
            "gpus": [ident for _, ident, _ in devices],
            "devices": devices,
            "ranks": self._facts_of_ranks(job),
            "name": lived.label if lived is not None else job.name,
            "kind": lived.kind if lived is not None else job.kind,
            "actor": job.actor if job.actor not in (0, job.id) else None,
            **self._place(job),
            "waited": round(job.waited, 3),
            "ended": round(time.time() - (time.monotonic() - ended), 3),
            "gpu_seconds": round(self._gpu_seconds(job), 3),
            "memory": dict(_NOTHING),
            "hint": None,
            "has_log": job.sink is not None and job.sink.log is not None,
            "background": job.sink is not None and job.sink.background,
        }

    def _actor(self, actor: Any) -> dict[str, Any]:
        facts = actor.facts()
        job = actor.job
        calls = [each for each in list(self._kernel.jobs.open.values()) if each.actor == actor.id]
        calls = [each for each in calls if each.kind != "create"]
        return {
            "id": actor.id,
            "name": facts["name"],
            "class": facts["class"],
            "kind": actor.kind,
            "state": facts["state"],
            "seconds": round(job.seconds, 3) if job is not None and job.began else None,
            **self._place(job),
            **self._holds(job),
            "memory": dict(_NOTHING),
            "waiting": sum(each.began is None for each in calls),
            "running": sum(each.began is not None for each in calls),
            "restarts": 0,
            "worker": None,
            "pid": facts["pid"],
        }
