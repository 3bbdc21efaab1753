"""Parked actors in sessions: on simulated devices, and on a stand-in for a device."""

from __future__ import annotations

import os

import pytest

import gpunb
from gpunb.engine.share_checks import ShareChecks
from gpunb.exceptions import GpunbError
from gpunb.protocol import backend
from tests import sessions
from tests.waiting import Gate, eventually

STAND_IN = sessions.ROOT / "tests" / "gpu" / "stand_in"


@gpunb.remote(num_gpus=1)
class Counter:
    def __init__(self):
        self.count = 0

    def add(self):
        self.count += 1
        return self.count, os.getpid(), gpunb.get_gpu_ids()

    def hold(self, gate):
        gate.enter()


@gpunb.remote(num_gpus=1)
class Async:
    async def nothing(self):
        pass


@gpunb.remote
class Plain:
    def nothing(self):
        pass


@gpunb.remote(num_gpus=1)
def device():
    return gpunb.get_gpu_ids()


def free():
    return gpunb.available_resources().get("GPU", 0)


def test_a_parked_actor_goes_on_with_its_state_on_its_device(start):
    session = start(simulate="1xA100:40GiB")
    actor = Counter.options(name="counter").remote()
    (_, pid, _) = gpunb.get(actor.add.remote())
    (ident,) = session.park("counter")
    assert session.park() == []
    assert free() == 1
    (facts,) = gpunb.status()["actors"]
    assert facts["id"] == ident
    assert (facts["state"], facts["devices"], facts["pid"]) == ("parked", [], pid)
    assert gpunb.get(device.remote()) == [0]
    assert gpunb.get(actor.add.remote()) == (2, pid, [0])
    assert free() == 0
    gpunb.kill(actor)


def test_a_call_of_a_parked_actor_waits_for_its_share_and_says_so(start, tmp_path):
    session, gate = start(simulate="1xA100:40GiB"), Gate(tmp_path)
    parked = Counter.remote()
    gpunb.get(parked.add.remote())
    (ident,) = session.park()
    holder = Counter.remote()
    held = holder.hold.remote(gate)
    gate.await_()
    ref = parked.add.remote()
    waiting = {each["name"]: each["waits_for"] for each in gpunb.status()["waiting"]}
    reason = f"waits for actor #{ident} to have its devices again: needs 1 whole"
    assert waiting["Counter.add"].startswith(reason)
    gate.open()
    gpunb.get(held)
    gpunb.kill(holder)
    assert gpunb.get(ref)[0] == 2
    gpunb.kill(parked)


def test_a_parked_actor_whose_memory_does_not_fit_says_so(start, monkeypatch):
    session, free = start(simulate="1xA100:40GiB"), [0]
    before = ShareChecks.memory
    with monkeypatch.context() as measured:
        measured.setattr(
            ShareChecks, "memory", lambda self, job: {**before(self, job), "now": 8 * 2**30}
        )
        actor = Counter.remote()
        gpunb.get(actor.add.remote())
        (ident,) = session.park()
    monkeypatch.setattr(ShareChecks, "free", lambda self, keys, since: free[0])
    ref = actor.add.remote()
    (call,) = gpunb.status()["waiting"]
    reason = f"waits for actor #{ident} to have its devices again: 8 GiB of its memory come back"
    assert call["waits_for"].startswith(f"{reason} to GPU 0, where 0 B are free")
    assert backend.current().ask("why", call["id"]) == call["waits_for"]
    free[0] = 40 * 2**30
    assert gpunb.get(ref)[0] == 2
    assert backend.current().ask("why", ident) is None
    gpunb.kill(actor)


def test_an_actor_that_cannot_be_parked_is_refused_with_the_reason(start, tmp_path):
    session, gate = start(simulate="2xA100:40GiB"), Gate(tmp_path)
    busy, loop, plain = Counter.remote(), Async.remote(), Plain.remote()
    held = busy.hold.remote(gate)
    gate.await_()
    gpunb.get([loop.nothing.remote(), plain.nothing.remote()])
    for actor, reason in ((busy, "runs a call"), (loop, "has coroutines"), (plain, "no devices")):
        with pytest.raises(GpunbError, match=f"the actor #.* cannot be parked: .*{reason}"):
            session.park(actor)
    with pytest.raises(ValueError, match="no actor and no session of cells has the name 'nobody'"):
        session.park("nobody")
    gate.open()
    gpunb.get(held)
    assert len(session.park()) == 1


def test_idle_actors_park_by_themselves_and_end_when_they_are_killed(start):
    start(simulate="1xA100:40GiB", park_after=0.05)
    actor = Counter.remote()
    (_, pid, _) = gpunb.get(actor.add.remote())
    eventually(lambda: free() == 1, "the device is free")
    assert gpunb.get(actor.add.remote())[:2] == (2, pid)
    eventually(lambda: free() == 1, "the device is free again")
    gpunb.kill(actor)
    eventually(lambda: not sessions.alive(pid), "its process is gone")


@pytest.mark.parametrize(
    ("value", "error"),
    [("soon", ValueError), (0, ValueError), ("5 weeks", ValueError), ([], TypeError)],
)
def test_a_bad_time_is_refused(value, error):
    with pytest.raises(error, match="park_after"):
        gpunb.init(simulate="1", park_after=value)


SCRIPT = """
    import gpunb
    from gpunb import accelerators

    class Holder:
        def take(self):
            import ctypes
            cuda = ctypes.CDLL("libcuda.so.1")
            cuda.cuDevicePrimaryCtxRetain(None, 0)
            return 1

    def used():
        devices = accelerators.detect().devices
        return accelerators.measure(devices)[devices[0].key].memory_used >> 20

    with gpunb.init(preload=[]) as session:
        holder = gpunb.remote(num_gpus=1)(Holder).remote()
        gpunb.get(holder.take.remote())
        print(used())
        try:
            print(session.park(holder), used())
        except gpunb.exceptions.GpunbError as error:
            print(error)
        print(gpunb.get(holder.__ray_ready__.remote()), used())
"""


FULL = """
    import card_memory
    import gpunb
    from gpunb.engine import share_checks
    from tests.waiting import eventually

    share_checks.hidden = lambda devices: False  # the stand-in knows this namespace's processes

    class Holder:
        def take(self):
            card_memory.take(card_memory.CONTEXT)

    with gpunb.init(preload=[]) as session:
        holder = gpunb.remote(num_gpus=1)(Holder).remote()
        gpunb.get(holder.take.remote())
        eventually(lambda: gpunb.status()["actors"][0]["memory"]["now"])
        session.park(holder)
        card_memory.take(card_memory.TOTAL - card_memory.CONTEXT // 2)
        ref = holder.take.remote()
        print(len(gpunb.wait([ref], timeout=0.5)[0]))
        card_memory.take(0)
        print(gpunb.get(ref))
"""


def run(folder, script=SCRIPT, **env):
    path = os.pathsep.join([str(STAND_IN), str(sessions.ROOT)])
    done = sessions.script(script, env={"PYTHONPATH": path, "GPUNB_STAND_IN": str(folder), **env})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_memory_of_a_parked_actor_is_off_the_device_and_comes_back(tmp_path):
    assert run(tmp_path) == ["400", "[1] 0", "True 400"]


def test_an_actor_that_the_driver_refuses_to_park_goes_on(tmp_path):
    printed = run(tmp_path, GPUNB_STAND_IN_FAILS="cuCheckpointProcessCheckpoint")
    reason = "cuCheckpointProcessCheckpoint failed: error (999)"
    assert printed == ["400", f"the actor #1 cannot be parked: {reason}", "True 400"]


def test_the_memory_comes_back_once_the_device_has_room_for_it(tmp_path):
    assert run(tmp_path, FULL) == ["0", "None"]
