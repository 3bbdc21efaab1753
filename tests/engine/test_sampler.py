"""The thread that looks at devices: when it is there, and what a vendor's call can do to it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from gpunb.accelerators import Accelerator, Process, Usage, registry
from gpunb.engine import sampler
from gpunb.engine.sampler import People, Sampler
from gpunb.scheduler.resources import Device
from tests.waiting import PATIENCE, eventually


class Acme(Accelerator):
    name: ClassVar[str] = "acme"
    looks = 0
    looked = 0
    opened: ClassVar[list[str]] = []
    blocks: ClassVar[threading.Event | None] = None
    fails = False
    health_asked = 0

    def devices(self) -> Sequence[Device]:
        return ()

    def usage(self, devices: Sequence[Device]) -> dict[str, Usage]:
        Acme.looks += 1
        if Acme.blocks is not None:
            Acme.blocks.wait(PATIENCE)
        Acme.looked += 1
        if Acme.fails:
            raise OSError("no answer")
        mine = Process(os.getpid(), 5)
        return {each.key: Usage(memory_used=7, processes=(mine,)) for each in devices}

    def health(self, devices: Sequence[Device]) -> dict[str, str | None]:
        Acme.health_asked += 1
        return {each.key: None for each in devices}

    @contextmanager
    def polling(self) -> Iterator[None]:
        Acme.opened.append("open")
        yield
        Acme.opened.append("closed")


class Silent(Accelerator):
    """A plug-in that measures nothing."""

    name: ClassVar[str] = "silent"

    def devices(self) -> Sequence[Device]:
        return ()


REAL = Device("a", 0, "card", memory=40, vendor="acme")


@pytest.fixture(autouse=True)
def plugin(monkeypatch) -> None:
    known = {**registry._known, "acme": Acme, "silent": Silent}
    monkeypatch.setattr(registry, "_known", known)
    for name in ("looks", "looked", "health_asked"):
        monkeypatch.setattr(Acme, name, 0)
    monkeypatch.setattr(Acme, "blocks", None)
    monkeypatch.setattr(Acme, "fails", False)
    monkeypatch.setattr(Acme, "opened", [])


class Seen:
    def __init__(self) -> None:
        self.readings: list[Any] = []

    def __call__(self, readings: Any, health: Any) -> None:
        self.readings.append((readings, health))


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "gpunb-sampler"]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def made(seen) -> Iterator[Sampler]:
    sampler = Sampler([REAL], seen)
    yield sampler
    sampler.stop()
    eventually(lambda: not threads(), "the thread ends")


def test_it_looks_while_somebody_wants_to_know_and_no_longer(made, seen):
    assert not threads()

    def many() -> bool:
        made.want(0.05, 0.001)
        return len(seen.readings) > 2

    eventually(many, "it looks again and again")
    eventually(lambda: not threads(), "the thread ends by itself")
    assert Acme.opened[-2:] == ["open", "closed"]
    before = len(Acme.opened)
    made.want(0.01, 0.001)
    eventually(lambda: len(Acme.opened) == before + 2, "it begins again")


def test_wanting_more_starts_no_other_thread(made):
    for _ in range(5):
        made.want(PATIENCE, 0.001)
    assert len(threads()) == 1


def test_it_looks_later_if_the_system_gives_no_thread_now(made, seen, monkeypatch):
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        made.want(0, 0.01)
        made.fresh(0, 0.01)
        assert made.first(0.01) is None
    assert not made.running
    made.want(0, 0.01)
    eventually(lambda: seen.readings, "it looks")


def test_who_wants_more_with_each_look_is_heard_however_late():
    looks: list[Any] = []

    def deliver(readings: Any, health: Any) -> None:
        looks.append(readings)
        if len(looks) < 5:
            made.want(0, 0.001)  # over before the thread looks at the clock again

    made = Sampler([REAL], deliver)
    made.want(0, 0.001)
    eventually(lambda: not threads(), "the thread ends when nobody wants more")
    assert len(looks) == 5


def test_what_it_sees(made, seen):
    made.want(0.01, 1)
    eventually(lambda: seen.readings, "something is seen")
    reading = seen.readings[0][0]["a"]
    assert (reading.memory_used, reading.memory_total) == (7, None)
    (process,) = reading.processes
    assert (process.pid, process.memory) == (os.getpid(), 5)
    assert process.line[:2] == (os.getpid(), os.getppid())


def test_the_health_is_asked_for_less_often(made, seen):
    made.want(PATIENCE, 0.001)
    eventually(lambda: Acme.looks > sampler.HEALTH_EVERY + 2, "it looks often")
    made.stop()
    assert Acme.health_asked == (Acme.looks - 1) // sampler.HEALTH_EVERY + 1


def test_process_ids_that_mean_nothing_here_are_left_out(seen):
    made = Sampler([REAL], seen, strange=True)
    made.want(0.01, 1)
    eventually(lambda: seen.readings, "something is seen")
    assert seen.readings[0][0]["a"].processes is None


def test_a_plug_in_that_fails_makes_it_know_nothing(made, seen, monkeypatch):
    monkeypatch.setattr(Acme, "fails", True)
    made.want(0.01, 1)
    eventually(lambda: seen.readings, "it goes on")
    assert seen.readings[0][0] == {}


def test_a_call_that_does_not_return_holds_nobody_up(made, seen, monkeypatch):
    block = threading.Event()
    monkeypatch.setattr(Acme, "blocks", block)
    monkeypatch.setattr(sampler, "SLOW", 0.01)
    made.want(PATIENCE, 0.001)
    eventually(lambda: made.silent_for() > 0.01, "it is known that it does not answer")
    made.fresh(0, 0.01)
    made.stop()
    assert not Acme.looked
    assert not seen.readings
    block.set()


@pytest.mark.parametrize(
    "device",
    [
        Device("sim:0", 0, "simulated", vendor="simulated", logical=True),
        Device("s", 0, "card", vendor="silent"),
        Device("x", 0, "card", vendor="nobody"),
    ],
    ids=lambda each: each.vendor,
)
def test_where_there_is_nothing_to_see_there_is_no_thread(device, seen):
    made = Sampler([device], seen)
    assert made.blind
    made.want(PATIENCE, 0.001)
    made.fresh(0, PATIENCE)
    assert not threads()


def test_something_fresh_is_waited_for_and_not_longer(made, seen):
    made.fresh(0, PATIENCE)
    assert len(seen.readings) == 1
    made.fresh(PATIENCE, PATIENCE)
    assert len(seen.readings) == 1


def test_who_a_process_is():
    people = People()
    seen = people.seen(Process(os.getpid(), None))
    assert seen.user
    assert "py" in (seen.name or "")
    assert abs((seen.since or 0) - time.time()) < 3600
    assert people.seen(Process(2**22 + 1, 5)).line == (2**22 + 1,)
    people.only(set())
    assert not people._known


def test_where_process_ids_mean_nothing(tmp_path):
    strange = tmp_path / "pid"
    strange.touch()
    assert sampler.hidden(str(strange), "6.8.0-generic")
    assert not sampler.hidden(str(tmp_path / "missing"), "6.8.0-generic")
    assert sampler.hidden(str(tmp_path / "missing"), "5.15.0-microsoft-standard-WSL2")
