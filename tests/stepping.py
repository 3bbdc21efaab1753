"""Something that happens between two steps of Python's, wherever these are."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import os
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

    def _counts(self, frame: types.FrameType) -> bool:
        """Whether steps in this function do."""
        return frame.f_code.co_filename in self._files

    def _counted(self, frame: types.FrameType) -> bool:
        """Whether the next step of the function does."""
        return True

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count those of this thread, in functions that are called in the block."""
        # Python 3.12 looks for frames that want this when tracing begins, and not later.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if not self._counts(frame):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self._counted(frame):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self._do()
        return self._trace


class Interrupts(Steps):
    """As `Steps`, of those in a whole package before which Python looks for signals: where a
    function begins, after a call and where a loop turns."""

    def __init__(self, nth: int, do: Callable[[], None], package: types.ModuleType) -> None:
        super().__init__(nth, do)
        self._folder = os.path.dirname(package.__file__ or "") + os.sep

    def _counts(self, frame: types.FrameType) -> bool:
        return frame.f_code.co_filename.startswith(self._folder)

    def _counted(self, frame: types.FrameType) -> bool:
        return frame.f_lasti in _looks(frame.f_code)


@functools.cache
def _looks(code: types.CodeType) -> frozenset[int]:
    found = set()
    for one, next_ in itertools.pairwise(dis.get_instructions(code)):
        if one.opname == "RESUME" or one.opname.startswith("CALL"):
            found.add(next_.offset)
        elif "JUMP_BACKWARD" in one.opname and "NO_INTERRUPT" not in one.opname:
            found.add(one.argval)
    return frozenset(found)


def every_step(do: Callable[[], None], *modules: types.ModuleType) -> Iterator[Steps]:
    """For each step in turn; the last one is never reached."""
    for nth in itertools.count(1):
        steps = Steps(nth, do, *modules)
        yield steps
        if steps.left > 0:
            assert nth > 20, "hardly anything was counted"
            return
