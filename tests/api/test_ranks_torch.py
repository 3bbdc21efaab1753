"""Training with PyTorch in several ranks, on CPUs with gloo."""

from __future__ import annotations

import os
from pathlib import Path

import gpunb
from tests import needs
from tests.sessions import assert_idle, session
from tests.waiting import PATIENCE

IMPORTS = ["torch", "torch._dynamo"]
"""Imported once, and not again in each rank: DistributedDataParallel imports the second."""


def trained(images, digits):
    """The weights after three steps, each with a part of the batch in each rank."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    inputs, targets = torch.as_tensor(images[rank::size]), torch.as_tensor(digits[rank::size])
    model = plain = torch.nn.Linear(inputs.shape[1], 10)
    if size > 1:
        distributed.init_process_group()
        model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    if size > 1:
        del model, loss  # PyTorch 2.13 may hang if they outlive the process group
        distributed.destroy_process_group()
    return plain.weight.detach().numpy(), plain.bias.detach().numpy()


def sharded(folder):
    """The weights of a model in parts, and of a second one that has them from a checkpoint."""
    import torch
    import torch.distributed.checkpoint as checkpoints
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(torch.nn.Linear(4, 2))
        fully_shard(models[-1])
    first, second = models
    first(torch.ones(3, 4)).sum().backward()
    torch.optim.SGD(first.parameters(), lr=0.1).step()
    checkpoints.save(get_model_state_dict(first), checkpoint_id=folder)
    state = get_model_state_dict(second)
    checkpoints.load(state, checkpoint_id=folder)
    set_model_state_dict(second, state)
    part = first.weight.to_local().shape
    found = [each.weight.full_tensor().detach().numpy() for each in models]
    distributed.destroy_process_group()
    return tuple(part), *found


def test_the_weights_on_the_digits_are_those_of_one_process_with_the_whole_batch(
    by_value: None,
) -> None:
    needs.pytorch()
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    batch = (images[:1600] / 16).astype("f4"), digits[:1600]
    with session(num_gpus=4, num_cpus=4, preload=IMPORTS):
        remote = gpunb.remote(num_gpus=1)(trained)
        alone = gpunb.get(remote.remote(*batch), timeout=4 * PATIENCE)
        for size in (2, 4):
            found = gpunb.get(remote.options(ranks=size).remote(*batch), timeout=4 * PATIENCE)
            assert len(found) == size
            for weights in found:
                for own, one in zip(weights, alone, strict=True):
                    assert abs(own - one).max() < 1e-6
        assert_idle()


def test_a_model_in_parts_comes_back_from_a_checkpoint(by_value: None, tmp_path: Path) -> None:
    needs.pytorch()
    with session(num_gpus=2, num_cpus=2, preload=[*IMPORTS, "torch.distributed.fsdp"]):
        remote = gpunb.remote(num_gpus=1, ranks=2)(sharded)
        for part, first, second in gpunb.get(remote.remote(tmp_path), timeout=4 * PATIENCE):
            assert part == (1, 4)
            assert (first == second).all()
        assert_idle()
