"""Sessions of cells: what they keep, what travels between them and the notebook, how they end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import Kernel
from tests.sessions import alive, eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def notebook(cell: Kernel) -> Kernel:
    """A kernel before which a user sits."""
    cell.stdin = True
    cell.ok("import os, time, gc, weakref\nimport numpy as np")
    return cell


@pytest.fixture(autouse=True)
def no_session_afterwards(notebook: Kernel) -> Iterator[None]:
    yield
    notebook.ok("%gpu cancel all\n%gpu wait")
    sessions = "get_ipython().magics_manager.registry['GpuMagics'].sessions"
    notebook.ok(
        f"for _n in {sessions}.names(): get_ipython().run_line_magic('gpu', f'stop {{_n}}')"
    )
    busy = "gpunb.status()['available'] != gpunb.status()['total']"
    eventually(lambda: not notebook.value(busy), "all is free")


def test_a_session_keeps_its_process_names_and_devices(notebook: Kernel) -> None:
    notebook.ok("%%gpu 0.5 --session s\nown = 5\npid = os.getpid()\nseen = gpunb.get_gpu_ids()")
    assert notebook.value("(own, pid != os.getpid(), seen)") == (5, True, [0])
    assert notebook.ok("%%gpu -s s\nown, pid == os.getpid()").value == "(5, True)"
    shown = notebook.ok("%gpu").value or ""
    (line,) = [each for each in shown.splitlines() if each.endswith("idle")]
    assert "session s" in line
    assert "GPU 0 (0.5)" in line
    assert "session s (0.5)" in shown.splitlines()[1]
    assert "session s" in notebook.ok("%gpu").result["text/html"]
    assert not [each for each in shown.splitlines() if "session s" in each and "done" in each]
    pid = notebook.value("pid")
    notebook.ok("%gpu stop s")
    eventually(lambda: not alive(pid), "its process is gone", 2)
    eventually(lambda: not notebook.value("gpunb.status()['actors']"), "it is over")
    ended = (notebook.ok("%gpu").value or "").partition("\nfinished ")[2].splitlines()[1]
    assert ended.split()[1:5] == ["session", "s", "GPU", "0"]
    assert ended.endswith("cancelled")
    kind, has, took = notebook.value(
        "next((j['kind'], j['gpu_seconds'] > 0, [each['gpu_seconds'] for each in"
        " gpunb.status()['finished'] if each['actor'] == j['id']])"
        " for j in gpunb.status()['finished'])"
    )
    assert (kind, has, took) == ("session", True, [0.0, 0.0])
    assert not notebook.ok("%%gpu -s s\nimport sys\n'own_too' in globals()").stderr


def test_only_new_or_changed_values_are_sent(notebook: Kernel) -> None:
    notebook.ok(
        "class Counted:\n"
        "    sent = 0\n"
        "    def __init__(self): self.data = []\n"
        "    def __reduce__(self):\n"
        "        Counted.sent += os.getpid() == home\n"
        "        return rebuilt, (self.data,)\n"
        "def rebuilt(data):\n"
        "    made = Counted()\n"
        "    made.data = data\n"
        "    return made\n"
        "home = os.getpid()"
    )
    notebook.ok("thing = Counted()\nbig = np.zeros(500_000)")
    notebook.ok("%%gpu -s s\nfirst = id(thing), big.sum()\nthere = id(big)")
    assert (
        notebook.ok("%%gpu -s s\nid(thing) == first[0], id(big) == there").value == "(True, True)"
    )
    notebook.ok("thing.data.append(1)\nbig[3] = 7")
    assert notebook.ok("%%gpu -s s\nthing.data, big.sum().item()").value == "([1], 7.0)"
    notebook.ok("thing = 'other'\nbig = np.ones(3)")
    assert notebook.ok("%%gpu -s s\nthing, len(big)").value == "('other', 3)"


def test_values_changed_in_place_come_home(notebook: Kernel) -> None:
    notebook.ok("log = [1]\nsame_log = log\nbig = np.zeros(100_000)")
    notebook.ok("%%gpu -s s\nlog.append(2)\nbig[0] = 1")
    notebook.ok("%%gpu -s s\nlog.append(3)\nbig[1] = 1")
    assert notebook.value("(log, same_log is log, big.sum().item())") == ([1, 2, 3], True, 2.0)
    notebook.ok("log.append(4)")
    assert notebook.ok("%%gpu -s s\nlog").value == "[1, 2, 3, 4]"


def test_the_sessions_value_wins_until_the_notebook_binds_the_name_anew(notebook: Kernel) -> None:
    notebook.ok("value, cond = 1, False")
    notebook.ok("%%gpu -s s --out none\nvalue = 2")
    assert notebook.ok("%%gpu -s s\nvalue").value == "2"
    assert notebook.value("value") == 1
    notebook.ok("value = 3")
    assert notebook.ok("%%gpu -s s\nvalue").value == "3"
    # A name that a cell could have bound, but did not.
    notebook.ok("other = 5")
    notebook.ok("%%gpu -s s\nif cond:\n    other = 6\n    del value")
    assert notebook.ok("%%gpu -s s\nother, value").value == "(5, 3)"
    notebook.ok("%%gpu -s s\ndel other")
    assert notebook.value("'other' in globals()") is False


def test_a_value_that_cannot_be_pickled_stays_and_can_be_used(notebook: Kernel) -> None:
    notebook.ok("gen = 'of the notebook'")
    first = notebook.ok(
        "%%gpu -s s\nimport threading\nlock = threading.Lock()\ngen = (i for i in [8, 9])"
    )
    assert "'lock' stays in the worker" in first.stderr
    assert len(first.stderr.strip().splitlines()) == 2
    second = notebook.ok("%%gpu -s s\nwith lock: print('held', next(gen))")
    assert second.stdout == "held 8\n"
    assert not second.stderr
    assert notebook.value("('lock' in globals(), gen)") == (False, "of the notebook")


def test_functions_and_classes_go_both_ways(notebook: Kernel) -> None:
    notebook.ok("scale = 2\ndef double(x): return x * scale\nclass Kind: pass")
    notebook.ok("%%gpu -s s\none = Kind()\ndef twice(x): return double(double(x))\nn = twice(3)")
    assert notebook.value("(isinstance(one, Kind), n, twice(1))") == (True, 12, 4)
    notebook.ok("scale = 10")
    assert notebook.ok("%%gpu -s s\ntwice(1), isinstance(one, Kind)").value == "(100, True)"
    notebook.ok("def double(x): return -x")
    assert notebook.ok("%%gpu -s s\ntwice(1)").value == "1"


def test_a_failed_cell_keeps_the_names_that_it_bound(notebook: Kernel) -> None:
    failed = notebook("%%gpu -s s\nbefore = 1\n1 / 0")
    assert failed.ename == "ZeroDivisionError"
    assert f"Cell In[{failed.count}], line 3" in failed.traceback
    assert notebook.ok("%%gpu -s s\nbefore + 1").value == "2"


def test_objects_that_the_notebook_dropped_are_not_kept_for_a_session(notebook: Kernel) -> None:
    notebook.ok("given = np.ones(10)\nseen = weakref.ref(given)")
    notebook.ok("%%gpu -s s\ntotal = given.sum()")
    notebook.ok("del given")
    notebook.ok("n = gc.collect()")
    assert notebook.value("seen() is None") is True


# ----------------------------------------------------------------------------------- how they end


def test_stop_keeps_the_session(notebook: Kernel) -> None:
    notebook.ok("%%gpu -s s\nkept_there = 7\npid = os.getpid()")
    result = notebook.start("%%gpu -s s\n\nprint('ready'); time.sleep(60)")
    notebook.shows(result, "ready")
    notebook.interrupt()
    assert notebook.finish(result).ename == "KeyboardInterrupt"
    assert f"Cell In[{result.count}], line 3" in result.traceback
    assert notebook.ok("%%gpu -s s\nkept_there, pid == os.getpid()").value == "(7, True)"


def test_a_second_stop_ends_the_session(notebook: Kernel) -> None:
    body = "while True:\n    try:\n        print('ready')\n        time.sleep(60)\n"
    result = notebook.start(f"%%gpu -s s\n{body}    except KeyboardInterrupt: print('no')")
    notebook.shows(result, "ready")
    notebook.interrupt()
    notebook.shows(result, "no")
    notebook.interrupt()
    notebook.finish(result, 5)
    assert result.ename == "KeyboardInterrupt"
    assert "the session 's' is gone" in result.evalue
    anew = notebook.ok("%%gpu -s s\n1")
    assert "'s' had ended" in anew.stderr


def test_after_a_crash_the_next_cell_starts_the_session_anew(notebook: Kernel) -> None:
    notebook.ok("in_both = [1]")
    notebook.ok("%%gpu 0.5 -s s\nin_both.append(2)\npid = os.getpid()\nimport threading")
    crashed = notebook("%%gpu -s s\nprint('last', flush=True)\nos._exit(4)")
    assert crashed.ename == "ActorDiedError"
    assert (
        "the session 's' is gone, with all that was in it, and its share of GPU 0 is free again: "
        "it exited with status 4"
    ) in crashed.evalue
    assert "gpunb/" not in crashed.traceback
    assert crashed.stdout == "last\n"
    anew = notebook.ok("%%gpu -s s\nin_both, pid == os.getpid(), gpunb.get_gpu_ids()")
    assert anew.value == "([1, 2], False, [0])"
    assert "the session 's' had ended, with all that was in it; it starts anew" in anew.stderr
    assert not notebook.ok("%%gpu -s s 0.5\npass").stderr  # with the share that it had


def test_the_share_of_a_session_stays_its_own(notebook: Kernel) -> None:
    notebook.ok("%%gpu 0.5 -s s\npass")
    notebook.ok("%%gpu 0.5 -s s\npass")
    notebook.ok("%%gpu -s s\npass")
    other = notebook("%%gpu 1 -s s\nprint('ran')")
    assert "the session 's' has 0.5 GPU, and the cell asks for 1 GPU" in other.stderr
    assert not other.stdout
    too_much = notebook("%%gpu 3 -s other\npass")
    assert too_much.ename == "InfeasibleRequestError"
    assert "a request for 3 GPU can never be met" in too_much.evalue
    assert "gpunb/" not in too_much.traceback
    assert "retries" in notebook("%%gpu -s s --retries 2\npass").stderr
    assert "must be a name" in notebook("%%gpu -s a-b\npass").stderr


def test_a_cell_cannot_change_the_options_of_the_process(notebook: Kernel) -> None:
    notebook.ok("%%gpu 0.5 -s s --env Q=1 --env R=r\npass")
    for line in ("--env Q=1", "0.5 --cpus 0 --env R=r", "--timeout 60 --name other --out none"):
        assert notebook.ok(f"%%gpu -s s {line}\nos.environ['Q']").value == "'1'"
    other = notebook("%%gpu -s s --env Q=2 --type A100 --cpus 1\nprint('ran')")
    assert other.stderr.strip() == (
        "UsageError: %%gpu: the session 's' has no --type and --cpus 0 and --env Q=1, and the cell "
        "asks for --type A100 and --cpus 1 and --env Q=2: leave that out, or end the session with "
        "%gpu stop s"
    )
    assert not other.stdout
    notebook("%%gpu -s s\nos._exit(4)")
    anew = notebook.ok("%%gpu -s s --env Q=2\nos.environ['Q'], os.environ['R']")
    assert anew.value == "('2', 'r')"


def test_a_timeout_keeps_the_session(notebook: Kernel) -> None:
    notebook.ok("%%gpu -s s\npid = os.getpid()")
    late = notebook("%%gpu -s s --timeout 0.3\ntime.sleep(60)")
    assert late.ename == "TimeoutError"
    assert late.evalue.endswith("0.3 s and was stopped; the session 's' goes on")
    assert notebook.ok("%%gpu -s s\npid == os.getpid()").value == "True"


def test_a_session_starts_anew_after_a_shutdown(notebook: Kernel) -> None:
    notebook.ok("%%gpu 2 -s s\npass")
    notebook.ok("gpunb.shutdown()\n_ = gpunb.init(num_cpus=2, num_gpus=2)")
    anew = notebook.ok("%%gpu -s s\ngpunb.get_gpu_ids()")
    assert anew.value == "[0, 1]"
    assert "had ended" in anew.stderr


def test_a_reload_of_the_extension_keeps_the_session(notebook: Kernel) -> None:
    notebook.ok("%%gpu -s s\npid = os.getpid()")
    notebook.ok("%reload_ext gpunb")
    assert notebook.ok("%%gpu -s s\npid == os.getpid()").value == "True"


def test_two_sessions_run_beside_each_other(notebook: Kernel) -> None:
    notebook.ok("%%gpu 0.5 -s a\nmine = 'a'")
    notebook.ok("%%gpu 0.5 -s b --out none\nmine = 'b'")
    assert notebook.ok("%%gpu -s a\nmine").value == "'a'"
    assert notebook.ok("%%gpu -s b\nmine").value == "'b'"
    stopped = notebook("%gpu stop c")
    assert "no session of cells has the name 'c'; those that there are: a, b" in stopped.stderr


# -------------------------------------------------------------------------------- in the background


def test_background_cells_run_in_their_order(notebook: Kernel) -> None:
    notebook.ok("%%gpu -s s\ntotal, order = 0, []")
    results = [
        notebook.ok(f"%%gpu -s s --bg\ntotal += {i}\norder.append({i})\nprint('did', {i})")
        for i in range(5)
    ]
    after = notebook.ok("%%gpu -s s\ntotal, order")
    assert after.value == "(10, [0, 1, 2, 3, 4])"
    notebook.ok("%gpu wait")
    assert notebook.value("(total, order)") == (10, [0, 1, 2, 3, 4])
    for i, result in enumerate(results):
        notebook.shows(result, f"did {i}\n")
        assert result.stdout == f"did {i}\n"


def test_a_name_bound_anew_while_a_cell_runs_keeps_the_notebooks_value(notebook: Kernel) -> None:
    notebook.ok("os.mkfifo('hold')")
    result = notebook.ok("%%gpu -s s --bg\nopen('hold').read()\nmeanwhile = 'of the session'")
    notebook.ok("meanwhile = 'of the notebook'")
    waiting = notebook.ok("%%gpu -s s --bg\npass")
    shown = f"Out[{waiting.count}]._repr_mimebundle_()['text/html']"
    turn = "waits for its turn in the session"
    eventually(lambda: turn in notebook.value(shown), "the session has started")
    why = notebook.ok(f"%gpu why {{Out[{waiting.count}].id}}").stdout
    assert why.endswith("waits for its turn in the session 's'\n")
    notebook.ok("open('hold', 'w').close()\nos.remove('hold')")
    notebook.ok(f"Out[{result.count}].wait()")
    assert notebook.value("meanwhile") == "of the notebook"
    assert notebook.ok("%%gpu -s s\nmeanwhile").value == "'of the notebook'"


def test_cancelling_a_cell_keeps_the_session(notebook: Kernel) -> None:
    notebook.ok("%%gpu -s s\npid = os.getpid()")
    running = notebook.ok("%%gpu -s s --bg\nprint('ready')\ntime.sleep(60)")
    queued = notebook.ok("%%gpu -s s --bg\nsent_late = 1\nprint('never')")
    notebook.shows(running, "ready")
    notebook.ok(f"Out[{queued.count}].cancel()\nOut[{running.count}].cancel()\n%gpu wait")
    states = f"(Out[{running.count}].state, Out[{queued.count}].state)"
    assert notebook.value(states) == ("cancelled", "cancelled")
    assert not queued.stdout
    assert notebook.ok("%%gpu -s s\npid == os.getpid()").value == "True"
    busy = notebook.ok("%%gpu -s s --bg\nprint('ready')\ntime.sleep(60)")
    notebook.shows(busy, "ready")
    notebook.ok("%gpu stop s")
    notebook.ok("%gpu wait")
    assert notebook.value(f"Out[{busy.count}].state") in ("failed", "cancelled")
