"""What a worker gets: its devices, its variables and its folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpunb.engine.worker_setup import EXPOSE, LEFT, Present, Setups, others, without_left
from gpunb.protocol.backend import VARIABLES
from gpunb.protocol.messages import THREAD_VARIABLES, UNPINNED, Setup
from gpunb.protocol.verbs import Surroundings
from gpunb.scheduler.resources import UNIT, Allocation, Device, Machine

GIB = 1 << 30

MACHINE = Machine(
    (
        Device("g0", 0, "card", memory=40 * GIB),
        Device("g1", 1, "card", memory=40 * GIB),
        Device("n0", 0, "core", resource="NPU"),
    ),
    cpus=8 * UNIT,
)

ONE = Allocation((("g0", UNIT),))
HALF = Allocation((("g1", UNIT // 2),))
BOTH = Allocation((("g0", UNIT), ("g1", UNIT)))
NPU = Allocation((("n0", UNIT),))
NONE = Allocation(cpus=UNIT)


def pin(devices: Sequence[Device], *, ordered: bool = False) -> Mapping[str, str]:
    """Show these devices by their keys; a star marks an order that is not the machine's."""
    return {"VISIBLE": ",".join(each.key for each in devices) + "*" * ordered}


def here(**environment: str) -> Surroundings:
    return Surroundings(environment, "/work", ["/lib"], ["prog"])


def setup(
    allocation: Allocation,
    extra: Sequence[tuple[str, str]] = (),
    base: Mapping[str, str] | None = None,
    now: Surroundings | None = None,
    **options: Any,
) -> Setup:
    """Return the setup of a worker with this allocation, made by new `Setups` with the options
    that belong to these."""
    own = {each: options.pop(each) for each in list(options) if each in ("reports", "sharing")}
    setups = Setups(MACHINE, pin, caps=options.pop("session_caps", True), **own)
    return Setup(*setups.of(allocation, extra, base or {}, now or here(), **options))


# -------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("allocation", "visible", "gpu_ids", "npus"),
    [
        (ONE, "g0", (0,), ()),
        (BOTH, "g0,g1", (0, 1), ()),
        (HALF, "g1", (1,), ()),
        (NPU, "n0", (), (0,)),
        (NONE, "", (), ()),
    ],
)
def test_worker_sees_its_own_devices(
    allocation: Allocation, visible: str, gpu_ids: tuple[int, ...], npus: tuple[int, ...]
) -> None:
    made = setup(allocation)
    assert made.environment["VISIBLE"] == visible
    assert made.gpu_ids == gpu_ids
    assert made.others == (("NPU", npus),)


def test_worker_of_a_group_may_see_the_devices_of_the_whole_group() -> None:
    made = setup(ONE, seen=("g1", "g0"))
    assert made.environment["VISIBLE"] == "g1,g0*"
    assert made.gpu_ids == (0,)
    assert made.reports == UNPINNED


def test_no_variable_of_a_task_shows_other_devices() -> None:
    assert setup(ONE, [("VISIBLE", "g1"), ("A", "1")]).environment["VISIBLE"] == "g0"


@pytest.mark.parametrize(
    ("allocation", "value", "pinned"),
    [(NONE, "1", False), (NONE, "0", True), (ONE, "1", True)],
)
def test_task_without_devices_may_be_shown_all(
    allocation: Allocation, value: str, pinned: bool
) -> None:
    made = setup(allocation, now=here(**{EXPOSE: value}))
    assert ("VISIBLE" in made.environment) is pinned


@pytest.mark.parametrize(
    ("value", "left"), [("1", True), ("true", True), ("True", True), ("0", False), ("", False)]
)
def test_user_can_have_a_variable_of_devices_left_alone(value: str, left: bool) -> None:
    kept, any_left = without_left({"VISIBLE": "g0", "OTHER": "0"}, {f"{LEFT}VISIBLE": value})
    assert any_left is left
    assert kept == ({"OTHER": "0"} if left else {"VISIBLE": "g0", "OTHER": "0"})
    made = setup(ONE, now=here(**{f"{LEFT}VISIBLE": value}), reports=2.0)
    assert made.reports == (UNPINNED if left else 2.0)


@pytest.mark.parametrize(("allocation", "reports"), [(ONE, 2.0), (NONE, 0.0)])
def test_worker_with_a_device_reports_its_memory(allocation: Allocation, reports: float) -> None:
    assert setup(allocation, reports=2.0).reports == reports


def test_other_kinds_of_devices_are_listed_once() -> None:
    npus = tuple(Device(f"n{at}", at, "core", resource="NPU") for at in range(2))
    assert others(Machine((*MACHINE.devices[:2], *npus))) == ("NPU",)
    assert others(Machine()) == ()


# ---------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("allocation", "options", "capped"),
    [
        (HALF, {}, True),
        (ONE, {}, False),
        (BOTH, {}, False),
        (NONE, {}, False),
        (HALF, {"caps": False}, False),
        (HALF, {"session_caps": False}, False),
    ],
    ids=["a part", "one", "two", "none", "task without", "session without"],
)
def test_frameworks_are_capped_to_a_part_of_a_device(
    allocation: Allocation, options: dict[str, bool], capped: bool
) -> None:
    caps = setup(allocation, **options).caps
    assert (caps is not None) is capped
    if caps is not None:
        fraction, nbytes = caps
        assert 0.4 < fraction < 0.5
        assert nbytes == round(fraction * 40 * GIB)


def test_driver_is_told_of_the_share_of_a_device() -> None:
    def sharing(device: Device, units: int) -> Mapping[str, str]:
        return {"DRIVER_SHARE": f"{device.key}:{units}"}

    for allocation, share in ((HALF, "g1:5000"), (ONE, None), (NONE, None)):
        assert setup(allocation, sharing=sharing).environment.get("DRIVER_SHARE") == share
    assert Setups(MACHINE, pin, sharing=sharing).shares_by_driver
    assert not Setups(MACHINE, pin).shares_by_driver


# ----------------------------------------------------------------------------------- surroundings


def test_worker_gets_the_changes_of_the_environment_since_its_start() -> None:
    base = {"SAME": "1", "OTHER": "old", "GONE": "1", **dict.fromkeys(THREAD_VARIABLES, "4")}
    now = here(SAME="1", OTHER="new", NEW="1", **dict.fromkeys(THREAD_VARIABLES, "4"))
    made = setup(NONE, base=base, now=now)
    assert made.environment == {"OTHER": "new", "NEW": "1", "GONE": None, "VISIBLE": ""}
    assert (made.directory, made.path, made.argv) == ("/work", ["/lib"], ["prog"])


def test_changes_are_those_of_the_pair_that_is_asked_about() -> None:
    """They are remembered, because most workers start from the same base."""
    setups = Setups(MACHINE, pin)
    first, second, now = {"A": "1"}, {"B": "1"}, here(A="2")
    found = [
        Setup(*setups.of(NONE, (), base, each, caps=True)).environment
        for base, each in ((first, now), (second, now), (first, here(A="3")), (first, now))
    ]
    assert [each.get("A") for each in found] == ["2", "2", "3", "2"]
    assert ["B" in each for each in found] == [False, True, False, False]


def test_setup_of_one_worker_leaves_the_next_alone() -> None:
    setups = Setups(MACHINE, pin)
    base, now = {"A": "1"}, here(A="2")
    setups.of(ONE, [("OPTION", "1")], base, now)
    made = Setup(*setups.of(NONE, (), base, now))
    assert "OPTION" not in made.environment
    assert made.environment["VISIBLE"] == ""


def test_variables_of_the_session_belong_to_the_surroundings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(VARIABLES, "GPUNB_NAMESPACE", "lab")
    monkeypatch.setenv("MINE", "1")
    now = Setups(MACHINE, pin).now()
    assert (now.environment["GPUNB_NAMESPACE"], now.environment["MINE"]) == ("lab", "1")
    assert (now.directory, now.argv) == (os.getcwd(), sys.argv)


@pytest.mark.parametrize("change", ["variable", "session", "directory", "path", "argv"])
def test_surroundings_are_the_same_object_until_they_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
) -> None:
    present = Present()
    before = present.now()
    assert present.now() is before
    match change:
        case "variable":
            monkeypatch.setenv("GPUNB_TEST_VARIABLE", "1")
        case "session":
            monkeypatch.setitem(VARIABLES, "GPUNB_TEST_VARIABLE", "1")
        case "directory":
            monkeypatch.chdir(tmp_path)
        case "path":
            monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        case _:
            monkeypatch.setattr(sys, "argv", ["other"])
    after = present.now()
    assert after is not before
    assert after != before
    assert present.now() is after


def test_folder_that_was_removed_is_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert Present().now().directory is None


def test_path_of_a_user_may_have_paths_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [tmp_path])
    assert Present().now().path == [str(tmp_path)]
