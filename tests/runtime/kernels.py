"""Kernels that take leases, and are killed: a program of its own, for `test_ledger_kills`.

It forks kernels that do nothing but take and give back shares of devices, each with a process
that stands for its worker, and kills kernels at random moments. Whether a device is over-subscribed
is seen by other means than the ledger's: whoever uses a share has that many of ten bytes of a file
locked, which no two processes can.

``python -m tests.runtime.kernels FOLDER KERNELS KILLS SEED`` prints what came of it, as JSON.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from pathlib import Path

from gpunb.core.resources import UNIT
from gpunb.runtime.ledger import Busy, Ledger
from gpunb.workers import system

DEVICES = ("sim:0", "sim:1", "sim:2")
PARTS = 10
LONGEST = 60.0
"""Seconds after which it is said that a device cannot be had any more."""


def seats(folder: Path) -> dict[str, int]:
    """The files whose bytes stand for parts of devices."""
    return {key: os.open(folder / f"seats-{key}", os.O_RDWR | os.O_CREAT) for key in DEVICES}


def sit(descriptor: int, parts: int) -> bool:
    """Lock so many of the bytes; False if there are not enough that nobody has."""
    for at in range(PARTS):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except OSError:
            continue
        parts -= 1
        if not parts:
            return True
    return False


def worker(files: dict[str, int], shares: dict[str, int], ready: int, say: int) -> None:
    """Use the shares until the kernel says so, or is gone."""
    for key, units in shares.items():
        if not sit(files[key], units * PARTS // UNIT):
            os.write(say, b"X")
    os.write(ready, b"r")
    signal.pause()


def kernel(folder: Path, seed: int, say: int) -> None:
    """Take, use and give back for ever."""
    chance = random.Random(seed)
    # Opened before the bell: a process that dies closes what was opened first first.
    files = seats(folder)
    while True:
        try:
            ledger = Ledger(folder / "ledger", DEVICES, {"pid": os.getpid()})
            break
        except Busy:
            continue
    while True:
        count = chance.choice([1, 1, 1, 2])
        units = chance.choice([1, 3, 5, 6, 10]) if count == 1 else PARTS
        shares = dict.fromkeys(chance.sample(DEVICES, count), units * UNIT // PARTS)
        lasting = chance.random() < 0.2
        wait_for(ledger, shares, lasting, chance, say)
        use(ledger, files, shares, chance, say)
        ledger.give(shares, lasting=lasting)
        patiently(ledger.tell)


def wait_for(ledger, shares, lasting, chance, say) -> None:
    waits = False
    began = time.monotonic()
    while True:
        try:
            if ledger.take(shares, lasting=lasting, job="job"):
                os.write(say, b"t")
                break
        except Busy:
            continue
        if not waits:
            os.write(say, b"w")
            patiently(lambda: ledger.claim(shares))
            waits = True
        if time.monotonic() - began > LONGEST:
            os.write(say, b"S")
            os._exit(1)
        # The bell may ring for somebody else, and those may die who would have rung it.
        select.select([ledger.bell], [], [], 0.05)
        ledger.heard()
        patiently(ledger.look)
    if waits:
        patiently(lambda: ledger.claim(None))


def use(ledger, files, shares, chance, say) -> None:
    ready, said = os.pipe()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            if system.die_with_parent(me):
                worker(files, shares, said, say)
        finally:
            os._exit(0)
    os.close(said)
    os.read(ready, 1)
    os.close(ready)
    time.sleep(chance.choice([0, 0, 0.001, 0.005]))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def patiently(call) -> None:
    while True:
        try:
            return call()
        except Busy:
            continue


def main(folder: Path, count: int, kills: int, seed: int) -> dict[str, int]:
    """Run kernels and kill them; what happened."""
    chance = random.Random(seed)
    (folder / "ledger").mkdir(exist_ok=True)
    hear, say = os.pipe()
    os.set_blocking(hear, False)
    born = 0
    living: list[int] = []
    said = {"taken": 0, "waited": 0, "oversubscribed": 0, "starved": 0, "killed": 0, "broken": 0}
    names = {"t": "taken", "w": "waited", "X": "oversubscribed", "S": "starved", "E": "broken"}

    def listen() -> None:
        try:
            for each in os.read(hear, 1 << 16).decode():
                said[names[each]] += 1
        except BlockingIOError:
            pass

    while said["killed"] < kills:
        while len(living) < count:
            born += 1
            pid = os.fork()
            if pid == 0:
                try:
                    signal.alarm(int(LONGEST) * 10)
                    kernel(folder, seed * 100_000 + born, say)
                except BaseException:  # noqa: BLE001 - whatever it is, it is to be seen
                    os.write(say, b"E")
                    traceback.print_exc()
                finally:
                    os._exit(1)
            living.append(pid)
        time.sleep(chance.choice([0.001, 0.005, 0.01, 0.03]))
        listen()
        victim = living.pop(chance.randrange(len(living)))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        said["killed"] += 1
        if said["oversubscribed"] or said["starved"] or said["broken"]:
            break
    for each in living:
        os.kill(each, signal.SIGKILL)
        os.waitpid(each, 0)
    listen()
    return said


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
