"""Packs a cell for its worker: source, values, modules and settings."""

from __future__ import annotations
import __future__

import ast
import contextlib
import linecache
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from IPython.core.compilerop import code_name
from IPython.core.error import UsageError

from gpunb.data import serialize
from gpunb.data.serialize import Payload
from gpunb.data.serialize.pickler import global_names
from gpunb.data.serialize.reuse import Reuse
from gpunb.engine.object_budget import total_memory
from gpunb.notebook import auto_magic
from gpunb.notebook.leading_imports import modules_of_results, needed_modules
from gpunb.notebook.name_analysis import CellNames, analyse, parse
from gpunb.notebook.rank_output import Folds
from gpunb.notebook.sessions import CellSession
from gpunb.notebook.shell import NotebookShell
from gpunb.notebook.shipment import Shipment, Since
from gpunb.protocol import backend
from gpunb.protocol.ranks import Ranks
from gpunb.scheduler.options import Options
from gpunb.worker import library_state
from gpunb.worker.cell import figures
from gpunb.worker.cell.cell_types import LOCALS, SHELL_NAMES, Cell, module_names
from gpunb.worker.cell.shell import remember
from gpunb.worker.user_modules import Autoreload

_sent_before = Reuse(min(4 << 30, total_memory() // 8))
"""Buffers that were sent before: many cells read large data, and few change it."""

_NOT_DATA = SHELL_NAMES - {"_", "__", "___"}
_INPUTS = frozenset({"In", "_ih", "_i", "_ii", "_iii"})


@dataclass(frozen=True, slots=True)
class CellRequest:
    """A %%gpu cell as the user wrote it.

    Attributes:
        source: text of the cell.
        first_line: the %%gpu line, or a comment with the lines before an expression; empty if the
            user did not write it.
        options: options of the line.
        inputs: names to send, and no others; None for the names that the cell reads.
        outputs: names to bring home, and no others; None for the names that the cell binds.
        session: the session that runs the cell.
        expression: whether the source is an expression for its value, which is not shown.
        largest: size in bytes above which a value comes home only if `outputs` names it.
        local: names of the function that asks for an expression.
        apart: whether the cell changes no library settings of the notebook, and has random numbers
            of its own, as a background cell.
        ranks: the ranks that run the cell; None for one process.
        show: ranks whose output is shown in full.
        given: values of names for this cell only, as for a trial of a sweep.
        check: whether to list what differs after the trip.
    """

    source: str
    first_line: str
    options: Options
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    session: CellSession | None = None
    expression: bool = False
    largest: int = 0
    local: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False
    ranks: Ranks | None = None
    show: frozenset[int] = frozenset()
    given: Mapping[str, Any] = field(default_factory=dict)
    check: bool = False

    def folds(self, shell: NotebookShell) -> Folds | None:
        """The display of the output of its ranks."""
        if self.ranks is None:
            return None
        return Folds(self.show.__contains__, live=shell.kernel is not None)


class _Code(NamedTuple):
    """The code of a cell."""

    text: str
    python: str
    body: list[ast.stmt]
    file: str
    names: CellNames
    binds: frozenset[str] | None  # names that it may bind; None if the text does not tell


class _Contents(NamedTuple):
    """The notebook's objects that go with a cell."""

    objects: dict[str, Any]  # all of them, by name
    values: dict[str, Any]  # to be pickled; under `LOCALS`, the names of a function in one dict
    optional: set[str]  # names that stay out if they cannot be pickled
    needed: set[str]  # names that the cell reads, or the user has listed
    known: frozenset[str]  # names that the session has already
    past: tuple[str, ...]  # names of outputs
    local: tuple[str, ...]  # names of the function that asks for an expression
    modules: dict[str, str]  # module names, by name
    codes: set[types.CodeType]  # of the functions among the objects


def pack_cell(
    shell: NotebookShell, request: CellRequest, number: int, *, late: bool = False
) -> tuple[Payload, Shipment]:
    """The cell with the names that it reads, and the objects of these names as they are now.

    The names that functions among the objects look up go along. Values that the session has already
    stay here.

    Args:
        number: execution count of the cell.
        late: whether other cells run before this one comes home.

    Raises:
        UsageError: a name to send is not bound, or its object cannot be pickled.
        SyntaxError: the cell is not Python.
    """
    code = _read(shell, request, number)
    space, binds, since = shell.user_ns, code.binds, None
    inner: list[types.FunctionType] = []  # functions within the objects, such as a hook of a model
    while True:
        contents = _collect(space, code, request, inner)
        cell = _cell(shell, code, contents, request, number=number, late=late)
        # Warnings of libraries that packing alone causes are of no use.
        with warnings.catch_warnings(action="ignore"), serialize.noting() as met:
            payload = _packed(cell, contents.values, contents.optional)
        unsent = space.keys() - contents.objects.keys()
        more = [each for each in met.functions if _looked_up(each, space) & unsent]
        if all(each in inner for each in more):
            break
        inner += more
    objects = contents.objects
    objects.update((name, space[name]) for name in cell.deletes)
    if late:
        since = Since(space, space if binds is None else binds | objects.keys(), objects)
    sent = frozenset(contents.values)
    return payload, Shipment(
        objects,
        sent,
        binds,
        since,
        request.expression,
        code.python,
        detached=serialize.with_graph(contents.values) if met.graphs else (),
        losses=_losses(contents.values) if request.check else None,
        needs=needed_modules(code.body, objects.values()),
        brings=_brought(code.body, objects) if request.outputs is None else (),
    )


def meaning(shell: NotebookShell, request: CellRequest) -> tuple[Any, ...]:
    """The meaning of a cell: its code without comments and the values it reads, but not `given`."""
    code = _read(shell, request, shell.number)
    contents = _collect(shell.user_ns, code, replace(request, given={}))
    values = {n: each for n, each in contents.values.items() if n not in request.given}
    tree = ast.dump(ast.Module(code.body, []))
    return tree, sorted(values.items()), sorted(contents.modules.items()), request.outputs


def _read(shell: NotebookShell, request: CellRequest, number: int) -> _Code:
    """Find the names in the source of a cell."""
    text = _numbered(request.source, request.first_line)
    with auto_magic.plain():
        python = shell.ip.transform_cell(text)
        file = _check_syntax(shell.ip.compile, python, number)
        body = parse(python)
        names = analyse(body, shell.ip.transform_cell)
    hidden = names.star_imports or ("get_ipython" in python and _calls_magics(body))
    return _Code(text, python, body, file, names, None if hidden else names.binds)


def _collect(
    space: Mapping[str, Any], code: _Code, request: CellRequest, inner: Sequence[Any] = ()
) -> _Contents:
    """Collect the objects for a cell, with those that the functions `inner` look up."""
    names = code.names
    local = {name: request.local[name] for name in sorted(names.reads & request.local.keys())}
    needed, optional, codes = _select(space, names, request.inputs, local, inner)
    outputs = space.get("_oh", {}) if space.get("Out") is space.get("_oh") else {}
    past = {f"_{each}": outputs[each] for each in names.outputs & outputs.keys()}
    objects = {name: space[name] for name in sorted((needed | optional) & space.keys())} | past
    modules = module_names(objects)
    values = {name: each for name, each in objects.items() if name not in modules}
    if request.session is not None:
        held = request.session.held
        values = {name: each for name, each in values.items() if not held.has(name, each)}
    objects.update(request.given)
    values.update(request.given)
    known = frozenset(objects.keys() - modules.keys() - values.keys())
    if local and _awaits(code.body):  # which a plain function around the expression may not
        values.update(local)
        objects.update(local)
        local = {}
    elif local:
        values[LOCALS] = local
    return _Contents(
        objects, values, optional, needed, known, tuple(past), tuple(local), modules, codes
    )


def _select(
    space: Mapping[str, Any],
    names: CellNames,
    inputs: tuple[str, ...] | None,
    local: Mapping[str, Any],
    inner: Sequence[Any],
) -> tuple[set[str], set[str], set[types.CodeType]]:
    """The names that the cell needs, names that it may need, and the code of the functions among
    the objects."""
    others = *local.values(), *inner
    if inputs is not None:
        if missing := [each for each in inputs if each not in space]:
            raise UsageError(f"%%gpu --in: not bound in the notebook: {', '.join(missing)}")
        needed, codes = _with_globals(inputs, space, *others)
        return needed, set(), codes
    bound = space.keys() - _NOT_DATA
    needed, codes = _with_globals((names.reads - local.keys()) & bound, space, *others)
    optional, more = _with_globals(names.mentioned & bound, space)
    return needed, (optional | _within(needed, space)) - needed, codes | more


def _cell(
    shell: NotebookShell,
    code: _Code,
    contents: _Contents,
    request: CellRequest,
    *,
    number: int,
    late: bool,
) -> Cell:
    """The cell as its worker gets it."""
    space, ip, names, session = shell.user_ns, shell.ip, code.names, request.session
    apart = late or request.apart
    return Cell(
        source=code.text,
        name=code.file,
        number=number,
        modules=contents.modules,
        submodules=_submodules(
            contents.objects, {*names.attributes, *names.mentioned}, contents.codes
        ),
        history={name: space[name] for name in names.reads & space.keys() & _INPUTS},
        past=contents.past,
        binds=None if code.binds is None else code.binds | contents.needed,
        deletes=(names.deletes & space.keys()) - contents.objects.keys() - _NOT_DATA,
        imports=names.imports,
        outputs=request.outputs,
        gather=request.ranks.gather if request.ranks is not None else (),
        sources=_sources(shell.cell_files, {each.co_filename for each in contents.codes}),
        flags=ip.compile.flags,
        colors=ip.colors,
        xmode=ip.InteractiveTB.mode,
        figures=figures.settings(ip),
        interactivity=ip.ast_node_interactivity,
        known=contents.known,
        local=contents.local,
        shell=(type(ip).__module__, type(ip).__name__),
        silent=request.expression,
        largest=0 if request.expression else request.largest,
        autoreload=_autoreload(ip),
        lasting=late and isinstance(backend.existing(), backend.SharedBackend),
        libraries=library_state.taken(random=session is None and not apart),
        brings="" if apart else "settings" if session is not None else "all",
        request=(shell.request().get("header") or {}).get("msg_id", ""),
        check=request.check,
    )


def _numbered(source: str, first_line: str) -> str:
    """The source with a comment in place of the %%gpu line, so that its lines have the notebook's
    numbers.

    A source that begins with another cell magic gets no comment, because that magic must come
    first. An indented source stays indented.
    """
    code = source.lstrip()
    if code.startswith("%%") or not first_line:
        return source
    indent = source[: len(source) - len(code)].rpartition("\n")[2]
    return f"{indent}#{first_line}\n{source}"


def _check_syntax(compiler: Any, transformed: str, number: int) -> str:
    """Raise a SyntaxError here, not after a wait for a GPU; return the file name of the code.

    The name is IPython's own. Those of ipykernel end with ``.py``: for such a file that does not
    exist, IPython shows the last line that a function has reached, not the line that failed.
    """
    name: str = code_name(transformed, number)
    remember(compiler, name, number, transformed)
    tree = compiler.ast_parse(transformed, filename=name)
    flags = compiler.flags & _FUTURE | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are shown when the cell runs
        compile(tree, name, "exec", flags, dont_inherit=True)
    return name


def _autoreload(ip: Any) -> Autoreload | None:
    """Which edited modules the notebook reloads; None if it reloads none."""
    magics = ip.magics_manager.registry.get("AutoreloadMagics")
    reloader = getattr(magics, "_reloader", None)
    if reloader is None or not reloader.enabled:
        return None
    chosen = reloader.skip_modules if reloader.check_all else reloader.modules
    return Autoreload(bool(reloader.check_all), frozenset(chosen))


_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def _with_globals(
    names: Iterable[str], space: Mapping[str, Any], *others: Any
) -> tuple[set[str], set[types.CodeType]]:
    """The names with those that functions among their objects, and in `others`, look up; and the
    code of these functions."""
    used, codes = set(names), set()
    for function in serialize.functions_within(*(space[name] for name in names), *others):
        codes.add(function.__code__)
        used.update(_looked_up(function, space))
    return used - _NOT_DATA, codes


def _looked_up(function: types.FunctionType, space: Mapping[str, Any]) -> set[str]:
    """The names of the notebook that a function looks up, also those that are not bound yet."""
    if function.__globals__ is not space:
        return set()
    return set(global_names(function.__code__)) - _NOT_DATA


def _within(names: Iterable[str], space: Mapping[str, Any]) -> set[str]:
    """Names of the notebook for parts of the objects of these names, and for arrays of such parts,
    so that an object that the cell changes in place stays one object."""
    roots = {name: space[name] for name in names if name in space}
    found = [(id(part), len(path)) for part, path in serialize.parts(roots, exact=False)]
    inner = {part for part, steps in found if steps > 1}
    if not inner:
        return set()
    every = {part for part, _ in found}
    return {
        name
        for name, value in space.items()
        if id(value) in inner or any(id(part) in every for _, part in serialize.in_array(value))
        if not name.startswith("_") and name not in _NOT_DATA
    }


def _submodules(
    objects: Mapping[str, Any], attributes: set[str], codes: Iterable[types.CodeType]
) -> tuple[str, ...]:
    """Modules within packages of the notebook that these attributes and this code may use."""
    packages = [each for each in objects.values() if isinstance(each, types.ModuleType)]
    if not packages:
        return ()
    todo = list(codes)
    while todo:
        code = todo.pop()
        attributes.update(code.co_names)
        todo.extend(each for each in code.co_consts if isinstance(each, types.CodeType))
    modules = {name for each in packages for name in serialize.modules_within(each, attributes)}
    return tuple(sorted(modules))


def _sources(numbers: Mapping[str, int], files: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Number and text of the cells with these file names, for tracebacks in the worker."""
    return {
        name: (numbers[name], "".join(linecache.getlines(name)))
        for name in files
        if name in numbers
    }


def _calls_magics(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == "get_ipython"
        for node in ast.walk(ast.Module(body, []))
    )


def _brought(body: Sequence[ast.stmt], objects: Mapping[str, Any]) -> tuple[str, ...]:
    modules = {
        name: object.__getattribute__(each, "__name__")
        for name, each in objects.items()
        if issubclass(type(each), types.ModuleType)
    }
    return modules_of_results(body, modules)


def _awaits(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Await) or (isinstance(node, ast.comprehension) and node.is_async)
        for node in ast.walk(ast.Module(body, []))
    )


def _packed(cell: Cell, values: dict[str, Any], optional: set[str]) -> Payload:
    with serialize.staying() or contextlib.nullcontext():
        try:
            return _dumps(cell, values)
        except Exception:  # a value cannot be pickled
            pass
        for name, value in [*values.items(), *values.get(LOCALS, {}).items()]:
            try:
                if name != LOCALS:
                    serialize.dumps(value, what=name, way="cell")
            except Exception as error:
                if name not in optional or name not in values:
                    raise UsageError(f"%%gpu: {error}") from None
                del values[name]
        return _dumps(cell, values)


def _losses(values: dict[str, Any]) -> list[serialize.Loss]:
    with serialize.staying() or contextlib.nullcontext():
        return serialize.losses(values, "cell")


def _dumps(cell: Cell, values: dict[str, Any]) -> Payload:
    what = "names of the cell"
    return serialize.dumps((cell, values), what=what, way="cell", reuse=_sent_before)
