"""``python -m tests.rerun ARGS``: run pytest with ARGS, then run each failed test again, alone.

The last lines name unsteady tests, those that passed when they ran again; ``build/unsteady/`` has
their whole first failures, in a folder for each version of Python, or in the one that
``--folder NAME`` names.

Exit status: 0 if each test passed, at once or later; 5 if some were unsteady and ``--strict`` is
given; else pytest's own, or 1.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from gpunb.system.process_control import adopt_orphans
from tests.rerun import look

FOLDER = Path("build/unsteady")


def show(title: str, failures: dict[str, dict[str, Any]]) -> None:
    if failures:
        print(f"\n{title}:")
        for test, failure in failures.items():
            print(f"  {test}: {failure['line'][:300]} (load {failure['load']:.1f})")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rerun", allow_abbrev=False)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--folder", default="python{}.{}".format(*sys.version_info))
    own, arguments = parser.parse_known_args(arguments)
    folder = FOLDER / own.folder
    shutil.rmtree(folder, ignore_errors=True)
    adopt_orphans()
    verdict = look.look_again(look.run(arguments))
    if verdict.unsteady:
        look.keep(verdict.unsteady, folder)
    show(f"UNSTEADY, failed and then passed alone; the failures are in {folder}/", verdict.unsteady)
    if verdict.reason:
        print(f"\nRED, nothing runs again: {verdict.reason}")
        return verdict.status
    show(f"RED, failed {1 + look.AGAIN} times", verdict.red)
    return 0 if verdict.status == look.UNSTEADY and not own.strict else verdict.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
