"""Where gpunb differs from Ray on purpose, by name; `docs/ray-compatibility.md` explains each.

A test of a difference says what it expects of either, with `here(ray=..., gpunb=...)`.
"""

from __future__ import annotations

from typing import Any

import pytest

DIFFERENCES = {
    # what may be asked for, and when it is refused
    "cpus-of-gpu-tasks": (
        "A task or actor that asks for a device takes no CPU unless it says so: four quarters of "
        "a GPU run at once on a laptop with two cores, too."
    ),
    "infeasible-requests": (
        "What this machine can never give is refused by `.remote()`: one machine does not grow, "
        "and a wait without end tells nobody anything."
    ),
    "fractions-above-one": "1.5 GPUs are refused where they are written, not at the first call.",
    "memory-of-a-gpu": "`gpu_memory` asks for an amount, not a share; Ray has no such option.",
    "time-limits": "`timeout` limits an attempt of a task. Ray has no such option.",
    "lists-of-types": "`accelerator_type` may be a list, in order of preference.",
    "types-are-of-devices": (
        "A type belongs to devices, and is matched for each: mixed machines work. It is no "
        "resource that a request takes a thousandth of."
    ),
    "misuse-is-a-type-error": (
        "A wrong kind of argument is a TypeError, and a wrong value a ValueError, everywhere."
    ),
    "builtin-functions": "Functions written in C, such as `len`, can be remote.",
    "names-of-functions": "A remote function keeps the name and the doc of its function.",
    # devices
    "ids-are-numbers": (
        "Ids are numbers whenever they can be, whatever the environment says; texts are for "
        "UUIDs and MIG slices."
    ),
    "order-of-ids": "Ids are in the order of the devices; texts come in any order in Ray.",
    "hidden-gpus": (
        "A task without devices sees none: a library that takes all it sees must not take the "
        "devices of others."
    ),
    "order-of-devices": "CUDA counts as NVML does, so that an id means the same device to both.",
    "fresh-process-by-option": (
        "A task with a device has a process of its own, also if the device came from `.options()`."
    ),
    "kept-workers": (
        "Where `max_calls=0` keeps a worker on a device, other tasks take another if there is one."
    ),
    "accelerator-families": "`get_accelerator_ids()` names the kinds that this machine has.",
    # objects and errors
    "writable-arrays": "Arrays arrive as private copies on write: they can be changed in place.",
    "objects-outlive-their-maker": (
        "What a worker puts belongs to the session, so that it is there when the worker is not."
    ),
    "exits-are-errors": "`sys.exit` in a task is an error of its code, not a crash of its process.",
    "any-exception-travels": "Exceptions that pickle cannot rebuild arrive whole all the same.",
    "cancel-before-its-argument": (
        "A task can be cancelled while it waits for its argument. In Ray 2.60 this can end the "
        "program that cancels, when the argument comes."
    ),
    "cancel-of-queued-calls": "A cancelled call of an actor that has not begun never runs.",
    "calls-are-interrupted": (
        "A running call of an actor without threads and coroutines is interrupted, as a task is."
    ),
    "errors-of-cancelled-tasks": (
        "A task that raises an error after it was told to stop was cancelled: the error is most "
        "likely a consequence."
    ),
    "yield-from-iterators": "A generator may delegate to any iterable, as in plain Python.",
    "too-many-results": (
        "Another number of results than `num_returns` says is an error, for a generator as well, "
        "and so is an error after the last result."
    ),
    "groups-end-with-their-handles": (
        "A placement group without a name ends with its last handle and its last task: when a "
        "cell runs again, the devices of the group that it made before are free."
    ),
    "handles-from-names": "Each handle keeps its actor alive, also one that came from a name.",
    "ids-of-tasks-are-numbers": "A task is #7 wherever it is shown; in Ray ids are long texts.",
}

ON_THE_BACKEND = {
    "backend-queued-calls": (
        "A call of an actor that was cancelled may still run, if Ray has sent it already."
    ),
    "backend-errors-of-cancelled-tasks": (
        "A task that raises an error after it was told to stop has failed."
    ),
    "backend-exits": "`exit_actor` lets the running calls finish; elsewhere they fail.",
    "backend-puts": "What a worker puts belongs to its process, and can be lost with it.",
    "backend-names": "An actor ends with its maker's handles; one that was looked up does not.",
    "backend-memory": "`gpu_memory` is refused: Ray does not know how large devices are.",
    "backend-types": "A type is of a node: Ray matches nodes, and takes a thousandth of it.",
    "backend-placement-groups": "Placement groups are made with Ray's own functions.",
    "backend-kept-workers": "A GPU on which a worker was kept is given to others as well.",
}
"""Where gpunb on a Ray cluster differs from gpunb elsewhere, as Ray decides it."""

TESTS_ON_THE_BACKEND: dict[str, str] = {
    "test_a_queued_call_of_an_actor": "backend-queued-calls",
    "test_a_task_that_catches_its_interrupt_and_raises_another_error": (
        "backend-errors-of-cancelled-tasks"
    ),
    "test_an_object_of_a_process_that_was_killed": "backend-puts",
    "test_where_others_go_when_a_worker_was_kept": "backend-kept-workers",
    "test_many_share_a_type_that_they_reserve_nothing_of": "backend-types",
}
"""The tests in which that shows; they are expected to fail there."""


def differs(name: str) -> Any:
    """Mark a test that expects different things of the two."""
    if name not in DIFFERENCES:
        raise KeyError(f"{name!r} is not in the list of differences")
    return pytest.mark.differs(name)
