"""How an actor that runs several calls at once ends at SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.sessions import ROOT

PROGRAM = """
import os, signal, sys, time
from gpunb.worker import termination

termination.GRACE = 0.05
ended = termination.Termination({idle})
{more}
os.kill(os.getpid(), signal.SIGTERM)
assert ended.asked
while True:
    time.sleep(0.01)
"""

CHILD = """
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert not ended.asked
"""

YOUNG = """
import threading

def fork():
    for _ in range(50):
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

codes = []
caller = threading.Thread(target=fork)
caller.start()
caller.join()
assert codes == [-signal.SIGTERM] * 50
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""

OWN = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
signal.signal(signal.SIGTERM, ended._signalled)
"""


@pytest.mark.parametrize(
    ("idle", "more"),
    [
        ("lambda: True", ""),
        ("lambda: False", ""),
        ("lambda: True", CHILD),
        ("lambda: True", YOUNG),
        ("lambda: True", OWN),
    ],
    ids=[
        "calls are over",
        "calls go on",
        "a forked child ends at once",
        "a forked child that has taken no step ends at once",
        "a handler of the user's stays in a forked child",
    ],
)
def test_the_signal_ends_the_process(idle: str, more: str) -> None:
    program = PROGRAM.format(idle=idle, more=more)
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert ended.returncode == -signal.SIGTERM


DEAF = """
import ctypes
from tests.waiting import until_main_sleeps
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
lock(mutex)
"""


def test_a_process_in_code_that_handles_no_signals_is_killed() -> None:
    program = PROGRAM.format(idle="lambda: until_main_sleeps() or True", more=DEAF)
    program = program.replace("assert ended.asked", "lock(mutex)  # no signal ends this wait")
    program = program.replace("GRACE = 0.05", "GRACE = 60.0")
    ended = subprocess.run([sys.executable, "-c", program], check=False, timeout=60, cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
