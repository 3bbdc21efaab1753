"""The user's modules, edited while workers have them loaded."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.worker import user_modules
from gpunb.worker.user_modules import Loaded
from tests.notebook.kernels import Kernel, kernel
from tests.sessions import PATIENCE, eventually

_lengths = itertools.count(1)


def write(path: Path, text: str) -> None:
    """Write a module. Each time with another size, as compiled files have times in seconds."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n#{'x' * next(_lengths)}\n")


# ------------------------------------------------------------------------------------------ looking


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Imports a module out of a folder of its own, the only one that counts as the user's."""
    monkeypatch.syspath_prepend(tmp_path)
    of = user_modules.users_file

    def users_file(name: str) -> str | None:
        path = of(name)
        return path if path is not None and path.startswith(str(tmp_path)) else None

    monkeypatch.setattr(user_modules, "users_file", users_file)
    yield lambda name: __import__(name, fromlist=["x"])
    for name in [name for name in sys.modules if users_file(name)]:
        del sys.modules[name]


def settle(folder: Path) -> None:
    """Wait until what was written is clearly older than what comes."""
    newest = max(each.stat().st_ctime_ns for each in folder.rglob("*"))
    eventually(lambda: time.time_ns() > newest + 1.5 * user_modules._CLOCK)


def test_files_that_were_not_edited_are_not_reported(tmp_path: Path, imported: Any) -> None:
    write(tmp_path / "quiet.py", "x = 1")
    settle(tmp_path)
    loaded = Loaded()
    imported("quiet")
    imported("numpy")
    imported("gpunb.api")
    assert not loaded.edited()
    os.utime(tmp_path, None)
    assert not loaded.edited()
    (tmp_path / "quiet.py").unlink()
    assert not loaded.edited()


def test_an_edit_is_found(tmp_path: Path, imported: Any) -> None:
    write(tmp_path / "first.py", "x = 1")
    write(tmp_path / "second.py", "import first")
    settle(tmp_path)
    loaded = Loaded()
    imported("second")
    assert not loaded.edited()
    write(tmp_path / "first.py", "x = 2")
    assert loaded.edited() == ["first"]
    loaded.forget()
    assert not {"first", "second"} & sys.modules.keys()
    assert imported("second").first.x == 2
    settle(tmp_path)
    loaded.edited()  # it was written just before
    loaded.forget()
    imported("second")
    assert not loaded.edited()


def test_an_edit_between_the_import_and_the_next_check_is_found(
    tmp_path: Path, imported: Any
) -> None:
    write(tmp_path / "during.py", "x = 1")
    settle(tmp_path)
    loaded = Loaded()
    imported("during")
    write(tmp_path / "during.py", "x = 2")
    assert loaded.edited() == ["during"]


def test_a_replaced_file_with_an_old_time_is_found(tmp_path: Path, imported: Any) -> None:
    write(tmp_path / "moved.py", "x = 1")
    write(tmp_path / "other", "x = 2")
    os.utime(tmp_path / "other", (1, 1))
    settle(tmp_path)
    loaded = Loaded()
    imported("moved")
    (tmp_path / "other").replace(tmp_path / "moved.py")
    assert loaded.edited() == ["moved"]


def test_a_part_of_a_package_without_a_file_is_imported_anew(tmp_path: Path, imported: Any) -> None:
    write(tmp_path / "spaced" / "inner.py", "x = 1")
    settle(tmp_path)
    loaded = Loaded()
    imported("spaced.inner")
    write(tmp_path / "spaced" / "inner.py", "x = 2")
    assert loaded.edited() == ["spaced.inner"]
    loaded.forget()
    from spaced import inner  # type: ignore[import-not-found]

    assert inner.x == 2


def test_a_check_for_edits_is_one_call_of_the_system_for_each_module() -> None:
    loaded = Loaded()
    loaded.edited()
    count = len(loaded._files)
    assert count > 0
    calls: Counter[str] = Counter()

    def note(_: Any, event: str, called: Any) -> None:
        if event == "c_call" and called.__module__ == "posix":
            calls[called.__name__] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        loaded.edited()
    finally:
        sys.setprofile(before)
    assert calls == {"stat": count}


# -------------------------------------------------------------------------------------- in workers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where workers find modules, but this process does not look."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return tmp_path


def get(ref: Any) -> Any:
    return gpunb.get(ref, timeout=PATIENCE)


@pytest.mark.parametrize("options", [{"num_cpus": 1}, {"num_gpus": 1, "max_calls": 0}])
def test_the_next_task_on_the_same_worker_has_the_new_code(
    start: Any, folder: Path, options: dict[str, Any]
) -> None:
    write(folder / "helping.py", "def f(): return 1\nclass Base:\n    def g(self): return f()")
    start(num_gpus=1, num_cpus=1)
    import helping  # type: ignore[import-not-found]

    try:
        from helping import f

        class Mine(helping.Base):  # type: ignore[misc]
            pass

        @gpunb.remote(**options)
        def call() -> Any:
            return os.getpid(), helping.f(), f(), Mine().g()

        pid, *values = get(call.remote())
        assert values == [1, 1, 1]
        assert get(call.remote()) == (pid, 1, 1, 1)
        write(
            folder / "helping.py", "def f(): return 22\nclass Base:\n    def g(self): return -f()"
        )
        assert get(call.remote()) == (pid, 22, 22, -22)
        assert get(call.remote()) == (pid, 22, 22, -22)
        write(folder / "helping.py", "def f(): return 3 / 0")
        with pytest.raises(AttributeError, match="Base"):
            get(call.remote())
    finally:
        del sys.modules["helping"]


def test_an_edit_while_a_task_runs_reaches_the_next_task(start: Any, folder: Path) -> None:
    write(folder / "meanwhile.py", "x = 1")
    start(num_cpus=1)

    @gpunb.remote
    def wait(path: Path) -> Any:
        import meanwhile  # type: ignore[import-not-found]

        path.touch()
        while path.exists():
            time.sleep(0.005)
        return os.getpid(), meanwhile.x

    @gpunb.remote
    def look() -> Any:
        import meanwhile

        return os.getpid(), meanwhile.x

    ref = wait.remote(folder / "begun")
    eventually((folder / "begun").exists)
    write(folder / "meanwhile.py", "x = 2")
    (folder / "begun").unlink()
    pid, value = get(ref)
    assert value == 1
    assert get(look.remote()) == (pid, 2)


def test_edited_modules_that_the_zygote_imported_are_imported_anew(
    start: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "preloaded.py", "import os\nx, pid = 1, os.getpid()")
    session = start(num_gpus=1, preload=["preloaded"])
    assert session is not None

    @gpunb.remote(num_gpus=1)
    def look() -> Any:
        import preloaded  # type: ignore[import-not-found]

        return preloaded.x, preloaded.pid == os.getpid()

    eventually(lambda: get(look.remote()) == (1, False), "it was preloaded")
    write(folder / "preloaded.py", "import os\nx, pid = 2, os.getpid()")
    assert get(look.remote()) == (2, True)
    assert get(look.remote()) == (2, True)


def test_an_actor_goes_on_with_what_it_has_loaded(start: Any, folder: Path) -> None:
    write(folder / "acting.py", "x = 1")
    start(num_cpus=2)

    @gpunb.remote
    class Actor:
        def look(self) -> Any:
            import acting  # type: ignore[import-not-found]

            return acting.x

    actor = Actor.remote()
    assert get(actor.look.remote()) == 1
    write(folder / "acting.py", "x = 2")
    assert get(actor.look.remote()) == 1
    assert get(Actor.remote().look.remote()) == 2


# ----------------------------------------------------------------------------------------- in cells


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("autoreload")


@pytest.fixture(scope="module")
def cell(here: Path) -> Iterator[Kernel]:
    """A kernel in the folder of the modules."""
    with kernel(here) as running:
        yield running


@pytest.mark.kernel
def test_a_cell_has_the_new_code_even_if_the_notebook_has_the_old_one(
    cell: Kernel, here: Path
) -> None:
    write(here / "plain.py", "def f(): return 1")
    cell.ok("import plain\nfrom plain import f")
    assert cell.ok("%%gpu\nplain.f(), f()").value == "(1, 1)"
    write(here / "plain.py", "def f(): return 2")
    assert cell.ok("%%gpu\nplain.f(), f()").value == "(2, 2)"
    assert cell.value("plain.f()") == 1


@pytest.mark.kernel
def test_a_session_reloads_if_the_notebook_does(cell: Kernel, here: Path) -> None:
    text = "def f(): return {0}\nclass Thing:\n    def g(self): return {0}"
    write(here / "lasting.py", text.format(1))
    look = "lasting.f(), f(), thing.g()"
    cell.ok("%%gpu 0 -s lasts\nimport lasting\nfrom lasting import f\nthing = lasting.Thing()")
    settle(here)
    assert cell.ok(f"%%gpu -s lasts\n{look}").value == "(1, 1, 1)"
    write(here / "lasting.py", text.format(2))
    assert cell.ok(f"%%gpu -s lasts\n{look}").value == "(1, 1, 1)"
    cell.ok("%load_ext autoreload\n%autoreload 2")
    try:
        assert cell.ok(f"%%gpu -s lasts\n{look}").value == "(2, 2, 2)"
        write(here / "lasting.py", text.format(3) + "\ndef new(): return 'new'")
        assert cell.ok(f"%%gpu -s lasts\n{look}, lasting.new()").value == "(3, 3, 3, 'new')"

        write(here / "lasting.py", "def f(: return 4")
        broken = cell(f"%%gpu -s lasts\n{look}")
        assert broken.value == "(3, 3, 3)"
        assert "gpunb: reloading lasting failed: SyntaxError" in broken.stderr
        assert "reloading lasting" not in cell.ok(f"%%gpu -s lasts\n{look}").stderr
        write(here / "lasting.py", text.format(5))
        assert cell.ok(f"%%gpu -s lasts\n{look}").value == "(5, 5, 5)"
    finally:
        cell.ok("%autoreload 0")
    write(here / "lasting.py", text.format(6))
    assert cell.ok(f"%%gpu -s lasts\n{look}").value == "(5, 5, 5)"
    cell.ok("%gpu stop lasts")


@pytest.mark.kernel
def test_a_new_function_of_an_edited_module_reaches_a_session(cell: Kernel, here: Path) -> None:
    write(here / "growing.py", "def old(): return 1")
    cell.ok("%load_ext autoreload\n%autoreload 2\nimport growing")
    try:
        cell.ok("%%gpu 0 -s grows\nimport growing\ngrowing.old()")
        write(here / "growing.py", "def old(): return 1\ndef fresh(): return 'fresh'")
        cell.ok("from growing import fresh\nfresh()")
        assert cell.ok("%%gpu -s grows\nfresh()").value == "'fresh'"
    finally:
        cell.ok("%autoreload 0\n%gpu stop grows")


@pytest.mark.kernel
def test_only_modules_chosen_with_aimport_are_reloaded(cell: Kernel, here: Path) -> None:
    write(here / "chosen.py", "x = 1")
    write(here / "unchosen.py", "x = 1")
    cell.ok("%load_ext autoreload\n%autoreload 1\n%aimport chosen")
    try:
        cell.ok("%%gpu 0 -s some\nimport chosen, unchosen")
        write(here / "chosen.py", "x = 2")
        write(here / "unchosen.py", "x = 2")
        assert cell.ok("%%gpu -s some\nchosen.x, unchosen.x").value == "(2, 1)"
        cell.ok("%autoreload 2\n%aimport -unchosen")
        write(here / "chosen.py", "x = 3")
        assert cell.ok("%%gpu -s some\nchosen.x, unchosen.x").value == "(3, 1)"
    finally:
        cell.ok("%autoreload 0\n%gpu stop some")
