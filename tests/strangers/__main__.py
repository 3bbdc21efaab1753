"""``python -m tests.strangers ray PATH [FILES...]``: run Ray's tests on gpunb."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.strangers import kept, runner

HERE = Path(__file__).parent
SUITES = sorted(each.stem.removeprefix("on_") for each in HERE.glob("on_*.py"))


def main(arguments: list[str] | None = None) -> int:
    """Run a suite. Returns 1 if an outcome is not the one that the kept list says."""
    parser = argparse.ArgumentParser(prog="python -m tests.strangers", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("path", type=Path, help="the folder with the test files")
    parser.add_argument("files", nargs="*", help="files or tests; default: the files of the list")
    parser.add_argument("--kept", type=Path, help="another kept list")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a test")
    options = parser.parse_intermixed_args(arguments)
    listed = kept.load(options.kept or HERE / f"{options.suite}.toml")
    files = options.files or listed.files
    if absent := [each for each in files if not (options.path / each.split("::")[0]).exists()]:
        parser.error(f"{options.path} has no {', '.join(absent)}")
    total = runner.run(options.suite, options.path, files, listed, options.timeout)
    sys.stdout.write(f"\n{total.line()}\n{total.reasons()}\n")
    return int(bool(total.unexpected or total.passing))


if __name__ == "__main__":
    sys.exit(main())
