"""What values lose on a trip is found."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from gpunb.data import serialize
from gpunb.data.serialize import Loss, losses
from gpunb.data.serialize.identities import identity_of, object_of
from tests import needs


class Partly:
    """Loses an attribute."""

    def __init__(self) -> None:
        self.kept = [1]
        self.lost = 2

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}


class Twice:
    """Makes two objects of one."""

    def __init__(self, one: list[int], other: list[int]) -> None:
        self.one, self.other = one, other

    def __reduce__(self) -> Any:
        return Twice, (list(self.one), list(self.other))


class Changed:
    def __reduce__(self) -> Any:
        return list, ()


class Broken:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_nothing_is_lost_of_plain_values() -> None:
    array = np.zeros(3)
    values = {"a": {"b": [1, {2, 3}, array]}, "c": array, "d": "text", "f": losses}
    assert losses(values, "cell") == []


def test_what_cannot_be_pickled_is_named() -> None:
    ((loss),) = losses({"lock": threading.Lock(), "x": 1}, "home")
    assert loss.where == "lock"
    assert "cannot come home" in loss.what


def test_what_cannot_be_made_again_is_named() -> None:
    ((loss),) = losses({"broken": Broken()}, "home")
    assert loss.where == "broken"
    assert "no number" in loss.what


def test_attributes_types_and_identities_are_compared() -> None:
    same = [1]
    found = losses({"p": [Partly()], "t": Twice(same, same), "c": Changed()}, "cell")
    assert Loss("p[0]", "its attributes lost") in found
    assert Loss("c", "it is of the type list") in found
    assert Loss("t.other", "it is another object than t.one") in found
    assert len(found) == 3


def test_views_that_no_longer_share_memory_are_named() -> None:
    array = np.zeros((4, 4))
    found = losses({"a": array, "b": array[::-1, 1:], "c": np.zeros(4)}, "cell")
    assert found == [Loss("b", "it no longer shares memory with a")]


def test_a_copy_does_not_take_the_place_of_the_original() -> None:
    def own() -> None:
        """A function that travels with an identity."""

    own.__module__ = "__main__"
    identity = identity_of(own)
    assert losses({"own": own}, "home") == []
    assert object_of(identity) is own


@pytest.mark.usefixtures("torch")
class TestPyTorch:
    """With PyTorch."""

    @pytest.fixture
    def torch(self) -> Any:
        needs.pytorch()
        import torch

        return torch

    def test_a_graph_is_named(self, torch: Any) -> None:
        weight = torch.ones(2, requires_grad=True)
        found = losses({"w": weight, "loss": {"sum": (weight * weight).sum()}}, "home")
        assert [each.where for each in found] == ["loss['sum']"]
        assert "graph" in found[0].what

    def test_gradients_and_shared_memory_are_kept(self, torch: Any) -> None:
        model = torch.nn.Linear(2, 1)
        model(torch.ones(1, 2)).sum().backward()
        array = np.zeros(4)
        values = {"m": model, "w": model.weight, "a": array, "t": torch.from_numpy(array)}
        with serialize.moving() or nullcontext():
            assert losses(values, "home") == []
