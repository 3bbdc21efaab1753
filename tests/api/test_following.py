"""Fresh workers start with what earlier tasks have imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import gpunb
from gpunb.api import init_options
from gpunb.cli.checks import Place, sessions
from gpunb.exceptions import TaskCancelledError, WorkerCrashedError
from gpunb.processes import followed, generation, import_zygotes
from gpunb.protocol import backend
from gpunb.protocol.zygote import Imports
from tests.sessions import alive, named
from tests.waiting import PATIENCE, eventually


def get(ref):
    return gpunb.get(ref, timeout=PATIENCE)


@gpunb.remote(num_gpus=1)
def loaded(*names):
    """Which of these modules are there before the task has imported anything; then import them."""
    import importlib
    import sys

    there = [name for name in names if name in sys.modules]
    for name in names:
        importlib.import_module(name)
    return there


@gpunb.remote(num_gpus=1)
def value(name):
    import importlib

    return importlib.import_module(name).VALUE


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Installs a package with 40 modules, whose import also runs this code."""
    folder = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])

    def make(name: str, code: str = "") -> str:
        (folder / name).mkdir(parents=True)
        lines = [f"from {name} import m{each}" for each in range(40)]
        (folder / name / "__init__.py").write_text("\n".join([*lines, code]))
        for each in range(40):
            (folder / name / f"m{each}.py").touch()
        return name

    return make


@pytest.fixture
def follow(start, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Starts a session that preloads what tasks import, soon after they have."""
    monkeypatch.setattr(followed, "FIRST_PAUSE", 0.01)

    def begin(**settings) -> None:
        start(num_gpus=2, start_method="fork", preload=None, **settings)
        eventually(lambda: gpunb.status()["preload"] is not None)

    return begin


def needing(modules, *names):
    """Start `loaded` as a task that needs these modules at its begin."""
    current = backend.current()
    submit = current.submit
    imports = (modules,) if isinstance(modules, str) else modules
    with patch.object(current, "submit", lambda call: submit(replace(call, imports=imports))):
        return loaded.remote(*names)


def why(ref) -> str:
    """Why the task of this result has not begun."""
    return eventually(lambda: backend.current().ask("why", ref.task_id), "it says why")


def only_one() -> int:
    """The only zygote that follows; its children have its name for a moment."""
    (pid,) = eventually(lambda: len(found := named("gpunb-follow")) == 1 and found)
    return pid


def preloaded(name: str) -> None:
    eventually(lambda: name in gpunb.status()["preload"], f"{name} is preloaded")


def noted(text: str) -> str:
    def found() -> list[str]:
        return [each for each in gpunb.status()["notes"] if text in each]

    return eventually(found, f"a note says {text}")[0]


def test_later_tasks_have_what_the_first_has_imported(follow, install):
    name = install("follow_plain")
    follow()
    assert get(loaded.remote(name)) == []
    preloaded(name)
    assert get(loaded.remote(name, f"{name}.m7")) == [name, f"{name}.m7"]
    assert any(f"preloaded: {name}" in each.text for each in sessions.runtime(Place()))


def test_a_package_that_comes_later_joins_the_others(follow, install):
    first, second = install("follow_first"), install("follow_second")
    follow()
    get(loaded.remote(first))
    preloaded(first)
    get(loaded.remote(second))
    preloaded(second)
    assert get(loaded.remote(first, second)) == [first, second]


def test_a_list_of_modules_turns_it_off(start, install, monkeypatch):
    monkeypatch.setattr(followed, "FIRST_PAUSE", 0.0)
    name = install("follow_off")
    start(num_gpus=1, start_method="fork", preload=["json"])
    eventually(lambda: gpunb.status()["preload"] is not None)
    for _ in range(3):
        assert get(loaded.remote(name)) == []
    assert list(gpunb.status()["preload"]) == ["json"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import threading\nthreading.Thread(target=threading.Event().wait).start()", "thread"),
        ("import socket\nPAIR = socket.socketpair()", "connection"),
    ],
    ids=["thread", "socket"],
)
def test_a_package_that_does_not_survive_a_fork_is_left_out(follow, install, code, why):
    bad, good = install("follow_bad", code), install("follow_good")
    follow()
    get(loaded.remote(bad, good))
    preloaded(good)
    assert why in noted(f"each task imports {bad} by itself")
    assert get(loaded.remote(bad, good)) == [good]


def test_a_package_with_a_thread_of_jemalloc_is_preloaded(follow, install):
    code = """
import threading, time

def named():
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write("jemalloc_bg_thd")
    begun.set()
    time.sleep(1000)

begun = threading.Event()
threading.Thread(target=named, daemon=True).start()
begun.wait()
"""
    name = install("follow_jemalloc", code)
    follow()
    get(loaded.remote(name))
    preloaded(name)
    assert get(loaded.remote(name)) == [name]


def test_what_takes_too_much_memory_is_left_out(follow, install, monkeypatch):
    monkeypatch.setattr(init_options, "_FOLLOW", 1 << 30)
    name = install("follow_large")
    follow()
    get(loaded.remote(name))
    assert "MiB" in noted(f"each task imports {name} by itself")
    assert get(loaded.remote(name)) == []


def test_a_task_with_variables_of_its_own_imports_for_itself(follow, install):
    name = install("follow_variable", "import os\nVALUE = os.environ.get('FOLLOW_BACKEND')")
    follow()
    get(loaded.remote(name))
    preloaded(name)
    variable = {"env_vars": {"FOLLOW_BACKEND": "own"}}
    assert get(value.options(runtime_env=variable).remote(name)) == "own"
    assert get(value.remote(name)) is None
    own = loaded.options(runtime_env=variable)
    assert get(own.remote("IPython", name)) == ["IPython"], "what the session preloads is there"


def test_a_change_of_the_notebooks_variables_is_seen(follow, install, monkeypatch):
    name = install("follow_changed", "import os\nVALUE = os.environ.get('FOLLOW_BACKEND')")
    follow()
    get(loaded.remote(name))
    preloaded(name)
    monkeypatch.setenv("FOLLOW_BACKEND", "changed")
    assert get(value.remote(name)) == "changed"
    eventually(lambda: get(loaded.remote(name)) == [name], "preloaded with the new variable")
    assert get(value.remote(name)) == "changed"


def test_a_new_release_of_a_package_takes_the_place_of_the_old_one(follow, install, tmp_path):
    name = install("follow_release", "VALUE = 1")
    follow()
    get(loaded.remote(name))
    preloaded(name)
    assert get(value.remote(name)) == 1
    (tmp_path / "site-packages" / name / "__init__.py").write_text("VALUE = 'second'")
    (tmp_path / "site-packages" / f"{name}-2.dist-info").mkdir()
    assert get(value.remote(name)) == "second"


def test_what_was_imported_after_a_change_of_the_tasks_own_is_not_preloaded(follow, install):
    name = install("follow_own", "import os\nVALUE = os.environ.get('FOLLOW_BACKEND')")
    follow()

    @gpunb.remote(num_gpus=1)
    def choose(name):
        import importlib
        import os

        os.environ["FOLLOW_BACKEND"] = "own"
        return importlib.import_module(name).VALUE

    assert get(choose.remote(name)) == "own"
    noted("FOLLOW_BACKEND")
    assert get(value.remote(name)) is None


def test_variables_that_the_packages_set_themselves_are_no_hindrance(follow, install):
    name = install("follow_sets", "import os\nos.environ['FOLLOW_SET'] = '1'")
    follow()
    get(loaded.remote(name))
    preloaded(name)
    assert get(gpunb.remote(num_gpus=1)(os.getenv).remote("FOLLOW_SET")) == "1"


def test_so_it_is_once_the_notebook_has_imported_such_a_package_itself(
    follow, install, monkeypatch
):
    name = install("follow_set", "import os\nos.environ['FOLLOW_SET'] = '1'")
    follow()
    get(loaded.remote(name))
    preloaded(name)
    monkeypatch.setenv("FOLLOW_SET", "1")
    assert get(loaded.remote(name)) == [name]


def test_a_package_that_ends_the_process_stops_it(follow, install):
    code = "import os\n'follow' in open('/proc/self/comm').read() and os.kill(os.getpid(), 9)"
    name = install("follow_ends", code)
    follow()
    get(loaded.remote(name))
    noted("the process that imported it died")
    assert get(loaded.remote(name)) == []


def test_a_crash_of_a_worker_goes_back_to_plain_ones(follow, install):
    name = install("follow_crash")
    follow()
    get(loaded.remote(name))
    preloaded(name)
    crash = gpunb.remote(num_gpus=1, max_retries=0)(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    with pytest.raises(WorkerCrashedError):
        get(crash.remote())
    noted("a worker that had it crashed")
    assert get(loaded.remote("IPython", name)) == ["IPython"], "workers are plain again"
    assert name not in gpunb.status()["preload"]
    eventually(lambda: not named("gpunb-follow"), "the zygote has ended")


def test_a_task_goes_on_while_its_zygote_is_replaced(follow, install, gate, monkeypatch):
    monkeypatch.setattr(generation, "MOST_ANCESTORS", 0)
    first, second = install("follow_before"), install("follow_after")
    follow()

    @gpunb.remote(num_gpus=1)
    def hold(gate):
        gate.enter()
        return os.getppid()

    get(loaded.remote(first))
    preloaded(first)
    held = hold.remote(gate)
    before = only_one()
    gate.await_()
    get(loaded.remote(second))
    preloaded(second)
    assert get(loaded.remote(first, second)) == [first, second]
    assert alive(before)
    gate.open()
    assert get(held) == before
    eventually(lambda: not alive(before), "the zygote that was replaced ends")


def test_the_next_zygote_imports_only_what_is_new(follow, install):
    first = install("follow_parent", "import os\nVALUE = os.getpid()")
    second = install("follow_child", "import os\nVALUE = os.getpid()")
    follow()
    get(loaded.remote(first))
    preloaded(first)
    get(loaded.remote(second))
    preloaded(second)
    before, after = get(value.remote(first)), get(value.remote(second))
    assert before != after
    assert {before, after} <= set(named("gpunb-follow")), "each has imported one of them"


def test_zygotes_that_only_keep_others_alive_are_few(follow, install, monkeypatch):
    monkeypatch.setattr(generation, "MOST_ANCESTORS", 2)
    monkeypatch.setattr(followed, "LONGEST_PAUSE", 0.01)
    names = [install(f"follow_link{each}") for each in range(4)]
    follow()
    for name in names:
        get(loaded.remote(name))
        preloaded(name)
    eventually(lambda: len(named("gpunb-follow")) <= 2, "the first ones have ended")
    assert get(loaded.remote(*names)) == names


SLOW = """
import os, time
while "follow" in open("/proc/self/comm").read() and not os.path.exists("{}/go"):
    time.sleep(0.005)
"""


def test_with_its_zygote_one_that_still_imports_is_lost_and_comes_back(follow, install, tmp_path):
    first, second = install("follow_once"), install("follow_slow", SLOW.format(tmp_path))
    follow()
    get(loaded.remote(first))
    preloaded(first)
    before = only_one()
    get(loaded.remote(second))
    eventually(lambda: len(named("gpunb-follow")) == 2, "another one imports")
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not named("gpunb-follow"), "both are gone")
    (tmp_path / "go").touch()
    eventually(lambda: get(loaded.remote(first, second)) == [first, second])
    assert not any("no longer" in each for each in gpunb.status()["notes"])


def test_a_task_waits_for_the_modules_that_it_needs(follow, install):
    name = install("follow_needed", "import os\nVALUE = os.getppid() != 1 and os.getpid()")
    follow()
    assert get(needing(name, name)) == [name]
    assert get(value.remote(name)) in named("gpunb-follow")
    assert get(loaded.remote(name)) == [name], "standbys have it too"


def test_a_preload_in_the_background_gives_way_to_one_that_a_task_waits_for(
    follow, install, tmp_path
):
    slow, needed = install("follow_slow", SLOW.format(tmp_path)), install("follow_urgent")
    follow()
    get(loaded.remote(slow))
    background = only_one()
    waits = needing(needed, needed, slow)
    eventually(lambda: not alive(background), "it was ended")
    assert why(waits) == "what it imports is imported first, for 0 s now"
    (tmp_path / "go").touch()
    assert get(waits) == [needed, slow]


def test_a_task_waits_only_so_long_for_its_modules(follow, install, tmp_path, monkeypatch):
    monkeypatch.setattr(import_zygotes, "LONGEST_WAIT", 0.2)
    slow = install("follow_slow", SLOW.format(tmp_path))
    follow()
    assert get(needing(slow, slow)) == []
    (tmp_path / "go").touch()
    preloaded(slow)
    assert get(needing(slow, slow)) == [slow]


def test_a_task_that_waits_for_modules_can_be_interrupted(follow, install, tmp_path):
    slow = install("follow_slow", SLOW.format(tmp_path))
    follow()
    ref = needing(slow, slow)
    eventually(lambda: named("gpunb-follow"), "one imports")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    ref = needing(slow, slow)
    gpunb.cancel(ref, force=True)
    with pytest.raises((TaskCancelledError, WorkerCrashedError)):
        get(ref)
    eventually(lambda: gpunb.available_resources()["GPU"] == 2, "its device is free")
    (tmp_path / "go").touch()
    preloaded(slow)


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import socket\nPAIR = socket.socketpair()", "each task imports"),
        ("raise ImportError('it needs more')", ""),
        ("import os\n'follow' in open('/proc/self/comm').read() and os._exit(3)", "died"),
    ],
    ids=["unsafe", "error", "death"],
)
def test_a_task_whose_modules_cannot_be_preloaded_imports_by_itself(follow, install, code, note):
    bad, good = install("follow_bad", code), install("follow_good")
    follow()
    assert get(needing((bad, good), good)) == ([] if note else [good])
    if note:
        noted(note)
    assert get(needing(bad, "json")) == ["json"], "it does not wait again"


def test_tasks_that_wait_survive_the_death_of_the_zygotes(follow, install, tmp_path):
    slow = install("follow_slow", SLOW.format(tmp_path))
    follow()
    ref = needing(slow, slow)
    eventually(lambda: named("gpunb-follow"), "one imports")
    os.kill(named("gpunb-zygote")[0], signal.SIGKILL)
    assert get(ref) == []


def test_a_session_that_ends_keeps_no_task_that_waits(follow, install, tmp_path):
    slow = install("follow_slow", SLOW.format(tmp_path))

    def descriptors_after(*needed: str) -> int:
        follow()
        ref = needing(needed, "json")
        zygote = only_one() if needed else 0
        gpunb.shutdown()
        eventually(lambda: not alive(zygote), "its zygote has ended")
        del ref
        return len(os.listdir("/proc/self/fd"))

    before = descriptors_after()
    assert descriptors_after(slow) == before


def test_a_closed_source_starts_no_zygote(follow, install):
    follow()
    engine = backend.existing().engine
    imports = Imports((install("follow_closed"),), {}, {}, sys.path, [])
    counts = []

    def count() -> None:
        counts.append(len(os.listdir("/proc/self/fd")))

    def close() -> None:
        engine.source.close()
        count()
        engine.source.follow(imports)
        engine.loop.after(10 * followed.FIRST_PAUSE, count)

    engine.loop.post((close,))
    eventually(lambda: len(counts) == 2)
    assert counts[1] == counts[0]


def test_what_the_imports_print_is_shown_by_the_task_that_waited(follow, install, capfd):
    code = "import os, sys\nprint('to out')\nprint('to err', file=sys.stderr)\nos.system('echo sh')"
    name = install("follow_prints", code)
    follow()
    get(needing(name, name))
    shown = []

    def all_shown() -> bool:
        shown.extend("".join(capfd.readouterr()).splitlines())
        return len(shown) >= 3

    eventually(all_shown, "the lines are shown")
    get(loaded.remote(name))
    assert sorted(each.rpartition(") ")[2] for each in shown) == ["sh", "to err", "to out"]


def test_after_the_loss_of_its_zygote_a_session_follows_again(follow, install):
    name = install("follow_killed")
    follow()
    get(loaded.remote(name))
    preloaded(name)
    zygote = only_one()
    os.kill(zygote, signal.SIGKILL)
    eventually(lambda: get(loaded.remote(name)) == [], "the plain one serves")
    eventually(lambda: get(loaded.remote(name)) == [name], "preloaded again")
