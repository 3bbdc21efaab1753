"""Cells in several ranks: names, output, errors, Stop and sessions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.notebook.kernels import Kernel, plain
from tests.sessions import alive, eventually

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def notebook(cell: Kernel) -> Kernel:
    """A kernel before which a user sits."""
    cell.stdin = True
    cell.ok("import os, signal, threading\nrank = lambda: int(os.environ['RANK'])")
    return cell


@pytest.fixture(autouse=True)
def nothing_afterwards(notebook: Kernel) -> Iterator[None]:
    yield
    notebook.ok("%gpu cancel all\n%gpu wait")
    free = "gpunb.status()['available'] == gpunb.status()['total']"
    eventually(lambda: notebook.value(free), "all is free")


def states_of_ranks(notebook: Kernel) -> list[str]:
    """The states of the ranks of the last cell."""
    ended = "gpunb.status()['finished'][0]"
    states: list[str] = notebook.value(f"[each['state'] for each in {ended}['ranks']]")
    return states


def test_names_come_home_from_rank_0_and_gathered_names_as_lists(notebook: Kernel) -> None:
    notebook.ok("%%gpu 1 --ranks 2 --gather loss\nloss, own = 10 * rank(), rank()\nown + 5")
    assert notebook.value("(loss, own)") == ([0, 10], 0)
    assert notebook.value("_") == 5


def test_several_names_are_gathered_each_as_a_list(notebook: Kernel) -> None:
    notebook.ok(
        "%%gpu 0.5 --ranks 3 --gather loss,steps --out best\n"
        "loss, steps, best = [rank() / 10], 5 - rank(), rank() + 7"
    )
    assert notebook.value("(loss, steps, best)") == ([[0.0], [0.1], [0.2]], [5, 4, 3], 7)


@pytest.mark.parametrize(
    ("rest", "kind", "text"),
    [
        ("", "NameError", "--gather asks for steps, which the cell did not bind"),
        ("if rank(): steps = threading.Lock()", "TypeError", "--gather: .*steps.* lock"),
    ],
)
def test_a_name_that_cannot_be_gathered_is_an_error_which_names_the_rank(
    notebook: Kernel, rest: str, kind: str, text: str
) -> None:
    notebook.ok("loss = steps = 'kept'")
    failed = notebook(
        f"%%gpu 1 --ranks 2 --gather loss,steps\nloss = rank()\nif not rank(): steps = 3\n{rest}"
    )
    assert failed.ename == kind
    assert re.search(text, failed.evalue)
    assert "raised in rank 1 of 2" in plain(failed.traceback).splitlines()[-1]
    # Rank 0 may have been interrupted before it bound a name.
    assert notebook.value("loss in (0, 'kept') and steps in (3, 'kept')"), "there is no list"


def test_the_output_of_other_ranks_is_one_line_to_open(notebook: Kernel) -> None:
    code = "%%gpu 1 --ranks 2\nfor turn in range(3): print('turn', turn, 'of', rank())"
    shown = notebook.ok(code)
    assert shown.stdout == "turn 0 of 0\nturn 1 of 0\nturn 2 of 0\n"
    last = [*shown.displayed, *(each["data"] for each in shown.of("update_display_data"))][-1]
    assert last["text/plain"] == "rank 1: 3 lines"
    assert last["text/html"].startswith("<details><summary>rank 1: 3 lines</summary>")
    assert "turn 2 of 1\n" in last["text/html"]
    job = notebook.value("gpunb.status()['finished'][0]['id']")
    again = notebook.ok(f"%gpu logs {job}")
    assert (again.stdout, again.displayed[0]["text/plain"]) == (shown.stdout, "rank 1: 3 lines")
    other = notebook.ok(f"%gpu logs {job} --rank 1")
    assert (other.stdout, other.displayed) == (shown.stdout.replace("of 0", "of 1"), [])


def test_figures_widgets_and_questions_are_those_of_rank_0_alone(
    notebook: Kernel, tmp_path: Path
) -> None:
    notebook.comms.clear()
    # The error of rank 1 ends rank 0, so it comes when rank 0 has shown all.
    code = (
        "%%gpu 1 --ranks 2\nimport pathlib, time\nfrom IPython.display import display\n"
        "from ipywidgets import IntProgress\n"
        "display({'image/png': 'QUJD', 'text/plain': f'figure {rank()}'}, raw=True)\n"
        "display(IntProgress(description=f'of {rank()}'))\n"
        f"shown = pathlib.Path({str(tmp_path / 'shown')!r})\n"
        "if not rank(): shown.touch()\n"
        "while not shown.exists(): time.sleep(0.005)\n"
        "if rank(): input('?')"
    )
    shown = notebook(code)
    assert shown.ename == "StdinNotImplementedError"
    assert "only the first rank can ask the user, not 1" in shown.evalue
    figures = [each["text/plain"] for each in shown.displayed if "image/png" in each]
    assert figures == ["figure 0"]
    states = [
        each["content"]["data"]["state"]
        for each in notebook.comms
        if each["msg_type"] == "comm_open"
    ]
    assert [each["description"] for each in states if each.get("description")] == ["of 0"]
    job = notebook.value("gpunb.status()['finished'][0]['id']")
    other = notebook.ok(f"%gpu logs {job} --rank 1")
    assert [each["text/plain"] for each in other.displayed if "image/png" in each] == ["figure 1"]


def test_ranks_that_are_shown_have_their_number_before_each_line(notebook: Kernel) -> None:
    shown = notebook.ok("%%gpu 1 --ranks 2 --show all\nprint('a'); print('b')")
    assert sorted(shown.stdout.splitlines()) == ["[0] a", "[0] b", "[1] a", "[1] b"]
    assert not shown.displayed


def test_the_error_of_a_rank_is_that_of_the_cell_and_names_the_rank(
    notebook: Kernel, tmp_path: Path
) -> None:
    os.mkfifo(both := tmp_path / "both")  # to open it, each rank waits for the other
    code = (
        "%%gpu 1 --ranks 2\nbefore = 'bound'\n"
        f"open('{both}', 'r' if rank() else 'w').close()\n"
        "if rank() == 1:\n    raise ValueError('no such batch')\nthreading.Event().wait()"
    )
    failed = notebook(code)
    assert (failed.ename, failed.evalue) == ("ValueError", "no such batch")
    lines = plain(failed.traceback)
    assert re.search(r"Cell In\[\d+\], line 5", lines)
    assert "rank 1 of 2" in lines.splitlines()[-1]
    assert notebook.value("before") == "bound"
    assert states_of_ranks(notebook) == ["cancelled", "failed"]


def test_a_rank_that_dies_by_a_signal_says_so(notebook: Kernel) -> None:
    code = (
        "%%gpu 1 --ranks 2\nif rank() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Event().wait()"
    )
    failed = notebook(code)
    assert failed.ename == "WorkerCrashedError"
    assert re.search(r"rank 1 of 2.*SIGKILL", failed.evalue)


def test_a_time_limit_of_a_cell_counts_for_all_ranks_and_retries_run_all_again(
    notebook: Kernel, tmp_path: Path
) -> None:
    late = notebook("%%gpu 1 --ranks 2 --timeout 0.3\nthreading.Event().wait()")
    assert late.ename == "TimeoutError"
    text = "ranks 0, 1 of 2 had not finished, and rank 0 had not opened MASTER_PORT"
    assert re.search(rf"timeout of 0\.3 s.*{text}", late.evalue)
    code = (
        "%%gpu 1 --ranks 2 --retries 1 --gather again\n"
        f"again = os.path.exists('{tmp_path}/once')\n"
        "if rank() and not again:\n"
        f"    open('{tmp_path}/once', 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if not again: threading.Event().wait()"
    )
    notebook.ok(code)
    assert notebook.value("again") == [True, True]


def test_stop_reaches_all_ranks(notebook: Kernel) -> None:
    running = notebook.start(
        "%%gpu 1 --ranks 2 --show all\nprint(os.getpid())\nthreading.Event().wait()"
    )
    notebook.until(lambda: running.stdout.count("\n") == 2, running)
    pids = [int(line.split()[1]) for line in running.stdout.splitlines()]
    notebook.interrupt()
    assert notebook.finish(running).ename == "KeyboardInterrupt"
    eventually(lambda: not any(map(alive, pids)), "both processes are gone")
    assert notebook.value("gpunb.status()['finished'][0]['state']") == "cancelled"
    assert states_of_ranks(notebook) == ["cancelled", "cancelled"]


def test_a_session_keeps_its_ranks_and_some_of_them_run_a_cell(notebook: Kernel) -> None:
    notebook.ok("start = 1")
    notebook.ok("%%gpu 1 -s ddp --ranks 2 --gather pids\nown, pids = start + rank(), os.getpid()")
    pids = notebook.value("pids")
    notebook.ok("sent = 'to all'")
    notebook.ok("%%gpu -s ddp --only 1\nwhich, seen = rank(), (own, sent)")
    assert notebook.value("(which, seen)") == (1, (2, "to all"))
    notebook.ok("%%gpu -s ddp --gather known\nknown = own, sent, os.getpid()")
    assert notebook.value("known") == [(1, "to all", pids[0]), (2, "to all", pids[1])]
    assert "the session 'ddp' has --ranks 2" in notebook("%%gpu -s ddp --ranks 3\n1").stderr
    assert "2 ranks are 0 to 1" in notebook("%%gpu -s ddp --only 2\n1").stderr
    notebook.ok("%gpu stop ddp")
    eventually(lambda: not any(map(alive, pids)), "its processes are gone")


@pytest.mark.parametrize("end", ["Stop", "cancel"])
def test_an_interrupt_keeps_a_session_with_its_ranks(notebook: Kernel, end: str) -> None:
    notebook.ok("%%gpu 1 -s ddp --ranks 2 --gather pids\nown, pids = rank() + 1, os.getpid()")
    pids = notebook.value("pids")
    cell = "-s ddp --show all\nprint('here')\nthreading.Event().wait()"
    if end == "Stop":
        running = notebook.start(f"%%gpu {cell}")
        notebook.until(lambda: running.stdout.count("here\n") == 2, running)
        notebook.interrupt()
        assert notebook.finish(running).ename == "KeyboardInterrupt"
    else:
        shown = notebook.ok(f"%%gpu --bg {cell}")
        notebook.late(lambda: shown.stdout.count("here\n") == 2)
        notebook.ok("%gpu cancel all\n%gpu wait")
    notebook.ok("%%gpu -s ddp --gather known\nknown = own, os.getpid()")
    assert notebook.value("known") == [(1, pids[0]), (2, pids[1])]
    notebook.ok("%gpu stop ddp")
    eventually(lambda: not any(map(alive, pids)), "its processes are gone")


def test_a_session_ends_with_one_of_its_ranks(notebook: Kernel) -> None:
    notebook.ok("%%gpu 1 -s ddp --ranks 2 --gather pids\npids = os.getpid()")
    pids = notebook.value("pids")
    code = "%%gpu -s ddp\nif rank(): os.kill(os.getpid(), signal.SIGKILL)\nthreading.Event().wait()"
    failed = notebook(code)
    assert failed.ename == "ActorDiedError"
    assert "the session 'ddp' is gone" in failed.evalue
    assert re.search(r"rank 1 of 2.*SIGKILL", failed.evalue)
    eventually(lambda: not any(map(alive, pids)), "both processes are gone")


def test_an_error_in_a_session_keeps_its_ranks(notebook: Kernel) -> None:
    notebook.ok("%%gpu 1 -s ddp --ranks 2 --gather pids\npids = os.getpid()")
    pids = notebook.value("pids")
    failed = notebook(
        "%%gpu -s ddp\nif rank(): raise ValueError('no such batch')\nthreading.Event().wait()"
    )
    assert (failed.ename, failed.evalue) == ("ValueError", "no such batch")
    last = plain(failed.traceback).splitlines()[-1]
    assert last == "raised in rank 1 of 2; the others were interrupted"
    notebook.ok("%%gpu -s ddp --gather again\nagain = os.getpid()")
    assert notebook.value("again") == pids
    notebook.ok("%gpu stop ddp")
    eventually(lambda: not any(map(alive, pids)), "its processes are gone")


DEAF = (
    "def deaf():\n"
    "    while True:\n"
    "        try: threading.Event().wait()\n"
    "        except KeyboardInterrupt: pass\n"
)
"""A function that nothing but the end of its process stops."""


def test_an_error_is_shown_when_a_session_ends_with_ranks_that_do_not_stop(
    notebook: Kernel,
) -> None:
    notebook.ok(f"%%gpu 1 -s ddp --ranks 2\n{DEAF}")
    failed = notebook("%%gpu -s ddp\nif rank(): raise ValueError('no such batch')\ndeaf()")
    assert failed.ename == "ActorDiedError"
    assert re.search(
        r"rank 0 of 2 did not stop within [\d.]+ s after rank 1 of 2 had failed: "
        r"ValueError: no such batch",
        failed.evalue,
    )
    assert re.search(r"Cell In\[\d+\], line 2", plain(failed.stderr))
    late = notebook(f"%%gpu 1 -s ddp --ranks 2 --timeout 0.3\n{DEAF}deaf()")
    assert late.ename == "ActorDiedError"
    assert re.search(
        r"ranks 0, 1 of 2 did not stop within [\d.]+ s after the end of their time: .* 0\.3 s",
        late.evalue,
    )


def test_a_session_says_when_another_process_has_its_port(notebook: Kernel) -> None:
    notebook.ok("import socket")
    notebook.ok(
        "%%gpu 1 -s ddp --ranks 2 --gather port\nport = int(os.environ['MASTER_PORT'])\n"
        "meet = lambda: socket.create_server(('127.0.0.1', port))"
    )
    notebook.ok("taken = socket.create_server(('127.0.0.1', port[0]))")
    failed = notebook("%%gpu -s ddp\nif rank() == 0: meet()")
    notebook.ok("taken.close()")
    assert failed.ename == "OSError"
    last = plain(failed.traceback).splitlines()[-1]
    assert re.search(r"another process has port \d+: end the session with %gpu stop", last)
    notebook.ok("%gpu stop ddp")


def test_a_session_keeps_its_process_group_and_its_model(notebook: Kernel) -> None:
    needs.pytorch()
    notebook.ok(
        "%%gpu 1 -s ddp --ranks 2\nimport torch\ntorch.set_num_threads(1)\n"
        "torch.distributed.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))"
    )
    notebook.ok(
        "%%gpu -s ddp --gather gradient\nmodel(torch.full((1, 2), rank() + 1.)).sum().backward()\n"
        "gradient = model.module.weight.grad.tolist()"
    )
    assert notebook.value("gradient") == [[[1.5, 1.5]]] * 2
    notebook.ok("%gpu stop ddp")


def test_a_rank_that_does_not_join_in_the_time_of_pytorch_is_named(
    notebook: Kernel, tmp_path: Path
) -> None:
    needs.pytorch()
    # The time of PyTorch does not run while a busy machine still imports it in the other rank.
    failed = notebook(
        "%%gpu 0.5 --ranks 3\nimport datetime, pathlib, torch\n"
        "from tests.waiting import Gate, eventually\nif rank() == 1: threading.Event().wait()\n"
        f"gate = Gate(pathlib.Path({str(tmp_path)!r}))\ngate.note(rank())\n"
        "eventually(lambda: gate.count() == 2)\n"
        "time = datetime.timedelta(seconds=6)\n"
        "torch.distributed.init_process_group('gloo', timeout=time)"
    )
    last = plain(failed.traceback).splitlines()[-1]
    assert last.endswith("; rank 1 of 3 had not joined the others at MASTER_PORT"), last


def test_jax_sums_over_the_ranks_of_a_session(notebook: Kernel) -> None:
    needs.jax()
    notebook.ok(
        "%%gpu 0.5 -s jax --ranks 2 --gather known\nos.environ['JAX_PLATFORMS'] = 'cpu'\n"
        "import jax\nfrom jax.experimental import multihost_utils\njax.distributed.initialize()\n"
        "own = jax.numpy.full(jax.local_device_count(), rank() + 1.0)\n"
        "known = multihost_utils.process_allgather(own).ravel().tolist()"
    )
    assert notebook.value("known") == [[1.0, 2.0]] * 2
    notebook.ok(
        "%%gpu -s jax --gather total\n"
        "total = jax.pmap(lambda x: jax.lax.psum(x, 'i'), axis_name='i')(own).tolist()"
    )
    assert notebook.value("total") == [[3.0]] * 2
    notebook.ok("%gpu stop jax")


def test_a_rank_that_does_not_join_in_the_time_of_jax_is_named(notebook: Kernel) -> None:
    needs.jax()
    failed = notebook(
        "%%gpu 0.5 --ranks 2\nif rank() == 1: threading.Event().wait()\n"
        "os.environ['JAX_PLATFORMS'] = 'cpu'\nimport jax\n"
        "jax.distributed.initialize(initialization_timeout=3)"
    )
    assert failed.ename == "WorkerCrashedError"  # JAX ends the process
    assert "DEADLINE_EXCEEDED" in failed.evalue
    last = failed.evalue.splitlines()[-1]
    assert last == "rank 1 of 2 had not joined the others at MASTER_PORT"


def test_a_background_cell_has_ranks(notebook: Kernel) -> None:
    started = notebook.ok("%%gpu 1 --bg --ranks 2 --gather ranks\nprint('here')\nranks = rank()")
    notebook.ok("%gpu wait")
    assert notebook.value("ranks") == [0, 1]
    notebook.late(lambda: "here\n" in started.stdout)
    assert any("rank 1: 1 line" in each["text/plain"] for each in started.displayed)


def test_a_background_cell_without_a_user_runs_to_its_end(notebook: Kernel) -> None:
    notebook.ok("%config GpuMagics.headless = True")
    try:
        shown = notebook.ok("%%gpu 1 --bg --ranks 2 --gather own\nprint('a')\nown = rank()")
        assert shown.stdout.endswith("a\n")
        assert shown.displayed[0]["text/plain"] == "rank 1: 1 line"
        assert notebook.value("own") == [0, 1]
    finally:
        notebook.ok("%config GpuMagics.headless = False")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("1 --ranks 0", "ranks=0 must be 1 or more"),
        ("1 --ranks 3", "together"),
        ("1 --ranks 2 --only 1", "add --session NAME"),
        ("1 --gather loss", "add --ranks N"),
        ("1 --ranks 2 --show 2", "the 2 ranks are 0 to 1"),
        ("1 --ranks 2 --gather a-b", "is not a name"),
        ("1 --isolate", "add ranks="),
        ("1 --ranks 2 --sweep rate=1,2", "--ranks 2 does not go with --sweep"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    notebook: Kernel, line: str, text: str
) -> None:
    refused = notebook(f"%%gpu {line}\n1")
    assert text in refused.stderr + refused.evalue
