"""The parts of an attached kernel that its sinks, and the cells that it has left, need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpunb.data.segments import Segment
from gpunb.engine.jobs import Owner
from gpunb.engine.state import EngineState
from gpunb.protocol import messages as msg


class AttachedKernel(Owner, Protocol):
    """A kernel that is attached to this head process.

    Attributes:
        gone: whether its connection has ended.
    """

    gone: bool
    pid: int | None

    @property
    def engine(self) -> EngineState: ...
    @property
    def behind(self) -> bool: ...
    @property
    def sessions(self) -> str: ...
    def look(self) -> None: ...
    def send(self, message: msg.Message, segments: Sequence[Segment] = ()) -> None: ...
