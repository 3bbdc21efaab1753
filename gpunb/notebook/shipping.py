"""What travels with a cell, and what comes home with it."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Mapping
from typing import Any

from IPython.core.error import UsageError

from gpunb import serialize
from gpunb.notebook.names import CellNames, analyse
from gpunb.serialize import Payload
from gpunb.workers.cells import LAST, SHELL_NAMES, Cell, Ending

_NOT_DATA = SHELL_NAMES - {"_", "__", "___"}
_UNCHANGING = (int, float, complex, str, bytes, bool, type(None), type, types.FunctionType)


def outgoing(
    shell: Any,
    source: str,
    first_line: str,
    number: int,
    *,
    inputs: tuple[str, ...] | None = None,
    outputs: tuple[str, ...] | None = None,
) -> tuple[Payload, dict[str, Any]]:
    """The cell with the names that it reads, and the objects that these are bound to now.

    `inputs` are the names to ship, and no others; None for what the cell reads.

    Raises:
        UsageError: a name to ship is not bound, or its object cannot be pickled.
        SyntaxError: the cell is not Python.
    """
    transformed = shell.transform_cell(source)
    _check_syntax(shell, transformed, f"#{first_line}\n{source}", number)
    names = analyse(transformed, shell.transform_cell)
    space = shell.user_ns
    if inputs is not None:
        missing = [name for name in inputs if name not in space]
        if missing:
            raise UsageError(f"%%gpu --in: not bound in the notebook: {', '.join(missing)}")
        wanted, perhaps = set(inputs), set()
    else:
        wanted = (names.reads & space.keys()) - _NOT_DATA
        perhaps = (names.mentioned & space.keys()) - _NOT_DATA - wanted
    objects = {name: space[name] for name in sorted(wanted | perhaps)}
    modules = {
        name: each.__name__
        for name, each in objects.items()
        if isinstance(each, types.ModuleType) and sys.modules.get(each.__name__) is each
    }
    values = {name: each for name, each in objects.items() if name not in modules}
    cell = Cell(
        source=source,
        first_line=first_line,
        number=number,
        modules=modules,
        binds=_binds(names, transformed),
        outputs=outputs,
        colors=shell.colors,
        xmode=shell.InteractiveTB.mode,
        interactivity=shell.ast_node_interactivity,
    )
    return _packed(cell, values, perhaps), values


def _check_syntax(shell: Any, transformed: str, raw: str, number: int) -> None:
    """Raise a SyntaxError here, not after a wait for a GPU."""
    lines = raw.count("\n", 0, raw.find("\n") + 1)
    padded = "\n" * lines + transformed
    name = shell.compile.cache(padded, number, raw_code=raw)
    shell.compile.ast_parse(padded, filename=name)


def _binds(names: CellNames, transformed: str) -> frozenset[str] | None:
    """The names that the cell may bind; None if something runs in it that its text hides."""
    if names.star_imports or _calls_magics(transformed):
        return None
    return names.binds


def _calls_magics(transformed: str) -> bool:
    if "get_ipython" not in transformed:
        return False
    return any(
        isinstance(node, ast.Name) and node.id == "get_ipython"
        for node in ast.walk(compile(transformed, "cell", "exec", _PARSE_ONLY))
    )


_PARSE_ONLY = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _packed(cell: Cell, values: dict[str, Any], perhaps: set[str]) -> Payload:
    try:
        return serialize.dumps((cell, values), what="names of the cell")
    except Exception:  # one of them cannot be pickled
        pass
    for name in list(values):
        try:
            serialize.dumps(values[name], what=name)
        except Exception as error:
            if name in perhaps:
                del values[name]
                continue
            raise UsageError(f"%%gpu: {error} Or name what to send with --in.") from None
    return serialize.dumps((cell, values), what="names of the cell")


# ----------------------------------------------------------------------------------- coming home


def incoming(shell: Any, payload: Payload, shipped: Mapping[str, Any]) -> Ending:
    """Bind what came home, and return how the cell ended."""
    space = shell.user_ns
    ending, values = serialize.loads(payload, namespace=space, lazy_modules=True)
    assert isinstance(ending, Ending)
    last = values.pop(LAST, None)
    for name, module in ending.modules.items():
        values[name] = sys.modules.get(module) or serialize.lazy_module(module)
    aliases = _aliases(space, shipped, ending.changed, values)
    shell.push({**values, **aliases})
    for name in ending.deleted:
        if name in shipped and space.get(name) is shipped[name]:
            del space[name]
    if ending.shown:
        shell.displayhook.update_user_ns(last)
        shell.displayhook.fill_exec_result(last)
    for name, reason in ending.kept:
        sys.stderr.write(f"gpunb: {name!r} stays in the worker: {reason}\n")
    return ending


def _aliases(
    space: Mapping[str, Any],
    shipped: Mapping[str, Any],
    changed: tuple[str, ...],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """Other names of the notebook for objects that the cell changed: they stay one object."""
    new = {id(shipped[name]): values[name] for name in changed if name in shipped}
    if not new:
        return {}
    return {
        name: new[id(each)]
        for name, each in space.items()
        if id(each) in new and name not in values and not isinstance(each, _UNCHANGING)
    }
