"""The helpers of Ray's internal modules that its tests import most."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpunb
from ray._lookup import NotThere

_own = threading.local()


@gpunb.remote(num_cpus=0)
class SignalActor:
    """Holds the tasks that wait for it until it is sent."""

    def __init__(self) -> None:
        self._sent = asyncio.Event()
        self._waiters = 0

    async def send(self, clear: bool = False) -> None:
        self._sent.set()
        if clear:
            self._sent.clear()

    async def wait(self, should_wait: bool = True) -> None:
        if should_wait:
            self._waiters += 1
            try:
                await self._sent.wait()
            finally:
                self._waiters -= 1

    async def cur_num_waiters(self) -> int:
        return self._waiters


@gpunb.remote(num_cpus=0)
class Semaphore:
    """A semaphore for tasks."""

    def __init__(self, value: int = 1) -> None:
        self._semaphore = asyncio.Semaphore(value)

    async def acquire(self) -> None:
        await self._semaphore.acquire()

    async def release(self) -> None:
        self._semaphore.release()

    async def locked(self) -> bool:
        return self._semaphore.locked()


class RayTestTimeoutException(Exception):
    """A helper waited too long."""


def wait_for_condition(
    condition_predictor: Callable[..., Any],
    timeout: float = 10,
    retry_interval_ms: float = 100,
    raise_exceptions: bool = False,
    **arguments: Any,
) -> None:
    """Wait until the function returns a true value."""
    if not _waited(condition_predictor, timeout, retry_interval_ms, raise_exceptions, arguments):
        raise RuntimeError(f"not within {timeout} s: {condition_predictor}")


def _waited(
    true: Callable[..., Any],
    timeout: float,
    interval_ms: float,
    strict: bool,
    arguments: dict[str, Any],
) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            if true(**arguments):
                return True
        except NotThere:
            raise
        except Exception:
            if strict:
                raise
        time.sleep(interval_ms / 1000)
    return False


async def async_wait_for_condition(
    condition_predictor: Callable[..., Any],
    timeout: float = 10,  # noqa: ASYNC109 - the name that Ray's tests use
    retry_interval_ms: float = 100,
    **arguments: Any,
) -> None:
    """Wait until the function or the coroutine returns a true value."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = condition_predictor(**arguments)
        if await found if inspect.isawaitable(found) else found:
            return
        await asyncio.sleep(retry_interval_ms / 1000)
    raise RuntimeError(f"not within {timeout} s: {condition_predictor}")


async_wait_for_condition_async_predicate = async_wait_for_condition


def wait_for_pid_to_exit(pid: int, timeout: float = 20) -> None:
    """Wait until no process has this pid."""
    wait_for_condition(lambda: not Path(f"/proc/{pid}").exists(), timeout)


def wait_for_num_actors(num_actors: int, state: str | None = None, timeout: float = 10) -> None:
    """Wait until the session has so many actors."""
    from gpunb.util.state import list_actors

    filters = [("state", "=", state)] if state else None
    wait_for_condition(lambda: len(list_actors(filters)) >= num_actors, timeout)


def kill_actor_and_wait_for_failure(
    actor: Any, timeout: float = 10, retry_interval_ms: float = 100
) -> None:
    """Kill the actor, and wait until the session has no such actor."""
    from gpunb.util.state import list_actors

    number = int(actor._actor_id)
    gpunb.kill(actor)
    wait_for_condition(lambda: not list_actors([("actor_id", "=", number)]), timeout)


@gpunb.remote
def _put(value: Any) -> Any:
    return value


def put_object(value: Any, use_ray_put: bool) -> Any:
    """A reference to the value: of `put`, or the result of a task."""
    return gpunb.put(value) if use_ray_put else _put.remote(value)


def convert_actor_state(state: Any) -> Any:
    """The state of an actor, from Ray's number of it."""
    return state


def run_string_as_driver(driver_script: str, env: dict[str, str] | None = None) -> str:
    """Run a program; return its output, errors included."""
    process = run_string_as_driver_nonblocking(driver_script, env, stderr=subprocess.STDOUT)
    return _finished(process, driver_script)[0]


def run_string_as_driver_stdout_stderr(
    driver_script: str, env: dict[str, str] | None = None
) -> tuple[str, str]:
    """Run a program; return its output and its errors."""
    return _finished(run_string_as_driver_nonblocking(driver_script, env), driver_script)


def run_string_as_driver_nonblocking(
    driver_script: str, env: dict[str, str] | None = None, stderr: int = subprocess.PIPE
) -> subprocess.Popen[bytes]:
    """Start a program."""
    process = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
    )
    assert process.stdin is not None
    process.stdin.write(driver_script.encode())
    process.stdin.close()
    process.stdin = None
    return process


def _finished(process: subprocess.Popen[bytes], script: str) -> tuple[str, str]:
    out, err = ((each or b"").decode() for each in process.communicate())
    if process.returncode:
        if (marker := "NotThere: ") in out + err:
            raise NotThere((out + err).rpartition(marker)[2].partition("\n")[0])
        raise subprocess.CalledProcessError(process.returncode, script, out, err)
    return out, err


def dicts_equal(one: dict[Any, Any], other: dict[Any, Any], abs_tol: float = 1e-4) -> bool:
    """Whether two dicts have the same keys, and values that are nearly the same."""
    return one.keys() == other.keys() and all(
        value == other[key] or abs(value - other[key]) <= abs_tol for key, value in one.items()
    )


def generate_system_config_map(**settings: Any) -> dict[str, Any]:
    """The argument of `init` with settings of Ray's internals, which has no effect."""
    return {"_system_config": settings}


def get_or_create_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this thread, new if it has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        if not hasattr(_own, "loop") or _own.loop.is_closed():
            _own.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(_own.loop)
        return _own.loop


def client_test_enabled() -> bool:
    """Whether Ray client is tested: never."""
    return False


def skip_flaky_core_test_premerge(reason: str) -> Callable[[Any], Any]:
    """A decorator without an effect."""
    return lambda test: test
