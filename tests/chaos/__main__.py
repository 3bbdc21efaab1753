"""``python -m tests.chaos --faults 1000 --seed 1``: let faults happen, and say what went wrong."""

from __future__ import annotations

import argparse
import sys

from tests.chaos.supervising import WORLDS, chaos
from tests.chaos.unsurvived import UNSURVIVED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", type=int, help="the one kernel with this seed")
    parser.add_argument("--first", type=int, default=0, help="the first round")
    parser.add_argument("--world", choices=WORLDS, action="append")
    parser.add_argument("--minutes", type=float, default=1e4)
    parser.add_argument("--without", action="append", default=[], help="a kind to leave out")
    parser.add_argument("--all", action="store_true", help="also what is known not to be survived")
    options = parser.parse_args()
    report = chaos(
        options.faults,
        options.seed,
        only=options.kernel,
        first=options.first,
        worlds=options.world or list(WORLDS),
        without=(*options.without, *(() if options.all else UNSURVIVED)),
        seconds=60 * options.minutes,
    )
    sys.stdout.write(report.text() + "\n")
    return int(bool(report.wrong))


if __name__ == "__main__":
    sys.exit(main())
