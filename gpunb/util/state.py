"""Lists of tasks and actors, from the snapshot that `gpunb.status` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpunb.instead import missing
from gpunb.protocol import backend

Filter = tuple[str, str, Any]

_TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": lambda one, other: str(one) == str(other),
    "!=": lambda one, other: str(one) != str(other),
}


class Record(dict[str, Any]):
    """The facts about a task or an actor: a dict whose items are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"{name!r} is not known of it; known are {', '.join(self)}")


def list_tasks(filters: Iterable[Filter] | None = None, limit: int = 100, **_: Any) -> list[Record]:
    """The tasks of ``status()``: those that wait, those that run, and the last that are over.

    Args:
        filters: triples such as ``("state", "=", "running")``, with "=" or "!=".
        limit: the largest number of tasks.
    """
    facts = backend.current().ask("status")
    found = [*facts["waiting"], *facts["running"], *facts["finished"]]
    named = ({"task_id": each["id"], **each} for each in found)
    return _filtered(named, filters, limit)


def list_actors(
    filters: Iterable[Filter] | None = None, limit: int = 100, **_: Any
) -> list[Record]:
    """The actors that have not ended. The arguments are those of `list_tasks`; states have Ray's
    names: ``"ALIVE"``, ``"RESTARTING"``, ``"PENDING_CREATION"``, ``"DEAD"`` while one ends."""
    states = {"alive": "ALIVE", "restarting": "RESTARTING", "ending": "DEAD"}
    named = (
        {
            **each,
            "actor_id": each["id"],
            "class_name": each["class"],
            "state": states.get(each["state"], "PENDING_CREATION"),
        }
        for each in backend.current().ask("status")["actors"]
    )
    return _filtered(named, filters, limit)


def _filtered(
    found: Iterable[Mapping[str, Any]], filters: Iterable[Filter] | None, limit: int
) -> list[Record]:
    chosen = [Record(each) for each in found]
    for key, sign, value in filters or ():
        if sign not in _TESTS:
            raise ValueError(f"{sign!r} is no comparison: use '=' or '!='")
        chosen = [each for each in chosen if _TESTS[sign](each.get(key), value)]
    return chosen[:limit]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
