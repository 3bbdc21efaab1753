"""On a real NVIDIA GPU: tensors on it come home as host memory."""

import pytest

import gpunb
from gpunb import accelerators

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="these tests compute with PyTorch")


@pytest.fixture(scope="module")
def session(torch, by_value):
    devices = [each for each in accelerators.detect().devices if each.vendor == "nvidia"]
    if not devices:
        pytest.skip("no NVIDIA GPU: " + "; ".join(accelerators.detect().notes))
    with gpunb.init(num_gpus=1, preload=["numpy", "torch"]) as session:
        yield session


@pytest.fixture(autouse=True)
def untouched(torch):
    """Whatever comes home, this process has no context on the device."""
    yield
    assert not torch.cuda.is_initialized()


@gpunb.remote(num_gpus=1)
def compute():
    import torch

    whole = torch.arange(1.0 * MIB, device="cuda")
    return {"whole": whole, "again": whole, "part": whole[2:5], "half": whole.half(), "n": 3}


@gpunb.remote(num_gpus=1)
def train():
    import torch

    model = torch.nn.Linear(100, 100, device="cuda")
    model.tied = model.weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 100, device="cuda")).sum().backward()
    optimizer.step()
    return model, optimizer, torch.eye(3, device="cuda").to_sparse()


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


def test_a_tensor_comes_home_as_host_memory(session, torch, capfd):
    got = gpunb.get(compute.remote())
    assert {got[name].device.type for name in ("whole", "part", "half")} == {"cpu"}
    assert got["whole"] is got["again"]
    assert float(got["whole"].sum()) == float(torch.arange(1.0 * MIB).sum())
    got["part"][0] = -1  # a view still
    assert got["whole"][2] == -1
    said = capfd.readouterr().err
    assert "moved 3 tensors (6 MiB) from the device to host memory" in said


def test_a_model_goes_on_on_the_host(session, torch):
    model, optimizer, sparse = gpunb.get(train.remote())
    assert model.weight.device.type == "cpu"
    assert model.tied is model.weight
    assert optimizer.param_groups[0]["params"][0] is model.weight
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    assert torch.equal(sparse.to_dense(), torch.eye(3))


def test_an_error_with_a_tensor(session):
    with pytest.raises(ValueError, match="tensor") as caught:
        gpunb.get(fail.remote())
    assert caught.value.cause.args[0].device.type == "cpu"


def test_an_actor_keeps_its_tensor_on_the_device(session):
    holder = Holder.remote()
    assert gpunb.get(holder.add.remote()).tolist() == [2, 2, 2]
    assert gpunb.get(holder.add.remote()).tolist() == [3, 3, 3]
    assert gpunb.get(holder.device.remote()) == "cuda"
    gpunb.kill(holder)
