"""Options as they are written, and what they ask for."""

from __future__ import annotations

import re

import pytest

from gpunb.scheduler.options import ActorOptions, MethodOptions, Options, check_either
from gpunb.scheduler.resources import UNIT, Demand

GiB = 1024**3


@pytest.mark.parametrize("kind", [Options, ActorOptions])
@pytest.mark.parametrize(
    ("written", "asks"),
    [
        (
            {"num_gpus": 1, "min_memory": "40GiB"},
            Demand(gpus=UNIT, min_memory=40 * GiB),
        ),
        (
            {"gpu_memory": "4GiB", "min_memory": 2**30, "accelerator_type": ["a100", "4090"]},
            Demand(gpu_memory=4 * GiB, min_memory=GiB, types=("a100", "4090")),
        ),
        (
            {"num_gpus": 0.5, "resources": {"accelerator_type:A100": 0.001, "port": 1}},
            Demand(gpus=UNIT // 2, resources=(("port", UNIT),), types=("A100",)),
        ),
        (
            {
                "num_gpus": 1,
                "accelerator_type": "T4",
                "resources": {"accelerator_type:A100": 0.001},
            },
            Demand(gpus=UNIT, types=("T4",)),
        ),
        ({"resources": {"TPU": 4}, "num_cpus": 0}, Demand(resources=(("TPU", 4 * UNIT),))),
    ],
)
def test_options_give_this_demand(kind, written, asks) -> None:
    assert kind().updated(written).demand() == asks


@pytest.mark.parametrize("kind", [Options, ActorOptions])
@pytest.mark.parametrize(
    ("written", "error", "message"),
    [
        ({"min_memory": "1GiB"}, ValueError, "no device is asked for: add num_gpus=1"),
        ({"num_gpus": 0, "min_memory": "1GiB"}, ValueError, "no device is asked for"),
        ({"num_gpus": 1, "min_memory": "much"}, ValueError, "min_memory='much' is not a size"),
        ({"num_gpus": 1, "min_memory": 0}, ValueError, "min_memory=0 must be at least one byte"),
        ({"num_gpus": 1, "min_memory": []}, TypeError, "min_memory must be a number of bytes"),
        ({"num_gpus": 1, "min_mem": 1}, ValueError, "did you mean 'min_memory'?"),
    ],
)
def test_bad_options_raise(kind, written, error, message) -> None:
    with pytest.raises(error) as raised:
        kind().updated(written)
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", [Options, ActorOptions, MethodOptions])
@pytest.mark.parametrize("name", ["a\0", "\x1b[2J", "two\nlines", "\x9b", "exe\u202etxt", "\udcff"])
def test_names_with_control_characters_are_refused(kind, name) -> None:
    with pytest.raises(ValueError, match=r"name=.* has the control character .*: leave it out"):
        kind().updated({"name": name})


def test_default_names_are_made_printable() -> None:
    given = "\x1b]0;title\x07"
    assert Options().spec(given).name == r"\x1b]0;title\x07"
    assert ActorOptions().spec(given).name == r"\x1b]0;title\x07"
    assert MethodOptions().spec(given, "f", 0).name == r"\x1b]0;title\x07"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"max_retry": 1}, "did you mean 'max_retries'?"),
        ({"num_return": 1}, "did you mean 'num_returns'?"),
        ({"max_restart": 1}, "did you mean 'max_restarts'?"),
        ({"foo": 1}, "unknown option 'foo' (known are "),
        ({"max_calls": 1, "lifetime": None}, "option of functions and 'lifetime' one of classes"),
        ({"max_calls": -1}, "max_calls=-1"),
        ({"max_restarts": -2}, "max_restarts=-2"),
        ({"num_gpus": 1.5}, "num_gpus=1.5"),
    ],
)
def test_options_of_neither_functions_nor_classes_raise(written, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        check_either(written)
    if "unknown" in str(raised.value):
        assert "max_calls" in str(raised.value)
        assert "max_restarts" in str(raised.value)


@pytest.mark.parametrize(
    ("written", "kind", "other"),
    [
        ({"max_retries": 0}, Options, ActorOptions),
        ({"max_restarts": 1}, ActorOptions, Options),
        ({"num_gpus": 1, "timeout": 5}, Options, ActorOptions),
    ],
)
def test_options_of_functions_or_classes_are_accepted(written, kind, other) -> None:
    given = dict(written)
    check_either(given)
    assert given == written
    options = kind().updated(given)
    assert {name: getattr(options, name) for name in written} == written
    with pytest.raises(ValueError, match="unknown option"):
        other().updated(given)


@pytest.mark.parametrize("kind", [Options, ActorOptions])
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ZE_AFFINITY_MASK"])
def test_env_vars_that_choose_devices_are_refused(kind, name) -> None:
    with pytest.raises(ValueError, match=f"{name}.*no task can choose"):
        kind().updated({"runtime_env": {"env_vars": {"OTHER": "1", name: "0"}}})


def test_a_demand_is_shown_with_its_memory() -> None:
    demand = Options().updated({"num_gpus": 2, "min_memory": "40GiB"}).demand()
    assert str(demand) == "2 GPU, 40 GiB or more on each"
