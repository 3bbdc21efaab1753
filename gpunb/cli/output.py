"""Prints the texts of the commands for people."""

from __future__ import annotations

import sys

from gpunb.scheduler.markup import LAYOUT, escaped


def print_text(text: str) -> None:
    """Print a text. Control characters are escaped, since names and paths may hold any."""
    print(escaped(text, LAYOUT), flush=True)


def print_remark(text: str) -> None:
    """Print a text to stderr, so that a program can read stdout."""
    print(escaped(text, LAYOUT), file=sys.stderr, flush=True)
