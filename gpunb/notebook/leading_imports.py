"""Finds the modules that a cell needs when it begins, so that they can be imported before it.

Only the imports at the top of a cell count: a statement before an import may set an environment
variable or a path that the import reads. Only modules of installed packages count: a user's own
module has to be imported from its current file.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpunb.data import serialize
from gpunb.system.module_files import INSTALLED
from gpunb.worker.imported import NEVER


def needed_modules(body: Sequence[ast.stmt], values: Iterable[Any]) -> tuple[str, ...]:
    """Return the modules that a cell imports at its top, and those of these values."""
    return _followed([*_modules_of(values), *(name for name, _ in _imported(body))])


def modules_of_results(body: Sequence[ast.stmt], modules: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that the notebook will have to import when the values of a cell come home:
    those from which the cell imports classes, functions or other values at its top, and those whose
    functions make values that the cell binds.

    Args:
        modules: the notebook's names of modules, with the modules.
    """
    modules = {**modules, **dict(_bound(body))}
    found = [name for name, has_values in _imported(body) if has_values]
    found += [modules[name] for name in _makers(body) if name in modules]
    return _followed(found)


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the names that import statements bind, with what they import."""
    for statement in body:
        match statement:
            case ast.Import(names):
                for each in names:
                    package = each.name.partition(".")[0]
                    yield (each.asname, each.name) if each.asname else (package, package)
            case ast.ImportFrom(str(module), names, 0):
                yield from ((each.asname or each.name, f"{module}.{each.name}") for each in names)


def _makers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield names like `plt` in ``fig = plt.figure()``, but not within functions and classes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        match node:
            case ast.Assign(value=ast.Call(ast.Attribute(value=owner))):
                while isinstance(owner, ast.Attribute):
                    owner = owner.value
                if isinstance(owner, ast.Name):
                    yield owner.id
        yield from _makers(ast.iter_child_nodes(node))


def import_here(modules: Iterable[str]) -> None:
    """Import modules that the notebook will need, while a worker imports them too. The worker says
    what they print, and which of them fail."""
    for name in modules:
        if name not in sys.modules:
            text = io.StringIO()
            with (
                contextlib.suppress(BaseException),
                contextlib.redirect_stdout(text),
                contextlib.redirect_stderr(text),
                warnings.catch_warnings(action="ignore"),
            ):
                importlib.import_module(name)


def _imported(body: Sequence[ast.stmt]) -> Iterator[tuple[str, bool]]:
    """Yield the modules that the statements at the top import, and whether from the module itself
    something is imported."""
    for statement in body:
        match statement:
            case ast.Import(names):
                yield from ((each.name, False) for each in names)
            case ast.ImportFrom(str(module), names, 0):
                for each in names:
                    inner = f"{module}.{each.name}"
                    if serialize.find_module(inner) is not None:
                        yield inner, False
                    else:
                        yield module, True
            case ast.Expr(ast.Constant(str())):  # the description of an example
                pass
            case ast.Expr(ast.Call(ast.Attribute(), [ast.Constant("matplotlib"), *_])):
                pass  # %matplotlib inline
            case _:
                return


def _modules_of(values: Iterable[Any]) -> Iterator[str]:
    """Yield the modules that these values are, or in which they or their types are defined."""
    for value in values:
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            yield object.__getattribute__(value, "__name__")
        else:
            named = issubclass(kind, (type, types.FunctionType, types.BuiltinFunctionType))
            module = (value if named else kind).__module__
            if isinstance(module, str):
                yield module


def _followed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the modules, each once, that are of installed packages and may be preloaded."""
    return tuple(name for name in dict.fromkeys(names) if _is_followed(name.partition(".")[0]))


def _is_followed(package: str) -> bool:
    if package in sys.stdlib_module_names or package in NEVER or package == "__main__":
        return False
    spec = serialize.find_module(package)
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
    return any(each in f"{place}/" for place in places for each in INSTALLED)
