"""Interrupts at every step of what begins a session, ends it and moves data: each of these happens
or does not."""

import os
import subprocess
import sys

import pytest

from tests.sessions import ROOT

FULL = bool(os.environ.get("GPUNB_SLOW_TESTS"))


def interrupted(work, most):
    """Run `tests.interrupted`, which fails unless all is as it has to be."""
    command = [sys.executable, "-W", "error", "-m", "tests.interrupted", work, str(most)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3600 if FULL else 300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("work", "most"),
    [("arrays", 150), ("results", 15), ("calls", 15), ("init", 15), ("shutdown", 10)],
)
def test_an_interrupt_is_raised_once_and_what_it_hits_is_whole(work, most):
    steps = int(interrupted(work, 0 if FULL else most))
    assert steps > most or work == "shutdown"


@pytest.mark.parametrize("nth", range(100, 4000, 100) if FULL else (500, 1500, 3000))
def test_the_first_session_of_a_process_can_be_interrupted(nth):
    """While it imports what it needs."""
    interrupted("init", -nth)
