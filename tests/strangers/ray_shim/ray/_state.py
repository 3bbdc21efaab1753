"""`ray.util.state`: the lists of gpunb, with the keys and states that Ray's tests filter by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpunb.util import state
from gpunb.util.state import Record

_STATES = {"running": "RUNNING", "done": "FINISHED", "failed": "FAILED", "cancelled": "FAILED"}


def _with_rays_keys(each: Record) -> Record:
    name = each.get("class_name") or each["name"]
    shown = each["state"] if each["state"].isupper() else _STATES.get(each["state"], "PENDING")
    return Record({**each, "state": shown, "name": name, "func_or_class_name": name})


def _filtered(
    found: Callable[..., list[Record]], filters: Iterable[Any], limit: int
) -> list[Record]:
    chosen = [_with_rays_keys(each) for each in found(limit=limit)]
    for key, sign, value in filters:
        same = sign == "="
        chosen = [each for each in chosen if (str(each.get(key.lower())) == str(value)) == same]
    return chosen


def list_tasks(*_: Any, filters: Iterable[Any] = (), limit: int = 100, **__: Any) -> list[Record]:
    """The tasks of the session."""
    return _filtered(state.list_tasks, filters or (), limit)


def list_actors(*_: Any, filters: Iterable[Any] = (), limit: int = 100, **__: Any) -> list[Record]:
    """The actors of the session."""
    return _filtered(state.list_actors, filters or (), limit)
