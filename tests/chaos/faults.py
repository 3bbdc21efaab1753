"""The faults: what is done to a session, and which ends of its jobs it excuses."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import gpunb
from gpunb import exceptions as ex
from gpunb.control import client
from gpunb.head import discovery
from gpunb.leases.records import LEDGER_FILE
from gpunb.system import runtime_dir
from tests.chaos import jobs, seam
from tests.chaos.seam import CHILD, MAIN, SITES

WORKER, FIRST, SECOND = "gpunb-worker", "gpunb-zygote", "gpunb-preload"
"""Names of processes: a worker or standby, and the zygotes of the two generations."""

WINDOW = 35.0
"""Seconds; a little more than those in which a session forgives the deaths of a few zygotes."""

NOISES = 13
"""Kinds of noise that `seam.noise` makes."""


class Target:
    """The session under test, as faults see it.

    Attributes:
        main: the process that has the scheduler: the kernel, or the head process.
        job: the last job that was submitted.
        attached: the name of the head process, or None.
    """

    def __init__(self, page: seam.Seam | None, main: int, attached: str | None) -> None:
        self.page = page
        self.main = main
        self.job = 0
        self.attached = attached
        self.spares_zygotes = False
        # At a head process other faults of other kernels end some, too.
        self._killed: deque[float] = deque(maxlen=1 if attached else 4)

    def may_kill_zygotes(self) -> bool:
        """Whether another zygote may be killed now: if five die within half a minute, the session
        waits as long before it tries again."""
        now = time.monotonic()
        if self.spares_zygotes or (
            len(self._killed) == self._killed.maxlen and self._killed[0] > now - WINDOW
        ):
            return False
        self._killed.append(now)
        return True

    def family(self) -> dict[str, list[int]]:
        """The processes that the session has started, by their names."""
        found: dict[str, list[int]] = {}
        for pid in self.descendants():
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("gpunb"):  # not the trackers of multiprocessing
                    found.setdefault(name, []).append(pid)
        return found

    def descendants(self) -> list[int]:
        """All processes below the session's own, also those that have no name yet."""
        found: list[int] = []
        waiting = [self.main]
        while waiting:
            below = _children(waiting.pop())
            found += below
            waiting += below
        return found

    def processes(self) -> list[int]:
        """All of them."""
        return [pid for pids in self.family().values() for pid in pids]


def _children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (each / "children").read_text().split()]
    return found


def ended(error: BaseException) -> bool:
    """Whether the error says that the session itself has failed, which nothing excuses."""
    if type(error) is ex.GpunbError or isinstance(error, ex.InternalError):
        return True
    return "the runtime stopped" in str(error)


class Fault:
    """One fault. `begin` comes before jobs are submitted, `strike` after, `end` when all are over.

    Attributes:
        kind: under which it is counted.
        crashes: whether processes may die of it, so that jobs end as crashed.
        names: words of which one has to be in the error of a job that failed of it.
    """

    kind = ""
    crashes = False
    names: tuple[str, ...] = ()

    def begin(self, target: Target) -> None:
        """Before jobs are submitted."""

    def strike(self, target: Target) -> None:
        """When all are submitted."""

    def end(self, target: Target) -> bool:
        """Undo what can be undone; whether the fault has happened."""
        return True

    def excuses(self, error: BaseException) -> bool:
        """Whether a job may have failed so because of this."""
        text = str(error)
        if ended(error):
            return False
        crashed = isinstance(error, (ex.WorkerCrashedError, ex.ActorError, ex.ObjectLostError))
        if self.crashes and crashed:
            return True
        return any(each.lower() in text.lower() for each in self.names)

    def __repr__(self) -> str:
        return self.kind


class Others(Fault):
    """What the other kernels of a head process do to it meanwhile, which is any of all this."""

    kind = "faults of other kernels"
    crashes = True
    names = ("memory", "room", "descriptor", "arrive", "ended", "open files", "KeyboardInterrupt")

    def excuses(self, error: BaseException) -> bool:
        return super().excuses(error) or isinstance(error, OSError)


class Call(Fault):
    """A system call of gpunb's fails."""

    def __init__(self, section: int, site: int, effect: int, after: int, times: int) -> None:
        self.section = section
        self.site = site
        self.effect = effect
        self.after = after
        self.times = times
        self.kind = f"{'child' if section else 'kernel'} {SITES[site]} {seam.describe(effect)}"
        # Whoever cannot be reached, or cannot say what he has to say, is ended.
        self.crashes = True
        strerror = os.strerror(effect) if effect < seam.SHORT else seam.describe(effect)
        self.names = (strerror, "memory", "no room", "descriptor", "not arrive", "ended")
        self.before: int | None = None

    def __repr__(self) -> str:
        return f"{self.kind} after {self.after}, {self.times} times"

    def begin(self, target: Target) -> None:
        assert target.page is not None
        if self._kills_zygotes():
            if not target.may_kill_zygotes():
                return
            self.times = 1
        self.before = target.page.came(self.section, self.site)
        target.page.arm(self.section, self.site, self.effect, self.after, self.times)

    def _kills_zygotes(self) -> bool:
        site = SITES[self.site]
        if site.module == "control":
            return self.effect in (*seam.ENDED, seam.GARBAGE)
        return self.section == CHILD and site.call == "pidfd_open"

    def end(self, target: Target) -> bool:
        assert target.page is not None
        target.page.disarm(self.section, self.site)
        return self.before is not None and target.page.came(self.section, self.site) > self.before

    def excuses(self, error: BaseException) -> bool:
        code = getattr(error, "errno", None)
        return super().excuses(error) or (code == self.effect and not ended(error))


class Signal(Fault):
    """A signal to a process of the session."""

    crashes = True
    names = ("SIGKILL", "ended", "killed", "KeyboardInterrupt")

    def __init__(self, name: str, number: int, delay: float) -> None:
        self.name = name
        self.number = number
        self.delay = delay
        self.kind = f"{signal.Signals(number).name} to {name}"
        self.hit = False

    def __repr__(self) -> str:
        return f"{self.kind} after {self.delay:.4f} s"

    def strike(self, target: Target) -> None:
        time.sleep(self.delay)
        if self.number == signal.SIGKILL and self.name != WORKER and not target.may_kill_zygotes():
            return
        pids = target.family().get(self.name, [])
        if not pids:
            return
        pid = pids[int(self.delay * 1e6) % len(pids)]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.number)
            self.hit = True
            if self.number == signal.SIGSTOP:
                threading.Timer(0.02 + 10 * self.delay, _go_on, [pid]).start()

    def end(self, target: Target) -> bool:
        return self.hit


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


class Pause(Fault):
    """The head process, or the kernel's own loop, is stopped for a moment."""

    kind = "SIGSTOP to the head process"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def begin(self, target: Target) -> None:
        os.kill(target.main, signal.SIGSTOP)
        threading.Timer(self.seconds, _go_on, [target.main]).start()


class Interrupt(Fault):
    """Ctrl-C in the kernel. The KeyboardInterrupt has to arrive."""

    kind = "SIGINT to the kernel"

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.timer = threading.Timer(0, int)

    def __repr__(self) -> str:
        return f"{self.kind} after {self.delay:.4f} s"

    def begin(self, target: Target) -> None:
        main = threading.main_thread().ident
        assert main is not None
        self.timer = threading.Timer(self.delay, signal.pthread_kill, [main, signal.SIGINT])
        self.timer.start()

    def end(self, target: Target) -> bool:
        # A round that has gone wrong may be over before the interrupt came.
        try:
            self.timer.cancel()
            self.timer.join()
            signal.pthread_sigmask(signal.SIG_BLOCK, ())  # here at the latest Python looks for it
        except KeyboardInterrupt:
            pass
        return True


class Storm(Fault):
    """Signals that mean nothing reach the kernel's threads, so that system calls return EINTR."""

    kind = "EINTR in the kernel"

    def __init__(self) -> None:
        self._over = threading.Event()

    def begin(self, target: Target) -> None:
        threading.Thread(target=self._blow, daemon=True).start()

    def _blow(self) -> None:
        me = threading.get_ident()
        while not self._over.wait(0.0002):
            for each in threading.enumerate():
                if each.ident not in (None, me) and each.is_alive():
                    with contextlib.suppress(ProcessLookupError):
                        signal.pthread_kill(each.ident, signal.SIGUSR2)  # type: ignore[arg-type]

    def end(self, target: Target) -> bool:
        self._over.set()
        return True


class Noise(Fault):
    """Somebody connects to a socket and says what nobody understands, or stops in the middle."""

    def __init__(self, where: str, number: int, cut: int) -> None:
        self.where = where
        self.number = number
        self.cut = cut
        self.kind = f"noise at the {where} socket"

    def __repr__(self) -> str:
        return f"{self.kind}: {self.number} cut at {self.cut}"

    def begin(self, target: Target) -> None:
        printed = {
            "control": [b'{"do": "status"}\n', b"[" * 60_000 + b"\n", b'{"do": 5, "job": []}\n',
                        b'{"do": "logs", "job": 1e400}\n', b'{"do":"watch","interval":-1}\n',
                        b'{"do": "logs", "job": %d}\n' % target.job],
            "head": [b'{"gpunb": 1}', b"[" * 60_000, b"{}", b'{"about": []}', b"null"],
        }[self.where]  # fmt: skip
        printed += [seam.noise(each) for each in range(NOISES)]
        data = printed[self.number % len(printed)]
        path = (
            client.path_of(target.main)
            if self.where == "control"
            else discovery.path_of(target.attached or "")
        )
        kind = socket.SOCK_STREAM if self.where == "control" else socket.SOCK_SEQPACKET
        with socket.socket(socket.AF_UNIX, kind) as sock, contextlib.suppress(OSError):
            sock.settimeout(0.1)
            with client.address(path) as place:
                sock.connect(place)
            sock.send(data[: self.cut] if self.cut else data)
            if data.endswith(b"\n") and not self.cut:
                sock.recv(100)


class Printed(Fault):
    """A worker says what no worker says."""

    crashes = True
    names = ("ended",)

    def __init__(self, number: int, descriptors: int, cut: int) -> None:
        self.number = number
        self.descriptors = descriptors
        self.cut = cut
        self.kind = "garbage from a worker"
        self.ref: Any = None

    def __repr__(self) -> str:
        return f"{self.kind}: {self.number}, {self.descriptors} descriptors, cut at {self.cut}"

    def strike(self, target: Target) -> None:
        data = seam.noise(self.number)
        task = gpunb.remote(max_retries=0)(jobs.report)
        self.ref = task.remote([data[: self.cut] if self.cut else data], self.descriptors)

    def end(self, target: Target) -> bool:
        if self.ref is None:
            return False
        try:
            gpunb.get(self.ref, timeout=10)
        except ex.GetTimeoutError:
            raise
        except Exception:  # noqa: BLE001 - it may fail in any way, of this or of other faults
            pass
        finally:
            self.ref = None
        return True


LASTS = 0.05
"""Seconds for which nothing is left."""

LIMITED = {resource.RLIMIT_NOFILE: "descriptors", resource.RLIMIT_FSIZE: "bytes"}
"""What a process may have no more of."""


class Limits(Fault):
    """No more descriptors, or no more bytes in files, for a process of the session."""

    crashes = True

    def __init__(self, name: str, what: int, room: int) -> None:
        self.name = name
        self.what = what
        self.room = room
        self.kind = f"no {LIMITED[what]} left in {name}"
        self.names = (
            os.strerror(errno.EMFILE),
            os.strerror(errno.EFBIG),
            "room",
            "memory",
            "descriptor",
            "arrive",
            "ended",
        )
        self.before: tuple[int, tuple[int, int]] | None = None

    def __repr__(self) -> str:
        return f"{self.kind}, but for {self.room}"

    def begin(self, target: Target) -> None:
        pids = [target.main] if self.name == "main" else target.family().get(self.name, [])
        if not pids:
            return
        pid = pids[0]
        room = self.room
        with contextlib.suppress(OSError):  # the process may be gone by now
            if self.what == resource.RLIMIT_NOFILE:
                room += len(os.listdir(f"/proc/{pid}/fd"))
            _, hard = resource.prlimit(pid, self.what)
            self.before = pid, (hard, hard)  # what is now may be another kernel's fault
            resource.prlimit(pid, self.what, (room, hard))
            # What cannot be had now may be waited for, so it is to be had again.
            threading.Timer(LASTS, self._lift).start()

    def _lift(self) -> None:
        assert self.before is not None
        with contextlib.suppress(OSError):
            resource.prlimit(self.before[0], self.what, self.before[1])

    def end(self, target: Target) -> bool:
        if self.before is None:
            return False
        self._lift()
        # A zygote that was started meanwhile has inherited the limit.
        for pid in target.descendants():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, self.what, self.before[1])
        return True

    def excuses(self, error: BaseException) -> bool:
        codes = (errno.EMFILE, errno.EFBIG)
        return super().excuses(error) or (isinstance(error, OSError) and error.errno in codes)


FILES = (
    "the control socket",
    "the book of leases",
    "the pipes of sessions",
    "what sessions tell of themselves",
)


class Deleted(Fault):
    """A file of the session's is removed."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.kind = f"deleted: {what}"

    def begin(self, target: Target) -> None:
        ledger = Path(
            os.environ.get("GPUNB_LEDGER_DIR") or runtime_dir.runtime_folder() / runtime_dir.LEASES
        )
        paths = {
            FILES[0]: [client.path_of(target.main)],
            FILES[1]: [ledger / LEDGER_FILE],
            FILES[2]: [each for each in ledger.iterdir() if len(each.name) == 32],
            FILES[3]: list(ledger.glob("*.json")),
        }[self.what]
        self.removed = 0
        for each in paths:
            with contextlib.suppress(FileNotFoundError):  # another kernel's fault was the same
                each.unlink()
                self.removed += 1

    def end(self, target: Target) -> bool:
        return self.removed > 0


def call(chance: random.Random, chosen: list[tuple[int, int, int]]) -> Fault:
    """A fault of a system call."""
    section, site, effect = chance.choice(chosen)
    return Call(
        section, site, effect, chance.choice((0, 0, 0, 1, 2, 4)), chance.choice((1, 1, 1, 2, 5))
    )


def calls() -> list[tuple[int, int, int]]:
    """All of them."""
    return [
        (section, number, effect)
        for number, site in enumerate(SITES)
        for section, effects in ((MAIN, site.main), (CHILD, site.child))
        for effect in effects
    ]


def _noise(where: str) -> Any:
    def make(chance: random.Random) -> Fault:
        cut = chance.choice((0, 0, 1, 7, 60))
        return Noise(where, chance.randrange(6 + NOISES), cut)

    return make


def _signal(name: str, number: int) -> Any:
    return lambda chance: Signal(name, number, chance.random() * 0.003)


def _garbage(chance: random.Random) -> Fault:
    descriptors = chance.choice((0, 0, 1, 3))
    return Printed(chance.randrange(NOISES), descriptors, chance.choice((0, 0, 1, 5)))


def _limits(name: str, what: int, *rooms: int) -> Any:
    return lambda chance: Limits(name, what, chance.choice(rooms))


def kinds(attached: bool) -> dict[str, tuple[float, Any]]:
    """For each kind of fault its weight, and what makes one of it."""
    everything = calls()
    nofile, fsize = resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE
    found = {
        "call": (60.0, lambda chance: call(chance, everything)),
        "kill worker": (6, _signal(WORKER, signal.SIGKILL)),
        "stop worker": (3, _signal(WORKER, signal.SIGSTOP)),
        "interrupt worker": (3, _signal(WORKER, signal.SIGINT)),
        "kill second zygote": (0.4, _signal(SECOND, signal.SIGKILL)),
        "kill first zygote": (0.3, _signal(FIRST, signal.SIGKILL)),
        "stop second zygote": (1, _signal(SECOND, signal.SIGSTOP)),
        "stop first zygote": (1, _signal(FIRST, signal.SIGSTOP)),
        "interrupt zygote": (1, _signal(SECOND, signal.SIGINT)),
        "interrupt": (4, lambda chance: Interrupt(chance.random() * 0.006)),
        "storm": (2, lambda chance: Storm()),
        "garbage": (8, _garbage),
        "control noise": (8, _noise("control")),
        "descriptors": (3, _limits("main", nofile, *range(8))),
        "descriptors of a zygote": (1, _limits(SECOND, nofile, *range(8))),
        "descriptors of a worker": (1, _limits(WORKER, nofile, *range(4))),
        "full disk": (2, _limits("main", fsize, 0, 4096, 100_000)),
        "full disk of a worker": (1, _limits(WORKER, fsize, 0, 4096)),
        "deleted": (1, lambda chance: Deleted(chance.choice(FILES))),
    }
    if attached:
        found["head noise"] = (8, _noise("head"))
        found["stop head"] = (1, lambda chance: Pause(0.01 + chance.random() * 0.05))
    return found
