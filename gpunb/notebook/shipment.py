"""The notebook's side of a cell that was sent: its objects, and the state of its names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpunb.data.serialize import Loss
from gpunb.worker.cell.change_detection import Fingerprints


class Since:
    """The notebook's names at one moment, to find later which of them have changed."""

    def __init__(self, space: Mapping[str, Any], names: Iterable[str], shipped: Mapping[str, Any]):
        self._space = space
        self._bound = {name: _weakly(space[name]) for name in names if name in space}
        self._data = Fingerprints(shipped, "ignored")

    def now(self, name: str) -> None:
        """Take the present value as unchanged, because an earlier cell has bound it."""
        self._bound.pop(name, None)
        if name in self._space:
            self._bound[name] = _weakly(self._space[name])
        self._data.forget(name)

    def touched(self, name: str) -> bool:
        """Whether the notebook has bound the name anew, deleted it, or changed its object."""
        before = self._bound.get(name)
        if name not in self._space or before is None:
            return name in self._space or before is not None
        return before() is not self._space[name] or self._data.has_changed(name)


def _weakly(value: Any) -> Callable[[], Any]:
    """A reference to an object that does not keep it alive. An object without weak references is
    kept alive, or another object could get its identity."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


@dataclass(frozen=True, slots=True)
class Shipment:
    """The notebook's side of a cell that was packed.

    Attributes:
        objects: objects of the cell's names, by name.
        sent: names whose values travelled.
        binds: names that the cell may bind; None if the text does not tell.
        since: the notebook's names at that moment, for a cell in the background.
        expression: whether the cell is an expression for its value.
        python: the cell as IPython has transformed it.
        detached: names of values with tensors whose graph stays in the notebook.
        losses: what the values lose on the way, if the user has asked for it.
        needs: modules of installed packages that the worker needs when the cell begins.
        brings: modules that the notebook needs when the cell is over.
    """

    objects: Mapping[str, Any]
    sent: frozenset[str] = frozenset()
    binds: frozenset[str] | None = None
    since: Since | None = None
    expression: bool = False
    python: str = ""
    detached: tuple[str, ...] = ()
    losses: list[Loss] | None = None
    needs: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()
