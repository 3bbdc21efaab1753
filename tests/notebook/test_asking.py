"""What the options of a cell ask of the machine."""

from __future__ import annotations

import pytest

from gpunb.core.options import Options
from gpunb.core.resources import UNIT, Demand
from gpunb.notebook.lasting import again, differences, lasting
from gpunb.notebook.lines import options
from gpunb.notebook.magics import GpuMagics

GiB = 2**30


def asked(line: str) -> Options:
    return options(GpuMagics.gpu.parser.parse_args(line.split()), "1")


@pytest.mark.parametrize(
    ("line", "demand"),
    [
        ("", Demand(gpus=UNIT)),
        ("--min-memory 20GiB", Demand(gpus=UNIT, min_memory=20 * GiB)),
        ("0.5 --min-memory 20GiB", Demand(gpus=5000, min_memory=20 * GiB)),
        ("--resource NPU=1", Demand(cpus=UNIT, resources=(("NPU", UNIT),))),
        ("0.5 -r NPU=0.25", Demand(gpus=5000, resources=(("NPU", 2500),))),
        ("-r NPU=2 -r port=1", Demand(cpus=UNIT, resources=(("NPU", 2 * UNIT), ("port", UNIT)))),
    ],
)
def test_devices_by_size_and_of_other_kinds(line: str, demand: Demand) -> None:
    assert asked(line).demand() == demand


_STARTED = "10GiB --type A100,V100 --min-memory 20GiB -c 1 -r lic=1 --env Q=1 --env R=a=b"


@pytest.mark.parametrize(
    ("said", "others"),
    [
        ("", []),
        (f"{_STARTED} --timeout 5 --name x --bg", []),
        ("10240MiB --type a100,v100 --min-memory 20480MiB", []),
        ("0.25", [("10 GiB of GPU memory", "0.25 GPU")]),
        ("0", [("10 GiB of GPU memory", "no GPU")]),
        ("--type A100", [("--type A100,V100", "--type A100")]),
        ("--min-memory 40GiB", [("--min-memory 20 GiB", "--min-memory 40 GiB")]),
        ("--cpus 0", [("--cpus 1", "--cpus 0")]),
        ("-r lic=2", [("--resource lic=1", "--resource lic=2")]),
        ("-r lic=0", [("--resource lic=1", "no --resource lic")]),
        ("-r NPU=1 -r lic=1", [("no --resource NPU", "--resource NPU=1")]),
        ("--no-caps", [("no --no-caps", "--no-caps")]),
        ("--env R=a", [("--env R=a=b", "--env R=a")]),
        (
            "--env Q=1 --env Z= --type V100",
            [("--type A100,V100", "--type V100"), ("no --env Z", "--env Z=")],
        ),
    ],
)
def test_what_a_cell_says_otherwise_of_its_sessions_process(
    said: str, others: list[tuple[str, str]]
) -> None:
    asks = GpuMagics.gpu.parser.parse_args(said.split())
    shares = asks.share is not None
    assert differences(asked(_STARTED), asked(said), shares) == others


@pytest.mark.parametrize(
    ("said", "all_of_it"),
    [
        ("--timeout 5 --name x", _STARTED),
        ("0.5 --timeout 5", _STARTED.replace("10GiB", "0.5")),
        ("--type H100 -r NPU=1 -c 2", f"{_STARTED} --type H100 -r NPU=1 -c 2"),
        ("--no-caps --env Q=2", f"{_STARTED} --no-caps --env Q=2"),
        ("--min-memory 1GiB", f"{_STARTED} --min-memory 1GiB"),
    ],
)
def test_a_session_that_has_ended_starts_as_before_but_for_what_is_said(
    said: str, all_of_it: str
) -> None:
    shares = GpuMagics.gpu.parser.parse_args(said.split()).share is not None
    made = again(asked(_STARTED), asked(said), shares)
    assert lasting(made).spec("s") == lasting(asked(all_of_it)).spec("s")


def test_what_was_said_of_nothing_can_be_said_of_a_bare_session() -> None:
    own = asked("")
    for said in ("1", "--cpus 0", "--env A=1"):
        assert bool(differences(own, asked(said), asked=True)) is ("env" in said)
    assert differences(asked("--no-caps"), asked("--no-caps"), asked=False) == []


@pytest.mark.parametrize("text", ["NPU", "NPU=", "=1", "NPU=many", "NPU=nan"])
def test_a_resource_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=AMOUNT, such as NPU=1"):
        asked(f"--resource {text}")


def test_a_size_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="min_memory='20GiB' says how large each device must be"):
        asked("0 --min-memory 20GiB")
