"""The notebook's shell: the members of IPython's shell that gpunb uses, with types.

The same members work in a Jupyter kernel, in a terminal, and in a program without IPython.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from gpunb.protocol.sink import Place

_Part = TypeVar("_Part")
_KEY = "_gpunb"


class NotebookShell:
    """An IPython shell. `of` returns the only one for a shell.

    Attributes:
        ip: IPython's own object.
        kernel: the Jupyter kernel of the shell; None if there is none.
        shows: whether there is a user to whom anything is shown; False in a program.
    """

    def __init__(self, ip: Any) -> None:
        self.ip = ip
        self.kernel: Any = getattr(ip, "kernel", None)
        self.shows = not isinstance(ip, _Program)
        self._parts: dict[Callable[[NotebookShell], Any], Any] = {}

    def part(self, kind: Callable[[NotebookShell], _Part]) -> _Part:
        """The object of this class that belongs to the shell; the first call makes it."""
        part: _Part | None = self._parts.get(kind)
        if part is None:
            part = self._parts[kind] = kind(self)
        return part

    @property
    def user_ns(self) -> dict[str, Any]:
        """The names of the notebook."""
        names: dict[str, Any] = self.ip.user_ns
        return names

    @property
    def number(self) -> int:
        """Execution count of the running cell."""
        count: int = self.ip.displayhook.prompt_count
        return count

    @property
    def cell_files(self) -> dict[str, int]:
        """Execution counts of cells, by the file names of their code."""
        files: dict[str, int] = self.ip.compile._filename_map  # noqa: SLF001 - no public way
        return files

    def cell_of(self, file: str) -> str | None:
        """Such as ``"Cell In[3]"`` for the file name of a cell's code; None for another file."""
        named = getattr(self.ip.compile, "format_code_name", None)
        names = named(file) if named is not None else None
        return None if names is None else " ".join(names)

    def lines_before(self) -> str:
        """The lines of the running cell before the line that runs, as a comment."""
        frame = sys._getframe()  # noqa: SLF001 - what `inspect` uses
        while frame is not None and frame.f_globals is not self.user_ns:
            frame = frame.f_back  # type: ignore[assignment]
        source = self.user_ns.get("In", [""])[-1].splitlines()
        if frame is None or self.cell_files.get(frame.f_code.co_filename) != self.number:
            return ""
        return "\n# ".join(["", *source[: frame.f_lineno - 1]])[2:]

    def set_output(self, value: Any) -> None:
        """Make a value the output of the running cell: in ``_``, ``Out`` and their like."""
        self.ip.displayhook.update_user_ns(value)
        self.ip.displayhook.fill_exec_result(value)

    def request(self) -> dict[str, Any]:
        """The message that asked the kernel to run the current cell; empty without a kernel."""
        if self.kernel is None:
            return {}
        get_parent = getattr(self.ip, "get_parent", None) or self.kernel.get_parent
        parent: dict[str, Any] = get_parent()
        return parent

    def send(self, kind: str, content: Mapping[str, Any], parent: Any, **more: Any) -> None:
        """Send a message to the front end, as output of the cell of the request `parent`."""
        kernel = self.kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=parent, **more)

    def may_ask(self) -> bool:
        """Whether the front end of the running cell takes input. A front end that only executes a
        notebook does not, and does not wait for late output either."""
        return bool((self.request().get("content") or {}).get("allow_stdin", True))

    def headless(self) -> bool:
        """Whether nobody would see output that comes after a cell's end."""
        magics = self.ip.magics_manager.registry.get("GpuMagics")
        setting = magics.headless if magics is not None else None
        return not self.may_ask() if setting is None else bool(setting)

    def place(self) -> Place:
        """The running cell: its number, and the front end's name for it."""
        return self.number, self._cell_id()

    def origin(self) -> str | None:
        """A key of the running cell that stays the same when the cell runs again: the front end's
        name for it, or its text."""
        code: str | None = (self.request().get("content") or {}).get("code")
        return self._cell_id() or code

    def _cell_id(self) -> str | None:
        ident: str | None = (self.request().get("metadata") or {}).get("cellId")
        return ident


class _Program:
    """In place of IPython's shell: a program without a notebook."""

    displayhook = SimpleNamespace(prompt_count=0)

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}

    def push(self, names: Mapping[str, Any]) -> None:
        """Bind names; `Job.names` has them."""
        self.user_ns.update(names)


_program = _Program()


def of(ip: Any) -> NotebookShell:
    """The notebook shell of an IPython shell."""
    shell: NotebookShell | None = vars(ip).get(_KEY)
    if shell is None:
        shell = vars(ip)[_KEY] = NotebookShell(ip)
    return shell


def current() -> NotebookShell:
    """The notebook shell of this process; of a program, one that shows nothing."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    ip = get_ipython() if get_ipython is not None else None
    return of(_program if ip is None else ip)
