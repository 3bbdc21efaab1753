"""The object store: values, the threads and tasks that wait for them, and reference counts.

Objects are results of tasks, values from `put`, and values that generators yield; an entry for the
latter is made when the value is yielded or first waited for. Generators and actors are objects too,
with indices below 0: they live as long as there are references to them.

Only the loop's thread counts references; other threads post their changes in order. The thread that
submits a task makes its entries; any thread may read them.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence

from gpunb.data.serialize import Payload, dumps
from gpunb.engine.object_memory import Memory
from gpunb.exceptions import GetTimeoutError, ObjectLostError
from gpunb.protocol.backend import COMPLETED, HANDLE, STREAM, ObjectId, Outcome
from gpunb.scheduler.tasks import ActorId, TaskId, WorkerId
from gpunb.system.signals import wait_for_gate


class Entry(list[Callable[[], None]]):
    """One object, and the list of callbacks that wait for it.

    It is the list itself, because there may be a hundred thousand objects, and Python's garbage
    collector looks at each part of each again and again.
    """

    __slots__ = ("outcome", "references")

    def __init__(self, outcome: Outcome | None = None) -> None:
        self.references = 1
        self.outcome = outcome

    def notify(self, callback: Callable[[], None]) -> None:
        """Call a function when the object is there: at once, or later on the loop's thread."""
        if self.outcome is None:
            self.append(callback)
            # If the object came in between, the thread that removes the callback calls it.
            if self.outcome is None or not _taken(self, callback):
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """Cancel a callback of `notify`."""
        _taken(self, callback)

    def tell(self) -> Exception | None:
        """Call all callbacks, the first that asked first. Return an error of one of them."""
        failure: Exception | None = None
        self.reverse()
        while self:
            try:
                callback = self.pop()
            except IndexError:  # another thread has taken it
                break
            try:
                callback()
            except Exception as error:  # the others are called all the same
                failure = error
        return failure


_NOTHING = Outcome(Payload())
_NONE = Outcome(dumps(None))
_END = Outcome(Payload(), failed=True)
"""Comes after the last value of a generator."""


class _Stream:
    """The values that a generator has yielded: `count` of them, the first `taken` handed out."""

    __slots__ = ("count", "ended", "taken")

    def __init__(self) -> None:
        self.count = 0
        self.taken = 0
        self.ended = False


class Store:
    """All objects that have references.

    Attributes:
        released: is called on the loop's thread with each actor to which no handle is left.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._entries: dict[ObjectId, Entry] = {}
        self._streams: dict[TaskId, _Stream] = {}
        self._workers: dict[WorkerId, dict[ObjectId, int]] = {}
        self.released: Callable[[ActorId], object] = id

    def __len__(self) -> int:
        return len(self._entries)

    def facts(self) -> dict[str, int]:
        """Counts for `status()`: objects, references, bytes of memory segments."""
        entries = [each for obj, each in list(self._entries.items()) if obj[1] >= 0]
        there = [each.outcome.payload for each in entries if each.outcome is not None]
        return {
            "objects": len(entries),
            "references": sum(each.references for each in entries),
            "bytes": sum(each.nbytes for each in there),
        }

    # --------------------------------------------------------------------------- from any thread

    def create(self, obj: ObjectId, outcome: Outcome | None = None) -> None:
        """Add an object with one reference, which belongs to the caller."""
        if outcome is not None:
            self.memory.hold(outcome.payload)
        self._entries[obj] = Entry(outcome)

    def create_living(self, obj: ObjectId) -> ObjectId:
        """Add an actor or a generator with one reference, the caller's. Return its id."""
        if obj[1] == STREAM:
            self._streams[obj[0]] = _Stream()
            self.create((obj[0], COMPLETED))
        self.create(obj, _NOTHING)
        return obj

    def entry(self, obj: ObjectId) -> Entry:
        """Return the entry of an object.

        Raises:
            ObjectLostError: nobody held a reference to it any more, or it is of another session.
        """
        entry = self._entries.get(obj)
        if entry is None and (stream := self._streams.get(obj[0])) is not None and obj[1] >= 0:
            entry = self._entries.setdefault(obj, Entry())
            # Looked at after it was made: who ends the stream does it the other way round.
            if stream.ended and obj[1] >= stream.count and entry.outcome is None:
                self._entries.pop(obj, None)
                return Entry(_END)
        if entry is None:
            raise ObjectLostError(
                f"the object {obj} is not there: it belongs to a session that was shut down, "
                "or its last reference was dropped"
            )
        return entry

    def get(self, obj: ObjectId) -> Outcome | None:
        entry = self._entries.get(obj)
        return entry.outcome if entry is not None else None

    def notify(self, obj: ObjectId, callback: Callable[[], None]) -> None:
        """Call back when the object is there: at once, or later on the loop's thread."""
        self.entry(obj).notify(callback)

    def wait(self, objects: Sequence[ObjectId], count: int, timeout: float | None) -> set[ObjectId]:
        """Block until `count` of the objects are there, or one failed, or time is up."""
        entries = {obj: self.entry(obj) for obj in objects}
        there = _there(entries)
        if len(there) >= count or timeout == 0:
            return there
        missing = [entry for obj, entry in entries.items() if obj not in there]
        _Counter(count - len(there)).wait(missing, timeout)
        return _there(entries)

    def fetch(self, objects: Sequence[ObjectId], timeout: float | None) -> list[Outcome]:
        """Return the outcomes when all are there, or up to and including the first failure."""
        entries = [self.entry(obj) for obj in objects]
        missing = {
            obj: entry for obj, entry in zip(objects, entries, strict=True) if not entry.outcome
        }
        # One that has failed before, or just now, is not waited for, and ends the wait.
        if missing and _first_failed(entries) is None:
            self._wait_all(missing, len(objects), timeout)
        failed = _first_failed(entries)
        if failed is not None:
            return [failed]
        for entry in entries:
            if entry.outcome is not None:
                self.memory.touch(entry.outcome.payload)
        return [entry.outcome for entry in entries if entry.outcome is not None]

    def _wait_all(self, missing: dict[ObjectId, Entry], total: int, timeout: float | None) -> None:
        counter = _Counter(len(missing), fail_fast=True)
        if not counter.wait(list(missing.values()), timeout):
            late = sorted(obj for obj, entry in missing.items() if entry.outcome is None)
            if late:
                shown = ", ".join(f"#{task}" if task else "a put" for task, _ in late[:4])
                raise GetTimeoutError(
                    f"{len(late)} of {total} results were not there after {timeout:g} s "
                    f"({shown}{', ...' if len(late) > 4 else ''}); the tasks go on"
                )

    def take(self, obj: ObjectId) -> bool:
        """Hand out the next value of a generator with its reference; return False at the end."""
        entry = self.entry(obj)
        if entry.outcome is None or entry.outcome is _END:
            return False
        stream = self._streams.get(obj[0])
        if stream is not None:
            stream.taken = max(stream.taken, obj[1] + 1)
        return True

    # ------------------------------------------------------------------------- on the loop's thread

    def yielded(self, obj: ObjectId, outcome: Outcome) -> None:
        """Store the next value of a generator. A further attempt yields the same values again."""
        stream = self._streams.get(obj[0])
        if stream is None:
            return  # there are no references to the object any more
        if obj[1] >= stream.taken:
            self._entries.setdefault(obj, Entry())
            stream.count = max(stream.count, obj[1] + 1)
            self.settle(obj, outcome)

    def end_stream(self, task: TaskId, failure: Outcome | None, *, raised: bool = False) -> None:
        """End a generator; its error, if any, is its last value. `raised` if the function raised
        the error."""
        self.settle((task, COMPLETED), _NONE if raised or failure is None else failure)
        stream = self._streams.get(task)
        if stream is None:
            return
        if failure is not None:
            self.yielded((task, stream.count), failure)
        stream.ended = True
        index = stream.count
        while (entry := self._entries.get((task, index))) is not None:
            self.settle((task, index), _END)
            del self._entries[task, index]
            index += 1
            del entry

    def _release(self, obj: ObjectId) -> None:
        """Release an actor or a generator that has no reference left."""
        task, index = obj
        if index == HANDLE:
            self.released(task)
        elif index == STREAM:
            stream = self._streams.pop(task)
            self.drop((task, COMPLETED))
            self._entries.pop((task, stream.count), None)  # if it was waited for in vain
            for each in range(stream.taken, stream.count):
                self.drop((task, each))

    def settle(self, obj: ObjectId, outcome: Outcome) -> None:
        """Store the outcome of an object. The objects in it are held as long as the object is."""
        entry = self._entries.get(obj)
        if entry is None or entry.outcome is not None:
            return
        self.hold_inner(outcome.payload)
        self.memory.hold(outcome.payload)
        entry.outcome = outcome
        failure = entry.tell()
        if not entry.references:
            self._let_go(obj, entry)
        if failure is not None:
            raise failure

    def hold(self, obj: ObjectId, count: int = 1) -> None:
        entry = self._entries.get(obj)
        if entry is not None:
            entry.references += count

    def drop(self, obj: ObjectId, count: int = 1) -> None:
        entry = self._entries.get(obj)
        if entry is None:
            return
        entry.references -= count
        if entry.references <= 0 and entry.outcome is not None:
            self._let_go(obj, entry)

    def hold_inner(self, payload: Payload) -> None:
        """Count the references that a value holds."""
        for inner in payload.references:
            self.hold(inner)

    def drop_inner(self, payload: Payload) -> None:
        """Undo `hold_inner`."""
        for inner in payload.references:
            self.drop(inner)

    def hold_for(self, worker: WorkerId, obj: ObjectId, count: int) -> None:
        """Count references that a worker gained or lost. A worker cannot lose more than it has."""
        held = self._workers.setdefault(worker, {})
        count = max(count, -held.get(obj, 0))
        held[obj] = held.get(obj, 0) + count
        if not held[obj]:
            del held[obj]
        if count > 0:
            self.hold(obj, count)
        else:
            self.drop(obj, -count)

    def granted(self, worker: WorkerId, objects: Iterable[ObjectId]) -> None:
        """Give a worker the one reference that each new object begins with."""
        held = self._workers.setdefault(worker, {})
        for obj in objects:
            held[obj] = held.get(obj, 0) + 1

    def held_by(self, worker: WorkerId, obj: ObjectId) -> int:
        """Return the references that a worker has to an object."""
        return self._workers.get(worker, {}).get(obj, 0)

    def may_name(self, worker: WorkerId, obj: ObjectId) -> bool:
        """Return whether a worker has a reference to an object, or to its generator."""
        held = self._workers.get(worker, {})
        of_stream = obj[1] >= 0 or obj[1] == COMPLETED
        return obj in held or (of_stream and (obj[0], STREAM) in held)

    def wanted(self, obj: ObjectId) -> bool:
        """Return whether there is any reference to an object."""
        entry = self._entries.get(obj)
        return entry is not None and entry.references > 0

    def take_stock(self, worker: WorkerId, held: dict[ObjectId, int]) -> None:
        """Replace the references of a worker by the complete list that the worker reports."""
        booked = self._workers.get(worker, {})
        changes = {obj: held.get(obj, 0) - booked.get(obj, 0) for obj in {**booked, **held}}
        for obj, change in sorted(changes.items(), key=lambda each: -each[1]):
            if change:
                self.hold_for(worker, obj, change)

    def forget(self, worker: WorkerId) -> None:
        """Drop all references of a worker that is gone."""
        for obj, count in self._workers.pop(worker, {}).items():
            self.drop(obj, count)

    def clear(self) -> None:
        """Drop all objects, and with them their memory."""
        self._entries.clear()
        self._streams.clear()
        self._workers.clear()

    def forked(self) -> None:
        """Drop the parent's memory, in a child that was forked off the kernel."""
        for entry in self._entries.values():
            if entry.outcome is not None:
                for segment in entry.outcome.payload.segments:
                    segment.close()
        self.memory.forked()
        self.clear()

    def _let_go(self, obj: ObjectId, entry: Entry) -> None:
        if self._entries.pop(obj, None) is not None and entry.outcome is not None:
            self.memory.release(entry.outcome.payload)
            self.drop_inner(entry.outcome.payload)
            if obj[1] < 0:
                self._release(obj)


class _Counter:
    """Opens a gate when enough objects are there. Any thread counts, so there is no lock."""

    __slots__ = ("_fail_fast", "_gate", "_left", "_seen")

    def __init__(self, left: int, *, fail_fast: bool = False) -> None:
        self._left = left
        self._seen = itertools.count(1)
        self._gate = threading.Lock()
        self._gate.acquire()
        self._fail_fast = fail_fast

    def wait(self, entries: Sequence[Entry], timeout: float | None) -> bool:
        """Whether enough of the entries are there within `timeout` seconds.

        An interrupt may leave a callback in an entry, which does nothing when it is called.
        """
        callbacks: list[Callable[[], None]] = [self._gate.release]
        if len(entries) > 1:
            callbacks = [functools.partial(self._settled, entry) for entry in entries]
        try:
            for entry, callback in zip(entries, callbacks, strict=True):
                entry.notify(callback)
            return wait_for_gate(self._gate, timeout)
        finally:
            # Who waits again and again for the same objects leaves nothing behind.
            for entry, callback in zip(entries, callbacks, strict=True):
                entry.forget(callback)

    def _settled(self, entry: Entry) -> None:
        enough = next(self._seen) >= self._left
        failed = self._fail_fast and entry.outcome is not None and entry.outcome.failed
        if enough or failed:
            try:
                self._gate.release()
            except RuntimeError:
                pass  # it is open already


def _taken(waiters: list[Callable[[], None]], callback: Callable[[], None]) -> bool:
    try:
        waiters.remove(callback)
    except ValueError:
        return False
    return True


def _first_failed(entries: Sequence[Entry]) -> Outcome | None:
    for entry in entries:
        if entry.outcome is not None and entry.outcome.failed:
            return entry.outcome
    return None


def _there(entries: dict[ObjectId, Entry]) -> set[ObjectId]:
    return {obj for obj, entry in entries.items() if entry.outcome is not None}
