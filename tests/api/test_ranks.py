"""Functions in several ranks: their environment, their results, and how they fail together."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpunb
from gpunb.exceptions import (
    GpunbError,
    InfeasibleRequestError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)
from tests.sessions import alive, assert_idle, session
from tests.waiting import PATIENCE, Gate, eventually


@pytest.fixture(scope="module")
def started(by_value: None) -> Iterator[None]:
    with session(num_gpus=4, num_cpus=2):
        yield


@pytest.fixture(autouse=True)
def four(started: None) -> Iterator[None]:
    """Four logical devices, in a session in which each test leaves everything free."""
    yield
    assert_idle()


def get(ref):
    return gpunb.get(ref, timeout=PATIENCE)


def pids(gate: Gate) -> list[int]:
    return [int(each.name.removeprefix("came-")) for each in gate.folder.glob("came-*")]


def waits(ref) -> bool:
    """Whether the ranks of a job wait for room."""
    known = {each["id"]: each["waits_for"] for each in gpunb.status()["waiting"]}
    return bool(known.get(ref.task_id))


def seen():
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK JAX_PROCESS_ID"
    numbers = [int(os.environ[name]) for name in names.split()]
    return numbers, os.environ["CUDA_VISIBLE_DEVICES"], gpunb.get_gpu_ids()


def all_reduce(number):
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


def test_ranks_have_the_environment_of_torchrun_and_see_each_others_devices():
    refs = gpunb.remote(num_gpus=1, ranks=3)(seen).remote()
    assert get(refs) == [([rank, rank, 3, 3, 0, rank], "0,1,2", [rank]) for rank in range(3)]


def test_ranks_have_the_variables_of_jax_with_a_port_of_their_own():
    def jax():
        names = "COORDINATOR_ADDRESS NUM_PROCESSES PROCESS_ID LOCAL_DEVICE_IDS"
        port = os.environ["MASTER_PORT"]
        return [os.environ[f"JAX_{name}"] for name in names.split()], port

    (first, port), (second, _) = get(gpunb.remote(num_gpus=1, ranks=2)(jax).remote())
    assert (first[1:], second[1:]) == (["2", "0", "0"], ["2", "1", "1"])
    address = re.fullmatch(r"127\.0\.0\.1:(\d+)", first[0])
    assert address is not None
    assert (first[0], address[1] != port) == (second[0], True)


def test_the_device_with_the_number_of_a_rank_is_its_own_with_two_devices_each():
    ranks = get(gpunb.remote(num_gpus=2, ranks=2)(seen).remote())
    for rank, (_, visible, own) in enumerate(ranks):
        assert sorted(map(int, visible.split(","))) == [0, 1, 2, 3]
        assert int(visible.split(",")[rank]) in own


@pytest.mark.parametrize("options", [{"num_gpus": 1, "isolate": True}, {"num_gpus": 0.5}])
def test_an_isolated_rank_and_one_with_a_part_of_a_device_see_their_own_only(options):
    for _, visible, own in get(gpunb.remote(ranks=2, **options)(seen).remote()):
        assert visible == ",".join(map(str, own))


def test_ranks_meet_at_the_address_and_port_of_rank_0():
    assert get(gpunb.remote(num_gpus=1, ranks=4)(all_reduce).remote(5)) == [20] * 4


def test_arguments_may_be_refs_and_the_list_may_be_an_argument():
    doubled = gpunb.remote(lambda ranks: [2 * each for each in ranks])
    two = gpunb.remote(lambda number: number)
    three = gpunb.remote(num_gpus=1)(all_reduce).options(ranks=2)
    assert get(doubled.remote(three.remote(two.remote(2)))) == [8, 8]


def test_the_error_of_the_first_rank_that_fails_is_the_error_of_the_call(gate: Gate):
    @gpunb.remote(num_gpus=1, ranks=3, max_retries=0)
    def fail():
        if os.environ["RANK"] == "1":
            raise ValueError("no such batch")
        gate.enter(os.getpid())

    with pytest.raises(ValueError, match="no such batch") as failed:
        get(fail.remote())
    assert "fail rank 1 of 3" in str(failed.value)
    assert 'raise ValueError("no such batch")' in str(failed.value)
    eventually(lambda: not any(map(alive, pids(gate))), "the others are gone")


def test_a_rank_that_does_not_stop_is_killed_after_the_grace_period(gate: Gate, monkeypatch):
    monkeypatch.setattr("gpunb.protocol.ranks.GRACE", 0.2)

    @gpunb.remote(num_gpus=1, ranks=2, max_retries=0)
    def fail():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        gate.note(os.getpid())
        if os.environ["RANK"] == "1":
            raise ValueError("no such batch")
        gate.enter(os.getpid())

    with pytest.raises(ValueError, match="no such batch"):
        get(fail.remote())
    eventually(lambda: not any(map(alive, pids(gate))), "both are gone")


def test_a_rank_that_dies_is_the_cause_of_the_errors_of_the_others():
    @gpunb.remote(num_gpus=1, ranks=3, max_retries=0)
    def die():
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(WorkerCrashedError, match=r"rank 2 of 3.*SIGKILL"):
        get(die.remote())


def test_all_ranks_run_again_after_a_crash(tmp_path: Path):
    @gpunb.remote(num_gpus=1, ranks=2, max_retries=1)
    def once():
        marks = tmp_path / "crashed"
        if os.environ["RANK"] == "1" and not marks.exists():
            marks.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not marks.exists():
            threading.Event().wait()
        return all_reduce(1)

    assert get(once.remote()) == [2, 2]


def assert_late(remote, text):
    """Check the error of a time limit, a longer one if the machine is too slow for this one."""
    for seconds in (0.3, 2, 15):
        with pytest.raises(TimeoutError, match=f" {seconds} s ") as late:
            get(remote.options(timeout=seconds).remote())
        if re.search(text, str(late.value)):
            return
    raise late.value


def test_a_time_limit_names_the_ranks_that_have_not_finished():
    @gpunb.remote(num_gpus=1, ranks=3)
    def late():
        if os.environ["RANK"] != "1":
            threading.Event().wait()

    assert_late(late, r"late .* its timeout of .* s .* ranks 0, 2 of 3 had not finished")


def test_a_time_limit_names_a_rank_that_never_joined_the_others():
    @gpunb.remote(num_gpus=1, ranks=3)
    def meet():
        if os.environ["RANK"] == "2":
            threading.Event().wait()
        return all_reduce(1)

    text = "ranks 0, 1, 2 of 3 had not finished, and rank 2 of 3 had not joined the others"
    assert_late(meet, text)


def test_a_snapshot_has_one_job_with_its_ranks(gate: Gate):
    @gpunb.remote(num_gpus=1, ranks=2)
    def wait():
        gate.enter(os.getpid())

    ref, waiting = wait.remote(), wait.options(ranks=3).remote()
    eventually(lambda: gate.count() == 2, "both run")
    eventually(lambda: gpunb.status()["waiting"][0]["waits_for"], "the others wait for room")
    status = gpunb.status()
    (job,) = status["running"]
    assert (job["id"], job["name"], job["kind"]) == (ref.task_id, "wait", "ranks")
    assert [(each["rank"], each["state"]) for each in job["ranks"]] == [
        (0, "running"),
        (1, "running"),
    ]
    assert job["devices"] == [["GPU", 0, 1.0], ["GPU", 1, 1.0]]
    assert [each["held"] for each in status["devices"]] == [[[ref.task_id, 1.0]]] * 2 + [[]] * 2
    (late,) = status["waiting"]
    assert (late["id"], late["state"], late["ranks"]) == (waiting.task_id, "queued", [])
    assert "GPU" in late["waits_for"]
    assert not status["actors"]
    gate.open()
    get([ref, waiting])
    finished = [each for each in gpunb.status()["finished"] if each["name"] == "wait"][:2]
    assert sorted(len(each["ranks"]) for each in finished) == [2, 3]
    assert finished[0]["gpu_seconds"] > 0


def test_ranks_of_a_higher_priority_start_first(gate: Gate):
    holding = gpunb.remote(num_gpus=4)(gate.enter).remote()
    when = gpunb.remote(num_gpus=1, ranks=3)(time.monotonic)
    low = when.remote()
    eventually(lambda: waits(low), "the first ranks wait for room")
    high = when.options(priority=100).remote()
    eventually(lambda: waits(high), "the second ranks wait for room")
    gate.open()
    gpunb.get(holding)
    assert max(get(high)) < min(get(low))


def test_a_cancel_stops_all_ranks(gate: Gate):
    @gpunb.remote(num_gpus=1, ranks=2)
    def wait():
        gate.enter(os.getpid())

    ref = wait.remote()
    eventually(lambda: gate.count() == 2, "both run")
    gpunb.cancel(ref)
    with pytest.raises(TaskCancelledError):
        get(ref)
    eventually(lambda: not any(map(alive, pids(gate))), "both are gone")


def test_the_ranks_go_with_their_coordinator(gate: Gate):
    @gpunb.remote(num_gpus=1, ranks=2, max_retries=0)
    def wait():
        gate.enter(os.getpid())

    ref = wait.remote()
    eventually(lambda: gate.count() == 2, "both run")
    (job,) = (each for each in gpunb.status()["running"] if each["id"] == ref.task_id)
    os.kill(job["pid"], signal.SIGKILL)
    with pytest.raises(WorkerCrashedError):
        get(ref)
    eventually(lambda: not any(map(alive, pids(gate))), "both are gone")


def test_another_port_is_used_if_a_process_was_faster(tmp_path: Path):
    asked, taken = str(tmp_path / "asked"), str(tmp_path / "taken")
    os.mkfifo(asked)
    os.mkfifo(taken)

    @gpunb.remote(num_gpus=1, ranks=2)
    def meet():
        if os.environ["RANK"] == "0" and os.path.exists(asked):
            with open(asked, "w") as file:
                file.write(os.environ["MASTER_PORT"])
            os.remove(asked)
            with open(taken) as file:
                file.read()
        return os.environ["MASTER_PORT"], all_reduce(1)

    ref = meet.remote()
    with open(asked) as file:
        port = int(file.read())
    with socket.create_server(("127.0.0.1", port)):
        with open(taken, "w") as file:
            file.write("now")
        (first, sum_of_ranks), second = get(ref)
    assert (sum_of_ranks, second) == (2, (first, 2))
    assert int(first) != port


def test_a_port_that_is_taken_each_time_is_an_error_with_a_way_out(tmp_path: Path):
    asked, taken = str(tmp_path / "asked"), str(tmp_path / "taken")
    os.mkfifo(asked)
    os.mkfifo(taken)

    @gpunb.remote(num_gpus=1, ranks=2, max_retries=0)
    def listen():
        if os.environ["RANK"] == "0":
            Path(asked).write_text(os.environ["MASTER_PORT"])
            Path(taken).read_text()
            socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()

    ref, ports = listen.remote(), []
    with contextlib.ExitStack() as servers:
        for _ in range(3):
            ports.append(Path(asked).read_text())
            servers.enter_context(socket.create_server(("127.0.0.1", int(ports[-1]))))
            Path(taken).write_text("now")
        text = rf"3 times \({', '.join(ports)}\): choose a free one .*--env MASTER_PORT=29500"
        with pytest.raises(GpunbError, match=text):
            get(ref)
    assert len(set(ports)) == 3


def test_a_port_that_the_user_chose_is_used():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    chosen = {"env_vars": {"MASTER_PORT": port, "RANK": "7"}}
    of = gpunb.remote(num_gpus=1, ranks=2, runtime_env=chosen)
    assert get(of(lambda: os.environ["MASTER_PORT"]).remote()) == [port, port]
    assert get(of(lambda: os.environ["RANK"]).remote()) == ["0", "1"]


def test_more_ranks_than_the_machine_has_room_for_are_refused_at_once():
    with pytest.raises(InfeasibleRequestError, match=r"seen: .*together"):
        gpunb.remote(num_gpus=1, ranks=5)(seen).remote()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ranks": 0}, ValueError, "ranks=0 must be 1 or more"),
        ({"ranks": 2.0}, TypeError, "ranks must be a whole number, not 2.0"),
        ({"isolate": True}, ValueError, "add ranks="),
        ({"ranks": 2, "isolate": "yes"}, TypeError, "isolate must be True or False"),
        ({"ranks": 2, "num_returns": 2}, ValueError, "the list of the ranks' results"),
        ({"ranks": 2, "max_calls": 3}, ValueError, "each rank gets a fresh process"),
        ({"ranks": 2, "num_gpus": "auto"}, ValueError, "'auto' does not go with ranks=2"),
        ({"ranks": 2, "num_gpus": 0.5, "retry_oom": True}, ValueError, "retry_oom=True does not"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        gpunb.remote(**options)(seen)


def test_a_trial_of_a_sweep_has_no_ranks():
    with pytest.raises(ValueError, match="ranks=2 does not go with a sweep"):
        gpunb.sweep(gpunb.remote(ranks=2)(seen), [{}])


def test_a_generator_has_no_ranks():
    def numbers():
        yield 1

    with pytest.raises(ValueError, match="return a list from each rank"):
        gpunb.remote(ranks=2)(numbers)


def test_an_error_in_one_rank_of_a_nested_call_arrives():
    @gpunb.remote
    def outer():
        return gpunb.get(gpunb.remote(num_gpus=1, ranks=2)(all_reduce).remote("no number"))

    with pytest.raises(TaskError):
        get(outer.remote())
