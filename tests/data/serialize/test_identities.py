"""Tensors and functions stay the same objects over a trip to a worker and back."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import traceback
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpunb.data import serialize
from gpunb.data.serialize import identities
from gpunb.data.serialize.identities import identity_of, object_of
from gpunb.data.serialize.pickler import Way
from tests import needs

Work = Callable[[Any], Any]


def packed(value: Any, way: Way) -> serialize.Payload:
    with serialize.moving() or contextlib.nullcontext():
        return serialize.inlined(serialize.dumps(value, way=way))


def trip(value: Any, work: Work, *, fill: bool = True) -> Any:
    """What comes home of what a worker, a child of this process, makes of a value."""
    out, (reader, writer) = packed(value, "cell"), os.pipe()
    child = os.fork()
    if not child:
        try:
            identities._objects.clear()
            identities._identities.clear()
            home = packed(work(serialize.loads(out)), "home")
            with open(writer, "wb") as file:
                pickle.dump((home.stream, home.buffers), file, protocol=5)
        except BaseException:  # noqa: BLE001 - a child must not go on with the tests
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        stream, buffers = pickle.load(file)
    assert os.waitpid(child, 0)[1] == 0
    return serialize.loads(serialize.Payload(stream, buffers), fill=fill)


def counter() -> tuple[Callable[[], int], Callable[[], int]]:
    count = 0

    def up() -> int:
        nonlocal count
        count += 1
        return count

    def ask() -> int:
        return count

    up.__module__ = ask.__module__ = "__main__"
    return up, ask


def test_functions_share_a_variable_at_the_receiver() -> None:
    up, ask = serialize.loads(packed(counter(), "task"))
    assert (up(), up(), ask()) == (1, 2, 2)


def test_function_that_comes_home_is_the_same_with_its_variables() -> None:
    functions = counter()

    def work(came: Any) -> Any:
        came[0]()
        came[0].calls = 1
        return came

    home = trip(functions, work)
    assert home[0] is functions[0]
    assert home[1] is functions[1]
    assert functions[1]() == 1
    assert functions[0].calls == 1  # type: ignore[attr-defined]


def test_function_that_comes_home_later_is_another_one() -> None:
    functions = counter()
    home = trip(functions, lambda came: [came[0](), came][1], fill=False)
    assert home[0] is not functions[0]
    assert (functions[1](), home[1]()) == (0, 1)


def test_an_identity_ends_with_its_object() -> None:
    up, _ = counter()
    identity = identity_of(up)
    assert identity_of(up) == identity
    assert object_of(identity) is up
    assert (identity, up) in list(identities.functions())
    del up
    gc.collect()
    assert object_of(identity) is None
    assert identity not in identities._objects
    assert identity_of(counter()[0]) != identity


def test_a_forked_child_has_an_origin_of_its_own() -> None:
    own = identity_of(counter()[0])[0]
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, identity_of(counter()[0])[0])
        os._exit(0)
    os.wait()
    assert os.read(reader, 100) != own
    os.close(reader)
    os.close(writer)


def test_tasks_get_no_identities() -> None:
    stream = packed(counter(), "task").stream
    assert b"identified" not in stream
    assert b"identified" in packed(counter(), "cell").stream


# ---------------------------------------------------------------------------------------- PyTorch


@pytest.fixture
def torch() -> Any:
    needs.pytorch()
    import torch

    torch.set_num_threads(1)
    return torch


def test_tensor_that_comes_home_is_filled(torch: Any) -> None:
    tensor = torch.zeros(4)
    view, version = tensor[1:], tensor._version

    def work(came: Any) -> Any:
        came += 1
        return came, came

    first, second = trip(tensor, work)
    assert first is second is tensor
    assert view.tolist() == [1, 1, 1]
    assert tensor._version > version


def test_tensor_that_is_equal_is_not_written_to(torch: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    assert trip(weight, lambda came: came) is weight
    loss.backward()
    assert weight.grad.tolist() == [2, 2]


@pytest.mark.parametrize("kind", ["another size", "another type", "sparse", "on no device"])
def test_tensor_that_cannot_be_filled_is_a_new_one(torch: Any, kind: str) -> None:
    tensor = torch.zeros(2)
    works: dict[str, Work] = {
        "another size": lambda came: setattr(came, "data", came.new_ones(3)) or came,
        "another type": lambda came: setattr(came, "data", came.double()) or came,
        "sparse": lambda came: came.to_sparse(),
        "on no device": lambda came: came.to("meta"),
    }
    home = trip(tensor, works[kind])
    assert (home is tensor) is (kind == "another size")
    assert tensor.shape == ((3,) if kind == "another size" else (2,))


def test_gradient_comes_and_goes(torch: Any) -> None:
    weight = torch.ones(2, requires_grad=True)

    def work(came: Any) -> Any:
        (came * 3).sum().backward()
        return came

    assert trip(weight, work) is weight
    assert weight.grad.tolist() == [3, 3]

    def drop(came: Any) -> Any:
        came.grad = None
        return came

    trip(weight, drop)
    assert weight.grad is None


def test_model_and_optimizer_stay_together_though_one_travels(torch: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = model[0].weight.tolist()

    def train(came: Any) -> Any:
        for each in came.param_groups[0]["params"]:
            each.grad = torch.ones_like(each)
        came.step()
        return came

    assert trip(optimizer, train) is optimizer
    assert model[0].weight.tolist() != before
    assert len(optimizer.state) == 4
    assert all(each in optimizer.state for each in model.parameters())

    def freeze(came: Any) -> Any:
        came[1] = torch.nn.Identity()
        return came.eval()

    inner = model[0]
    assert trip(model, freeze) is model
    assert model[0] is inner
    assert not inner.training
    assert model(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize("first", ["array", "tensor"])
def test_array_and_tensor_share_their_memory(torch: Any, first: str) -> None:
    array = np.zeros(4)
    tensor = torch.from_numpy(array)
    both = (array, tensor) if first == "array" else (tensor, array)
    came = serialize.loads(packed(both, "cell"))
    came[0][0] = 5
    assert came[1][0] == 5
    assert array[0] == 0


def test_array_is_a_part_of_a_tensor(torch: Any) -> None:
    tensor = torch.zeros(6)
    tensor, array = serialize.loads(packed((tensor, tensor.numpy()[2:4]), "cell"))
    array[0] = 5
    assert tensor.tolist() == [0, 0, 5, 0, 0, 0]


def test_a_tensor_of_a_graph_is_named_and_comes_as_a_constant(torch: Any) -> None:
    weight = torch.ones(2, requires_grad=True)
    values = {"loss": (weight * weight).sum(), "weight": weight, "many": {"a": [weight * weight]}}
    assert serialize.with_graph(values) == ("loss", "many")
    came = serialize.loads(packed(values, "home"))
    assert not came["loss"].requires_grad
    assert came["weight"].requires_grad
    values["loss"].backward()
    assert serialize.with_graph(values) == ("many",)


def test_a_large_tensor_takes_the_memory_that_has_come(torch: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 19))

    def work(came: Any) -> Any:
        came.data.add_(1)
        return came

    for number in (1, 2):
        before, version = weight.data_ptr(), weight._version
        assert trip(weight, work) is weight
        assert weight.data_ptr() != before
        assert weight._version > version
        assert weight[-1].item() == number
    assert len(identities.mapped) == 1
    del weight
    gc.collect()
    assert not identities.mapped


def test_a_dict_of_hooks_stays_the_same_and_no_other_dict(torch: Any) -> None:
    hooks: Any = OrderedDict({1: print})
    assert trip(hooks, lambda came: came.clear() or came) is hooks
    assert not hooks
    data = OrderedDict({1: [2]})
    assert trip(data, lambda came: came) is not data
    assert data == {1: [2]}


@pytest.mark.parametrize("kind", ["view", "array", "array first", "alias"])
def test_others_who_have_the_memory_of_a_large_tensor_see_the_change(torch: Any, kind: str) -> None:
    array = np.zeros(1 << 18)
    tensor = torch.from_numpy(array) if kind == "array first" else torch.zeros(1 << 18)
    others = {
        "view": lambda: tensor[1:],
        "array": tensor.numpy,
        "array first": lambda: array,
        "alias": tensor.detach,
    }
    for _ in range(2):
        other = others[kind]()
        assert trip(tensor, lambda came: came.add_(1)) is tensor
        assert other[-1] == tensor[-1]
