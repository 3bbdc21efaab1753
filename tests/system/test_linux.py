"""Systems that can and cannot run sessions, and Pythons without wrappers for system calls."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpunb.exceptions import GpunbError
from gpunb.system import linux
from tests.sessions import ROOT

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these are its calls")

# What this Python has and one for another system has not. Its libraries come first: they choose
# their parts by the system that they are told of.
LIBRARIES = """
import asyncio, ctypes, fcntl, importlib, json, multiprocessing, os, pkgutil, select, signal
import socket, subprocess, sys, sysconfig, tempfile, urllib.request
import IPython, anywidget, comm, ipywidgets, loky
import IPython.core.debugger, ipywidgets.embed
for name in ("joblib", "jupyter_server.serverapp", "tornado.websocket"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
"""
LACKING = """
def lacking(module, *starts):
    for name in [each for each in vars(module) if each.startswith(starts)]:
        delattr(module, name)

lacking(os, "memfd_", "MFD_", "pidfd_", "PIDFD_")
lacking(signal, "pidfd_")
lacking(fcntl, "F_SEAL", "F_ADD_SEALS", "F_GET_SEALS")
"""
MACOS = (
    LIBRARIES
    + LACKING
    + """
lacking(os, "eventfd", "EFD_", "O_TMPFILE", "pipe2", "sched_", "SCHED_", "posix_f", "splice")
lacking(socket, "SO_PEERCRED", "SOCK_NONBLOCK", "SOCK_CLOEXEC", "MSG_CMSG_CLOEXEC")
lacking(select, "epoll", "EPOLL")
lacking(fcntl, "F_SETPIPE_SZ", "F_GETPIPE_SZ")
pair = socket.socketpair
def socketpair(family=None, type=socket.SOCK_STREAM, proto=0):
    if type == socket.SOCK_SEQPACKET:
        raise OSError(43, "Protocol not supported")
    return pair(family, type, proto)
socket.socketpair = socketpair
sys.platform = "darwin"
"""
)
WINDOWS = """
import ctypes, importlib, os, pathlib, signal, sys
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
"""


def run(code: str, **environ: str) -> str:
    """Return the output of a Python program that must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_on_macos_everything_can_be_imported_and_sessions_are_refused() -> None:
    code = """
import gpunb
import gpunb.scheduler.scheduler
from argparse import Namespace
from gpunb import cli

others = ("__main__", ".ray", ".ray.")  # programs, and what needs a library of its own
broken, said = [], {}
for each in pkgutil.walk_packages(gpunb.__path__, "gpunb.", onerror=broken.append):
    if not any(each.name.endswith(other) or ".ray." in each.name for other in others):
        try:
            importlib.import_module(each.name)
        except Exception as error:
            broken.append(f"{each.name}: {error!r}")

ways = {
    "init": lambda: gpunb.init(simulate="1xA100"),
    "spawn": lambda: gpunb.init(start_method="spawn", simulate="1xA100"),
    "attach": lambda: gpunb.init("auto"),
    "remote": lambda: gpunb.remote(print).remote(),
    "put": lambda: gpunb.put(1),
    "gpunb start --head": lambda: cli.start.run(Namespace(head=True, address=None)),
}
for name, way in ways.items():
    try:
        way()
    except gpunb.exceptions.GpunbError as error:
        said[name] = str(error)
print(cli.main(["devices"]))
print(json.dumps([broken, said, gpunb.is_initialized()]))
"""
    *_, status, facts = run(MACOS + code).splitlines()
    broken, printed, session = json.loads(facts)
    assert broken == []
    assert printed.keys() == {"init", "spawn", "attach", "remote", "put", "gpunb start --head"}
    assert all("on Linux only, and this is macOS" in each for each in printed.values())
    assert session is False
    assert status == "0", "devices can be listed"


def test_on_windows_it_can_be_imported_and_says_where_to_use_it() -> None:
    code = """
import gpunb
assert gpunb.__version__
try:
    gpunb.init()
except Exception as error:
    print(type(error).__name__, error)
"""
    printed = run(WINDOWS + code)
    assert "GpunbError gpunb runs sessions on Linux only, and this is Windows" in printed
    assert "inside WSL 2" in printed


@on_linux
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_python_that_was_built_for_old_systems_runs_sessions(method: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import fcntl, os, signal\n" + LACKING)
    code = f"""
import numpy, os
import gpunb

@gpunb.remote(num_gpus=0.5)
def tripled(array):
    return hasattr(os, "pidfd_open"), gpunb.get_gpu_ids(), 3 * array

with gpunb.init(simulate="1xA100", start_method={method!r}):
    *rest, array = gpunb.get(tripled.remote(numpy.ones(1 << 18)))
    print(hasattr(os, "memfd_create"), *rest, array.sum() / (3 << 18))
"""
    assert run(code, PYTHONPATH=f"{tmp_path}:{ROOT}") == "False False [0] 1.0\n"


@pytest.fixture(params=["with names for the calls", "without"])
def python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        for module, name in ((os, "pidfd_open"), (signal, "pidfd_send_signal")):
            monkeypatch.delattr(module, name)
        monkeypatch.delattr(os, "memfd_create")


@on_linux
def test_pidfd_reports_and_ends_a_process(python: None) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = linux.pidfd_open(process.pid)
    try:
        assert not os.get_inheritable(descriptor)
        linux.pidfd_send_signal(descriptor, 0)
        assert select.select([descriptor], [], [], 0)[0] == []
        linux.pidfd_send_signal(descriptor, signal.SIGKILL)
        assert select.select([descriptor], [], [], 60)[0] == [descriptor]
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            linux.pidfd_send_signal(descriptor, signal.SIGTERM)
    finally:
        os.close(descriptor)
        process.kill()
        process.communicate()


@on_linux
def test_failed_call_raises_the_systems_error(python: None) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        linux.pidfd_open(-1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        linux.pidfd_send_signal(1 << 30, 0)
    with pytest.raises(OSError, match="Invalid argument"):
        linux.memfd_create("x", 1 << 20)


@on_linux
def test_memory_file_has_a_name_and_is_not_inherited(python: None) -> None:
    assert linux.has_memory_files()
    descriptor = linux.memfd_create("name", linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING)
    try:
        assert not os.get_inheritable(descriptor)
        assert "memfd:name" in os.readlink(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


@on_linux
def test_constants_equal_those_of_the_system() -> None:
    import fcntl

    names = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")
    assert sum(getattr(fcntl, name) for name in names) == linux.F_SEAL_ALL
    assert fcntl.F_ADD_SEALS == linux.F_ADD_SEALS
    assert (os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING) == (linux.MFD_CLOEXEC, linux.MFD_ALLOW_SEALING)


@pytest.mark.parametrize("system", ["freebsd14", "darwin", "win32"])
def test_other_systems_are_named(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform.startswith("linux"):
        linux.check()
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(GpunbError, match=r"on Linux only, and this is (freebsd14|macOS|Windows)"):
        linux.check()


@pytest.mark.parametrize(
    ("patched", "names"),
    [
        (("threading", "select", "socket", "os"), "threading, select, socket"),
        (("socket",), "socket"),
        (("queue", "signal"), None),
    ],
)
def test_modules_patched_by_gevent_are_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, patched: tuple[str, ...], names: str | None
) -> None:
    """gevent removes epoll and turns threads into greenlets, so a session would wait for ever."""
    import select
    import types

    stand_in = types.ModuleType("gevent.monkey")
    vars(stand_in)["is_module_patched"] = patched.__contains__
    monkeypatch.setitem(sys.modules, "gevent.monkey", stand_in)
    if "select" in patched:
        monkeypatch.delattr(select, "epoll")
    if names is None:
        linux.check()
        return
    with pytest.raises(GpunbError) as raised:
        linux.check()
    assert str(raised.value).startswith(f"gevent has patched {names} in this process")
    assert "patch_all(thread=False, select=False, socket=False)" in str(raised.value)


def test_missing_epoll_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import select

    monkeypatch.delattr(select, "epoll")
    with pytest.raises(GpunbError, match="another library, such as eventlet, has patched select"):
        linux.check()
