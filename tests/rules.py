"""``python -m tests.rules``: find tests that go by the clock, which fail on a busy machine, and
tests that no run counts as left out.

Three things are found, also in programs that a test has as strings:

- a sleep of a fixed time that is not a step of a ``while`` loop, which waits for something. A sleep
  of 30 s and more is left: it stands for a task that does not end by itself.
- an assert that compares elapsed seconds with a number.
- ``importorskip("torch")``: `tests.needs` counts the tests that are left out without PyTorch.

CONTRIBUTING names what to write instead. Where a fixed time is what the test is about, the line
ends with ``# by the clock:`` and the reason.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

EXCEPTION = re.compile(r"# by the clock: \w+")

ENDLESS = 30
"""Seconds from which on a sleep stands for a task that does not end by itself."""

CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}

IN_STRINGS = re.compile(r"\bsleep\(([\d.]+)\)")

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)

SLEEP = "a fixed sleep: wait for what should happen"
ELAPSED = "an assert on elapsed seconds: compare the order of events"
UNCOUNTED = "a skip without PyTorch that is not counted: call needs.pytorch()"


def _name(node: ast.expr) -> str:
    """The last part of what is called."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _number(node: ast.expr) -> float | None:
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, right=right):
            # Such as 3 * PATIENCE: the number says what is meant.
            return _number(left) if _number(left) is not None else _number(right)
    return None


def _fixed_sleeps(node: ast.AST, waits: bool = False) -> Iterator[int]:
    """The lines of sleeps below this node; ``waits`` says whether a ``while`` loop is around it."""
    match node:
        case ast.Call(func=func, args=[ast.Constant(value=int() | float() as seconds), *_]):
            if _name(func) == "sleep" and 0 < seconds < ENDLESS and not waits:
                yield node.lineno
        case ast.Constant(value=str() as text):
            yield from _in_string(text, node.lineno)
        case ast.JoinedStr(values=parts):
            text = "".join(str(each.value) for each in parts if isinstance(each, ast.Constant))
            yield from _in_string(text, node.lineno)
            return
        case ast.While():
            waits = True
        case _ if isinstance(node, FUNCTIONS):
            waits = False
    for child in ast.iter_child_nodes(node):
        yield from _fixed_sleeps(child, waits)


def _in_string(text: str, line: int) -> Iterator[int]:
    """The lines of fixed sleeps of a program that a test has as a string without a loop."""
    for found in IN_STRINGS.finditer(text):
        if 0 < float(found[1]) < ENDLESS and "while " not in text[: found.start()]:
            yield line + text[: found.start()].count("\n")


def _is_elapsed(node: ast.expr, names: set[str]) -> bool:
    """Whether this is a difference to the time of a clock, or the name of one."""
    match node:
        case ast.Name(id=name):
            return name in names
        case ast.NamedExpr(value=value):
            return _is_elapsed(value, names)
        case ast.BinOp(op=ast.Sub(), left=ast.Call(func=func)):
            return _name(func) in CLOCKS
        case ast.Call(func=func, args=arguments):
            return _name(func) in {"min", "max", "sum", "round", "abs"} and any(
                _is_elapsed(each, names) for each in arguments
            )
    return False


def _elapsed_asserts(function: ast.AST) -> Iterator[int]:
    names: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_elapsed(value, names):
                names.add(name)
            case ast.NamedExpr(target=ast.Name(id=name), value=value) if _is_elapsed(value, names):
                names.add(name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            for compare in ast.walk(node.test):
                if isinstance(compare, ast.Compare):
                    sides = [compare.left, *compare.comparators]
                    if any(_is_elapsed(each, names) for each in sides) and any(
                        _number(each) is not None for each in sides
                    ):
                        yield node.lineno


def _uncounted_skips(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func, args=[ast.Constant(value="torch"), *_]):
                if _name(func) == "importorskip":
                    yield node.lineno


def _excepted(lines: list[str], line: int) -> bool:
    """Whether a reason stands at the end of this line, or of the statement that begins there."""
    return any(EXCEPTION.search(each) for each in lines[line - 1 : line + 1])


def problems(source: str) -> list[tuple[int, str]]:
    """The lines of a module that break a rule, with what is wrong there."""
    tree = ast.parse(source)
    lines = source.splitlines()
    elapsed = {
        line
        for function in ast.walk(tree)
        if isinstance(function, FUNCTIONS)
        for line in _elapsed_asserts(function)
    }
    found = itertools.chain(
        ((line, SLEEP) for line in set(_fixed_sleeps(tree))),
        ((line, ELAPSED) for line in elapsed),
        ((line, UNCOUNTED) for line in _uncounted_skips(tree)),
    )
    return sorted(each for each in found if not _excepted(lines, each[0]))


def main(folder: Path) -> int:
    count = 0
    for path in sorted(folder.rglob("*.py")):
        if path.name == "test_rules.py":
            continue  # it has examples of what is found
        for line, problem in problems(path.read_text(encoding="utf-8")):
            print(f"{path}:{line}: {problem}")
            count += 1
    if count:
        print(f'{count} found. On the clock see "Tests that go by the clock" in CONTRIBUTING.')
    return int(bool(count))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parent))
