"""Values of the option `scheduling_strategy`, under the names of Ray's module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpunb.api.placement_group import PlacementGroup
from gpunb.scheduler.groups import Strategy, check_fits
from gpunb.scheduler.resources import Demand

__all__ = ["PlacementGroupSchedulingStrategy"]


class PlacementGroupSchedulingStrategy(Strategy):
    """Runs a task or an actor in a bundle of a placement group.

    Args:
        placement_group: the group; None for no group, also where the parent's group captures.
        placement_group_bundle_index: index of the bundle; -1 for any bundle with room.
        placement_group_capture_child_tasks: whether tasks and actors that it submits run in the
            group, too, unless they have a `scheduling_strategy` of their own.
    """

    def __init__(
        self,
        placement_group: PlacementGroup | None,
        placement_group_bundle_index: int = -1,
        placement_group_capture_child_tasks: bool | None = None,
    ) -> None:
        if placement_group is not None and not isinstance(placement_group, PlacementGroup):
            raise TypeError(
                f"placement_group must be a PlacementGroup or None, not {placement_group!r:.60}"
            )
        self.placement_group = placement_group
        self.placement_group_bundle_index = placement_group_bundle_index
        self.placement_group_capture_child_tasks = placement_group_capture_child_tasks

    def place(self, demand: Demand) -> Demand:
        group = self.placement_group
        if group is None:
            return demand
        capture = bool(self.placement_group_capture_child_tasks)
        within = group.within(self.placement_group_bundle_index, capture=capture)
        check_fits(demand, group.demands, within)
        return replace(demand, within=within)

    def __repr__(self) -> str:
        index = self.placement_group_bundle_index
        return f"<PlacementGroupSchedulingStrategy bundle {index} of {self.placement_group!r}>"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"gpunb.util.scheduling_strategies has no {name!r}: there is one machine; on a Ray cluster "
        "pass on Ray's own in ray={...}"
    )
