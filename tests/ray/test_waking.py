"""An interrupt that Python only notes ends a system call all the same."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import _thread, signal, threading, time
from gpunb.ray.wakeup import InterruptWaker
from gpunb.worker.interrupts import WAKE

def interrupted(number, frame):
    waking.seen()
    raise KeyboardInterrupt

waking = InterruptWaker()
signal.signal(WAKE, lambda *_: None)
signal.signal(signal.SIGINT, interrupted)
waking.listen()
for _ in range(3):
    try:
        threading.Timer(0.05, _thread.interrupt_main).start()
        time.sleep(300)
    except KeyboardInterrupt:
        print("awake")
"""


def test_an_interrupt_of_the_interpreter_ends_a_sleep() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["awake"] * 3
