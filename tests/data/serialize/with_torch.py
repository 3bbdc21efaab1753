"""The checks of `test_device_tensors` with PyTorch on the host; a separate program."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpunb.data import serialize
from gpunb.data.serialize import Moved, Payload, storages
from gpunb.data.serialize.reuse import Reuse
from gpunb.worker.cell.change_detection import Fingerprints

MIB = 1 << 20


def trip(value: Any) -> tuple[Any, Payload, Moved]:
    moved = serialize.moving()
    assert moved is not None
    with moved:
        payload = serialize.dumps(value)
    return serialize.loads(payload), payload, moved


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on a device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()

    def detach(self) -> Elsewhere:
        return self


def views_share_their_storage() -> None:
    for count in (10, MIB):
        whole = torch.arange(float(count))
        back, payload, moved = trip((whole, whole[2:5], whole.view(2, -1).t(), whole))
        assert back[0] is back[3]
        assert torch.equal(back[0], whole)
        assert back[2].stride() == (1, count // 2)
        back[1][0] = -1
        assert back[0][2] == -1
        assert back[2][2][0] == -1
        assert whole[2] == 2
        assert moved.count == 0
        assert payload.nbytes < 4 * count + 1000


def a_small_part_of_a_large_storage_travels_alone() -> None:
    whole = torch.ones(MIB)
    back, payload, _ = trip(whole[::1000])
    assert payload.nbytes < 10_000
    assert back.sum() == len(back) == 1049
    back, payload, _ = trip([whole[: MIB // 2 + 1], whole[:3]])
    assert back[0].untyped_storage()._cdata == back[1].untyped_storage()._cdata


def large_data_stays_out_of_the_stream() -> None:
    whole = torch.ones(4 * MIB)
    back, payload, _ = trip({"whole": whole})
    assert len(payload.spans) == 2
    assert payload.spans[1][1] == 16 * MIB
    back["whole"] += 1  # its own memory
    assert float(serialize.loads(payload)["whole"][0]) == 1.0


def a_model_and_its_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 200))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].bias.detach()[:50])
    optimizer = torch.optim.Adam(model.parameters())
    rows = torch.ones(3, 200)
    model(rows).sum().backward()
    optimizer.step()
    (copy, its, state), _, _ = trip((model, optimizer, model.state_dict()))
    assert torch.equal(copy(rows), model(rows))
    assert copy[0].weight is copy[1].weight
    assert type(copy[0].weight) is torch.nn.Parameter
    assert its.param_groups[0]["params"][0] is copy[0].weight
    assert state["0.weight"].data_ptr() == copy[0].weight.data_ptr()
    copy(rows).sum().backward()
    its.step()
    assert not torch.equal(copy(rows), model(rows))


def gradients_come_along() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, requires_grad=True)
    before = Fingerprints({"x": x}, "compared")
    model(x).sum().backward()
    assert list(before.changed()) == ["x"]
    (copy, its, leaf), _, _ = trip((model, optimizer, x))
    assert torch.equal(leaf.grad, x.grad)
    assert torch.equal(copy.bias.grad, model.bias.grad)
    its.step()
    optimizer.step()
    assert torch.equal(copy.weight, model.weight)
    shared = torch.ones(2, requires_grad=True)
    shared.grad = torch.zeros(2)
    (twice, gradient), _, _ = trip((shared, shared.grad))
    assert twice.grad is gradient


def all_kinds() -> None:
    warnings.filterwarnings("ignore", "TypedStorage|torch.quantize")  # PyTorch's own
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for value in (
        torch.empty(0),
        torch.empty(0, 3),
        torch.tensor(3),
        torch.tensor(True),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64) * 1j,
        (torch.ones(3, dtype=torch.complex64) * 1j).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(1).expand(5),
        torch.ones(2, 3, 4).permute(2, 0, 1),
        quantized,
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(100_000, dtype=torch.int8),
    ):
        back, _, _ = trip(value)
        assert type(back) is type(value)
        assert (back.dtype, back.shape, back.layout) == (value.dtype, value.shape, value.layout)
        assert back.is_conj() == value.is_conj()
        same = back.to_dense() == value.to_dense() if value.is_sparse else back == value
        assert bool(same.all())
        if not value.is_sparse:
            assert back.stride() == value.stride()
    constant, _, _ = trip(torch.ones(3, requires_grad=True) * 2)  # its graph stays behind, and
    assert not constant.requires_grad  # backward() of a leaf would do nothing, without a word
    without, _, moved = trip(torch.ones(3, device="meta"))
    assert without.device.type == "meta"
    assert moved.count == 0
    noted = torch.ones(3)
    noted.note = "kept"  # type: ignore[attr-defined]
    back, _, _ = trip(noted)
    assert back.note == "kept"


def other_tensors_of_a_device_are_moved() -> None:
    there = torch.ones(MIB // 4).as_subclass(Elsewhere)
    (first, second), _, moved = trip([there, there])
    assert first is second
    assert type(first) is torch.Tensor
    assert str(moved) == "moved 1 tensor (1 MiB) from the device to host memory"


class ElsewhereGenerator(torch.Generator):
    """A generator that claims to be of a device."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def a_generator_of_a_device_comes_home_as_one_of_the_host() -> None:
    there = ElsewhereGenerator()
    there.manual_seed(7)
    torch.rand(3, generator=there)
    back, _, moved = trip(there)
    assert type(back) is torch.Generator
    assert torch.equal(
        torch.rand(3, generator=back), torch.rand(3, generator=torch.Generator().manual_seed(7))
    )
    assert str(moved).startswith("a torch.Generator of the device came home as one of the host")
    of_the_host, _, moved = trip(torch.Generator().manual_seed(5))
    assert (of_the_host.initial_seed(), str(moved)) == (5, "")


@contextlib.contextmanager
def as_if_on_a_device() -> Iterator[None]:
    """The host counts as a device."""
    host, storages._HOST = storages._HOST, frozenset({"meta"})
    try:
        yield
    finally:
        storages._HOST = host


def plain_tensors_of_a_device_are_moved() -> None:
    whole = torch.arange(1.0 * MIB)
    model = torch.nn.Linear(10, 10)
    model.tied = model.weight  # type: ignore[assignment]
    with as_if_on_a_device():
        (_, again, part, _), _, moved = trip((whole, whole, whole[2:5], whole.half()))
        assert str(moved) == "moved 3 tensors (6 MiB) from the device to host memory"
        part[0] = -1  # a view still
        assert again[2] == -1
        back, _, moved = trip(model)
        assert back.tied is back.weight
        assert torch.equal(back.weight, model.weight)
        assert str(moved) == "moved 2 tensors (440 B) from the device to host memory"


def other_layouts_of_a_device_are_moved() -> None:
    eye, imaginary = torch.eye(3), torch.full((3,), 1j).conj()
    rows = [torch.ones(2), torch.zeros(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are experimental
        compressed, nested = eye.to_sparse_csr(), torch.nested.nested_tensor(rows)
        for context in (as_if_on_a_device(), contextlib.nullcontext()):
            with context:
                sparse, _, moved = trip(eye.to_sparse())
                assert moved.nbytes in (0, 120)  # the parts count too, as they are on the host
                assert torch.equal(sparse.to_dense(), eye)
                assert torch.equal(trip(compressed)[0].to_dense(), eye)
                assert torch.equal(trip(imaginary)[0], imaginary)
                assert [each.tolist() for each in trip(nested)[0].unbind()] == [[1, 1], [0, 0, 0]]


def a_plain_tensor_on_a_device_of_the_notebook_is_refused() -> None:
    refused = pytest.raises(TypeError, match=r"on a device .12 B. in the notebook's own process")
    with as_if_on_a_device(), refused, serialize.staying() or contextlib.nullcontext():
        serialize.dumps({"weights": torch.ones(3)}, what="model")


def a_change_in_place_is_seen() -> None:
    model = torch.nn.Linear(500, 500)
    there = torch.ones(3).as_subclass(Elsewhere)
    before = Fingerprints({"model": model, "there": there}, "compared")
    assert not list(before.changed())
    model.weight.data[3, 3] += 1
    assert list(before.changed()) == ["model"]
    there.zero_()
    assert list(before.changed()) == ["model", "there"]


def what_is_on_a_device_is_the_same_bytes_each_time() -> None:
    there = torch.ones(3).as_subclass(Elsewhere)
    kept = [torch.ones(3)]
    before = Fingerprints({"there": there}, "compared")
    for _ in range(20):
        kept.append(torch.ones(3))  # the copy on the host lies elsewhere each time
        assert not list(before.changed())


def what_did_not_change_is_not_sent_again() -> None:
    reuse = Reuse(1 << 30)

    def sent(value: Any) -> tuple[Any, list[int]]:
        staying = serialize.staying()
        assert staying is not None
        with staying:
            payload = serialize.dumps([value], reuse=reuse)
        (made,) = serialize.loads(payload)
        return made, [segment.fileno() for segment in payload.shared]

    whole = torch.zeros(2 * MIB)
    values = [whole, whole[MIB // 2 :], torch.nn.Linear(600, 600), torch.from_numpy(np.ones(MIB))]
    values.append(whole[: MIB // 2])  # a small part travels alone
    for value in values:
        _, first = sent(value)
        assert len(first) == 1
        gc.collect()
        assert sent(value)[1] == first
    whole[MIB] = 5
    values[2].weight.data[300, 300] = 7  # type: ignore[union-attr]
    values[3].add_(1)  # type: ignore[operator]
    assert float(sent(whole)[0][MIB]) == 5
    assert float(sent(values[1])[0][MIB // 2]) == 5
    assert float(sent(values[2])[0].weight.detach()[300, 300]) == 7
    assert float(sent(values[3])[0].sum()) == 2 * MIB
    whole[7] = 3
    assert float(sent(values[4])[0][7]) == 3
    assert len(reuse) == 4
    del whole, value
    values.clear()
    gc.collect()
    assert len(reuse) == 0


def what_a_notebook_does_with_them_works() -> None:
    back, _, _ = trip(torch.ones(100_000))
    back.share_memory_()
    assert back.numpy().sum() == 100_000
    assert torch.save({"back": back}, "/dev/null") is None
    with torch.inference_mode():
        inference = torch.ones(3)
    assert trip(inference)[0].tolist() == [1, 1, 1]


for check in (
    views_share_their_storage,
    a_small_part_of_a_large_storage_travels_alone,
    large_data_stays_out_of_the_stream,
    a_model_and_its_optimizer,
    gradients_come_along,
    all_kinds,
    other_tensors_of_a_device_are_moved,
    a_generator_of_a_device_comes_home_as_one_of_the_host,
    plain_tensors_of_a_device_are_moved,
    other_layouts_of_a_device_are_moved,
    a_plain_tensor_on_a_device_of_the_notebook_is_refused,
    a_change_in_place_is_seen,
    what_is_on_a_device_is_the_same_bytes_each_time,
    what_did_not_change_is_not_sent_again,
    what_a_notebook_does_with_them_works,
):
    check()
