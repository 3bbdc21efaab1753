"""Runs NVIDIA's MPS control program for a session, and ends it with the session.

This module is a program: ``python mps_guard.py PROGRAM FOLDER``. It uses the standard library only.
It prints ``ready``, or the reason why it failed. It runs until it reads a byte or the end of its
standard input, which the system closes when the session's process ends in any way.
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
    """Run the control program. Returns the exit status."""
    log = os.path.join(folder, "control.txt")
    with open(log, "wb") as out:
        control = subprocess.Popen(
            [program, "-f"], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        problem = _wait_until_ready(program, control, log)
        sys.stdout.write(f"{problem or READY}\n")
        sys.stdout.flush()
        if problem:
            return 1
        os.read(0, 1)  # waits for a byte, or for the end of the session's process
        return 0
    finally:
        _end(program, control)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_ready(program: str, control: subprocess.Popen[bytes], log: str) -> str | None:
    """Wait until the control program replies. Returns the reason if it does not."""
    deadline = time.monotonic() + _START
    while not send(program, "get_server_list"):
        if control.poll() is not None:
            with open(log, errors="replace") as file:
                text = " ".join(file.read().split())[-500:]
            return f"it ended with status {control.returncode}: {text or 'it said nothing'}"
        if time.monotonic() > deadline:
            return f"it did not answer within {_START:g} s"
        time.sleep(0.02)
    return None


def send(program: str, command: str, patience: float = _QUIT) -> bool:
    """Send the control program a command, for at most `patience` seconds. Returns its success."""
    try:
        done = subprocess.run(
            [program],
            input=f"{command}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=patience,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _end(program: str, control: subprocess.Popen[bytes]) -> None:
    """Ask the program and its servers to quit, then end all processes of this process group."""
    if control.poll() is None:
        send(program, "quit -t 2")
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
