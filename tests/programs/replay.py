"""Run random programs by their seeds: ``python -m tests.programs.replay 123 [--shrink]``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.programs.making import make
from tests.programs.running import check_processes, run, session
from tests.programs.steps import Program, listing

BATCH = 100
"""Programs that share a session."""


def batch(seed: int, count: int = BATCH, method: str = "fork") -> None:
    """Run the programs of these seeds, one after the other, on one session.

    Raises:
        AssertionError: one went wrong; it says which, and how to see that again.
    """
    with session(method):
        for each in range(seed, seed + count):
            one(each, f"{seed} --count {count} --method {method}")
        check_processes()


def one(seed: int, command: str) -> None:
    """Run the program of this seed on the session that there is."""
    program = make(seed)
    try:
        run(program)
    except Exception as error:
        raise AssertionError(
            f"the program of seed {seed} went wrong: {error}\n"
            f"again: python -m tests.programs.replay {seed} --times 20 (and --shrink), or with "
            f"those before it: python -m tests.programs.replay {command}\n{listing(program)}"
        ) from error


def wrong(program: Program, method: str, times: int) -> Exception | None:
    """What goes wrong with a program if it is run so often."""
    try:
        with session(method):
            for _ in range(times):
                run(program)
            check_processes()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    return None


def shrunk(program: Program, method: str, times: int) -> Program:
    """A program that still goes wrong, from which no step can be left out."""
    at = len(program) - 1
    while at >= 0:
        less = program[:at] + program[at + 1 :]
        if wrong(less, method, times) is not None:
            program = less
            _report(f"{len(program)} steps")
        at -= 1
    return program


def _report(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs.replay", description=__doc__)
    parser.add_argument("seed", type=int, help="of the first program")
    parser.add_argument("--count", type=int, default=1, help="programs, with the seeds from there")
    parser.add_argument("--times", type=int, default=1, help="how often to run each, or all")
    parser.add_argument("--method", default="fork", help="fork or spawn")
    parser.add_argument("--shrink", action="store_true", help="leave out steps while it fails")
    options = parser.parse_args(arguments)
    if options.count > 1:
        for _ in range(options.times):
            began = time.monotonic()
            for at in range(options.seed, options.seed + options.count, BATCH):
                batch(at, min(BATCH, options.seed + options.count - at), options.method)
            took = time.monotonic() - began
            _report(f"{options.count} programs in {took:.1f} s")
        return 0
    program = make(options.seed)
    error = wrong(program, options.method, options.times)
    if error is not None and options.shrink:
        program = shrunk(program, options.method, options.times)
        error = wrong(program, options.method, options.times) or error
    _report(listing(program))
    _report(error or "all is well")
    return int(error is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
