"""The values that kernel and worker exchange for a notebook cell: `Cell` and `CellResult`."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gpunb.data.serialize import Loss, Payload
from gpunb.worker.user_modules import Autoreload

LOCALS = "__gpunb_locals__"
"""The key of the names of the function that asks for an expression, in one dict."""

LAST = "\x00last"
"""The key, no possible name, of the last expression's value."""

SHELL_NAMES = frozenset(
    """In Out exit quit get_ipython open _ __ ___ _i _ii _iii _dh _ih _oh
    __builtin__ __builtins__ __name__ __doc__ __loader__ __package__ __spec__
    __annotations__ __warningregistry__""".split()
)
"""Names in a shell's namespace that are the shell's own, not the user's."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell for a worker to run. The values of its names travel beside it.

    Attributes:
        source: the text with its magics; its lines have the same numbers as in the notebook.
        name: file name of its code, which the notebook's shell knows too.
        number: execution count of the cell in the notebook.
        modules: module names, by the names that the notebook has bound to them.
        submodules: modules within these packages that the cell may look for.
        binds: names that the cell may bind; None if the text does not tell.
        history: the notebook's inputs that the cell reads, by name.
        past: names of the notebook's outputs that the cell reads, such as ``_5`` for ``Out[5]``.
        deletes: names of the notebook that the cell may delete, but does not read.
        imports: modules within packages that the import statements of the cell name.
        outputs: names to bring home, and no others; None for all.
        gather: names whose values come home from each rank.
        sources: cells that define the functions sent along: (number, text) by file name.
        flags: compiler flags, for imports from ``__future__``.
        colors: colours of tracebacks, as in the kernel's shell.
        xmode: length of tracebacks.
        figures: the notebook's settings for figures, from `figures.settings`.
        interactivity: the kernel's ``ast_node_interactivity``.
        shell: module and name of the class of the notebook's shell.
        local: names of the function that asks for this expression; one dict under `LOCALS` has
            their values.
        known: names that the cell reads and whose values this worker has from an earlier cell.
        silent: whether the value of the last expression is not shown.
        largest: size in bytes above which a value comes home only if `outputs` names it; 0 for no
            limit.
        autoreload: which edited modules the notebook reloads; the unpickling of this field reloads
            them. None if it reloads none.
        lasting: whether another kernel, which lacks the notebook's names, may bring the cell home.
        libraries: settings and random states by library, from `library_state.taken`.
        brings: which changes of `libraries` come home: none, settings, or random states as well.
        request: id of the message that asked the kernel to run the cell; empty if the notebook
            shows no widgets.
        check: whether to list what differs after the trip.
    """

    source: str
    name: str
    number: int
    modules: Mapping[str, str] = field(default_factory=dict)
    submodules: Sequence[str] = ()
    binds: frozenset[str] | None = None
    history: Mapping[str, Any] = field(default_factory=dict)
    past: tuple[str, ...] = ()
    deletes: frozenset[str] = frozenset()
    imports: frozenset[str] = frozenset()
    outputs: tuple[str, ...] | None = None
    gather: tuple[str, ...] = ()
    sources: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    flags: int = 0
    colors: str = "neutral"
    xmode: str = "Context"
    figures: Mapping[str, Any] = field(default_factory=dict)
    interactivity: str = "last_expr"
    known: frozenset[str] = frozenset()
    local: tuple[str, ...] = ()
    shell: tuple[str, str] = ("", "")
    silent: bool = False
    largest: int = 0
    autoreload: Autoreload | None = None
    lasting: bool = False
    libraries: Mapping[str, bytes] = field(default_factory=dict)
    brings: Literal["", "settings", "all"] = ""
    request: str = ""
    check: bool = False


@dataclass(frozen=True, slots=True)
class CellResult:
    """How a cell ended. The values of the names that come home travel beside it.

    Attributes:
        modules: module names, by the names that the cell has bound to them.
        imported: modules within packages that the cell's import statements have loaded.
        same: names bound to objects that the cell was given and left as they were, with the names
            of these objects in the notebook. If another kernel may bring the cell home, their
            values travel as well, as far as they can be pickled.
        deleted: names that the cell was given and that are gone.
        changed: names whose objects, given to the cell, were changed in place.
        kept: names whose values stay in the worker, each with the reason.
        own: names that the cell bound and that were not to come home.
        detached: names of values with tensors whose graph stays in the worker.
        losses: what the values lose on the way home, if the user has asked for it.
        shown: whether the values have the value of the last expression, under `LAST`.
        failure: the error of the cell, from `serialize.dump_failure`.
        traceback: the lines that IPython shows for that error.
        flags: compiler flags after the cell.
        libraries: changes of library settings, from `library_state.Watch`.
        peak: the most memory that the worker had, in bytes.
        home: of a cell in several ranks, the result of the rank whose names come home, with its
            values; this result then has only the failure of the cell, if any.
        gathered: of each rank in order, the values of the names to gather, in a dict.
    """

    modules: dict[str, str] = field(default_factory=dict)
    imported: tuple[str, ...] = ()
    same: dict[str, str] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    left_behind: tuple[tuple[str, str], ...] = ()
    own: tuple[str, ...] = ()
    detached: tuple[str, ...] = ()
    losses: list[Loss] | None = None
    shown: bool = False
    failure: Payload | None = None
    traceback: tuple[str, ...] = ()
    flags: int = 0
    libraries: Mapping[str, bytes] = field(default_factory=dict)
    peak: int = 0
    home: Payload | None = None
    gathered: tuple[Payload, ...] = ()


def module_names(objects: Mapping[str, Any]) -> dict[str, str]:
    """The names of the objects that are modules as `import` finds them, with the module names."""
    return {
        name: each.__name__
        for name, each in objects.items()
        if isinstance(each, types.ModuleType) and sys.modules.get(each.__name__) is each
    }
