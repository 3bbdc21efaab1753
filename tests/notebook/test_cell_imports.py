"""What a cell imports at its top is imported once: before it, for it and for the cells after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notebook.kernels import Kernel, kernel
from tests.waiting import eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook") / "site-packages"


@pytest.fixture(scope="module")
def cell(folder: Path) -> Iterator[Kernel]:
    folder.mkdir()
    with kernel(folder.parent) as running:
        running.ok(f"import sys; sys.path.insert(0, {str(folder)!r})")
        yield running


@pytest.fixture
def install(folder: Path, cell: Kernel) -> Callable[..., str]:
    """Installs a module with this code."""

    def make(name: str, code: str = "") -> str:
        (folder / f"{name}.py").write_text(code)
        cell.ok("import importlib; importlib.invalidate_caches()")
        return name

    return make


def test_the_cell_and_those_after_it_find_it_imported(
    cell: Kernel, install: Callable[..., str]
) -> None:
    first, second = install("ci_first"), install("ci_second")
    look = f"print([n for n in ({first!r}, {second!r}) if n in __import__('sys').modules])"
    assert cell.ok(f"%%gpu 0.5\nimport {first}\n{look}").stdout == f"['{first}']\n"
    assert cell.ok(f"%%gpu 0.5\n{look}").stdout == f"['{first}']\n"
    assert cell.ok(f"%%gpu 0.5\n{look}\nimport {second}").stdout == f"['{first}']\n"
    shown = cell.ok(f"%%gpu 0.5\nfrom {second} import __name__ as n\n{look}").stdout
    assert shown == f"['{first}', '{second}']\n"


def test_its_process_forks_the_cell(cell: Kernel, install: Callable[..., str]) -> None:
    name = install("ci_process", "import os\npid = os.getpid()")
    text = f"%%gpu 0.5\nimport os, {name}\nprint({name}.pid == os.getppid())"
    assert cell.ok(text).stdout == "True\n"


def test_a_cell_that_uses_a_value_waits_for_the_module_of_the_value(
    cell: Kernel, install: Callable[..., str]
) -> None:
    name = install("ci_value", "import os\npid = os.getpid()\nclass Thing: ...")
    cell.ok(f"from {name} import Thing\nthing = Thing()")
    text = f"%%gpu 0.5\nimport os, sys\nthing\nprint(sys.modules[{name!r}].pid == os.getppid())"
    assert cell.ok(text).stdout == "True\n"


def test_what_the_import_prints_is_output_of_the_cell_once(
    cell: Kernel, install: Callable[..., str]
) -> None:
    code = "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\nX = 1"
    name = install("ci_prints", code)
    shown = cell.ok(f"%%gpu 0.5\nfrom {name} import X\nprint('begun')")
    assert (shown.stdout, shown.stderr) == ("out\nbegun\n", "err\n")
    again = cell.ok(f"%%gpu 0.5\nfrom {name} import X\nprint('begun')")
    assert (again.stdout, again.stderr) == ("begun\n", "")


def test_a_module_that_looks_for_a_notebook_finds_one(
    cell: Kernel, install: Callable[..., str]
) -> None:
    code = """
from IPython import get_ipython
shell = get_ipython()
found = shell and (type(shell).__name__, "IPKernelApp" in shell.config)
"""
    name = install("ci_looks", code)
    text = f"%%gpu 0.5\nimport {name}\nprint({name}.found)"
    for _ in range(2):
        assert cell.ok(text).stdout == "('ZMQInteractiveShell', True)\n"


def test_an_error_of_the_import_is_that_of_the_cell(
    cell: Kernel, install: Callable[..., str]
) -> None:
    name = install("ci_fails", "raise ValueError('it needs more')")
    failed = cell(f"%%gpu 0.5\nimport {name}")
    assert (failed.ename, failed.evalue) == ("ValueError", "it needs more")
    assert f"import {name}" in failed.traceback


def test_variables_that_a_cell_sets_before_an_import_are_there(
    cell: Kernel, install: Callable[..., str]
) -> None:
    name = install("ci_reads", "import os\nfound = os.environ.get('CI_READS')")
    set_it = "import os\nos.environ['CI_READS'] = 'set'"
    show = f"import {name}\nprint({name}.found)"
    assert cell.ok(f"%%gpu 0.5\n{set_it}\n{show}").stdout == "set\n"
    cell.ok("import os\nos.environ['CI_READS'] = 'by the notebook'")
    shown = cell.ok(f"%%gpu 0.5\n{show}").stdout
    assert shown == "by the notebook\n"


def test_the_users_own_module_is_imported_from_its_current_file(cell: Kernel, folder: Path) -> None:
    own = folder.parent / "ci_own.py"
    for text in ("one", "the second"):
        own.write_text(f"text = {text!r}")
        assert cell.ok("%%gpu 0.5\nimport ci_own\nprint(ci_own.text)").stdout == f"{text}\n"


def test_stop_ends_the_wait_for_an_import(
    cell: Kernel, install: Callable[..., str], folder: Path
) -> None:
    begun = folder.parent / "begun"
    code = f"""
import time
while "follow" in open("/proc/self/comm").read():
    open({str(begun)!r}, "w").close()
    time.sleep(0.01)
"""
    name = install("ci_hangs", code)
    running = cell.start(f"%%gpu 0.5\nimport {name}\nimport time\ntime.sleep(60)")
    eventually(begun.exists, "the import has begun")
    cell.interrupt()
    assert cell.finish(running).ename == "KeyboardInterrupt"
