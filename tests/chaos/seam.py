"""Makes single system calls of gpunb's modules fail on demand, in any process.

The production code knows nothing of it. If the environment of a process names a page (`PAGE`) and
its path begins with `tests/chaos/site`, the modules of `TABLE` are patched as they are imported:
their `os`, `socket`, `fcntl`, ... are then stand-ins, whose calls look at the page first. The page
is a file that the process and all its children map, so a fault can be armed for a child, too.

Imports nothing of gpunb, because it runs before anything else.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.abc
import importlib.machinery
import mmap
import os
import pickle
import select
import socket
import struct
import sys
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PAGE = "GPUNB_CHAOS_PAGE"

_BELOW = "GPUNB_CHAOS_BELOW"

MAIN, CHILD = 0, 1
"""Whose calls: those of the process that the page was made for, or of zygotes and workers."""

SHORT, GARBAGE, NO_RIGHTS, NO_THREAD, NOTHING = 201, 202, 203, 204, 205
"""What may happen instead of an error: a part is written or read; what arrives is no message;
descriptors that were sent do not arrive; no thread can be started; the other side has ended."""

WORDS = {
    SHORT: "short",
    GARBAGE: "garbage",
    NO_RIGHTS: "no descriptors arrive",
    NO_THREAD: "no thread",
    NOTHING: "end of file",
}

E = errno
FULL = (E.ENOSPC, E.ENOMEM)
NO_DESCRIPTOR = (E.EMFILE, E.ENFILE)


@dataclass(frozen=True)
class Site:
    """One system call of one module, and what may happen there in the kernel and in children."""

    module: str
    call: str
    main: tuple[int, ...] = ()
    child: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}:{self.call}"


def both(module: str, call: str, *effects: int) -> Site:
    return Site(module, call, effects, effects)


SITES: tuple[Site, ...] = (
    both("objects", "os.ftruncate", *FULL),
    both("objects", "os.pwritev", *FULL, SHORT, E.EINTR),
    both("objects", "os.dup", *NO_DESCRIPTOR),
    both("objects", "fcntl.fcntl", E.ENOMEM),
    both("objects", "map", E.ENOMEM, E.ENFILE),
    both("linux", "memfd_create", *NO_DESCRIPTOR, E.ENOMEM),
    Site("linux", "pidfd_open", (*NO_DESCRIPTOR, E.ESRCH), (*NO_DESCRIPTOR, E.ENOMEM)),
    Site("channel", "socketpair", (*NO_DESCRIPTOR, E.ENOMEM), NO_DESCRIPTOR),
    Site("channel", "send", (E.EAGAIN, E.ENOBUFS, E.EPIPE), (E.ENOBUFS, E.EPIPE)),
    Site("channel", "sendmsg", (E.EAGAIN, E.ENOBUFS, E.ETOOMANYREFS), (E.ENOBUFS, E.ETOOMANYREFS)),
    Site(
        "channel",
        "recvmsg_into",
        (E.EAGAIN, E.ECONNRESET, E.ENOMEM, NO_RIGHTS, GARBAGE),
        (E.ECONNRESET, NO_RIGHTS),
    ),
    Site("control", "socketpair", NO_DESCRIPTOR),
    Site("control", "send", (), (E.ENOBUFS, E.EPIPE)),
    Site("control", "sendmsg", (E.EAGAIN, E.ENOBUFS, E.EPIPE, E.ETOOMANYREFS)),
    Site("control", "recv", (E.ECONNRESET, GARBAGE, NOTHING)),
    Site("control", "recvmsg", (), (E.ECONNRESET, NO_RIGHTS)),
    Site("listener", "accept", (*NO_DESCRIPTOR, E.ECONNABORTED, E.ENOMEM)),
    Site("listener", "recv", (E.ECONNRESET, E.ENOMEM, E.EAGAIN, SHORT, GARBAGE)),
    Site("listener", "send", (E.EPIPE, E.ENOBUFS, E.EAGAIN, SHORT)),
    Site("loop", "epoll.poll", (E.EINTR, NOTHING)),
    Site("loop", "epoll.register", FULL),
    Site("loop", "os.eventfd_read", (E.EAGAIN,)),
    Site("pool", "os.pipe2", NO_DESCRIPTOR),
    Site("permits", "os.pipe2", NO_DESCRIPTOR),
    Site("pool", "os.read", (E.EIO, E.EAGAIN, SHORT)),
    Site("pool", "os.write", (E.EAGAIN, E.EPIPE)),
    Site("pool", "fcntl.fcntl", (E.EPERM, E.EBUSY)),
    Site("interrupts", "os.read", (), (E.EAGAIN,)),
    Site("zygote", "os.fork", (), (E.EAGAIN, E.ENOMEM)),
    Site("system", "os.open", (), (*NO_DESCRIPTOR, E.ENOENT)),
    Site("ledger", "fcntl.flock", (E.EAGAIN, E.EINTR, E.ENOLCK)),
    Site("ledger", "os.pread", (E.EIO, SHORT)),
    Site("ledger", "os.pwrite", (E.ENOSPC, E.EIO, SHORT)),
    Site("fifos", "os.open", (*NO_DESCRIPTOR, E.EACCES)),
    Site("fifos", "os.read", (E.EIO, E.EAGAIN)),
    Site("fifos", "os.write", (E.EAGAIN, E.ENOSPC)),
    Site("fifos", "fcntl.flock", (E.EAGAIN, E.ENOLCK)),
    Site("log", "tempfile.TemporaryFile", (E.ENOSPC, *NO_DESCRIPTOR)),
    Site("control server", "threading.Thread", (NO_THREAD,)),
)

TABLE: dict[str, str] = {
    "gpunb.data.files": "objects",
    "gpunb.data.segments": "objects",
    "gpunb.data.arenas": "objects",
    "gpunb.data.segment_pool": "objects",
    "gpunb.system.linux": "linux",
    "gpunb.protocol.channel": "channel",
    "gpunb.processes.zygotes": "control",
    "gpunb.processes.launcher": "control",
    "gpunb.worker.zygote": "zygote",
    "gpunb.worker.preload": "preload",
    "gpunb.system.process_control": "system",
    "gpunb.system.loop": "loop",
    "gpunb.processes.pool": "pool",
    "gpunb.protocol.permits": "permits",
    "gpunb.processes.receiver": "pool",
    "gpunb.worker.interrupts": "interrupts",
    "gpunb.head.endpoint": "listener",
    "gpunb.leases.ledger_file": "ledger",
    "gpunb.leases.membership": "ledger",
    "gpunb.leases.liveness": "fifos",
    "gpunb.engine.job_log": "log",
    "gpunb.control.server": "control server",
}
"""Which sites each module has."""

_SLOT = struct.Struct("<BBHII")
"""The effect (0 for none), how often it comes, after how many calls, how often it came, calls. Only
who arms a fault writes its effect, so that nobody else can arm again what is over."""

_EFFECT, _COUNTS, _CAME, _CALLS = (
    struct.Struct("<B"),
    struct.Struct("<BH"),
    struct.Struct("<I"),
    struct.Struct("<I"),
)

_CHANGED = (GARBAGE, NO_RIGHTS)
ENDED = (E.EPIPE, E.ECONNRESET, NOTHING)


def describe(effect: int) -> str:
    return WORDS.get(effect) or errno.errorcode.get(effect, str(effect))


class Seam:
    """The faults that are armed, in a page that processes share."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        # Whoever is started by a process that has the seam is a zygote or a spawned worker.
        self.section = CHILD if _BELOW in os.environ else MAIN

    @staticmethod
    def make(path: str) -> None:
        """An empty page."""
        with open(path, "wb") as file:
            file.write(bytes(2 * len(SITES) * _SLOT.size))

    @staticmethod
    def _offset(section: int, site: int) -> int:
        return (section * len(SITES) + site) * _SLOT.size

    def arm(self, section: int, site: int, effect: int, after: int = 0, times: int = 1) -> None:
        """Let this happen so often, after so many further calls."""
        offset = self._offset(section, site)
        _EFFECT.pack_into(self._page, offset, 0)
        _COUNTS.pack_into(self._page, offset + 1, times, after)
        _EFFECT.pack_into(self._page, offset, effect)

    def disarm(self, section: int, site: int) -> None:
        self.arm(section, site, 0, 0, 0)

    def came(self, section: int, site: int) -> int:
        """How often anything happened there."""
        return int(_SLOT.unpack_from(self._page, self._offset(section, site))[3])

    def calls(self, section: int, site: int) -> int:
        return int(_SLOT.unpack_from(self._page, self._offset(section, site))[4])

    def armed(self, site: int) -> int:
        """What may happen, sooner or later."""
        return self._page[self._offset(self.section, site)]

    def next(self, site: int) -> int:
        """What is to happen to this call; 0 for nothing. Calls of several processes may be counted
        as one: that is as good."""
        offset = self._offset(self.section, site)
        page = self._page
        effect, times, after, came, calls = _SLOT.unpack_from(page, offset)
        _CALLS.pack_into(page, offset + 8, (calls + 1) & 0xFFFFFFFF)
        if not effect or not times:
            return 0
        if after:
            _COUNTS.pack_into(page, offset + 1, times, after - 1)
            return 0
        _COUNTS.pack_into(page, offset + 1, times - 1, 0)
        _CAME.pack_into(page, offset + 4, came + 1)
        return int(effect)


def _fail(effect: int) -> None:
    raise OSError(effect, os.strerror(effect))


def _os_like(seam: Seam, site: int, real: Callable[..., Any], call: str) -> Callable[..., Any]:
    """A function that may fail in place of a real one."""

    def faulty(*args: Any, **more: Any) -> Any:
        effect = seam.next(site)
        if not effect:
            return real(*args, **more)
        if effect == SHORT:
            return _short(real, call, *args)
        if effect == NO_THREAD:
            raise RuntimeError("can't start new thread")
        return _fail(effect)

    return faulty


def _short(real: Callable[..., Any], call: str, *args: Any) -> Any:
    """Only a part is read or written."""
    if call == "os.read":
        descriptor, size = args
        return real(descriptor, max(1, min(size, 7)))
    if call == "os.pread":
        descriptor, size, offset = args
        return real(descriptor, max(1, min(size, 40)), offset)
    if call == "os.pwritev":
        descriptor, buffers, offset = args
        first = buffers[0]
        return real(descriptor, [first[: max(1, len(first) // 2)]], offset)
    descriptor, data, *rest = args
    return real(descriptor, data[: max(1, len(data) // 2)], *rest)


class Stand(types.ModuleType):
    """A module as one of gpunb's modules sees it."""

    def __init__(self, real: Any, calls: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(calls)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _framed(pickled: bytes) -> bytes:
    """As gpunb.protocol.plain does it, which is not to be imported before the seam is there."""
    return pickled + zlib.crc32(pickled).to_bytes(4, "little")


_DONE, _USED = 5, 12
"""The numbers of two messages; a test compares them. This module is there before gpunb is."""

_NOISE = (
    b"",
    b"\x00spilled",
    b"\x00spilled\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"[" * 60_000,
    b"\x80\x05]\x94.",
    _framed(pickle.dumps((99, 1, 2), 5)),
    _framed(pickle.dumps((_DONE, 1, 2, 3, 4, 5), 5)),
    _framed(pickle.dumps({"a": 1}, 5)),
    _framed(pickle.dumps((_DONE, -1, -1, "nonsense", ()), 5)),
    _framed(b"\x80\x05K%c%b\x85\x86." % (_USED, b"]" * 20_000 + b"a" * 19_999)),
    _framed(pickle.dumps(("exited", 12345, 0), 5)),
    _framed(pickle.dumps(("unheard of", 1), 5)),
    bytes(range(256)),
)
"""What may arrive instead of a message."""


def noise(number: int) -> bytes:
    return _NOISE[number % len(_NOISE)] or b"\x00"


def _socket_class(seam: Seam, sites: dict[str, int]) -> type[socket.socket]:
    """Sockets of one module."""

    class Faulty(_Faulty):
        __slots__ = ()
        _seam = seam
        _sites = sites

    return Faulty


class _Faulty(socket.socket):
    __slots__ = ()
    _seam: Seam
    _sites: dict[str, int]

    def _effect(self, call: str) -> int:
        site = self._sites.get(call)
        if site is None or self._seam.armed(site) in _CHANGED:
            return 0
        effect = self._seam.next(site)
        if effect in ENDED:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)  # and so it is for the other side
        if effect and effect < SHORT:
            _fail(effect)
        return effect

    def _changed(self, call: str) -> int:
        """What happens to a message that has arrived, however long somebody waited for it."""
        site = self._sites.get(call)
        if site is None or self._seam.armed(site) not in _CHANGED:
            return 0
        return self._seam.next(site)

    def _noise(self, call: str) -> bytes:
        return noise(self._seam.came(self._seam.section, self._sites[call]))

    def send(self, data: Any, flags: int = 0) -> int:  # type: ignore[override]
        if self._effect("send") == SHORT:
            data = data[: max(1, len(data) // 2)]
        return super().send(data, flags)

    def sendmsg(self, *args: Any) -> int:  # type: ignore[override]
        self._effect("sendmsg")
        return super().sendmsg(*args)

    def recv(self, size: int, flags: int = 0) -> bytes:  # type: ignore[override]
        effect = self._effect("recv")
        if effect == NOTHING:
            return b""
        if effect == SHORT:
            return super().recv(3, flags)
        data = super().recv(size, flags)
        return self._noise("recv") if data and self._changed("recv") == GARBAGE else data

    def recvmsg(self, *args: Any) -> Any:
        self._effect("recvmsg")
        data, ancillary, flags, address = super().recvmsg(*args)
        if self._changed("recvmsg") == NO_RIGHTS:
            _drop(ancillary)
            ancillary, flags = [], flags | socket.MSG_CTRUNC
        return data, ancillary, flags, address

    def recvmsg_into(self, buffers: Any, *args: Any) -> Any:
        self._effect("recvmsg_into")
        size, ancillary, flags, address = super().recvmsg_into(buffers, *args)
        effect = self._changed("recvmsg_into")
        if effect == NO_RIGHTS:
            _drop(ancillary)
            ancillary, flags = [], flags | socket.MSG_CTRUNC
        elif effect == GARBAGE and size:
            data = self._noise("recvmsg_into")[: len(buffers[0])]
            buffers[0][: len(data)] = data
            size = len(data)
        return size, ancillary, flags, address

    def accept(self) -> Any:
        self._effect("accept")
        made, address = super().accept()
        made.__class__ = type(self)
        return made, address


def _drop(ancillary: Sequence[tuple[int, int, bytes]]) -> None:
    """Descriptors that the system had no room for: it closes them."""
    for _, _, data in ancillary:
        for (each,) in struct.iter_unpack("i", data[: len(data) - len(data) % 4]):
            os.close(each)


class _Epoll:
    def __init__(self, seam: Seam, sites: dict[str, int]) -> None:
        self._real = select.epoll()
        self._seam = seam
        self._sites = sites
        for name in ("modify", "unregister", "close", "fileno"):
            setattr(self, name, getattr(self._real, name))

    def poll(self, *args: Any) -> Any:
        # EINTR never comes out of Python: what is seen of it is that nothing was ready.
        if self._seam.next(self._sites["epoll.poll"]):
            return []
        return self._real.poll(*args)

    def register(self, *args: Any) -> None:
        effect = self._seam.next(self._sites["epoll.register"])
        if effect:
            _fail(effect)
        self._real.register(*args)


def patch(seam: Seam, module: Any, label: str) -> None:
    """Give a module its stand-ins."""
    space = vars(module)
    of = "zygote" if label == "preload" else label  # both fork
    sites = {site.call: number for number, site in enumerate(SITES) if site.module == of}
    if label == "zygote":
        sites |= {s.call: n for n, s in enumerate(SITES) if s.module == "control"}
    by_name: dict[str, dict[str, Any]] = {}
    for call, number in sites.items():
        name, _, function = call.rpartition(".")
        if name and name != "epoll" and name in space:
            real = getattr(space[name], function)
            by_name.setdefault(name, {})[function] = _os_like(seam, number, real, call)
        elif label == "linux":
            space[call] = _os_like(seam, number, space[call], call)
    if label == "log":  # it imports tempfile when it needs it
        real_tempfile = importlib.import_module("tempfile")
        wrapped = _os_like(
            seam, sites["tempfile.TemporaryFile"], real_tempfile.TemporaryFile, "tempfile"
        )
        log = space["Log"]

        def to_disk(self: Any, real: Any = log.to_disk) -> None:
            real_tempfile.TemporaryFile, kept = wrapped, real_tempfile.TemporaryFile  # type: ignore[misc]
            try:
                real(self)
            finally:
                real_tempfile.TemporaryFile = kept  # type: ignore[misc]

        log.to_disk = to_disk
    if label in ("channel", "control", "listener", "zygote"):
        _patch_sockets(seam, space, label, sites, by_name)
    if label == "loop":
        by_name.setdefault("select", {})["epoll"] = lambda: _Epoll(seam, sites)
    if "_map_private" in space:
        space["_map_private"] = _os_like(seam, sites["map"], space["_map_private"], "map")
    for name, calls in by_name.items():
        space[name] = Stand(space[name], calls)


def _patch_sockets(
    seam: Seam,
    space: dict[str, Any],
    label: str,
    sites: dict[str, int],
    by_name: dict[str, dict[str, Any]],
) -> None:
    kind = _socket_class(seam, sites)

    def socketpair(*args: Any) -> Any:
        number = sites.get("socketpair")
        effect = seam.next(number) if number is not None else 0
        if effect:
            _fail(effect)
        pair = socket.socketpair(*args)
        for each in pair:
            each.__class__ = kind
        return pair

    by_name.setdefault("socket", {}).update(socket=kind, socketpair=socketpair)
    if label == "channel":
        channel = space["Channel"]

        real = channel.__init__

        def begin(self: Any, sock: socket.socket, *more: Any) -> None:
            sock.__class__ = kind
            real(self, sock, *more)

        channel.__init__ = begin


class _Finder(importlib.abc.MetaPathFinder):
    """Patches modules as they are imported."""

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in TABLE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                patch(self._seam, module, TABLE[name])

            loader.exec_module = exec_module
        return spec


def install() -> None:
    """In a process that has imported nothing of gpunb yet."""
    global seam
    seam = Seam(os.environ[PAGE])
    os.environ[_BELOW] = "1"
    sys.meta_path.insert(0, _Finder(seam))


seam: Seam | None = None
