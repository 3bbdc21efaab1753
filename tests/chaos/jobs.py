"""What runs in the workers while faults come, and what has to come of it."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import gpunb

SEATS = "GPUNB_CHAOS_SEATS"
"""The folder with a file for each device. Whoever uses a device has as many bytes of it locked as
he holds tenths of it, which no two processes can: this tells by other means than the ledger's
whether a device is held twice."""

PARTS = 10
LARGE = 200_000
PLANNED = "planned"


def sit(parts: int) -> None:
    """Use so many tenths of each device that this task has, until `stand`.

    Raises:
        AssertionError: somebody else uses them: the device is held twice.
    """
    for device in gpunb.get_gpu_ids():
        seats = os.open(os.path.join(os.environ[SEATS], str(device)), os.O_RDWR | os.O_CREAT)
        _seats.append(seats)
        left = parts
        for at in range(PARTS):
            try:
                fcntl.lockf(seats, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
            except OSError:
                continue
            left -= 1
            if not left:
                break
        assert not left, f"device {device} is held twice: {left} of {parts} tenths are not free"


def stand() -> None:
    """Use the devices no more."""
    while _seats:
        os.close(_seats.pop())


_seats: list[int] = []


def plain(number: int) -> int:
    return number + 1


def large(number: int) -> bytes:
    return number.to_bytes(4, "big") * (LARGE // 4)


def measured(data: bytes, number: int) -> int:
    assert data == large(number)
    return number + 2


def printed(number: int) -> int:
    sys.stdout.write(f"chaos {number}\n")
    return number + 3


def flooded(number: int) -> int:
    sys.stdout.write(f"{number}\n" * 60_000)  # more than a log keeps in memory
    return number + 4


def nested(number: int) -> int:
    inner = [gpunb.remote(plain).remote(number + each) for each in range(3)]
    return sum(gpunb.get(inner))


def puts(number: int) -> int:
    ref = gpunb.put(large(number))
    return measured(gpunb.get(ref), number)


def on_device(number: int, parts: int) -> int:
    sit(parts)
    time.sleep(0.0005)  # by the clock: so long another job with the same part can meet this one
    stand()
    return number + 5


def yields(number: int) -> Iterator[Any]:
    yield number
    yield large(number)
    yield number + 1


def fails(number: int) -> None:
    raise ValueError(f"{PLANNED} {number}")


def sleeps(number: int) -> int:
    time.sleep(60)
    return number


def naps(number: int, seconds: float) -> int:
    time.sleep(seconds)
    return number + 6


def dies(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Actor:
    """Counts its calls."""

    def __init__(self, number: int, parts: int = 0) -> None:
        if parts:
            sit(parts)
        self.number = number

    def add(self, by: int) -> int:
        self.number += by
        return self.number

    def large(self, number: int) -> bytes:
        return large(number)


def report(data: list[bytes], descriptors: int) -> int:
    """Say something to the kernel that no worker says."""
    from gpunb.protocol import backend

    channel: Any = backend.current().transport.channel
    for each in data:
        null = [os.open(os.devnull, os.O_RDONLY) for _ in range(descriptors)]
        channel.send_encoded(each or b"\0", null)
        for descriptor in null:
            os.close(descriptor)
    return 7
