"""`Sweep`: runs trials as tasks, and collects their results on a thread of its own.

1. The thread of the caller submits the first trials, so that it gets their errors.
2. The engine's thread puts each end, report and question of a trial into a queue.
3. The sweep's thread takes all that is there, writes the results that are among it into the file,
   and only then gives the trials to those who wait. It submits the next trials.
"""

from __future__ import annotations

import importlib
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpunb.api.refs import ObjectRef, check_timeout, in_task
from gpunb.exceptions import GetTimeoutError, GpunbError, TaskCancelledError
from gpunb.protocol import backend
from gpunb.protocol.sink import Place
from gpunb.scheduler.resources import devices_text
from gpunb.sweeps.storage import Storage
from gpunb.sweeps.trials import Trial, best
from gpunb.sweeps.views import Views
from gpunb.sweeps.work import Rule, Source, TrialSink, Work, sweep_info
from gpunb.system.signals import HEARTBEAT, UNDIVIDED

GRACE = 5.0
"""Seconds that a trial has to end after its interrupt, before its process is killed."""

AHEAD = 32
"""Queued trials whose start is looked for at once: trials start nearly in their order."""


class Sweep:
    """The trials of a sweep, as `gpunb.sweep` starts them.

    Iterating gives each trial when it has ended, in that order. All other attributes tell of the
    present moment: `wait` first, to speak of all trials. In a notebook a sweep shows itself as a
    table that is kept up to date.
    """

    def __init__(
        self,
        work: Work,
        trials: Sequence[Trial],
        *,
        storage: Storage | None = None,
        keys: Mapping[Trial, str] | None = None,
        stop: Rule | None = None,
        source: Source | None = None,
        most: int | None = None,
        place: Place | None = None,
    ) -> None:
        """Submit the trials that are not over, `most` of them at a time."""
        self.name = work.name
        self.trials: list[Trial] = list(trials)
        """All trials, in the order of their numbers."""
        self._work, self._storage, self._keys = work, storage, keys or {}
        self._stop_rule, self._source, self._most, self._place = stop, source, most, place
        self._backend, self._info = backend.current(), sweep_info(work, () if source else trials)
        self._queue: queue.SimpleQueue[tuple[str, Any, Any]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._ended, self._next = [each for each in self.trials if each.over], 0
        self._refs: dict[Trial, ObjectRef[Any]] = {}
        self._stopping: dict[Trial, float] = {}
        self._unsaid: list[Trial] = []  # have ended, and nobody was told
        self._cancelled = self._over = False
        self._failure: BaseException | None = None
        self._states = threading.Lock()
        self._notes: list[str] = []
        self._views = Views()
        self._thread: threading.Thread | None = None
        try:
            self._fill()
            self._thread = threading.Thread(target=self._run, name="gpunb-sweep", daemon=True)
            self._thread.start()
        except BaseException:
            self._give_up()
            raise

    # ------------------------------------------------------------------------------ for its users

    def __iter__(self) -> Iterator[Trial]:
        """Each trial when it has ended: those of the file first, then in order of completion.

        Raises:
            GpunbError: after the last trial, if results could not be written to the file.
        """
        at = 0
        while True:
            while at < len(self._ended):
                at += 1
                yield self._ended[at - 1]
            with self._changed:
                if at == len(self._ended) and self._over:
                    break
            self._wait(lambda at=at: len(self._ended) > at or self._over)  # type: ignore[misc]
        self._check()

    def __len__(self) -> int:
        """The number of trials."""
        return len(self.trials)

    def __getitem__(self, number: int) -> Trial:
        """The trial with that number."""
        return self.trials[number]

    def wait(self, timeout: float | None = None) -> Sweep:
        """Wait until all trials are over, at most `timeout` seconds.

        Raises:
            KeyboardInterrupt: the user's Stop, which cancels the sweep. Results stay.
            GetTimeoutError: the time is over; the trials go on.
            GpunbError: results could not be written to the file. They are in memory.
        """
        check_timeout(timeout)
        if not self._wait(lambda: self._over, timeout):
            raise GetTimeoutError(f"{self!r} was not over after {timeout:g} s; it goes on")
        self._check()
        return self

    @property
    def done(self) -> bool:
        """Whether all trials are over."""
        return self._over

    @property
    def failed(self) -> list[Trial]:
        """The trials that have failed so far."""
        return [each for each in self.trials if each.state == "failed"]

    def best(self, metric: str = "value", mode: str = "min") -> Trial:
        """The trial with the lowest metric so far, or with ``mode="max"`` the highest.

        Raises:
            ValueError: no trial that has ended has the metric.
        """
        return best(self.trials, metric, mode)

    def table(self) -> Any:
        """A row for each trial, with parameters, metrics and state: a pandas DataFrame, or without
        pandas a list of dicts."""
        rows = [each.row() for each in self.trials]
        try:
            return importlib.import_module("pandas").DataFrame(rows)
        except ImportError:
            return rows

    def cancel(self) -> None:
        """Stop the trials that run, and start no more. Results stay."""
        self._post("cancel")

    def save(self) -> None:
        """Write the results that could not be written before to the sweep's file.

        Raises:
            GpunbError: that is still impossible.
        """
        if self._storage is None:
            raise GpunbError("this sweep has no file: give it a name=")
        if self._over:
            self._storage.retry()
        else:
            self._storage.save([])
        self._check()

    def counts(self) -> dict[str, int]:
        """The number of trials in each state that any trial has."""
        self.look()
        return dict(Counter(each.state for each in self.trials))

    @property
    def notes(self) -> list[str]:
        """What the user should know: of the sweep's file, and of faults."""
        if (storage := self._storage) is None:
            return list(self._notes)
        return [*storage.notes, *([storage.problem] if storage.problem else []), *self._notes]

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {state}" for state, count in self.counts().items())
        lines = [f"<Sweep {self.name} of {len(self.trials)} trials: {counts}>"]
        lines += [f"  {each!r}" for each in self.failed[:5]]
        return "\n".join([*lines, *self.notes])

    def _ipython_display_(self) -> None:
        importlib.import_module("gpunb.live").show_sweep(self)

    def watch(self, view: Callable[[], object]) -> None:
        """Call `view` on the sweep's thread now and then, and when all trials are over."""
        with self._changed:
            if not self._over:
                self._views.add(view)
                self._post("look")
                return
        view()

    def look(self) -> None:
        """Find out which trials run now; from any thread."""
        ahead = AHEAD
        for trial, ref in list(self._refs.items()):
            facts = self._backend.ask("job", ref.id[0]) or {}
            if facts.get("state") == "running":
                with self._states:  # it may end meanwhile
                    if not trial.over:
                        trial.state = "running"
                        trial.devices = devices_text(facts["devices"], shares=False)
            elif not (ahead := ahead - 1):
                break

    def stopped(self) -> KeyboardInterrupt:
        """Cancel the sweep after the user's Stop, wait until its processes had time to end, and
        return the error to raise."""
        self.cancel()
        self._wait_for(lambda: self._over, 2 * GRACE)
        text = ", ".join(f"{count} {state}" for state, count in self.counts().items())
        return KeyboardInterrupt(f"the sweep was stopped: {text}")

    def _wait(self, there: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for a condition; a Stop meanwhile cancels the sweep, so that it can run again."""
        try:
            return self._wait_for(there, timeout)
        except KeyboardInterrupt:
            raise self.stopped() from None

    def _wait_for(self, there: Callable[[], bool], timeout: float | None) -> bool:
        if timeout is None and in_task():
            # Tells the kernel, which lends the CPUs of this task, what the task waits for.
            while not there() and (pending := [each.id for each in list(self._refs.values())]):
                self._backend.wait(pending, 1, None)
                with self._changed:
                    self._changed.wait_for(there, HEARTBEAT)
        end = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not there() and (left := end - time.monotonic()) > 0:
                self._changed.wait(min(left, HEARTBEAT))  # an interrupt is seen between two waits
            return there()

    def _check(self) -> None:
        """Raise the error of the sweep itself."""
        if self._failure is not None:
            raise self._failure
        if self._storage is not None and self._storage.problem:
            raise GpunbError(self._storage.problem)

    # --------------------------------------------------------------------------- on its own thread

    def _post(self, what: str, trial: Trial | None = None, content: Any = None) -> None:
        self._queue.put((what, trial, content))

    def _run(self) -> None:
        try:
            while self._refs or self._unsaid:
                self._handle(self._take())
                self._kill_late()
                self._fill()
                ended, self._unsaid = self._unsaid, []
                if self._storage is not None:
                    self._storage.save((self._keys[each], each) for each in ended)
                with self._changed:
                    self._ended.extend(ended)
                    self._changed.notify_all()
                if (due := self._views.due) is not None and time.monotonic() >= due:
                    self._notes += self._views.update()
        except BaseException as error:
            self._failure = error
            self._give_up()
        finally:
            self._end()

    def _take(self) -> list[tuple[str, Any, Any]]:
        """All that has come from the trials; waits for the first of it, or for the time to act."""
        due = self._views.due
        times = [*self._stopping.values(), *([] if due is None else [due])]
        items = []
        try:
            left = max(0.0, min(times) - time.monotonic()) if times else None
            left = 0.0 if self._unsaid else left
            items.append(self._queue.get(timeout=left))
            while len(items) < 1000:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return items

    def _fill(self) -> None:
        """Submit trials, as many as may be under way."""
        while not self._cancelled and (self._most is None or len(self._refs) < self._most):
            if self._next == len(self.trials):
                trial = self._source.next(self._next) if self._source is not None else None
                if trial is None:
                    return
                self.trials.append(trial)
            trial = self.trials[self._next]
            self._next += 1
            if not trial.over:
                self._submit(trial)

    def _submit(self, trial: Trial) -> None:
        console = TrialSink(trial, self._post, self._place, self._info)
        with UNDIVIDED:
            try:
                ref = self._work.submit(trial, console)
            except Exception as error:
                if self._thread is None:
                    raise  # to the caller of `gpunb.sweep`
                self._conclude(trial, "failed", None, error)
                return
            self._refs[trial] = ref
            self._backend.notify(ref.id, lambda: self._post("ended", trial))

    def _handle(self, items: Sequence[tuple[str, Any, Any]]) -> None:
        for what, trial, content in items:
            match what:
                case "ended":
                    self._on_ended(trial)
                case "report":
                    self._on_report(trial, content)
                case "question":
                    self._on_question(trial, *content)
                case "cancel":
                    self._on_cancel()

    def _on_ended(self, trial: Trial) -> None:
        ref, stopping = self._refs.pop(trial), self._stopping.pop(trial, None)
        state, value, error = "done", None, None  # type: str, Any, BaseException | None
        try:
            facts = self._backend.ask("job", ref.id[0])
            if facts and facts["pid"] is not None:
                trial.seconds = facts["seconds"]
                trial.devices = devices_text(facts["devices"], shares=False)
            value = self._work.value(trial, self._backend.fetch([ref.id], 0)[0])
        except TaskCancelledError as raised:
            state, error = "cancelled", raised
        except BaseException as raised:
            state, error = "failed", raised.with_traceback(None)
        if state == "failed" and backend.existing() is not self._backend:
            state = "cancelled"  # the session was shut down
        if stopping is not None and not (self._cancelled and state == "done"):
            state, error = "cancelled" if self._cancelled else "stopped", None
        self._conclude(trial, state, value, error)

    def _conclude(self, trial: Trial, state: str, value: Any, error: BaseException | None) -> None:
        with self._states:
            trial.ended(state, value, error)
        if self._source is not None:
            self._source.ended(trial)
        self._unsaid.append(trial)

    def _on_report(self, trial: Trial, metrics: Mapping[str, Any]) -> None:
        trial.reported(metrics)
        if self._stop_rule is None or trial not in self._refs or trial in self._stopping:
            return
        try:
            stop = self._stop_rule(trial, self.trials)
        except Exception as error:
            self._stop_rule = None
            self._notes.append(f"the stop rule has failed and is not used any more: {error!r}")
            return
        if stop:
            self._stop(trial)

    def _on_question(self, trial: Trial, prompt: str, answer: Callable[..., None]) -> None:
        try:
            if self._source is None:
                raise NotImplementedError("a trial of a sweep cannot ask its user")
            answer(self._source.answer(trial, prompt), None)
        except Exception as error:
            answer(None, error)

    def _on_cancel(self) -> None:
        self._cancelled = True
        for trial in list(self._refs):
            self._stop(trial)
        for trial in self.trials[self._next :]:
            if not trial.over:
                trial.state = "cancelled"

    def _stop(self, trial: Trial) -> None:
        if trial not in self._stopping:
            self._stopping[trial] = time.monotonic() + GRACE
            self._backend.cancel(self._refs[trial].id, False, True)

    def _give_up(self) -> None:
        """Kill all trials, and keep no refs: the traceback of an error refers to this object."""
        while self._refs:
            self._backend.cancel(self._refs.popitem()[1].id, True, True)

    def _kill_late(self) -> None:
        now = time.monotonic()
        for trial, until in self._stopping.items():
            if until <= now:
                self._stopping[trial] = now + GRACE
                self._backend.cancel(self._refs[trial].id, True, True)

    def _end(self) -> None:
        for trial in self.trials:
            if not trial.over:
                trial.state = "cancelled"
        if self._storage is not None:
            self._storage.close()
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._notes += self._views.update()
        self._views.clear()
