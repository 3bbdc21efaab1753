"""Kernels that take leases and are killed: a separate program, for `test_ledger_kills`.

It forks kernels that only take and give back shares of devices, each with a process in place of its
worker, and kills kernels at random moments. Overbooking is found without the ledger: each user of a
share locks a part of ten bytes of a file, and two processes cannot lock the same byte.

``python -m tests.leases.kernels FOLDER KERNELS KILLS SEED`` prints the outcome as JSON.
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

from gpunb.leases.ledger import Ledger
from gpunb.leases.ledger_file import Busy
from gpunb.scheduler.resources import UNIT
from gpunb.system import process_control

DEVICES = ("sim:0", "sim:1", "sim:2")
PARTS = 10
LONGEST = 60.0
"""Seconds after which it is said that a device cannot be had any more."""


def seats(folder: Path) -> dict[str, int]:
    """Make the files whose bytes stand for parts of devices."""
    return {key: os.open(folder / f"seats-{key}", os.O_RDWR | os.O_CREAT) for key in DEVICES}


def sit(descriptor: int, parts: int) -> bool:
    """Lock so many of the bytes; return False if not enough are free."""
    for at in range(PARTS):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
        except OSError:
            continue
        parts -= 1
        if not parts:
            return True
    return False


def worker(files: dict[str, int], shares: dict[str, int], ready: int, report: int) -> None:
    """Use the shares until the kernel sends a message or ends."""
    for key, units in shares.items():
        if not sit(files[key], units * PARTS // UNIT):
            os.write(report, b"X")
    os.write(ready, b"r")
    signal.pause()


def kernel(folder: Path, seed: int, report: int) -> None:
    """Take, use and give back shares for ever."""
    chance = random.Random(seed)
    # Opened before the FIFO: a process that dies closes what was opened first first.
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
        wait_for(ledger, shares, lasting, chance, report)
        use(ledger, files, shares, chance, report)
        ledger.give(shares, lasting=lasting)
        patiently(ledger.publish)


def wait_for(ledger, shares, lasting, chance, report) -> None:
    waits = False
    began = time.monotonic()
    while True:
        try:
            if ledger.take(shares, lasting=lasting, job="job"):
                os.write(report, b"t")
                break
        except Busy:
            continue
        if not waits:
            os.write(report, b"w")
            patiently(lambda: ledger.claim(shares))
            waits = True
        if time.monotonic() - began > LONGEST:
            os.write(report, b"S")
            os._exit(1)
        # The byte in the FIFO may be for another process; a process that would write it may die.
        select.select([ledger.fifo], [], [], 0.05)
        ledger.clear_fifo()
        patiently(ledger.look)
    if waits:
        patiently(lambda: ledger.claim(None))


def use(ledger, files, shares, chance, report) -> None:
    ready, started = os.pipe()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            if process_control.die_with_parent(me):
                worker(files, shares, started, report)
        finally:
            os._exit(0)
    os.close(started)
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
    """Run kernels and kill them; return the outcome."""
    chance = random.Random(seed)
    (folder / "ledger").mkdir(exist_ok=True)
    reading, report = os.pipe()
    os.set_blocking(reading, False)
    born = 0
    living: list[int] = []
    counts = {"taken": 0, "waited": 0, "oversubscribed": 0, "starved": 0, "killed": 0, "broken": 0}
    names = {"t": "taken", "w": "waited", "X": "oversubscribed", "S": "starved", "E": "broken"}

    def listen() -> None:
        try:
            for each in os.read(reading, 1 << 16).decode():
                counts[names[each]] += 1
        except BlockingIOError:
            pass

    while counts["killed"] < kills:
        while len(living) < count:
            born += 1
            pid = os.fork()
            if pid == 0:
                try:
                    signal.alarm(int(LONGEST) * 10)
                    kernel(folder, seed * 100_000 + born, report)
                except BaseException:  # noqa: BLE001 - whatever it is, it is to be seen
                    os.write(report, b"E")
                    traceback.print_exc()
                finally:
                    os._exit(1)
            living.append(pid)
        time.sleep(chance.choice([0.001, 0.005, 0.01, 0.03]))
        listen()
        victim = living.pop(chance.randrange(len(living)))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        counts["killed"] += 1
        if counts["oversubscribed"] or counts["starved"] or counts["broken"]:
            break
    for each in living:
        os.kill(each, signal.SIGKILL)
        os.waitpid(each, 0)
    listen()
    return counts


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
