"""Samples the devices on a thread of its own, because a vendor's call may take long or never end.

The thread runs only while tasks have devices or somebody wants to know."""

from __future__ import annotations

import contextlib
import os
import pwd
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpunb.accelerators import Accelerator, Process, Usage, find
from gpunb.scheduler.resources import Device
from gpunb.scheduler.usage_types import Reading, Seen

HEALTH_EVERY = 10
"""Looks between two at the health of the devices, which takes longer."""

SLOW = 10.0
"""Seconds after which a vendor's call is said not to answer."""

_MOST_ANCESTORS = 40
_INITIAL_NAMESPACE = 4026531836
"""The inode of the system's first namespace of process ids, the same on every Linux."""

Readings = Mapping[str, Reading]
Health = Mapping[str, str | None]
Looked = Callable[[Readings, Health], None]


class Sampler:
    """Measures the devices that can be measured. From any thread, unless a method says otherwise.

    `deliver` is called on the sampler's thread with what was seen.
    """

    def __init__(
        self, devices: Sequence[Device], deliver: Looked, *, strange: bool = False
    ) -> None:
        """`strange` if the process ids that drivers tell mean nothing here."""
        self._devices: dict[str, list[Device]] = {}
        for device in devices:
            if _is_measured(device):
                self._devices.setdefault(device.vendor, []).append(device)
        self._deliver = deliver
        self._lock = threading.Condition()
        self._wake = threading.Event()
        self._until = 0.0
        self._period = 1.0
        self._running = False
        self._wanted = False
        self._asking: float | None = None
        self._last = 0.0
        self._latest: tuple[Readings, Health] | None = None
        self._people = People()
        self._strange = strange

    @property
    def blind(self) -> bool:
        """Whether no device can be measured."""
        return not self._devices

    @property
    def running(self) -> bool:
        return self._running

    def want(self, seconds: float, period: float) -> None:
        """Measure for so long and at least once, with such pauses. Starts the thread if there is
        none."""
        if self.blind:
            return
        with self._lock:
            self._until = max(self._until, time.monotonic() + seconds)
            self._wanted = True
            if period < self._period:
                self._wake.set()
            self._period = period
            if self._running:
                return
            self._running = True
            self._wake.clear()
        try:
            threading.Thread(target=self._run, name="gpunb-sampler", daemon=True).start()
        except RuntimeError:  # the system gives no thread now: the next call tries again
            with self._lock:
                self._running = False

    def fresh(self, age: float, timeout: float) -> None:
        """Wait until there is a measurement no older than `age` seconds, but not for long."""
        if self.blind or time.monotonic() - self._last <= age:
            return
        asked = time.monotonic()
        self.want(age, 1.0)
        self._wake.set()
        with self._lock:
            self._lock.wait_for(lambda: self._last >= asked or not self._running, timeout)

    def first(self, timeout: float) -> tuple[Readings, Health] | None:
        """Return the last measurement, if there is one within so many seconds."""
        if self.blind:
            return None
        self.want(timeout, 1.0)
        with self._lock:
            self._lock.wait_for(lambda: self._latest or not self._running, timeout)
            return self._latest

    def stop(self) -> None:
        """Measure no more. This does not wait for a vendor's call that does not return."""
        with self._lock:
            self._until = 0.0
            self._wanted = False
            self._devices = {}
        self._wake.set()

    def silent_for(self) -> float:
        """Return the seconds since a vendor's call has begun; 0 if no call takes long."""
        asking = self._asking
        silent = time.monotonic() - asking if asking is not None else 0.0
        return silent if silent > SLOW else 0.0

    # --------------------------------------------------------------------- on a thread of its own

    def _run(self) -> None:
        plugins = {vendor: find(vendor)() for vendor in self._devices}
        try:
            with contextlib.ExitStack() as stack:
                for plugin in plugins.values():
                    with contextlib.suppress(Exception):
                        stack.enter_context(plugin.polling())
                self._look_on(plugins)
        except BaseException:
            self._running = False  # else it has said so, and there may be another by now
            self._asking = None
            raise
        finally:
            with self._lock:
                self._lock.notify_all()

    def _look_on(self, plugins: Mapping[str, Accelerator]) -> None:
        turn = 0
        while True:
            self._wanted = False
            self._asking = time.monotonic()
            seen = self._look(plugins)
            health = self._health(plugins) if turn % HEALTH_EVERY == 0 else {}
            self._asking = None
            with self._lock:
                self._last = time.monotonic()
                self._latest = seen, health
                self._lock.notify_all()
            self._deliver(seen, health)
            turn += 1
            self._wake.wait(self._period)
            self._wake.clear()
            with self._lock:
                # Who wants more with each look would not be heard again if this were late.
                if time.monotonic() >= self._until and not self._wanted:
                    self._running = False
                    return

    def _look(self, plugins: Mapping[str, Accelerator]) -> dict[str, Reading]:
        usage: dict[str, Usage] = {}
        for vendor, devices in self._devices.items():
            try:
                usage.update(plugins[vendor].usage(devices))
            except Exception:  # whatever a plug-in does: what fails is unknown
                continue
        pids = {each.pid for one in usage.values() for each in one.processes or ()}
        self._people.only(pids)
        return {key: self._reading(each) for key, each in usage.items()}

    def _reading(self, usage: Usage) -> Reading:
        processes = None if self._strange else usage.processes
        return Reading(
            usage.memory_used,
            usage.memory_total,
            usage.utilization,
            usage.temperature,
            None if processes is None else tuple(map(self._people.seen, processes)),
            usage.power,
        )

    def _health(self, plugins: Mapping[str, Accelerator]) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for vendor, devices in self._devices.items():
            try:
                found.update(plugins[vendor].health(devices))
            except Exception:
                continue
        return found


def _is_measured(device: Device) -> bool:
    """Return whether the plug-in of a device measures its use."""
    if device.logical:
        return False
    try:
        return find(device.vendor).usage is not Accelerator.usage
    except LookupError:
        return False


class _Person(NamedTuple):
    """The facts about a process: its user, name and ancestors."""

    line: tuple[int, ...]
    user: str | None
    name: str | None
    since: float | None


class People:
    """The facts about processes on devices; each process is looked up once."""

    def __init__(self) -> None:
        self._known: dict[int, _Person] = {}

    def only(self, pids: set[int]) -> None:
        """Forget all other processes: the system may give their ids to new ones."""
        self._known = {pid: each for pid, each in self._known.items() if pid in pids}

    def seen(self, process: Process) -> Seen:
        person = self._known.get(process.pid)
        if person is None:
            person = self._known[process.pid] = _look_up(process.pid)
        return Seen(process.pid, process.memory, *person)


def _look_up(pid: int) -> _Person:
    line, user, since = [pid], None, None
    name, parent, started = _stat(pid)
    while parent > 1 and len(line) < _MOST_ANCESTORS:
        line.append(parent)
        _, parent, _ = _stat(parent)
    with contextlib.suppress(OSError, KeyError):
        user = pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    if started is not None:
        with contextlib.suppress(OSError, ValueError):
            uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
            since = time.time() - uptime + started / os.sysconf("SC_CLK_TCK")
    return _Person(tuple(line), user, name, since)


def _stat(pid: int) -> tuple[str | None, int, int | None]:
    """Return the name of a process, its parent, and its start in ticks since the system's start."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            head, _, rest = file.read().rpartition(")")
    except OSError:
        return None, 0, None
    fields = rest.split()
    return head.partition("(")[2], int(fields[1]), int(fields[19])


def hidden(link: str = "/proc/self/ns/pid", release: str | None = None) -> bool:
    """Return whether the driver's process ids differ from those of this process: in a container,
    and in WSL."""
    try:
        inside = os.stat(link).st_ino != _INITIAL_NAMESPACE
    except OSError:
        inside = False
    return inside or "microsoft" in (os.uname().release if release is None else release).lower()


def facts(reading: Reading | None) -> dict[str, Any]:
    """Return the figures of a device for a snapshot."""
    names = ("memory_used", "memory_total", "utilization", "temperature", "power")
    return {name: getattr(reading, name, None) for name in names}
