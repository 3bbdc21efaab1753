"""Names that only Ray has, each with what to use in its place."""

from __future__ import annotations

import sys
from opcode import opmap

_STATUS = "gpunb.status()"
_TASKS = "list_tasks(filters=[('task_id', '=', ...)])"
_GROUP = "gpunb.util.get_current_placement_group()"

INSTEAD = {
    "gpunb": {
        "client": "gpunb.init(address=...)",
        "get_tpu_ids": "gpunb.get_runtime_context().get_accelerator_ids()",
        "rllib": "Ray itself",
        "serve": "an actor, or Ray itself",
        "show_in_dashboard": "gpunb.monitor()",
        "train": "%%gpu --ranks, or Ray itself",
        "tune": "gpunb.sweep",
        "workflow": "gpunb.sweep with name=, or Ray itself",
    },
    "gpunb.exceptions": {
        "ActorPlacementGroupRemoved": "TaskPlacementGroupRemoved",
        "ActorUnschedulableError": "InfeasibleRequestError",
        "LocalRayletDiedError": "WorkerCrashedError",
        "NodeDiedError": "WorkerCrashedError",
        "ObjectFetchTimedOutError": "ObjectLostError",
        "ObjectFreedError": "ObjectLostError",
        "ObjectReconstructionFailedError": "ObjectLostError",
        "OutOfDiskError": "OutOfMemoryError",
        "OwnerDiedError": "ObjectLostError",
        "RaySystemError": "GpunbError",
        "ReferenceCountingAssertionError": "ObjectLostError",
        "RuntimeEnvSetupError": "ValueError, which the option runtime_env raises",
        "TaskUnschedulableError": "InfeasibleRequestError",
    },
    "gpunb.get_runtime_context()": {
        "actor_id": "get_actor_id()",
        "current_placement_group_id": _GROUP,
        "get_node_labels": "gpunb.nodes()",
        "get_placement_group_id": _GROUP,
        "get_resource_ids": "get_assigned_resources() and get_accelerator_ids()",
        "get_runtime_env_string": "os.environ",
        "get_session_name": "get_job_id()",
        "get_temp_dir": "tempfile.gettempdir()",
        "job_id": "get_job_id()",
        "node_id": "get_node_id()",
        "runtime_env": "os.environ",
        "should_capture_child_tasks_in_placement_group": _GROUP,
        "task_id": "get_task_id()",
    },
    "gpunb.util": {
        "as_completed": "gpunb.as_completed",
        "collective": "torch.distributed in actors, or the tasks' results",
        "connect": "gpunb.init(address=...)",
        "dask": "gpunb.Executor as Dask's scheduler",
        "disconnect": "gpunb.shutdown()",
        "get_node_ip_address": "gpunb.nodes()",
        "iter": "gpunb.util.ActorPool",
        "map_unordered": "gpunb.util.ActorPool",
        "metrics": "gpunb.status() and gpunb.timeline()",
        "pdb": "breakpoint() in a GPU cell",
        "register_serializer": "copyreg.pickle",
        "rpdb": "breakpoint() in a GPU cell",
        "spark": "Ray itself",
        "tracing": "gpunb.timeline()",
    },
    "gpunb.util.state": {
        "get_actor": "list_actors(filters=[('actor_id', '=', ...)])",
        "get_job": _STATUS,
        "get_log": "%gpu logs",
        "get_node": "gpunb.nodes()",
        "get_objects": _STATUS,
        "get_placement_group": "gpunb.util.placement_group_table()",
        "get_task": _TASKS,
        "get_worker": _STATUS,
        "list_cluster_events": "gpunb.timeline()",
        "list_jobs": _STATUS,
        "list_logs": "%gpu logs",
        "list_nodes": "gpunb.nodes()",
        "list_objects": _STATUS,
        "list_placement_groups": "gpunb.util.placement_group_table()",
        "list_runtime_envs": "os.environ in a task",
        "list_workers": _STATUS,
        "summarize_actors": _STATUS,
        "summarize_objects": _STATUS,
        "summarize_tasks": _STATUS,
    },
}
"""By the module or object, and the name that is not there."""


def missing(place: str, name: str, more: str = "") -> Exception:
    """The error for a name that is not there; to be raised by the ``__getattr__`` of the place.

    An AttributeError, but in ``from place import name`` an ImportError: there Python puts a text of
    its own in the place of an AttributeError.

    Args:
        more: more text for the error.
    """
    user = sys._getframe(1).f_back  # noqa: SLF001 - what `inspect` uses
    imports = user is not None and user.f_code.co_code[user.f_lasti] == opmap["IMPORT_FROM"]
    return (ImportError if imports else AttributeError)(
        f"{place!r} has no attribute {name!r}{_hint(place, name)}{more}"
    )


def check_module(name: str) -> None:
    """Raise an error if a module is one that only Ray has.

    Raises:
        ModuleNotFoundError: with what to use instead.
    """
    package, _, part = name.rpartition(".")
    if hint := _hint(package, part):
        raise ModuleNotFoundError(f"No module named {name!r}{hint}", name=name)


def _hint(place: str, name: str) -> str:
    instead = INSTEAD.get(place, {}).get(name)
    return f": use {instead}" if instead else ""
