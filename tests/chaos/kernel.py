"""A kernel to which faults happen: ``python -m tests.chaos.kernel '{"seed": 1, ...}'``.

Each round runs a few jobs while one to three faults happen, and compares the ends of the jobs with
the model. Each wrong thing is printed as a line of JSON; then a new session begins, so that one
wrong thing does not hide the next.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gpunb
from gpunb import exceptions as ex
from gpunb.engine.job_log import FILES, Log
from gpunb.protocol import backend, sink
from tests.chaos import faults, jobs, seam
from tests.chaos.faults import Fault, Target
from tests.sessions import open_files

PATIENCE = 30.0
"""Seconds within which anything ends."""

UNNAMED = "/tmp/#"
"""How the path of a temporary file without a name begins: the log of a job that prints much."""

HANGS = 60.0
"""Seconds after which a round is said to hang, whatever it waits for."""


class Wrong(Exception):
    """A fault had a consequence that it must not have. Equal causes have equal first arguments."""


class Sheet(sink.Sink):
    """What jobs print."""

    def __init__(self, name: str) -> None:
        self.shown: list[str] = []
        self.log = Log()
        sheets.append(self)

    def named(self, name: str) -> Sheet:
        return self

    def text(self, stream: str, text: str) -> None:
        if stream == "stdout":
            self.shown.append(text)
        self.log.add(("text", stream, {"text": text}))


sheets: list[Sheet] = []


@dataclass
class Job:
    """What was handed in: its refs, and what has to come of each."""

    kind: str
    number: int
    refs: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    ends: str = "value"
    actor: Any = None
    refused: BaseException | None = None

    @property
    def is_actor(self) -> bool:
        return self.kind.startswith("actor")


def _task(function: Any, value: Any, *arguments: Any, **options: Any) -> Callable[[Job], None]:
    remote = gpunb.remote(**options)(function) if options else gpunb.remote(function)

    def hand_in(job: Job) -> None:
        job.refs.append(remote.remote(job.number, *arguments))
        job.values.append(value(job.number) if callable(value) else value)

    return hand_in


def _with_large(job: Job) -> None:
    ref = gpunb.put(jobs.large(job.number))
    job.refs += [ref, _measured.remote(ref, job.number)]
    job.values += [jobs.large(job.number), job.number + 2]


def _actor(parts: int) -> Callable[[Job], None]:
    remote = gpunb.remote(num_gpus=parts / 10)(jobs.Actor)

    def hand_in(job: Job) -> None:
        job.actor = remote.remote(job.number, parts)
        job.refs += [job.actor.add.remote(1), job.actor.add.remote(2), job.actor.large.remote(3)]
        job.values += [job.number + 1, job.number + 3, jobs.large(3)]

    return hand_in


def _generator(job: Job) -> None:
    stream = _yields.remote(job.number)
    job.values += [job.number, jobs.large(job.number), job.number + 1]
    for _ in job.values:
        if not gpunb.wait([stream], timeout=PATIENCE)[0]:
            raise Wrong("a generator neither yields nor ends")
        with contextlib.suppress(StopIteration):
            job.refs.append(next(stream))


def _cancelled(job: Job) -> None:
    job.ends = "cancelled"
    job.refs.append(_sleeps.remote(job.number))
    job.values.append(None)


def _timed(job: Job) -> None:
    job.ends = "timeout"
    job.refs.append(_timed_out.remote(job.number))
    job.values.append(None)


def _failing(job: Job) -> None:
    job.ends = "raised"
    job.refs.append(_fails.remote(job.number))
    job.values.append(None)


_measured = gpunb.remote(jobs.measured)
_yields = gpunb.remote(jobs.yields)
_sleeps = gpunb.remote(jobs.sleeps)
_timed_out = gpunb.remote(timeout=0.02)(jobs.sleeps)
_fails = gpunb.remote(jobs.fails)

JOBS: dict[str, tuple[float, Callable[[Job], None]]] = {
    "plain": (6, _task(jobs.plain, lambda n: n + 1)),
    "fragile": (2, _task(jobs.naps, lambda n: n + 6, 0.001, max_retries=0)),
    "nap": (4, _task(jobs.naps, lambda n: n + 6, 0.002)),
    "large": (4, _task(jobs.large, jobs.large)),
    "large argument": (4, _with_large),
    "printed": (3, _task(jobs.printed, lambda n: n + 3)),
    "flooded": (0.5, _task(jobs.flooded, lambda n: n + 4)),
    "nested": (2, _task(jobs.nested, lambda n: 3 * n + 6)),
    "puts": (2, _task(jobs.puts, lambda n: n + 2)),
    "share": (4, _task(jobs.on_device, lambda n: n + 5, 5, num_gpus=0.5)),
    "device": (2, _task(jobs.on_device, lambda n: n + 5, 10, num_gpus=1)),
    "actor": (2, _actor(0)),
    "actor on a device": (1.5, _actor(3)),
    "generator": (2, _generator),
    "raised": (2, _failing),
    "cancelled": (1.5, _cancelled),
    "timeout": (0.7, _timed),
}


class Kernel:
    """Runs rounds."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.seed = settings["seed"]
        self.attached = settings.get("attached")
        self.others = [faults.Others()] if self.attached else []
        self.only = settings.get("only")
        self.without = set(settings.get("without", ()))
        assert seam.seam is not None
        page = seam.seam
        if self.attached:
            page = seam.Seam(settings["page"])
        self.target = Target(page, settings.get("main") or os.getpid(), self.attached)
        # Of several kernels only one may kill zygotes, or there are more deaths than are forgiven.
        self.target.spares_zygotes = self.attached is not None and self.seed % 10 > 0
        self.counts: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.rounds = 0
        self.away = 0
        self.recent: list[str] = []
        self.fresh = 0
        self.again: list[tuple[Job, Any, Any]] = []
        sink.install(Sheet)
        signal.signal(signal.SIGUSR2, lambda *_: None)

    # ----------------------------------------------------------------------------------- sessions

    def begin(self) -> None:
        """A session, or a connection to the head process."""
        if self.attached:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    gpunb.init(self.attached)
                    return
                except ex.GpunbError:
                    # The answer of the head process was lost, or another kernel's fault has just
                    # left it without descriptors.
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.1)
        self.again.clear()
        gpunb.init(simulate="2xA100:40GiB", num_cpus=2, preload=("tests.chaos.jobs",))
        deadline = time.monotonic() + PATIENCE
        while gpunb.status()["preload"] is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.recent.clear()

    def begin_anew(self) -> None:
        """After something went wrong."""
        for number in range(len(seam.SITES)):
            for section in (seam.MAIN, seam.CHILD):
                self.target.page.disarm(section, number)
        family = [] if self.attached else self.target.processes()
        with contextlib.suppress(Exception):
            gpunb.shutdown()
        backend.install(None)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        gc.collect()
        self.begin()

    # ------------------------------------------------------------------------------------- rounds

    def run(self, first: int, count: int, until: float) -> None:
        """Rounds from this one on, until so many faults have happened."""
        self.begin()
        for number in itertools.count(first):
            if sum(self.counts.values()) >= count or time.monotonic() > until:
                break
            faulthandler.dump_traceback_later(HANGS, exit=True)
            chance = random.Random(f"{self.seed}:{number}")
            chosen = self._choose(chance)
            report(round=number, faults=repr(chosen))
            self.recent = [*self.recent[-4:], f"{number}: {chosen}"]
            self.rounds += 1
            try:
                try:
                    self._round(chance, chosen)
                finally:
                    # An interrupt that is still to come must not come into the end of another.
                    chosen.sort(key=lambda each: not isinstance(each, faults.Interrupt))
                    for each in chosen:
                        each.end(self.target)
            except Wrong as error:
                self._went_wrong(number, chosen, error)
            except Exception as error:  # noqa: BLE001 - the harness's own, or of the session
                self._went_wrong(number, chosen, Wrong(_place(error), traceback.format_exc()))
        faulthandler.dump_traceback_later(HANGS, exit=True)
        self._end()
        faulthandler.cancel_dump_traceback_later()

    def _choose(self, chance: random.Random) -> list[Fault]:
        kinds = faults.kinds(self.attached is not None)
        if self.only:
            kinds = {name: each for name, each in kinds.items() if name in self.only}
        names = [name for name in kinds if name not in self.without]
        chosen: list[Fault] = []
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            name = chance.choices(names, [kinds[each][0] for each in names])[0]
            fault = kinds[name][1](chance)
            if fault.kind not in self.without and fault.kind not in [e.kind for e in chosen]:
                chosen.append(fault)
        return chosen

    def _sent_away(self) -> bool:
        """Whether this kernel has lost its connection to a head process that goes on, as it does
        when a message is lost or cannot be understood. It may come back."""
        connection = getattr(backend.existing(), "connection", None)
        return connection is not None and connection.lost and _alive(self.target.main)

    def _went_wrong(self, number: int, chosen: list[Fault], error: Wrong) -> None:
        if self.attached and self._sent_away():
            self.away += 1
            self.begin_anew()
            return
        kinds = " + ".join(sorted(each.kind for each in chosen)) or "no fault"
        self._wrong_output(number, kinds, *error.args)
        self.begin_anew()

    def _wrong_output(self, number: int, kinds: str, what: str, *rest: object) -> None:
        what = re.sub(r"\d+", "N", what)
        self.wrong[what] += 1
        about = "\n".join(map(str, rest))[:8000]
        reported = {"wrong": what, "faults": kinds, "about": about, "recent": self.recent}
        report(**reported, seed=self.seed, number=number)

    def _round(  # noqa: C901 - a round is told in one piece
        self, chance: random.Random, chosen: list[Fault]
    ) -> None:
        made: list[Job] = []
        interrupts = [each for each in chosen if isinstance(each, faults.Interrupt)]
        interrupted = 0
        # Of a job whose submission is interrupted there may be no ref to cancel it.
        names = [each for each in JOBS if not interrupts or each != "cancelled"]
        picked = chance.choices(names, [JOBS[each][0] for each in names], k=chance.randint(1, 4))
        picked.sort(key=lambda name: name == "cancelled")  # a generator waits for a CPU at once
        try:
            for each in chosen:
                each.begin(self.target)
            for name in picked:
                job = Job(name, chance.randrange(1 << 20))
                made.append(job)
                try:
                    JOBS[name][1](job)
                except Wrong:
                    raise
                except Exception as error:  # noqa: BLE001 - looked at below
                    job.refused = error.with_traceback(None)
                self.target.job = max([self.target.job, *(ref.task_id for ref in job.refs)])
            for each in chosen:
                self._strike(each, chosen)
            self._look(made, chosen)
        except KeyboardInterrupt:
            interrupted += 1
        deadline = time.monotonic() + PATIENCE
        try:
            while interrupts and not interrupted:
                if time.monotonic() > deadline:
                    raise Wrong("an interrupt never arrived")
                time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        if interrupts:
            self._look(made, chosen)  # what was handed in goes on
        for each in chosen:
            if each.end(self.target):
                self.counts[each.kind] += 1
                report(fault=each.kind)
        self._look_again()
        self._after(made)

    def _strike(self, fault: Fault, chosen: list[Fault]) -> None:
        try:
            fault.strike(self.target)
        except Exception as error:
            if not any(each.excuses(error) for each in (*chosen, *self.others)):
                raise

    def _look_again(self) -> None:
        """A value that could not be had because of a fault can be had when that is over."""
        for job, ref, value in self.again:
            self._check(job, ref, value, [])

    def _look(self, made: list[Job], chosen: list[Fault]) -> None:
        """See what came of the jobs."""
        # First of all: such a job holds a CPU, for which another job of this kernel may wait.
        for job in made:
            if job.kind == "cancelled" and job.refs:
                gpunb.cancel(job.refs[0])
        # Then actors, which end at once: two kernels that each keep a part of a device, and wait
        # for more of it, would wait for each other.
        for job in sorted(made, key=lambda job: not job.is_actor):
            if job.refused is not None:
                self._check_error(job, job.refused, chosen)
            for index, ref in enumerate(job.refs):
                word = self._check(job, ref, job.values[index], chosen)
                if word == "failed" and job.is_actor and index == 0:
                    # The call may have failed before it changed the actor, or after.
                    job.values[1] = (job.number + 3, job.number + 2)
            job.actor = None

    def _check(self, job: Job, ref: Any, value: Any, chosen: list[Fault]) -> str:
        """See what came of a ref; a tuple of values stands for any of them. The end in a word."""
        try:
            got = gpunb.get(ref, timeout=PATIENCE)
        except ex.GetTimeoutError as error:
            raise Wrong(f"{job.kind} never ends", error, self._doings()) from None
        except Exception as error:  # noqa: BLE001 - looked at
            self._check_error(job, error, chosen)
            word = "cancelled" if isinstance(error, ex.TaskCancelledError) else "failed"
        else:
            right = got in value if isinstance(value, tuple) else got == value
            if job.ends != "value" or not right:
                raise Wrong(f"{job.kind} has a wrong value", f"{got!r:.100}, not {value!r:.100}")
            word = "done"
        task = getattr(ref, "task_id", 0)
        if task and not job.is_actor and job.kind != "generator":
            facts = backend.current().ask("job", task)
            if facts is not None and facts["state"] != word:
                if (word, facts["state"]) == ("failed", "done"):
                    self.again.append((job, ref, value))  # it was not the job that failed
                    return word
                raise Wrong(f"{job.kind} ended as {facts['state']}, not {word}", facts)
        return word

    def _check_error(self, job: Job, error: BaseException, chosen: list[Fault]) -> None:
        if "held twice" in str(error):
            raise Wrong("a device was held twice", error)
        if job.ends == "cancelled" and isinstance(error, ex.TaskCancelledError):
            return
        if job.ends == "timeout" and isinstance(error, TimeoutError):
            return
        if job.ends == "raised" and jobs.PLANNED in str(error):
            return
        if any(each.excuses(error) for each in (*chosen, *self.others)):
            return
        session: Any = backend.existing()
        failure = getattr(session, "_failure", None)
        if failure is not None:
            raise Wrong(f"the session ended: {_place(failure)}", _text(failure))
        text = "\n".join(str(error).splitlines()[-3:])
        if isinstance(error, ex.TaskError) and error.cause is not None:
            raise Wrong(f"in a task: {type(error.cause).__name__}: {text[-150:]}", str(error))
        raise Wrong(f"{type(error).__name__}: {text[:150]}", _text(error))

    def _after(self, made: list[Job]) -> None:
        """The session serves on, and nothing is left."""
        failure = getattr(backend.existing(), "_failure", None)
        if failure is not None:
            raise Wrong(f"the session ended: {_place(failure)}", _text(failure))
        for job in made:
            job.refs.clear()
            job.actor = None
        made.clear()
        self.again.clear()
        sheets.clear()
        self._serves_on()
        if not self.attached:
            self._look_for_leftovers()

    def _serves_on(self) -> None:
        until = time.monotonic() + PATIENCE + 5
        while True:
            try:
                if gpunb.get(_next.remote(1), timeout=PATIENCE) != 2:
                    raise Wrong("the next job has a wrong value")
                return
            except ex.GetTimeoutError as error:
                raise Wrong("the next job never ends", error, self._doings()) from None
            except ex.GpunbError as error:
                # Too many have died lately: another one is tried half a minute later.
                later = "no zygote could be started" in str(error)
                # The faults of other kernels go on.
                excused = later or any(each.excuses(error) for each in self.others)
                if not excused or time.monotonic() > until:
                    what = f"the next job fails: {type(error).__name__}"
                    raise Wrong(what, _text(error)) from None
                time.sleep(0.05)

    def _look_for_leftovers(self) -> None:
        deadline = time.monotonic() + PATIENCE
        gc.collect(0)
        while left := _leftovers():
            if time.monotonic() > deadline:
                what = f"left in the books: {', '.join(left)}"
                raise Wrong(what, f"{left!r:.2000}", self._doings())
            time.sleep(0.001)
            gc.collect()
        self.fresh += 1
        if self.fresh % 20 == 0:
            self._check_processes()

    def _check_processes(self) -> None:
        """The processes that there are are those that are known, and no descriptor is left."""
        session: Any = backend.existing()
        engine = session.engine
        deadline = time.monotonic() + PATIENCE
        while True:
            gc.collect()
            family = self.target.family()
            known = {each.pid for each in engine.pool.processes()}
            there = set(family.get("gpunb-worker", ()))
            opened = open_files()
            memory = [each for each in opened.values() if "memfd" in each]
            mapped = _mapped()
            logs = sum(each.startswith(UNNAMED) for each in opened.values())
            room = 30 + 4 * len(known)
            problem = ""
            if known != there:
                problem = "processes are left" if there - known else "processes are missing"
            elif memory or mapped:
                problem = "memory segments are left"
            elif len(opened) - logs > room or logs > FILES:
                problem = "descriptors are left"
            if not problem:
                return
            if time.monotonic() > deadline:
                about = f"{known} known, {family}, {sorted(opened.values())}, {mapped}"
                raise Wrong(problem, about)
            time.sleep(0.01)

    def _doings(self) -> str:
        """What the session says of itself, and what its processes are doing."""
        try:
            facts = gpunb.status()
            names = ("waiting", "running", "actors", "devices", "warnings", "notes", "available")
            text = "\n".join(f"{name}: {facts.get(name)!r:.1500}" for name in names)
        except Exception as error:  # noqa: BLE001 - the session may be of no use
            text = f"it cannot be asked: {error!r}"
        if self.attached:
            return text
        from tests.programs import running

        return f"{text}\n{running._doings()}"

    def _end(self) -> None:
        if not self.attached:
            try:
                self._check_processes()
            except Wrong as error:
                self._wrong_output(-1, "all before the end", *error.args)
        left = [] if self.attached else self.target.processes()
        gpunb.shutdown()
        deadline = time.monotonic() + PATIENCE
        while left := [pid for pid in left if _alive(pid)]:
            if time.monotonic() > deadline:
                self._wrong_output(-1, "the end", "processes are left after the end", left)
                break
            time.sleep(0.005)
        report(end=True, rounds=self.rounds, away=self.away, wrong_ones=dict(self.wrong))


_next = gpunb.remote(jobs.plain)


def _leftovers() -> dict[str, Any]:
    from tests.programs import running

    found = running.leftovers()
    found.pop("available", None)  # another kernel may have them
    return found


def _mapped() -> list[str]:
    with open("/proc/self/maps") as file:
        return [line.split()[-2] for line in file if "memfd:gpunb" in line]


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _place(error: BaseException) -> str:
    """Where an error comes from, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if "/gpunb/" in each.filename]
    where = f"{os.path.basename(ours[-1].filename)}:{ours[-1].name}" if ours else "?"
    return f"{type(error).__name__}: {error!s:.100} in {where}"


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def report(**facts: Any) -> None:
    sys.__stdout__.write(json.dumps(facts) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def main() -> None:
    settings = json.loads(sys.argv[1])
    faulthandler.enable()
    until = time.monotonic() + settings.get("seconds", 1e9)
    Kernel(settings).run(settings.get("first", 0), settings["count"], until)


if __name__ == "__main__":
    main()
