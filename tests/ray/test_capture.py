"""The capture of a task's streams, which needs no Ray; in a process whose streams it may take."""

from __future__ import annotations

import subprocess
import sys


def outcome(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_the_thread_that_reads_may_wait_for_what_was_written() -> None:
    """As the finalizer of a user's object does that writes, and that this thread happens to run."""
    program = """
from gpunb.ray.capture import StreamCapture

texts = []

def on_text(name, text):
    capture.drain(0.1)
    texts.append(text)

capture = StreamCapture(on_text)
with capture.on():
    print("first")
    capture.drain(10)
    print("second")
print(*texts, sep="", end="")
"""
    assert outcome(program) == "first\nsecond\n"


def test_a_wait_for_output_ends_although_it_is_not_read() -> None:
    program = """
import threading
from gpunb.ray.capture import StreamCapture

texts, reading, go_on = [], threading.Event(), threading.Event()

def on_text(name, text):
    reading.set()
    go_on.wait()
    texts.append(text)

capture = StreamCapture(on_text)
with capture.on():
    print("text", flush=True)
    reading.wait()
    capture.drain(0.1)
    before = len(texts)
    go_on.set()
print(before, *texts)
"""
    assert outcome(program) == "0 text\n\n"
