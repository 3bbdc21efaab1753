"""Packs the results of a task for the kernel."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from gpunb.api.generators import DynamicObjectRefGenerator
from gpunb.api.refs import ObjectRef
from gpunb.data import serialize
from gpunb.data.serialize import Moved, Payload
from gpunb.exceptions import GpunbError
from gpunb.protocol import messages as msg
from gpunb.protocol.backend import DYNAMIC, STREAMING
from gpunb.worker.task_kernel import TaskKernel


class Packer:
    """Packs the results of attempts, of several at once in some actors."""

    def __init__(self, remote: TaskKernel, label: Callable[[msg.Execute], str]) -> None:
        """`label` describes an attempt in errors."""
        self._remote = remote
        self._label = label
        self._moved: dict[tuple[int, int], Moved] = {}
        self._early: dict[tuple[int, int], list[Any]] = {}

    def results(self, work: msg.Execute, value: Any) -> list[Payload]:
        """The results to report; those that come one by one are sent as they come."""
        returns, label = work.returns, self._label(work)
        what = f"the result of {label}"
        if isinstance(value, Payload):
            return [value]
        if work.kind == "cell":  # in one of several ranks
            payloads: list[Any] = value
            return payloads
        if returns == 1:
            return [self._dumps(work, value, what)]
        if returns == 0:
            if inspect.isgenerator(value):
                deque(value, maxlen=0)  # its results are not wanted, but what it does is
            return []
        if returns == STREAMING:
            for index, each in enumerate(_generator(value, label)):
                self.yielded(work, index, each)
            return []
        if returns == DYNAMIC:
            refs: list[Any] = []
            self._keep_each(work, refs, _generator(value, label), self._put)
            return [serialize.dumps(DynamicObjectRefGenerator(refs), what=what)]
        if inspect.isgenerator(value):
            payloads = []
            self._keep_each(work, payloads, value, self._dumps)
            if len(payloads) != returns:
                raise _wrong_number(label, returns, len(payloads))
            return payloads
        many = hasattr(value, "__iter__")
        values = list(value) if many else []
        if len(values) != returns:
            raise _wrong_number(label, returns, len(values) if values else repr(value)[:80])
        return [self._dumps(work, each, what) for each in values]

    def _keep_each(
        self,
        work: msg.Execute,
        kept: list[Any],
        values: Iterator[Any],
        keep: Callable[[msg.Execute, Any, str], Any],
    ) -> None:
        """Add what `keep` makes of each value, also to the results from before an error."""
        self._early[work.task, work.attempt] = kept
        for each in values:
            kept.append(keep(work, each, f"value {len(kept)} of {self._label(work)}"))

    def yielded(self, work: msg.Execute, index: int, value: Any) -> None:
        """Send a generator's value."""
        payload = self._dumps(work, value, f"value {index} of {self._label(work)}")
        (wire,), segments = serialize.to_wires([payload])
        self._remote.send(msg.Yielded(work.task, work.attempt, index, wire), segments)

    def results_before(self, work: msg.Execute, failure: Payload) -> list[Payload]:
        """The results of a generator that failed. The error must be at the place of a later
        result, so that the caller sees it: else there are none."""
        early = self._early.pop((work.task, work.attempt), None)
        if early is None:
            return []
        if work.returns != DYNAMIC:
            return early if len(early) < work.returns else []
        try:
            last: Any = ObjectRef(self._remote.put(failure, failed=True), held=True)
        except GpunbError:  # there is no room for it
            return []
        return [serialize.dumps(DynamicObjectRefGenerator([*early, last]))]

    def forget(self, work: msg.Execute) -> Moved | None:
        """Forget an attempt that is over. Returns what it moved off a device for its results."""
        attempt = work.task, work.attempt
        self._early.pop(attempt, None)
        return self._moved.pop(attempt, None)

    def _put(self, work: msg.Execute, value: Any, what: str) -> ObjectRef[Any]:
        return ObjectRef(self._remote.put(self._dumps(work, value, what)), held=True)

    def _dumps(self, work: msg.Execute, value: Any, what: str) -> Payload:
        """Pickle something for the kernel, which touches no device."""
        moved = serialize.moving()
        if moved is None:
            return serialize.dumps(value, what=what)
        with self._moved.setdefault((work.task, work.attempt), moved):
            return serialize.dumps(value, what=what)


def _generator(value: Any, label: str) -> Iterator[Any]:
    if not hasattr(value, "__next__"):
        raise TypeError(f"{label} was to yield its results, but returned {value!r:.80}")
    generator: Iterator[Any] = value
    return generator


def _wrong_number(label: str, returns: int, returned: int | str) -> ValueError:
    return ValueError(f"{label} has num_returns={returns}, but returned {returned}")
