"""Runs kernels to which faults happen, and says what went wrong.

There are two worlds: four kernels with a session each, which share the ledger of leases; and a head
process with three kernels attached. A kernel that ends or hangs counts as one wrong thing, and
another kernel goes on in its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpunb.system import runtime_dir as folder
from tests.chaos import seam
from tests.chaos.faults import LIMITED, Target
from tests.sessions import ROOT

SITE = Path(__file__).parent / "site"
HEAD = "chaos"
GONE = 5.0
"""Seconds within which all that a killed process has started is gone."""

MACHINE = {"simulate": "2xA100:40GiB", "num_cpus": 2, "preload": ["tests.chaos.jobs"]}


@dataclass
class Report:
    """What came of it.

    Attributes:
        faults: how many of each kind happened.
        wrong: what went wrong, each as the kernel said it.
    """

    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.faults.values())

    def text(self) -> str:
        """For people."""
        lines = [f"{self.total} faults of {len(self.faults)} kinds in {self.seconds:.0f} s"]
        lines += [f"{count:7}  {kind}" for kind, count in sorted(self.faults.items())]
        seen: Counter[str] = Counter(each["wrong"] for each in self.wrong)
        first = {each["wrong"]: each for each in reversed(self.wrong)}
        for what, count in seen.most_common():
            one = first[what]
            lines += [
                f"\n{count} times: {what}",
                f"  first in round {one['number']} of seed {one['seed']}: {one['faults']}",
                *(f"    {each}" for each in one.get("recent", ())),
                *(f"  | {line}" for line in one.get("about", "").splitlines()),
                _again(one),
            ]
        return "\n".join(lines)


def _again(one: dict[str, Any]) -> str:
    """The command that repeats what went wrong, with the rounds before it."""
    command = f"python -m tests.chaos --world {one['world']} --kernel {one['seed']}"
    return f"  again: {command} --first {max(0, one['number'] - 20)} --faults 60"


class Run:
    """One kernel after the other with the same seed, until so many faults have happened."""

    def __init__(self, world: World, seed: int, first: int, count: int) -> None:
        self.world = world
        self.seed = seed
        self.next = first
        self.left = count
        self.process: subprocess.Popen[str] | None = None
        self.killed = False
        self.stopped = False
        self._folder = Path(tempfile.mkdtemp(dir=world.folder))
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while self.left > 0 and not self.stopped and time.monotonic() < self.world.until:
            self._once()

    def _once(self) -> None:
        world = self.world
        page = self._folder / "page"
        seam.Seam.make(str(page))
        settings = {
            "seed": self.seed,
            "first": self.next,
            "count": self.left,
            "seconds": world.until - time.monotonic(),
            "without": list(world.without),
            **world.settings(),
        }
        errors = self._folder / "errors"
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.kernel", json.dumps(settings)],
                env=world.environment(page),
                cwd=ROOT,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.process = process
        ended = False
        recent = ""
        assert process.stdout is not None
        for line in process.stdout:
            printed = json.loads(line)
            ended = ended or "end" in printed
            if "round" in printed:
                self.next = printed["round"] + 1
                recent = printed["faults"]
            world.printed(self, printed)
        process.stdout.close()
        code = process.wait()
        self.process = None
        if ended:
            self.left = 0
        elif self.killed:
            self.killed = False
        else:
            text = errors.read_text()[-6000:]
            hung = "Timeout (" in text
            what = "a kernel hung" if hung else f"a kernel ended with {code}"
            where = f" in {_hung_in(text)}" if hung else ""
            world.printed(
                self,
                {
                    "wrong": what + where,
                    "faults": recent,
                    "seed": self.seed,
                    "number": self.next - 1,
                    "about": text,
                },
            )


def _hung_in(text: str) -> str:
    """Where the main thread was, in the package."""
    main = text.rpartition("(most recent call first):")[2]
    for line in main.splitlines():
        if "/gpunb/" in line:
            path, _, rest = line.partition(", line ")
            return (
                f"{Path(path.strip().removeprefix('File ').strip(chr(34))).name} {rest.split()[-1]}"
            )
    return "?"


class World:
    """Where runs take place."""

    name = "sessions"
    kernels = 4

    def __init__(self, folder: Path, without: Sequence[str], until: float, report: Report) -> None:
        self.folder = folder
        self.without = without
        self.until = until
        self.report = report
        self.runs: list[Run] = []
        self._lock = threading.Lock()
        for each in ("seats", "ledger", "run"):
            (folder / each).mkdir(mode=0o700)

    def environment(self, page: Path) -> dict[str, str]:
        """Of a kernel."""
        path = os.pathsep.join([str(SITE), str(ROOT)])
        return {**os.environ, **self._folders(), seam.PAGE: str(page), "PYTHONPATH": path}

    def _folders(self) -> dict[str, str]:
        return {
            "GPUNB_CHAOS_SEATS": str(self.folder / "seats"),
            "GPUNB_LEDGER_DIR": str(self.folder / "ledger"),
            folder.VARIABLE: str(self.folder / "run"),
        }

    def settings(self) -> dict[str, Any]:
        """More for a kernel."""
        return {}

    def printed(self, run: Run, printed: dict[str, Any]) -> None:
        """What a kernel says."""
        with self._lock:
            if "fault" in printed:
                self.report.faults[printed["fault"]] += 1
                run.left -= 1
            elif "wrong" in printed:
                self.report.wrong.append({"world": self.name, **printed})
            elif "round" in printed:
                self.report.rounds += 1

    def run(self, seed: int, first: int, count: int, only: int | None = None) -> None:
        """So many faults."""
        seeds = [10 * seed + each for each in range(self.kernels)] if only is None else [only]
        share = -(-count // len(seeds))
        self.runs = [Run(self, each, first, share) for each in seeds]
        chance = random.Random(seed)
        for each in self.runs:
            each.thread.start()
        next_kill = share // 2
        while any(each.thread.is_alive() for each in self.runs):
            time.sleep(0.05)
            done = count - sum(each.left for each in self.runs)
            if done > next_kill:
                next_kill = done + 50 + chance.randrange(200)
                self.strike(chance)
        for each in self.runs:
            each.thread.join()

    def strike(self, chance: random.Random) -> None:
        """Kill or stop a kernel, with all that is going on in it."""
        run = chance.choice(self.runs)
        process = run.process
        if process is None or "kill kernel" in self.without:
            return
        if chance.random() < 0.5:
            process.send_signal(signal.SIGSTOP)
            threading.Timer(0.1, process.send_signal, [signal.SIGCONT]).start()
            self.report.faults["SIGSTOP to a kernel"] += 1
            return
        run.killed = True
        self.kill(process.pid, "a kernel", run)

    def kill(self, pid: int, what: str, run: Run | None = None) -> None:
        """SIGKILL, after which nothing that this process has started is left."""
        family = Target(None, pid, None).family()
        os.kill(pid, signal.SIGKILL)
        kind = f"SIGKILL to {what}"
        self.report.faults[kind] += 1
        everybody = [each for pids in family.values() for each in pids]
        for each in everybody:  # which the process had stopped, and can let go on no more
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)
        left = _gone([pid, *everybody])
        if left:
            where = {"seed": run.seed if run else 0, "number": run.next if run else 0}
            about = f"{left} of {family}"
            wrong = {"wrong": f"processes outlive {what} that was killed", "about": about}
            self.report.wrong.append({"world": self.name, "faults": kind, **where, **wrong})


class Heads(World):
    """A head process with three kernels."""

    name = "head"
    kernels = 3

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.page = self.folder / "page of the head"
        self.pid, self.log = 0, Path()
        self._starting = threading.Lock()

    def settings(self) -> dict[str, Any]:
        with self._starting:
            if not _alive(self.pid):
                self._look_at_the_dead()
                self._start()
        return {"attached": HEAD, "page": str(self.page), "main": self.pid}

    def _look_at_the_dead(self) -> None:
        """Report a head process that has ended by itself, with its log."""
        if self.pid:
            wrong = {"wrong": "the head process ended", "about": self.log.read_text()[-6000:]}
            place = {"faults": "any", "seed": self.runs[0].seed, "number": self.runs[0].next}
            self.report.wrong.append({"world": self.name, **wrong, **place})

    def _start(self) -> None:
        seam.Seam.make(str(self.page))
        program = (
            "import json, os, sys; from gpunb.cli import start\n"
            f"os.environ.update({self._with_seam()!r})\n"
            "print(json.dumps(start.start_head(sys.argv[1], json.loads(sys.argv[2]))))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, HEAD, json.dumps(MACHINE)],
            env={**os.environ, **self._folders(), "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        facts = json.loads(done.stdout)
        self.pid, self.log = facts["pid"], Path(facts["log"])

    def _with_seam(self) -> dict[str, str]:
        path = os.pathsep.join([str(SITE), str(ROOT)])
        return {seam.PAGE: str(self.page), "PYTHONPATH": path}

    def run(self, seed: int, first: int, count: int, only: int | None = None) -> None:
        try:
            super().run(seed, first, count, only)
            if not _alive(self.pid):
                self._look_at_the_dead()
        finally:
            self.end()

    def strike(self, chance: random.Random) -> None:
        super().strike(chance)
        # A kernel that was killed can no longer end what it did to the head's processes.
        for pid in (self.pid, *Target(None, self.pid, None).descendants()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                for what in LIMITED:
                    _, hard = resource.prlimit(pid, what)
                    resource.prlimit(pid, what, (hard, hard))

    def end(self) -> None:
        """Kill the head process: nothing of it is left."""
        if not _alive(self.pid):
            return
        self.kill(self.pid, "a head process")


def _alive(pid: int) -> bool:
    if not pid:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _gone(pids: list[int]) -> list[int]:
    """Those that are still there after a while; they are killed."""
    deadline = time.monotonic() + GONE
    while left := [each for each in pids if _alive(each)]:
        if time.monotonic() > deadline:
            for each in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            return left
        time.sleep(0.01)
    return []


WORLDS = {each.name: each for each in (World, Heads)}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpunb-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def chaos(
    count: int,
    seed: int = 0,
    *,
    only: int | None = None,
    first: int = 0,
    worlds: Sequence[str] = ("sessions", "head"),
    without: Sequence[str] = (),
    seconds: float = 1e6,
) -> Report:
    """Let so many faults happen, a part of them in each world.

    Args:
        only: the seed of one kernel, to run that one alone.
        first: its first round.
        without: kinds of faults to leave out.
    """
    report, began = Report(), time.monotonic()
    until = began + seconds
    for number, name in enumerate(worlds):
        ends = began + seconds * (number + 1) / len(worlds)
        with _folder() as path:
            WORLDS[name](path, without, min(until, ends), report).run(
                seed, first, -(-count // len(worlds)), only
            )
    report.seconds = time.monotonic() - began
    return report
