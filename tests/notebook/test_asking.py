"""What the options of a cell ask of the machine."""

from __future__ import annotations

import pytest

from gpunb.notebook.line_options import options
from gpunb.notebook.magics import GpuMagics
from gpunb.notebook.session_options import again, differences, lasting
from gpunb.scheduler.options import Options
from gpunb.scheduler.resources import UNIT, Demand

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
def test_a_line_asks_for_devices_by_size_and_of_other_kinds(line: str, demand: Demand) -> None:
    assert asked(line).demand() == demand


_STARTED = "10GiB --type A100,V100 --min-memory 20GiB -c 1 -r lic=1 --env Q=1 --env R=a=b"


@pytest.mark.parametrize(
    ("line", "others"),
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
def test_differences_between_a_cell_and_its_session_are_listed(
    line: str, others: list[tuple[str, str]]
) -> None:
    asks = GpuMagics.gpu.parser.parse_args(line.split())
    shares = asks.share is not None
    assert list(differences(asked(_STARTED), asked(line), shares)) == others


@pytest.mark.parametrize(
    ("line", "all_of_it"),
    [
        ("--timeout 5 --name x", _STARTED),
        ("0.5 --timeout 5", _STARTED.replace("10GiB", "0.5")),
        ("--type H100 -r NPU=1 -c 2", f"{_STARTED} --type H100 -r NPU=1 -c 2"),
        ("--no-caps --env Q=2", f"{_STARTED} --no-caps --env Q=2"),
        ("--min-memory 1GiB", f"{_STARTED} --min-memory 1GiB"),
    ],
)
def test_an_ended_session_starts_again_with_the_changes_of_the_cell(
    line: str, all_of_it: str
) -> None:
    shares = GpuMagics.gpu.parser.parse_args(line.split()).share is not None
    made = again(asked(_STARTED), asked(line), shares)
    assert lasting(made).spec("s") == lasting(asked(all_of_it)).spec("s")


def test_options_equal_to_those_of_a_session_do_not_differ() -> None:
    own = asked("")
    for line in ("1", "--cpus 0", "--env A=1"):
        assert bool(list(differences(own, asked(line), asked=True))) is ("env" in line)
    assert not list(differences(asked("--no-caps"), asked("--no-caps"), asked=False))


@pytest.mark.parametrize("text", ["NPU", "NPU=", "=1", "NPU=many", "NPU=nan"])
def test_a_resource_without_a_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME=AMOUNT, such as NPU=1"):
        asked(f"--resource {text}")


def test_a_size_without_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="min_memory='20GiB' says how large each device must be"):
        asked("0 --min-memory 20GiB")
