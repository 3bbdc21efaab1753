"""Finds what earlier cells have registered with libraries in other processes, for a line below an
error that may come of it.

Nothing is noted while cells run: after an error, the texts of the earlier cells are read.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpunb.engine.job_log import COLOUR
from gpunb.notebook import auto_magic
from gpunb.notebook.shell import NotebookShell
from gpunb.worker.registrations import REGISTRATIONS

_REGISTERS = re.compile(r"regist|\btorch\.library\b", re.IGNORECASE)
"""In the text of cells, and in the names of functions, that register something."""

_TRAVEL = {
    "collections.abc.": ("abc",),
    "jax.tree_util.": ("jax trees",),
    "matplotlib.projections.": ("matplotlib.projections",),
    "matplotlib.scale.": ("matplotlib.scale",),
    "matplotlib.": ("matplotlib colormaps", "matplotlib.units"),
    "pandas.api.extensions.": ("pandas accessors", "pandas types"),
    "torch.distributions.": ("torch divergences",),
    "torch.library.custom_op": ("torch operators",),
    "torch.utils._pytree.": ("torch trees",),
    "transformers.Auto": ("transformers",),
}
"""The functions whose registrations travel, each with the registries that have them."""

_SAYS = {"codecs": "unknown encoding"}
"""What an error says that none of the library's own code raises, by the library."""

_SESSION = re.compile(r"(?:^|\s)(?:-s|--session)[ =]*(\S+)")


@dataclass(frozen=True, slots=True)
class _Cell:
    """An earlier cell.

    Attributes:
        line: what stands behind %%gpu; None for a plain cell.
    """

    number: int
    line: str | None
    code: str

    @property
    def process(self) -> object:
        """The process in which it ran, to compare: the notebook, a session or its own worker."""
        if self.line is None:
            return "notebook", ""
        session = _SESSION.search(self.line)
        return ("session", session[1]) if session else ("worker", self.number)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a function that registers something, with the words of its arguments."""

    name: str
    words: frozenset[str]

    def may_cause(self, error: str) -> bool:
        """Whether an error comes from the function's library, or names what the function got."""
        root = self.name.partition(".")[0]
        if re.search(rf"[/\\]{root}(?:\.py\b|[/\\])", error) or _SAYS.get(root, "\0") in error:
            return True
        message = error.rstrip().rpartition("\n")[2]
        return not self.words.isdisjoint(re.findall(r"\w+", message))


def hint(shell: NotebookShell, number: int, lines: Sequence[str]) -> str | None:
    """Return a line on what cells before this one have registered in other processes, if its error
    may come of that.

    Args:
        number: execution count of the cell that failed.
        lines: its error, as shown.
    """
    try:
        return _hint(shell, number, lines)
    except Exception:  # a fault in here must not take the place of the user's error
        return None


def _hint(shell: NotebookShell, number: int, lines: Sequence[str]) -> str | None:
    history = getattr(shell.ip, "history_manager", None)
    texts: Sequence[str] = history.input_hist_parsed if history is not None else ()
    if number >= len(texts) or not any(map(_REGISTERS.search, texts[:number])):
        return None
    with auto_magic.plain():
        cells = [_cell(shell, at, text) for at, text in enumerate(texts[: number + 1])]
    failed = cells[-1]
    error = COLOUR.sub("", "\n".join(lines))
    found: dict[_Call, int] = {}
    here: set[_Call] = set()
    imported: dict[str, str] = {}
    for cell in cells:
        for call in _calls(cell.code, imported):
            if cell.process == failed.process:
                here.add(call)
            elif call.may_cause(error) and not _travels(call.name):
                found[call] = cell.number
    elsewhere = [each for each in found.items() if each[0] not in here]
    if not elsewhere:
        return None
    call, at = elsewhere[-1]
    way = (
        "call it in this cell, too, or run both cells in one session (%%gpu --session NAME)"
        if failed.line is not None
        else "call it in a plain cell, too"
    )
    return (
        f"gpunb: In[{at}] called {call.name} in another process, and what it registered does not "
        f"travel: if it is missing here, {way}"
    )


def _travels(function: str) -> bool:
    """Whether what a function has registered is there in other processes, or is not for them."""
    if function.startswith("atexit."):
        return True
    for prefix, registries in _TRAVEL.items():
        if function.startswith(prefix):
            return all(map(_is_readable, registries))
    return False


def _is_readable(registry: str) -> bool:
    """Whether this release of a library still has its registry where we look for it."""
    library = REGISTRATIONS[registry]
    module = sys.modules.get(library.module)
    if module is None:
        return True
    try:
        library.read(module)
    except Exception:
        return False
    return True


def _cell(shell: NotebookShell, number: int, text: str) -> _Cell:
    """Return a cell of the history, which has its magics as calls."""
    match _parsed(text):
        case [ast.Expr(ast.Call(ast.Attribute(attr="run_cell_magic"), args))]:
            match [getattr(each, "value", None) for each in args]:
                case ["gpu", str(line), str(body)]:
                    with contextlib.suppress(SyntaxError):
                        body = shell.ip.transform_cell(body)
                    return _Cell(number, line, body)
    return _Cell(number, None, text)


def _parsed(text: str) -> list[ast.stmt]:
    """Return the statements of a text; none if it is not Python, as one with magics."""
    try:
        tree: ast.Module = compile(
            text, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
    except (SyntaxError, ValueError):
        return []
    return tree.body


def _calls(code: str, imported: dict[str, str]) -> Iterator[_Call]:
    """Yield the calls, also as decorators, of functions of modules that register something.

    Args:
        imported: what the names of the notebook have imported. That of the cell is added.
    """
    if "import" not in code and not _REGISTERS.search(code):
        return
    nodes = [node for statement in _parsed(code) for node in ast.walk(statement)]
    for node in nodes:
        imported.update(_imports(node))
    for node in nodes:
        for function, arguments in _uses(node):
            name = _full_name(function, imported)
            if name is not None and _REGISTERS.search(name):
                yield _Call(name, frozenset(_words(arguments)))


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Import(names):
            for each in names:
                root = each.name.partition(".")[0]
                yield each.asname or root, each.name if each.asname else root
        case ast.ImportFrom(module=str(module), names=names, level=0):
            for each in names:
                yield each.asname or each.name, f"{module}.{each.name}"


def _uses(node: ast.AST) -> Iterator[tuple[ast.expr, list[Any]]]:
    """Yield the functions that a node calls, with the nodes that they get."""
    if isinstance(node, ast.Call):
        yield node.func, [*node.args, *(each.value for each in node.keywords)]
    for each in getattr(node, "decorator_list", ()):
        call = isinstance(each, ast.Call)
        yield (each.func if call else each), [node, *(each.args if call else ())]


def _full_name(function: ast.expr, imported: Mapping[str, str]) -> str | None:
    """Return such as ``"codecs.register"``; None if no import says it."""
    parts: list[str] = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name) or function.id not in imported:
        return None
    return ".".join([imported[function.id], *reversed(parts)])


def _words(arguments: Iterable[Any]) -> Iterator[str]:
    for each in arguments:
        match each:
            case ast.Constant(value=str(text)):
                yield from re.findall(r"\w{3,}", text)
            case (
                ast.Name(name)
                | ast.Attribute(attr=name)
                | ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
            ):
                yield from re.findall(r"\w{3,}", name)


def tell(shell: NotebookShell, result: Any) -> None:
    """After a plain cell that failed, write the hint below its error."""
    error = result.error_in_exec
    if error is None or hasattr(error, "_render_traceback_"):  # that of a %%gpu cell has its own
        return
    lines = traceback.format_exception(error)
    if (text := hint(shell, result.execution_count or shell.number, lines)) is not None:
        sys.stderr.write(f"{text}\n")
