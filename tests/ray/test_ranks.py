"""Cells and functions in several ranks, on the nodes of a cluster."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

import gpunb
from gpunb.exceptions import InfeasibleRequestError, WorkerCrashedError
from tests.engine.test_status import check
from tests.sessions import alive
from tests.shells import run
from tests.waiting import Gate, eventually

pytestmark = [pytest.mark.needs_ray, pytest.mark.usefixtures("by_value", "nothing_left")]
WITHIN = 120


def get(ref: Any) -> Any:
    return gpunb.get(ref, timeout=WITHIN)


def seen() -> Any:
    import ray

    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK JAX_PROCESS_ID"
    numbers = [int(os.environ[name]) for name in names.split()]
    node, visible = ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]
    return numbers, node, visible, os.environ.get("JAX_LOCAL_DEVICE_IDS"), gpunb.get_gpu_ids()


def meet(number: int) -> int:
    """The sum of the numbers of all ranks, which rank 0 makes."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        while True:
            try:
                with socket.create_connection(address) as link, link.makefile("rw") as file:
                    print(number, file=file, flush=True)
                    return int(file.readline())
            except ConnectionRefusedError:
                pass  # rank 0 does not listen yet
    with socket.create_server(address) as server:
        links = [server.accept()[0].makefile("rw") for _ in range(size - 1)]
        total = number + sum(int(link.readline()) for link in links)
        for link in links:
            print(total, file=link, flush=True)
            link.close()
    return total


def pids(gate: Gate) -> list[int]:
    return [int(each.name.removeprefix("came-")) for each in gate.folder.glob("came-*")]


def test_ranks_are_placed_over_the_nodes_and_know_their_place() -> None:
    ranks = get(gpunb.remote(num_gpus=1, ranks=3)(seen).remote())
    by_node: dict[str, list[Any]] = {}
    for rank, (numbers, node, visible, jax, own) in enumerate(ranks):
        by_node.setdefault(node, []).append((numbers, visible, jax, own))
        assert (numbers[0], numbers[2], numbers[5]) == (rank, 3, rank)
    assert sorted(map(len, by_node.values())) == [1, 2]
    for at, local in enumerate(by_node.values()):
        for local_rank, (numbers, visible, jax, own) in enumerate(local):
            assert (numbers[1], numbers[3], numbers[4]) == (local_rank, len(local), at)
            assert visible.split(",")[local_rank] == str(*own)
            assert (len(visible.split(",")), jax) == (len(local), str(local_rank))


@pytest.mark.parametrize("options", [{"num_gpus": 1, "isolate": True}, {"num_gpus": 0.5}])
def test_an_isolated_rank_and_one_with_a_part_of_a_device_see_their_own_only(options: Any) -> None:
    kind = {"accelerator_type": ["H100", "A100"]}
    for _, _, visible, _, own in get(gpunb.remote(ranks=2, **options, **kind)(seen).remote()):
        assert visible == ",".join(map(str, own))


def test_ranks_on_several_nodes_meet_at_the_address_of_rank_0() -> None:
    of = gpunb.remote(num_gpus=1, ranks=3, timeout=WITHIN)
    assert get(of(meet).remote(5)) == [15] * 3
    without = gpunb.remote(num_gpus=0, num_cpus=0, ranks=2)
    assert get(without(meet).remote(2)) == [4, 4]


def test_another_port_is_used_if_a_process_was_faster(tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    def late(folder: Path) -> Any:
        first = folder / "first"
        if os.environ["RANK"] == "0" and not first.exists():
            first.write_text(" ".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")))
            gate.enter()
        return os.environ["MASTER_PORT"], meet(1)

    ref = gpunb.remote(num_gpus=1, ranks=2)(late).remote(tmp_path)
    eventually(gate.came, within=WITHIN)
    address, port = (tmp_path / "first").read_text().split()
    with socket.create_server((address, int(port))):
        gate.open()
        found = get(ref)
    assert {total for _, total in found} == {2}
    assert port not in {each for each, _ in found}


def test_a_rank_that_dies_is_named_and_all_ranks_run_again(tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    def die() -> None:
        gate.note(os.getpid())
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(WorkerCrashedError, match=r"rank 2 of 3"):
        get(gpunb.remote(num_gpus=1, ranks=3, max_retries=1)(die).remote())
    assert gate.count() == 6
    eventually(lambda: not any(map(alive, pids(gate))), "all are gone", within=WITHIN)


def test_the_ranks_go_with_their_coordinator(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    ref = gpunb.remote(num_gpus=1, ranks=3, max_retries=0)(lambda: gate.enter(os.getpid())).remote()
    eventually(lambda: gate.count() == 3, within=WITHIN)
    # The processes run before the mail that says so has come.
    (job,) = eventually(lambda: gpunb.status()["running"], "the job is shown", WITHIN)
    os.kill(job["pid"], signal.SIGKILL)
    with pytest.raises(WorkerCrashedError):
        get(ref)
    eventually(lambda: not any(map(alive, pids(gate))), "all are gone", within=WITHIN)


def test_a_snapshot_has_one_job_with_its_ranks(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    train = gpunb.remote(num_gpus=1, ranks=2)(lambda: gate.enter(os.getpid()))
    ref, late = train.remote(), train.remote()
    eventually(
        lambda: [len(each["ranks"]) for each in gpunb.status()["running"]] == [2], "", WITHIN
    )
    status = gpunb.status()
    check(status)
    (job,), (waiting,) = status["running"], status["waiting"]
    assert {job["id"], waiting["id"]} == {ref.task_id, late.task_id}
    assert [(each["rank"], each["state"]) for each in job["ranks"]] == [
        (0, "running"),
        (1, "running"),
    ]
    assert len(job["devices"]) == 2
    held = [each["held"] for each in status["devices"] if each["held"]]
    assert held == [[[job["id"], 1.0]]] * 2
    assert not status["actors"]
    gate.open()
    get([ref, late])
    done = [
        each for each in gpunb.status()["finished"] if each["id"] in (ref.task_id, late.task_id)
    ]
    assert [len(each["ranks"]) for each in done] == [2, 2]
    assert all(each["gpu_seconds"] > 0 for each in done)


def test_names_output_and_errors_of_ranks(shell: Any) -> None:
    code = (
        "%%gpu 1 --ranks 3 --gather both\nimport os\nrank = int(os.environ['RANK'])\n"
        "both, own = 10 * rank, rank\nprint('from', rank)\nown + 5"
    )
    result, text = run(shell, code)
    assert result.success
    assert (shell.user_ns["both"], shell.user_ns["own"]) == ([0, 10, 20], 0)
    assert text.startswith("from 0\n")
    assert "rank 1: 2 lines" in text
    assert "rank 2: 2 lines" in text
    code = (
        "%%gpu 1 --ranks 2\nimport os, threading\nbefore = 'bound'\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('no such batch')\n"
        "threading.Event().wait()"
    )
    result, text = run(shell, code)
    assert isinstance(result.error_in_exec, ValueError)
    assert re.search(r"line 5\b", text)
    assert "rank 1 of 2" in text
    assert shell.user_ns["before"] == "bound"


def test_a_background_cell_has_ranks_whose_output_can_be_shown(shell: Any) -> None:
    code = "import os\nown = int(os.environ['RANK'])\nprint('from', own)"
    run(shell, f"%%gpu 1 --bg --ranks 2 --gather own\n{code}")
    run(shell, "%gpu wait")
    assert shell.user_ns["own"] == [0, 1]
    job = next(each["id"] for each in gpunb.status()["finished"] if each["kind"] == "ranks")
    assert run(shell, f"%gpu logs {job} --rank 1")[1] == "from 1\n"
    _, text = run(shell, f"%%gpu 1 --ranks 2 --show all\n{code}")
    assert sorted(text.splitlines()) == ["[0] from 0", "[1] from 1"]


def test_a_time_limit_counts_for_all_ranks() -> None:
    late = gpunb.remote(num_gpus=1, ranks=2, timeout=1)(lambda: threading.Event().wait())
    with pytest.raises(TimeoutError, match=r"timeout of 1 s .* ranks 0, 1 of 2 had not finished"):
        get(late.remote())


def test_stop_reaches_all_ranks(shell: Any, tmp_path: Path) -> None:
    gate = shell.user_ns["gate"] = Gate(tmp_path)

    def stop() -> None:
        eventually(lambda: gate.count() == 3, within=WITHIN)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    code = "import os, time\nstopped = 'no'\ngate.note(os.getpid())\ntime.sleep(300)"
    result, _ = run(shell, f"%%gpu 1 --ranks 3\n{code}")
    thread.join()
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert shell.user_ns["stopped"] == "no"
    eventually(lambda: not any(map(alive, pids(gate))), "all are gone", within=WITHIN)


def test_a_session_keeps_its_ranks_until_one_dies(shell: Any) -> None:
    imports = "import os, signal, threading\nrank = int(os.environ['RANK'])\n"
    result, _ = run(shell, f"%%gpu 1 -s ddp --ranks 3 --gather pids\n{imports}pids = os.getpid()")
    assert result.success
    before = shell.user_ns["pids"]
    result, _ = run(shell, "%%gpu -s ddp --only 1,2 --gather seen\nseen = rank, os.getpid()")
    assert result.success
    assert shell.user_ns["seen"] == [(1, before[1]), (2, before[2])]
    (session,) = gpunb.status()["actors"]
    assert (session["kind"], len(session["devices"])) == ("session", 3)
    code = "%%gpu -s ddp\nif rank: os.kill(os.getpid(), signal.SIGKILL)\nthreading.Event().wait()"
    result, text = run(shell, code)
    assert "the session 'ddp' is gone" in text
    assert re.search(r"ranks? (1|2) of 3", text)
    eventually(lambda: not any(map(alive, before)), "all are gone", within=WITHIN)
    result, _ = run(shell, "%%gpu 1 -s two --ranks 2\n1")
    assert result.success
    run(shell, "%gpu stop two")


def test_ranks_that_no_nodes_can_have_together_are_refused() -> None:
    of = gpunb.remote(num_gpus=1, ranks=4)
    with pytest.raises(InfeasibleRequestError, match=r"4 x \[.*no autoscaler"):
        of(seen).remote()
    with pytest.raises(InfeasibleRequestError):  # three GPUs, but two of them on another node
        of(seen).options(num_gpus=2, ranks=2).remote()
    with pytest.raises(InfeasibleRequestError):
        of(seen).options(num_gpus=0.6, ranks=4).remote()
    with pytest.raises(ValueError, match="gpu_memory= cannot be asked for on Ray"):
        gpunb.remote(gpu_memory="1GiB", ranks=2)(seen).remote()
    with pytest.raises(ValueError, match="priority=1 cannot be asked for on Ray"):
        of(seen).options(ranks=2, priority=1).remote()
    with pytest.raises(ValueError, match="does not go with several ranks"):
        of(seen).options(ranks=2, ray={"scheduling_strategy": "SPREAD"}).remote()


def test_an_error_in_the_start_of_a_rank_is_told(tmp_path: Path) -> None:
    @gpunb.remote
    def outer() -> Any:  # in a task it is the coordinator that finds out
        return gpunb.get(gpunb.remote(num_gpus=1, ranks=4)(seen).remote())

    with pytest.raises(InfeasibleRequestError, match="no autoscaler"):
        get(outer.remote())
