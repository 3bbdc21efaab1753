"""Programs carried out on a session, and compared with the model."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpunb
from gpunb.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    TaskCancelledError,
    WorkerCrashedError,
)
from gpunb.leases.leases import Leases
from gpunb.leases.ledger_file import ledger_path
from gpunb.leases.report import read_entries
from gpunb.protocol import backend
from tests import sessions
from tests.programs import bodies
from tests.programs import steps as st
from tests.programs.model import Expected, Model, Value
from tests.programs.steps import Program
from tests.waiting import PATIENCE, eventually

DEVICES = "2xA100:40GiB,1xV100:16GiB"

_SEEN = 0.01
"""Seconds within which a task that is to be struck is expected to run."""


class Wrong(AssertionError):
    """The program came to something that it must not come to."""


@contextlib.contextmanager
def session(method: str = "fork") -> Iterator[Any]:
    """A session for programs, which leaves nothing behind."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(sessions.ROOT)
    settings: dict[str, Any] = {"simulate": DEVICES, "num_cpus": 2, "start_method": method}
    try:
        with sessions.session(**settings, preload=("tests.programs.bodies",)) as started:
            if method == "fork":
                eventually(lambda: gpunb.status()["preload"] is not None, "preloaded")
            yield started
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def run(program: Program) -> None:
    """Carry out a program on the session that there is.

    Raises:
        Wrong: something came of it that must not.
    """
    runner = _Runner()
    try:
        for step in program:
            runner.carry_out(step)
        runner.end()
    finally:
        runner.things.clear()
    check_idle()


class _Runner:
    def __init__(self) -> None:
        self.model = Model()
        self.things: dict[str, Any] = {}
        self.seen: dict[str, str] = {}
        self.prefix = f"{time.monotonic_ns()}-"

    def carry_out(self, step: st.Step) -> None:
        """Do a step, unless something that it needs is not there."""
        needed = [
            *getattr(step, "args", ()),
            *getattr(step, "nested", ()),
            *getattr(step, "holds", ()),
            *getattr(step, "handles", ()),
            *(getattr(step, each, "") for each in ("actor", "source")),
        ]
        if not hasattr(step, "salt") and not hasattr(step, "plan"):
            needed += [getattr(step, "name", "") if not _makes(step) else ""]
        if not all(each in self.things for each in needed if each):
            return
        getattr(self, f"_{type(step).__name__.lower()}")(step)

    # --------------------------------------------------------------------------------------- makes

    def _refs(self, names: tuple[str, ...]) -> list[Any]:
        return [self.things[each] for each in names]

    def _made(self, step: Any, *things: Any) -> None:
        self.model.made(step, step.name)
        for name, thing in zip((step.name, f"{step.name}'"), things, strict=False):
            self.things[name] = thing

    def _put(self, step: st.Put) -> None:
        value: Any = bodies.large(step.salt) if step.large else step.salt
        if step.holds:
            value = [step.salt, *self._refs(step.holds)]
        self._made(step, gpunb.put(value))

    def _task(self, step: st.Task) -> None:
        options = _options(step)
        if step.timeout is not None:
            options["timeout"] = step.timeout
        if step.plan.shape == "pair":
            options["num_returns"] = 2
        nested, handles = self._refs(step.nested), self._refs(step.handles)
        function = bodies.warm if step.reuse else bodies.task
        made = function.options(**options).remote(
            step.plan, *self._refs(step.args), nested=nested, handles=handles
        )
        self._made(step, *(made if isinstance(made, list) else [made]))

    def _generate(self, step: st.Generate) -> None:
        options = _options(step)
        if step.dynamic:
            options["num_returns"] = "dynamic"
        args = self._refs(step.args)
        made = bodies.generator.options(**options).remote(step.plan, step.count, *args)
        self._made(step, made)

    def _take(self, step: st.Take) -> None:
        source = self.things[step.source]
        node = self.model.nodes[step.source]
        if self.model.endless(node):
            return
        if not gpunb.wait([source], timeout=PATIENCE)[0]:
            raise Wrong(f"{step.source} neither yields nor ends")
        expected, may_end = self.model.stream(node, node.taken)
        try:
            ref = next(source)
        except StopIteration:
            if not may_end:
                raise Wrong(f"{step.source} ended after {node.taken} values") from None
            return
        if expected.value is None and not expected.errors:
            raise Wrong(f"{step.source} has yielded more than {node.taken} values")
        self._made(step, ref)

    def _make(self, step: st.Make) -> None:
        options: dict[str, Any] = {"max_restarts": step.restarts, "max_task_retries": step.retries}
        if step.gpus:
            options["num_gpus"] = step.gpus
        if step.known:
            options["name"] = self.prefix + step.name
        if step.kind == "threads":
            options["max_concurrency"] = 2
        made = bodies.actors[step.kind].options(**options)
        self._made(step, made.remote(step.salt, step.fails, *self._refs(step.args)))

    def _call(self, step: st.Call) -> None:
        method = self.things[step.actor].work
        args, nested = self._refs(step.args), self._refs(step.nested)
        self._made(step, method.remote(step.plan, *args, nested=nested))

    def _leave(self, step: st.Leave) -> None:
        self._made(step, self.things[step.actor].leave.remote())

    def _find(self, step: st.Find) -> None:
        node = self.model.nodes[step.actor]
        make: Any = node.step
        try:
            handle = gpunb.get_actor(self.prefix + make.name)
        except ValueError:
            ended = node.killed or node.strikes or node.revived or make.fails or make.args
            faults = [getattr(each.step, "plan", None) for each in node.calls]
            if ended or any(each is None or each.fault for each in faults):
                return
            raise
        self._made(step, handle)

    # ------------------------------------------------------------------------------------- watches

    def _get(self, step: st.Get) -> None:
        self.check(step.name)

    def check(self, name: str) -> None:
        """Get a ref, and compare what it has come to."""
        if self.model.endless(self.model.nodes[name]):
            return
        seen = outcome(self.things[name], self.model.expected(name), name)
        before = self.seen.setdefault(name, seen)
        if before != seen:
            raise Wrong(f"{name} was {before} and is now {seen}")

    def _wait(self, step: st.Wait) -> None:
        names = [each for each in step.names if each in self.things]
        nodes = [self.model.nodes[each] for each in names]
        count = min(step.count, len(names))
        if not names or (step.timeout is None and any(map(self.model.endless, nodes))):
            return
        timeout = PATIENCE if step.timeout is None else step.timeout
        refs = self._refs(tuple(names))
        ready, rest = gpunb.wait(refs, num_returns=count, timeout=timeout)
        if sorted(map(refs.index, ready + rest)) != list(range(len(refs))) or len(ready) > count:
            raise Wrong(f"wait of {names} gave {ready} and {rest}")
        if step.timeout is None and len(ready) < count:
            raise Wrong(f"{len(ready)} of {names} are ready, and not {count}")
        for each in ready:
            self.check(names[refs.index(each)])

    def _pause(self, step: st.Pause) -> None:
        time.sleep(step.seconds)

    # ---------------------------------------------------------------------------------- interferes

    def _cancel(self, step: st.Cancel) -> None:
        gpunb.cancel(self.things[step.name], force=step.force, recursive=step.recursive)
        self.model.cancel(step.name, recursive=step.recursive)

    def _interrupt(self, step: st.Interrupt) -> None:
        backend.current().interrupt(self.things[step.name].id)
        self.model.interrupt(step.name)

    def _strike(self, step: st.Strike) -> None:
        pid = self._pid(self.things[step.name])
        if pid is not None:
            self.model.strike(step.name)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _pid(thing: Any) -> int | None:
        """The process of a task or an actor, as soon as it runs, but soon."""
        what, ident = "job", getattr(thing, "task_id", None)
        if isinstance(thing, gpunb.ActorHandle):
            what, ident = "actor", thing._actor_id
        deadline = time.monotonic() + _SEEN
        while time.monotonic() < deadline:
            facts = backend.current().ask(what, ident)
            if facts is None or facts["state"] not in ("queued", "running", "starting", "alive"):
                return None
            if facts["pid"] and facts["state"] != "queued":
                return int(facts["pid"])
            time.sleep(0.0005)
        return None

    def _kill(self, step: st.Kill) -> None:
        gpunb.kill(self.things[step.actor], no_restart=not step.restart)
        self.model.kill(step.actor, restart=step.restart)

    def _drop(self, step: st.Drop) -> None:
        if step.name in self.model.sleepers():
            self._stop(step.name)
        self.model.drop(step.name)
        del self.things[step.name]

    # ----------------------------------------------------------------------------------------- end

    def end(self) -> None:
        """End what would not end, and look at what all the refs that are left have come to."""
        for name in self.model.sleepers():
            self._stop(name)
        for name, thing in list(self.things.items()):
            if isinstance(thing, gpunb.ObjectRef):
                self.check(name)

    def _stop(self, name: str) -> None:
        gpunb.cancel(self.things[name], force=True)
        self.model.cancel(name, recursive=True)


def _makes(step: st.Step) -> bool:
    return isinstance(step, st.Take | st.Call | st.Leave | st.Find)


def _options(step: st.Task | st.Generate) -> dict[str, Any]:
    options: dict[str, Any] = {"max_retries": step.retries}
    if step.gpus:
        options["num_gpus"] = step.gpus
    return options


_ENDS = {
    TaskCancelledError: "cancelled",
    ActorDiedError: "died",
    ActorUnavailableError: "unavailable",
    WorkerCrashedError: "crashed",
}


def outcome(ref: Any, expected: Expected, name: str) -> str:
    """What a ref has come to, in a word, if that is expected."""
    try:
        value = _value(ref, name)
    except GetTimeoutError as error:
        raise Wrong(f"{name} never ends: {error}; expected {expected}") from error
    except Exception as error:
        kind = next((word for each, word in _ENDS.items() if isinstance(error, each)), None)
        if kind is None and isinstance(error, ValueError):
            kind = str(getattr(error, "cause", error))
        elif kind is None and isinstance(error, TimeoutError):
            kind = "timeout"
        if kind not in expected.errors:
            raise Wrong(f"{name} failed, expected {expected}:\n{error}") from error
        return str(kind)
    if expected.value is None:
        raise Wrong(f"{name} is {value!r:.100}, expected {expected}")
    _compare(value, expected.value, name)
    return "value"


def _value(ref: Any, name: str) -> Any:
    """Get it, in one of the ways that there are."""
    way = zlib.crc32(name.encode()) % 4
    if way == 0:
        return ref.result(PATIENCE)
    if way == 1:
        return gpunb.get([ref], timeout=PATIENCE)[0]
    if way == 2:
        next(gpunb.as_completed([ref], timeout=PATIENCE))
        return ref.future().result(0)
    return gpunb.get(ref, timeout=PATIENCE)


def _compare(value: Any, expected: Value, name: str) -> None:
    match expected.form:
        case "number":
            right = value == expected.number
        case "large":
            right = value == bodies.large(expected.number)
        case "call":
            number, count = value
            right = number == expected.number and expected.low <= count <= expected.high
        case "refs" | "dynamic":
            refs = list(value)
            right = expected.form == "dynamic" or refs.pop(0) == expected.number
            inner = expected.inner
            if expected.ends is not None and len(refs) == expected.ends[0] + 1:
                before, error = expected.ends
                last = inner[before].value if len(inner) == len(refs) else None
                inner = (*inner[:before], Expected(last, frozenset({error})))
            right = right and len(refs) == len(inner)
            if right:
                for index, (ref, each) in enumerate(zip(refs, inner, strict=True)):
                    handle = isinstance(ref, gpunb.ActorHandle)
                    outcome(bodies.used(ref) if handle else ref, each, f"{name}[{index}]")
        case _:
            right = False
    if not right:
        raise Wrong(f"{name} is {value!r:.100}, expected {expected}")


# ---------------------------------------------------------------------------------------- leftovers


def leftovers() -> dict[str, Any]:
    """What a session that is idle must not have: in the books first, which costs little."""
    engine = backend.existing().engine
    core, store = engine.scheduler, engine.store
    found: dict[str, Any] = {
        "entries": store._entries,
        "streams": store._streams,
        "references of workers": {w: held for w, held in list(store._workers.items()) if held},
        "jobs": engine.jobs,
        "jobs by worker": {w: each for w, each in list(engine.by_worker.items()) if each},
        "actors of the runtime": list(engine.actors),
        "residents": engine.actors._residents,
        "names": engine.actors._names,
        "tasks": core.tasks,
        "children": core.life.children,
        "dependents": core.life.dependents,
        "book": core.state.actors,
        "busy workers": [each for each in list(core.state.workers.values()) if each.tasks],
        "leases": leases_left(engine.leases),
    }
    if not any(found.values()):
        facts = gpunb.status()
        there, total = facts["available"], facts["total"]
        missing = {name: there.get(name) for name in total if there.get(name) != total[name]}
        objects = {name: count for name, count in facts["objects"].items() if count}
        queues = {name: facts[name] for name in ("running", "queued", "actors")}
        found = {"available": missing, "objects": objects, **queues}
    return {name: each for name, each in found.items() if each}


def leases_left(leases: Leases) -> dict[str, Any]:
    """Leases of an idle session: of its workers, in its record, and in the ledger's file."""
    found: dict[str, Any] = {"of workers": dict(leases._held)}
    if (ledger := leases.ledger) is not None:
        found["in the record"] = {n: each for n, each in ledger.record.stakes.items() if each.held}
        entries = [each.record for each in read_entries(ledger_path())]
        mine = [each for each in entries if each.id == ledger.record.id]
        found["in the ledger"] = [each for each in mine if any(map(each.held, each.stakes))]
    return {name: each for name, each in found.items() if each}


def _doings() -> str:
    """What the threads of this process and its workers are doing."""
    frames = sys._current_frames()
    lines = []
    for thread in threading.enumerate():
        stack = traceback.format_stack(frames.get(thread.ident or 0), limit=4)
        lines.append(f"{thread.name}:\n{''.join(stack)}")
    for pid, command in sessions.marked().items():
        with contextlib.suppress(OSError):
            about = Path(f"/proc/{pid}")
            state = about.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            waits = about.joinpath("wchan").read_text()
            lines.append(f"{pid} is {state} in {waits}: {command}")
    return "\n".join(lines)


def check_idle() -> None:
    """Wait until nothing of the programs is left.

    Raises:
        Wrong: something is.
    """
    began = collected = time.monotonic()
    gc.collect(0)  # what was raised and caught
    while left := leftovers():
        now = time.monotonic()
        if now > began + PATIENCE:
            raise Wrong(f"this is left: {left!r:.2000}\n{_doings()}")
        if now > collected + 0.05:
            gc.collect()
            collected = now
        time.sleep(0.001)


def check_processes() -> None:
    """Those that the kernel started are the ones that it knows, and hold no memory of objects.

    Raises:
        Wrong: there are others.
    """
    engine = backend.existing().engine

    def same() -> bool:
        known = {each.pid for each in engine.pool.processes()}
        return known == set(sessions.named("gpunb-worker"))

    eventually(same, "the workers are those that are known", PATIENCE)
    memory = engine.store.memory.facts()
    if any(count for name, count in memory.items() if name in ("used", "spilled")):
        raise Wrong(f"memory is left: {memory}")
    segments = [each for each in sessions.open_files().values() if "memfd" in each]
    if segments:
        raise Wrong(f"memory segments are left: {segments}")
