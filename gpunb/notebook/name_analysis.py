"""Finds the names that a cell reads and binds, from its source alone.

The source is what IPython hands to Python. Nothing is run; the walk follows the evaluation.

- A name is read where the cell may look it up as a global, now or later. When in doubt it is read:
  a name too many costs a copy, a name too few breaks the cell. Builtins are names like others.
- A name is the cell's own, and no longer read, once the cell has bound it on every way there. What
  a branch, loop, `with` or `try` binds is own inside that block, and after it only if every way
  through binds it (a `with` may swallow an exception).
- A function reads where it is defined: it may be called before a name further down is bound. Its
  own name is bound before any call, unless a decorator could call it first.
- A class body runs at once, and its names are not the cell's. A comprehension keeps its targets,
  not its walrus targets. `global` in a function reads, and what is assigned under it is bound.
- Identifiers in strings for magics and shell commands are mentioned. So are those in all strings of
  a cell that looks names up by their text, as with `globals` or `eval`. Python that a magic runs in
  the notebook's namespace is analysed: a cell magic's body reads, a line magic's statement only
  mentions. `timeit` runs its code as the body of a function.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from getopt import GetoptError, getopt
from typing import Any, Literal

_Kind = Literal["cell", "function", "class", "targets"]


@dataclass(frozen=True, slots=True)
class CellNames:
    """The global names of one cell.

    `deletes` may be gone at the end through `del` or `except ... as`, in a branch that ran or not:
    only the run can tell. A name that is bound and then deleted is in `binds` too, because a run
    that stops early leaves it bound. `mentioned` are names that only strings hold. `imports` are
    modules within packages that its own import statements name, in a branch that ran or not.
    `attributes` are the names of all attributes that stand in it. `outputs` are numbers in a cell
    that reads the notebook's outputs, as in ``Out[5]``.
    """

    reads: frozenset[str]
    binds: frozenset[str]
    deletes: frozenset[str]
    star_imports: tuple[str, ...]
    mentioned: frozenset[str]
    imports: frozenset[str]
    attributes: frozenset[str] = frozenset()
    outputs: frozenset[int] = frozenset()


def analyse(
    source: str | Sequence[ast.stmt], transform: Callable[[str], str] | None = None
) -> CellNames:
    """Return the names of a transformed cell, as text or parsed; raise SyntaxError if the text is
    not Python.

    `transform` makes Python of a nested magic's body, as IPython's `transform_cell` does. Without
    it, a body that is not plain Python only has its identifiers mentioned.
    """
    reader = _Reader(transform or str)
    reader.walk(parse(source) if isinstance(source, str) else source)
    cell = reader.cell
    if cell.loads & _BY_TEXT:
        reader.mention(" ".join(reader.strings))
    return CellNames(
        reads=frozenset(cell.loads),
        binds=frozenset(cell.stores),
        deletes=frozenset(cell.gone),
        star_imports=tuple(dict.fromkeys(reader.stars)),
        mentioned=frozenset(reader.mentioned - cell.loads),
        imports=frozenset(reader.imports),
        attributes=frozenset(reader.attributes),
        outputs=frozenset(reader.numbers if cell.loads & {"Out", "_oh"} else ()),
    )


def parse(source: str) -> list[ast.stmt]:
    """Return the statements of a transformed cell; raise SyntaxError if it is not Python."""
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are shown when the cell runs
        tree: ast.Module = compile(source, "<cell>", "exec", flags, dont_inherit=True)
    return tree.body


class _Scope:
    """A region of names: the cell's, a function's, a class body's, a comprehension's targets."""

    def __init__(self, kind: _Kind, parent: _Scope | None = None) -> None:
        self.kind = kind
        self.parent: _Scope = parent or self
        self.cell: _Scope = parent.cell if parent else self
        self.frame: _Scope = self.parent.frame if kind == "targets" else self  # for a walrus
        self.branches = 0  # blocks around the point reached that may not run to their end
        self.own: frozenset[str] = frozenset()  # bound on every way to that point
        self.loads: set[str] = set()
        self.stores: set[str] = set()
        self.gone: set[str] = set()
        self.globals: set[str] = set()

    def load(self, name: str, *, within: bool = False) -> None:
        """Note a look-up, made here or `within` a function or comprehension inside."""
        match self.kind:
            case "cell" if name not in self.own:  # else the notebook's value is out of reach
                self.loads.add(name)
            case "function":
                self.loads.add(name)  # until its end: a name bound anywhere is local everywhere
            case "class" if within or name not in self.own:
                self.loads |= set() if within else {name}
                self.parent.load(name, within=True)
            case "targets" if name not in self.stores:
                self.parent.load(name, within=True)

    def store(self, name: str | None) -> None:
        if name and name in self.globals:
            self.cell.stores.add(name)
        elif name:
            self.stores.add(name)
            self.own |= {name}
            self.gone -= set() if self.branches else {name}

    def drop(self, name: str) -> None:
        if self.kind == "cell" or name in self.globals:
            self.cell.gone.add(name)
        elif self.kind == "class":
            self.own -= {name}
        else:
            self.stores.add(name)


class _Reader(ast.NodeVisitor):
    """Walks a cell in the order of evaluation, and notes look-ups and bindings in the scopes."""

    def __init__(self, transform: Callable[[str], str]) -> None:
        self.transform = transform
        self.scope = self.cell = _Scope("cell")
        self.annotations = True  # are evaluated
        self.stars: list[str] = []
        self.imports: set[str] = set()
        self.attributes: set[str] = set()
        self.mentioned: set[str] = set()
        self.strings: list[str] = []
        self.numbers: set[int] = set()

    def walk(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in filter(None, nodes):
            self.visit(node)

    def either(self, *ways: Sequence[ast.AST | None]) -> None:
        """Visit blocks of which one runs; own names are then those that each block has bound."""
        frame = self.scope.frame
        start, ends = frame.own, []
        frame.branches += 1
        for way in ways:
            frame.own = start
            self.walk(way)
            ends.append(frame.own)
        frame.branches -= 1
        frame.own = frozenset.intersection(*ends)

    def generic_visit(self, node: ast.AST) -> None:
        for step in _ORDER.get(type(node), node._fields):
            ways = [_children(node, way) for way in step.split("|")]
            (self.either if len(ways) > 1 else self.walk)(*ways)

    @contextmanager
    def inside(self, kind: _Kind, names: Iterable[str] = ()) -> Iterator[_Scope]:
        outer, self.scope = self.scope, _Scope(kind, self.scope)
        self.scope.stores.update(names)
        yield self.scope
        self.scope = outer

    def visit_Name(self, node: ast.Name) -> None:
        use = self.scope.store if isinstance(node.ctx, ast.Store) else self.scope.load
        use(node.id)
        if isinstance(node.ctx, ast.Del):
            self.scope.drop(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.append(node.value)
        elif type(node.value) is int:
            self.numbers.add(node.value)

    def visit_Global(self, node: ast.Global) -> None:
        self.scope.globals.update(node.names)
        self.cell.loads |= {*node.names} - self.cell.own

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.scope.store(alias.asname or alias.name.partition(".")[0])
            self.imported(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.names[0].name == "*":
            self.stars.append("." * node.level + (node.module or ""))
        else:
            for alias in node.names:
                self.scope.store(alias.asname or alias.name)
        if node.module and not node.level:
            self.imported(node.module)
        if node.module == "__future__" and "annotations" in {alias.name for alias in node.names}:
            self.annotations = False

    def imported(self, module: str) -> None:
        if "." in module and self.scope is self.cell:
            self.imports.add(module)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.scope.load(node.target.id)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        local = self.scope.kind == "function"
        self.walk([node.value])
        if node.value or local or not isinstance(node.target, ast.Name):
            self.visit(node.target)
        if self.annotations and not local:
            self.visit(node.annotation)

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        frame, start = self.scope.frame, self.scope.frame.own
        self.either([*node.body, *node.orelse], *([handler] for handler in node.handlers))
        end, frame.own = frame.own, start
        self.walk(node.finalbody)
        frame.own |= end

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.walk([node.type])
        self.scope.own |= {node.name} if node.name else set()
        self.walk(node.body)
        if node.name:
            self.scope.drop(node.name)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self.either(*([case] for case in node.cases), [])

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        self.generic_visit(node)
        self.scope.store(node.rest if isinstance(node, ast.MatchMapping) else node.name)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, args = self.scope, _children(node.args, _ARGUMENTS)
        self.walk([*node.decorator_list, *node.args.defaults, *node.args.kw_defaults])
        parameters = _children(node, "type_params")  # since Python 3.12
        with self.inside("targets", [each.name for each in parameters]):
            self.walk(parameters)
            self.walk([*args, node.returns] if self.annotations else [])
            if not node.decorator_list:
                outer.store(node.name)
            self.function(args, node.body)
        outer.store(node.name)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.walk([*node.args.defaults, *node.args.kw_defaults])
        self.function(_children(node.args, _ARGUMENTS), [node.body])

    def function(self, args: Iterable[ast.arg], body: Iterable[ast.AST]) -> None:
        with self.inside("function", [arg.arg for arg in args]) as scope:
            self.walk(body)
        for name in scope.loads - scope.stores:
            self.scope.load(name, within=True)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.walk(node.decorator_list)
        parameters = _children(node, "type_params")
        with self.inside("targets", [each.name for each in parameters]):
            self.walk([*parameters, *node.bases, *node.keywords])
            with self.inside("class") as scope:
                self.walk(node.body)
        for name in scope.loads & scope.stores:  # are looked up past the functions around
            self.cell.load(name)
        self.scope.store(node.name)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.scope.frame.store(node.target.id)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self.either(node.values[1:], [])

    def visit_ListComp(self, node: ast.AST) -> None:
        first, *others = _children(node, "generators")
        self.visit(first.iter)
        with self.inside("targets"):
            results = _children(node, "elt key value")
            self.either([first.target, *first.ifs, *others, *results], [])

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - these names are ast's
    visit_DictComp = visit_GeneratorExp = visit_SetComp = visit_ListComp  # noqa: N815
    visit_MatchMapping = visit_MatchStar = visit_MatchAs  # noqa: N815
    visit_TryStar = visit_Try  # noqa: N815

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=verb):
                self.magic(verb, *(getattr(arg, "value", None) for arg in node.args))

    def magic(self, *call: object) -> None:
        match call:
            case "run_cell_magic", str(name), str(line), str(body):
                self.cell_magic(name, line, body)
            case "run_line_magic", str(name), str(text):
                self.mention(text)
                reads = set(self.cell.loads)
                self.run(name, *_options(name, text))
                self.mentioned |= self.cell.loads - reads
                self.cell.loads = reads
            case "system" | "getoutput", str(command):
                self.mention(command)

    def cell_magic(self, name: str, line: str, body: str) -> None:
        options, statement = _options(name, line)
        capture = name == "capture"
        if not self.run(name, options, body if capture else f"{statement}\n{body}"):
            self.mention(f"{line}\n{body}")
        for result in statement.split()[:1] if capture else _RESULT.findall(line):
            self.scope.store(result)

    def run(self, name: str, options: dict[str, str], code: str) -> bool:
        """Analyse the code that a magic runs in the notebook's namespace; False if unknown."""
        if name not in {"capture", "time", *_SHORT} or self.scope is not self.cell:
            return False
        try:
            body = parse(self.transform(code))
        except (SyntaxError, ValueError):
            return False
        if name == "timeit":
            self.function([], body)
            self.cell.store(options.get("-v"))
        else:
            self.either(body, *([[]] if "--no-raise-error" in options else []))
        return True

    def mention(self, text: str) -> None:
        self.mentioned |= {*_IDENTIFIER.findall(text)}.difference(keyword.kwlist, self.cell.own)


# The fields of a node in the order of evaluation, where ast has another. One of the ways between
# bars is taken; the empty way is to skip the others or to leave them midway.
_ORDER: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Assert: ("test msg |",),
    ast.Assign: ("value", "targets"),
    ast.Compare: ("left", "comparators |"),
    ast.Dict: ("keys |", "values |"),  # in turn, so neither may count on the other
    ast.While: ("test", "body |", "orelse |"),
    **dict.fromkeys([ast.For, ast.AsyncFor], ("iter", "target body |", "orelse |")),
    **dict.fromkeys([ast.If, ast.IfExp], ("test", "body | orelse")),
    **dict.fromkeys([ast.With, ast.AsyncWith], ("items body |",)),
}

# The options of magics that run Python in the notebook's namespace, as getopt spells them.
_SHORT = {"memit": "r:t:i:coe", "prun": "D:l:rs:T:q", "timeit": "n:r:tcp:qov:"}
_RESULT = re.compile(r"--(?:out|err|proc)[ =]+(\w+)")  # %%bash --out name
_ARGUMENTS = "posonlyargs args vararg kwonlyargs kwarg"
_BY_TEXT = {"dir", "eval", "exec", "globals", "locals", "vars"}
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


def _options(magic: str, line: str) -> tuple[dict[str, str], str]:
    """Split a magic's line into its leading options and the rest."""
    long = ["no-raise-error", "no-stderr", "no-stdout", "no-display"]
    try:
        options, rest = getopt(line.split(), _SHORT.get(magic, ""), long)
    except GetoptError:
        return {}, line
    return dict(options), " ".join(rest)


def _children(node: ast.AST, fields: str) -> list[Any]:
    """Return the nodes that some fields of a node hold, in the order of `fields`."""
    values = (getattr(node, name, None) for name in fields.split())
    lists = (value if isinstance(value, list) else [value] for value in values)
    return [child for each in lists for child in each if isinstance(child, ast.AST)]
