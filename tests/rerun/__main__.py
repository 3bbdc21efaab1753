"""``python -m tests.rerun ARGS``: run pytest with ARGS, then run each failed test again, alone.

The last lines name unsteady tests, those that passed when they ran again; ``build/unsteady/`` has
their whole first failures, in a folder for each version of Python.

Exit status: 0 if each test passed, at once or later; 5 if some were unsteady and ``--strict`` is
given; else pytest's own, or 1.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from gpunb.system.process_control import adopt_orphans
from tests.rerun import look

FOLDER = Path("build/unsteady", "python{}.{}".format(*sys.version_info))


def show(title: str, failures: dict[str, dict[str, Any]]) -> None:
    if failures:
        print(f"\n{title}:")
        for test, failure in failures.items():
            print(f"  {test}: {failure['line'][:300]} (load {failure['load']:.1f})")


def main(arguments: list[str]) -> int:
    strict = "--strict" in arguments
    arguments = [each for each in arguments if each != "--strict"]
    shutil.rmtree(FOLDER, ignore_errors=True)
    adopt_orphans()
    verdict = look.look_again(look.run(arguments))
    if verdict.unsteady:
        look.keep(verdict.unsteady, FOLDER)
    show(f"UNSTEADY, failed and then passed alone; the failures are in {FOLDER}/", verdict.unsteady)
    if verdict.reason:
        print(f"\nRED, nothing runs again: {verdict.reason}")
        return verdict.status
    show(f"RED, failed {1 + look.AGAIN} times", verdict.red)
    return 0 if verdict.status == look.UNSTEADY and not strict else verdict.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
