"""What cells have registered in other processes is named below an error that may come of it."""

from __future__ import annotations

import pytest

from tests.notebook.kernels import Kernel, plain

pytestmark = pytest.mark.kernel

CODECS = "import codecs\ncodecs.register(lambda name: codecs.lookup('rot13') * (name == 'mine'))"
REGISTRY = """
import pathlib, sys
pathlib.Path('shapes').mkdir()
pathlib.Path('shapes/__init__.py').write_text('''
from shapes import kinds
def register_shape(cls): kinds[cls.__name__] = cls; return cls
''')
pathlib.Path('shapes/kinds.py').write_text('''
known = {}
def register(kind=None, name=''):
    def add(kind): known[name or kind.__name__] = kind; return kind
    return add if kind is None else add(kind)
def area(name):
    return known[name]()
''')
"""


@pytest.fixture(scope="module")
def notebook(cell: Kernel) -> Kernel:
    """Beside a package with a registry."""
    cell.ok(REGISTRY.replace("from shapes import kinds\n", ""))
    cell.ok("from shapes import kinds\nimport shapes.kinds as of_kinds")
    return cell


def fails(notebook: Kernel, code: str) -> str:
    """The last line of all that is shown of the error of a cell."""
    result = notebook(code)
    assert result.status == "error"
    return (plain(result.traceback) + "\n" + result.stderr).strip().splitlines()[-1]


def number(notebook: Kernel) -> int:
    """The execution count of the cell that ran last."""
    return int(notebook.value("len(In) - 1"))


@pytest.mark.parametrize(
    ("registers", "name", "later"),
    [
        (CODECS, "codecs.register", "b'x'.decode('mine')"),
        (
            "from shapes.kinds import register\n@register\nclass Square: pass",
            "shapes.kinds.register",
            "kinds.area('Square')",
        ),
        (
            "@of_kinds.register(name='a square')\nclass Other: pass",
            "shapes.kinds.register",
            "raise ValueError('there is no square')",
        ),
    ],
)
def test_the_error_of_a_cell_names_the_cell_that_registered_it(
    notebook: Kernel, registers: str, name: str, later: str
) -> None:
    notebook.ok(f"%%gpu 0\n{registers}")
    at = number(notebook)
    text = f"gpunb: In[{at}] called {name} in another process, and what it registered does not "
    assert fails(notebook, f"%%gpu 0\n{later}") == (
        f"{text}travel: if it is missing here, call it in this cell, too, or run both cells in one "
        "session (%%gpu --session NAME)"
    )
    assert fails(notebook, later) == (
        f"{text}travel: if it is missing here, call it in a plain cell, too"
    )
    notebook.ok(registers)
    assert "called" not in fails(notebook, f"{later}\nraise LookupError({name!r})")
    assert f"In[{number(notebook) - 1}] called {name}" in fails(notebook, f"%%gpu 0\n{later}")


def test_errors_of_other_kinds_and_cells_of_the_same_session_get_no_such_line(
    notebook: Kernel,
) -> None:
    registers = "import atexit, string\natexit.register(print)\nkinds.register(string.Template)"
    notebook.ok(f"%%gpu 0 -s same\n{registers}")
    later = "raise ValueError('no Template')"
    for code in (f"%%gpu 0 -s same\n{later}", "%%gpu 0\n1 / 0", "1 / 0"):
        assert "called" not in fails(notebook, code)
    assert "called" not in fails(notebook, f"%%gpu 0\n{registers}\n{later}")
    assert "called shapes.kinds.register" in fails(notebook, f"%%gpu 0\n{later}")
    notebook.ok("%gpu stop same")


def test_cells_that_are_no_python_do_not_keep_an_error_from_being_shown(notebook: Kernel) -> None:
    notebook("%%gpu 0\nif True:\n        x = 1\n\tif x: pass\n    else: x")
    notebook("%%gpu 0\n(")
    notebook.ok("kinds.register(int, name='whole')")
    for code in ("1 / 0", "%%gpu 0\n1 / 0"):
        result = notebook(code)
        assert (result.ename, result.stderr) == ("ZeroDivisionError", "")


def test_a_fault_in_the_search_does_not_take_the_place_of_the_error(notebook: Kernel) -> None:
    notebook.ok("kinds.register(int, name='whole')")
    notebook.ok(
        "from gpunb.notebook import registration_hint as its\nbefore = its._hint\nits._hint = 1"
    )
    for code in ("1 / 0", "%%gpu 0\n1 / 0"):
        result = notebook(code)
        assert (result.ename, result.stderr) == ("ZeroDivisionError", "")
    notebook.ok("its._hint = before")


def test_what_another_release_of_a_library_keeps_elsewhere_is_named(notebook: Kernel) -> None:
    notebook.ok("import collections.abc")
    notebook.ok("%%gpu 0\nclass Own: pass\ncollections.abc.Sequence.register(Own)")
    at = number(notebook)
    later = "raise ValueError('no Own')"
    assert "called" not in fails(notebook, later)
    notebook.ok(
        "import dataclasses\nfrom gpunb.worker.registrations import REGISTRATIONS\n"
        "known = REGISTRATIONS['abc']\n"
        "REGISTRATIONS['abc'] = dataclasses.replace(known, read=lambda abc: abc.renamed)"
    )
    text = f"gpunb: In[{at}] called collections.abc.Sequence.register in another process"
    assert fails(notebook, later).startswith(text)
    notebook.ok("REGISTRATIONS['abc'] = known")
