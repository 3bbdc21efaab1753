"""Something that happens between two steps of Python's, wherever these are."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any


class Steps:
    """Does something once, just before the nth step that Python takes in some modules.

    Attributes:
        left: steps until then; more than 0 if there were not as many.
    """

    def __init__(self, nth: int, do: Callable[[], None], *modules: types.ModuleType) -> None:
        self.left = nth
        self._do = do
        self._files = {each.__file__ for each in modules}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count those of this thread, in functions that are called in the block."""
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._do()
        return self._trace


def every_step(do: Callable[[], None], *modules: types.ModuleType) -> Iterator[Steps]:
    """For each step in turn; the last one is never reached."""
    for nth in itertools.count(1):
        steps = Steps(nth, do, *modules)
        yield steps
        if steps.left > 0:
            assert nth > 20, "hardly anything was counted"
            return
