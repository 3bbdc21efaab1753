"""Files of the package import each other in one direction."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import gpunb

PACKAGE = Path(gpunb.__file__).parent

ALLOWED = {
    # A sweep that is the value of a cell shows its live table, which reads the sweep.
    frozenset({"live", "live.sweep_view", "live.sweep_widget", "sweeps.sweep"}),
    # A task on Ray may submit tasks.
    frozenset({f"ray.{name}" for name in ("entry_points", "submission", "task_runner", "worker")}),
}
"""The cycles that are left, without ``gpunb.``. This list may only become shorter."""


def imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports: under TYPE_CHECKING, in functions and by name, too."""
    found: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= members & sources.keys() or {node.module or ""}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names = [each.value for each in node.args if isinstance(each, ast.Constant)]
                found[name].update(each for each in names if isinstance(each, str))
        found[name] &= sources.keys()
    return found


def cycles(edges: Mapping[str, Iterable[str]]) -> set[frozenset[str]]:
    """The sets of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = set(edges[todo.pop()]) - seen
            seen |= new
            todo.extend(new)
        return seen

    all_reached = {name: reached(name) for name in edges}
    return {
        frozenset(each for each in all_reached[name] if name in all_reached[each])
        for name in edges
        if name in all_reached[name]
    }


def package() -> dict[str, str]:
    """The source of each module of the package, by its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def test_files_that_import_each_other_are_known() -> None:
    found = {
        frozenset(name.removeprefix("gpunb.") for name in cycle)
        for cycle in cycles(imports(package()))
    }
    new = [sorted(each) for each in found - ALLOWED]
    gone = [sorted(each) for each in ALLOWED - found]
    assert found == ALLOWED, f"break these cycles: {new}; take these out of ALLOWED: {gone}"


def test_a_cycle_is_found_under_type_checking_in_functions_and_by_name() -> None:
    sources = {
        "p.a": "from p import b",
        "p.b": "if TYPE_CHECKING:\n    from p.c import C",
        "p.c": "def f():\n    import p.a",
        "p.d": "from p.a import A",
        "p.e": "def f():\n    import_module('p.f').g()",
        "p.f": "from p import e",
    }
    expected = {frozenset({"p.a", "p.b", "p.c"}), frozenset({"p.e", "p.f"})}
    assert cycles(imports(sources)) == expected


if __name__ == "__main__":  # `make lint` runs this
    test_files_that_import_each_other_are_known()
