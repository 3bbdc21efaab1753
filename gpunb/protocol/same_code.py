"""Digests of code that stay equal if only comments, blank lines or options of magics change."""

from __future__ import annotations

import ast
import hashlib
import re
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpunb.scheduler.tasks import TaskSpec


def digest_of_cell(python: str) -> str:
    """The digest of a cell, as IPython has transformed it to Python."""
    return _digest(_normal(python))


def digest_of_function(function: Callable[..., Any]) -> str:
    """The digest of a function: of its own code, without the functions that it calls."""
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        return _digest(repr(_parts(code)))
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return _digest(f"{getattr(function, '__module__', '')}.{name}")


def with_code(spec: TaskSpec, digest: str) -> TaskSpec:
    """The specification of a task whose share comes from the runs of the code with this digest."""
    assert spec.auto is not None
    return replace(spec, auto=replace(spec.auto, code=digest))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def _normal(source: str) -> str:
    """Return a text that is equal for sources that are compiled to the same code, but for options
    of magics. To compile takes a third of the time of a dump of the syntax tree."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are shown when the cell runs
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(_MAGIC.sub(_magic, source), "cell", "exec", flags, dont_inherit=True)
        return repr(_parts(code))
    except (SyntaxError, ValueError):  # the body of a magic that is not Python
        return source


_TEXT = r"""('[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
_MAGIC = re.compile(rf"(\.run_(?:line|cell)_magic\([^(),]*, ){_TEXT}(?:, {_TEXT})?")
"""The call of a magic as IPython writes it: up to its line, the line, and the cell."""


def _magic(found: re.Match[str]) -> str:
    """The call of a magic without its options, and with a cell that is normalised."""
    call, line, cell = found.groups()
    call += repr(_without_options(ast.literal_eval(line)))
    return call if cell is None else f"{call}, {_normal(ast.literal_eval(cell))!r}"


def _without_options(line: str) -> str:
    return " ".join(word for word in line.split() if not word.startswith("-"))


def _parts(code: types.CodeType) -> tuple[Any, ...]:
    """The content of a code object without its file and line numbers."""
    names = code.co_names, code.co_varnames, code.co_freevars
    return code.co_code, *names, tuple(map(_constant, code.co_consts))


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _parts(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return sorted(map(repr, value))
    return repr(value)
