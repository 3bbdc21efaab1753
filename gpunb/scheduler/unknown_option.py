"""The error for an option that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_STRATEGY = (
    "give scheduling_strategy=PlacementGroupSchedulingStrategy(...) of "
    "gpunb.util.scheduling_strategies"
)

_OF_RAY = {
    "placement_group": _STRATEGY,
    "placement_group_bundle_index": _STRATEGY,
    "placement_group_capture_child_tasks": _STRATEGY,
    "label_selector": "there is one machine; on a Ray cluster pass on ray={...}",
    "fallback_strategy": "accelerator_type= takes a list of types in order of preference",
    "object_store_memory": "gpunb.init(object_memory=...) is for the whole session",
    "allow_out_of_order_execution": "max_concurrency= lets calls overtake each other",
    "tensor_transport": "results come through the host's memory",
    "enable_task_events": "gpunb.timeline() has all tasks",
    "_generator_backpressure_num_objects": "init(object_memory=...) is what slows generators",
}
"""Options that only Ray has, with the advice for the error."""


def unknown_option(
    name: str, own: str, known: Iterable[str], others: Mapping[str, Iterable[str]]
) -> str:
    """The error text for an option that does not exist here.

    Args:
        name: the option.
        own: the owners of options here, such as "functions".
        known: the options that exist here.
        others: the options of other owners.
    """
    if name in _OF_RAY:
        return f"the option {name!r} is Ray's, and not there: {_OF_RAY[name]}"
    known = list(known)
    owners = [what for what, names in others.items() if name in names]
    near = difflib.get_close_matches(name, known, n=1)
    hint = ""
    if owners:
        hint = f", which is one of {' and '.join(owners)}, not of {own}"
    elif near:
        hint = f"; did you mean {near[0]!r}?"
    return f"unknown option {name!r}{hint} (known are {', '.join(known)})"
