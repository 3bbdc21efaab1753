"""Which devices a request gets."""

from __future__ import annotations

import pytest

from tests.conformance.api.backends import free, get, here, ray
from tests.conformance.api.differences import differs
from tests.waiting import eventually

pytestmark = [pytest.mark.machine(num_cpus=6, num_gpus=3), pytest.mark.usefixtures("idle")]


@ray.remote(num_cpus=0.1)
def hold(gate, name):
    gate.note(name)
    gate.enter(f"{name}-{ray.get_gpu_ids()}")
    return ray.get_gpu_ids()


@ray.remote(num_cpus=0)
class Holds:
    def where(self):
        return ray.get_gpu_ids()


def placed(gate, shares):
    """Where tasks with these shares run that come one after the other and all stay."""
    refs = []
    for name, share in enumerate(shares):
        refs.append(hold.options(num_gpus=share).remote(gate, name))
        gate.await_(name)
    gate.open()
    return get(refs)


@pytest.mark.parametrize(
    ("shares", "ids"),
    [
        pytest.param([0.5, 0.5, 0.5], [[0], [0], [1]], id="three halves fill one GPU first"),
        pytest.param(
            [0.3, 0.8, 0.2, 0.7], [[0], [1], [1], [0]], id="each goes where the least is left"
        ),
        pytest.param([0.5, 1, 0.5], [[0], [1], [0]], id="a whole one takes an untouched GPU"),
        pytest.param([0.6, 0.6, 0.6], [[0], [1], [2]], id="what does not fit takes the next"),
        pytest.param([1, 1, 1], [[0], [1], [2]], id="whole ones from the lowest"),
        pytest.param([2, 0.5, 0.5], [[0, 1], [2], [2]], id="two GPUs and the halves beside"),
        pytest.param([0.1, 2], [[0], [1, 2]], id="two wholly free GPUs beside a share"),
        pytest.param([3], [[0, 1, 2]], id="all three"),
        pytest.param([0.25] * 4 + [0.25], [[0]] * 4 + [[1]], id="four quarters and one more"),
        pytest.param([0.9, 0.2, 0.1], [[0], [1], [0]], id="the gap that fits exactly"),
    ],
)
def test_tasks_are_placed(gate, shares, ids):
    assert placed(gate, shares) == ids


def test_three_half_actors_fill_one_gpu_first():
    actors = []
    for _ in range(3):
        actors.append(Holds.options(num_gpus=0.5).remote())
        get(actors[-1].where.remote())
    assert get([actor.where.remote() for actor in actors]) == [[0], [0], [1]]


def test_a_share_is_never_split_over_two(gate):
    refs = [hold.options(num_gpus=0.6).remote(gate, name) for name in range(3)]
    for name in range(3):
        gate.await_(name)
    eventually(lambda: free().get("GPU") == pytest.approx(1.2))
    fourth = hold.options(num_gpus=0.6).remote(gate, "fourth")
    assert ray.wait([fourth], timeout=0.3) == ([], [fourth])
    assert not gate.came("fourth")
    gate.open()
    assert len(get(fourth)) == 1
    get(refs)


def test_a_freed_gpu_is_given_out_again(tmp_path):
    first = Holds.options(num_gpus=1).remote()
    second = Holds.options(num_gpus=2).remote()
    assert get([first.where.remote(), second.where.remote()]) == [[0], [1, 2]]
    ray.kill(first)
    third = Holds.options(num_gpus=1).remote()
    assert get(third.where.remote()) == [0]


@differs("kept-workers")
@pytest.mark.machine(num_cpus=4, num_gpus=2, resources={"alone": 1})
def test_where_others_go_when_a_worker_was_kept():
    kept = ray.remote(num_gpus=1, max_calls=0)(ray.get_gpu_ids)
    assert get(kept.remote()) == [0]
    eventually(lambda: free().get("GPU") == 2)
    assert get(ray.remote(num_gpus=1)(ray.get_gpu_ids).remote()) == here(ray=[0], gpunb=[1])


def test_tasks_of_one_function_start_in_the_order_of_their_calls(gate):
    log = gate.folder / "order"

    @ray.remote(num_gpus=3, num_cpus=0.1)
    def note(number):
        with log.open("a") as file:
            file.write(f"{number} ")

    get([note.remote(number) for number in range(4)])
    assert log.read_text().split() == ["0", "1", "2", "3"]
