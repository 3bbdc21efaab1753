"""On a real NVIDIA GPU: tensors on it come home as host memory."""

import pytest

import gpunb
from tests.gpu.cards import MIB, without_context
from tests.waiting import eventually

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def untouched(torch, card):
    """Whatever comes home, this process has no context on the device."""
    yield
    assert not torch.cuda.is_initialized()
    assert without_context(card)


@gpunb.remote(num_gpus=1)
def compute():
    import torch

    whole = torch.arange(1.0 * MIB, device="cuda")
    sparse = torch.eye(3, device="cuda").to_sparse()
    parts = {"part": whole[2:5], "half": whole.half(), "sparse": sparse}
    return {"whole": whole, "again": whole, "n": 3, **parts}


@gpunb.remote(num_gpus=1)
def train():
    import torch

    model = torch.nn.Linear(100, 100, device="cuda")
    model.tied = model.weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 100, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer


@gpunb.remote
def train_on(model, optimizer):
    import torch

    before = model.weight.detach().clone()
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    return bool((model.weight != before).any())


@gpunb.remote(num_gpus=1)
def state():
    import torch

    model = torch.nn.Linear(100, 100, device="cuda")
    return model.state_dict(), float(model.weight.sum())


@gpunb.remote(num_gpus=1)
def draw():
    import torch

    generator = torch.Generator(device="cuda").manual_seed(7)
    torch.rand(3, device="cuda", generator=generator)
    return generator


@gpunb.remote(num_gpus=1)
def fail():
    import torch

    raise ValueError(torch.ones(3, device="cuda"))


@gpunb.remote(num_gpus=0.5)
class Holder:
    def __init__(self):
        import torch

        self.rows = torch.ones(3, device="cuda")

    def add(self):
        self.rows += 1
        return self.rows

    def device(self):
        return self.rows.device.type


def await_note(capfd, text):
    printed = []
    eventually(lambda: printed.append(capfd.readouterr().err) or text in "".join(printed), text)


def test_a_tensor_comes_home_as_host_memory(session, torch, hardware, capfd):
    got = gpunb.get(compute.remote())
    assert {got[name].device.type for name in ("whole", "part", "half")} == {"cpu"}
    assert got["whole"] is got["again"]
    assert float(got["whole"].sum()) == float(torch.arange(1.0 * MIB).sum())
    got["part"][0] = -1  # a view still
    assert got["whole"][2] == -1
    assert torch.equal(got["sparse"].to_dense(), torch.eye(3))
    await_note(capfd, "moved 4 tensors (6 MiB) from the device to host memory")


def test_a_model_goes_on_on_the_host(session, torch, hardware):
    model, optimizer = gpunb.get(train.remote())
    assert model.weight.device.type == "cpu"
    assert model.tied is model.weight
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert {each.device.type for each in optimizer.state[model.weight].values()} == {"cpu"}
    # Not in this process: an optimizer asks CUDA whether it captures a graph.
    assert gpunb.get(train_on.remote(model, optimizer))


def test_a_state_dict_comes_home_as_host_memory(session, capfd):
    weights, total = gpunb.get(state.remote())
    await_note(capfd, "moved 2 tensors (39.5 KiB) from the device to host memory")
    assert {each.device.type for each in weights.values()} == {"cpu"}
    assert abs(float(weights["weight"].sum()) - total) < 1e-3


def test_a_generator_of_the_device_comes_home_as_one_of_the_host(session, capfd):
    generator = gpunb.get(draw.remote())
    assert generator.device.type == "cpu"
    assert generator.initial_seed() == 7
    await_note(capfd, "a torch.Generator of the device came home as one of the host")


def test_an_error_with_a_tensor(session):
    with pytest.raises(ValueError, match="cuda:0") as caught:
        gpunb.get(fail.remote())
    assert caught.value.cause.args[0].device.type == "cpu"


def test_an_actor_keeps_its_tensor_on_the_device(session):
    holder = Holder.remote()
    assert gpunb.get(holder.add.remote()).tolist() == [2, 2, 2]
    assert gpunb.get(holder.add.remote()).tolist() == [3, 3, 3]
    assert gpunb.get(holder.device.remote()) == "cuda"
    gpunb.kill(holder)
