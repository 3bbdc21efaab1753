"""Runs NVIDIA's MPS control program for a session, and ends it with the session, however that ends.

A program of its own, with nothing but the standard library: ``python mps_guard.py PROGRAM FOLDER``.
It says ``ready``, or why it cannot, on its standard output, and goes on until something comes on
its standard input, or that is closed, which happens by itself when the session's process is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

READY = "ready"
_START = 20.0
_QUIT = 2.0


def main(program: str, folder: str) -> int:
    """Returns the exit status."""
    log = os.path.join(folder, "control.txt")
    with open(log, "wb") as out:
        control = subprocess.Popen(
            [program, "-f"], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        problem = _wait(program, control, log)
        sys.stdout.write(f"{problem or READY}\n")
        sys.stdout.flush()
        if problem:
            return 1
        os.read(0, 1)  # until something is said, or nobody is left who could
        return 0
    finally:
        _end(program, control)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(program: str, control: subprocess.Popen[bytes], log: str) -> str | None:
    """Until it answers; or why it does not."""
    deadline = time.monotonic() + _START
    while not _say(program, "get_server_list"):
        if control.poll() is not None:
            with open(log, errors="replace") as file:
                said = " ".join(file.read().split())[-500:]
            return f"it ended with status {control.returncode}: {said or 'it said nothing'}"
        if time.monotonic() > deadline:
            return f"it did not answer within {_START:g} s"
        time.sleep(0.02)
    return None


def _say(program: str, command: str) -> bool:
    """Give the control program a command; whether it took it."""
    try:
        done = subprocess.run(
            [program],
            input=f"{command}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_QUIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _end(program: str, control: subprocess.Popen[bytes]) -> None:
    """Let it quit, with its servers; or end them all, as they are of this process's group."""
    if control.poll() is None:
        _say(program, "quit -t 2")
        try:
            control.wait(_QUIT)
        except subprocess.TimeoutExpired:
            control.kill()
            control.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        os.killpg(0, signal.SIGTERM)
    except OSError:
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main(*sys.argv[1:]))
