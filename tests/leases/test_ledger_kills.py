"""Kernels with leases are killed at any moment: no device is leased twice, and no lease stays for
ever."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from gpunb.leases.ledger import Ledger
from gpunb.leases.records import LEDGER_FILE
from tests.leases.kernels import DEVICES
from tests.sessions import ROOT, begun, running
from tests.waiting import PATIENCE, eventually

SLOW = bool(os.environ.get("GPUNB_SLOW_TESTS"))
SEEDS = range(1, 11) if SLOW else [1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_device_is_given_away_twice_and_none_is_lost(tmp_path, seed):
    kills = 5000 if SLOW else 500
    command = [sys.executable, "-m", "tests.leases.kernels", tmp_path, "8", str(kills), str(seed)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    printed = json.loads(done.stdout)
    assert printed["killed"] == kills, printed
    assert not printed["oversubscribed"], printed
    assert not printed["starved"], printed
    assert not printed["broken"], done.stderr
    assert printed["taken"] > kills
    assert printed["waited"] > kills / 4
    # Whoever comes next finds everything free, and tidies up.
    ledger = Ledger(tmp_path / "ledger", DEVICES, {})
    everything = dict.fromkeys(DEVICES, 10_000)
    eventually(lambda: ledger.take(everything, lasting=False, job=""), "everything is free")
    assert len(os.listdir(tmp_path / "ledger")) == 3
    ledger.close()
    assert os.listdir(tmp_path / "ledger") == [LEDGER_FILE]


SESSION = """
    import os, sys, time
    from pathlib import Path
    import gpunb
    from gpunb import exceptions
    sys.path.insert(0, {root!r})

    folder = Path({folder!r})
    gpunb.init(simulate="2xA100:40GiB", num_cpus=2, preload=())

    @gpunb.remote(num_gpus={share}, max_calls={calls})
    def use(folder, parts):
        import os, sys, time
        sys.path.insert(0, {root!r})
        from tests.leases.kernels import sit
        (device,) = gpunb.get_gpu_ids()
        seats = os.open(os.path.join(folder, "seats-%s" % device), os.O_RDWR | os.O_CREAT)
        if not sit(seats, parts):
            open(os.path.join(folder, "twice"), "w").close()
        with open(os.path.join(folder, "used"), "a") as file:
            file.write("%d\\n" % os.getppid())
        time.sleep(0.01)  # by the clock: so long whoever has the share too can meet this one
        os.close(seats)

    with open(folder / "begun", "a") as file:
        file.write("%d\\n" % os.getpid())
    for _ in range(1_000_000):
        gpunb.get([use.remote(str(folder), {parts}) for _ in range(3)])
"""


@pytest.mark.timeout(300)
def test_killed_sessions_take_their_workers_along_and_leave_room_for_the_others(
    tmp_path, monkeypatch
):
    """With real sessions. Each user of a share locks a part of ten bytes for its device."""
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    monkeypatch.setenv("GPUNB_LEDGER_DIR", str(ledger))
    chance = random.Random(1)
    kinds = [(0.5, 1), (1, 1), (0.3, 0), (0.7, 1)]
    living = []
    kills = 40 if SLOW else 4
    born = 0
    try:
        for _ in range(kills):
            while len(living) < 3:
                share, calls = kinds[born % len(kinds)]
                born += 1
                parts = round_up(share * 10)
                text = SESSION.format(
                    root=str(ROOT), folder=str(tmp_path), share=share, calls=calls, parts=parts
                )
                context = running(text)
                living.append((context, context.__enter__()))
            begun(tmp_path / "begun", born)
            used = len(begun(tmp_path / "used"))
            begun(tmp_path / "used", used + 5)
            context, process = living.pop(chance.randrange(len(living)))
            os.kill(process.pid, signal.SIGKILL)
            context.__exit__(None, None, None)
            assert not (tmp_path / "twice").exists(), "a device was given away twice"
    finally:
        for context, process in living:
            process.kill()
            context.__exit__(None, None, None)
    assert not (tmp_path / "twice").exists()
    last = Ledger(ledger, ["sim:0", "sim:1"], {})
    everything = {"sim:0": 10_000, "sim:1": 10_000}
    eventually(lambda: last.take(everything, lasting=False, job=""), "everything is free", PATIENCE)
    last.close()


def round_up(number):
    return int(number + 0.5)
