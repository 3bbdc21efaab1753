"""Dataclasses that travel as plain tuples."""

from __future__ import annotations

import pytest
from hypothesis import given

from gpunb.data.serialize import Payload
from gpunb.protocol import plain, records
from gpunb.protocol.backend import Call, NewActor
from gpunb.protocol.plain import Malformed
from gpunb.scheduler.resources import Demand, Device, Machine
from gpunb.scheduler.tasks import ActorSpec, AutoShare, TaskSpec
from tests.protocol.test_plain import values

SPEC = TaskSpec(
    "train",
    Demand(gpus=5000, resources=(("disk", 10_000),), types=("A100",)),
    "identity",
    max_calls=1,
    timeout=2.5,
    environment=(("A", "b"),),
    auto=AutoShare(by_memory=True, code="digest"),
    grow=True,
    priority=5,
)
CALL = Call(
    SPEC,
    b"code",
    Payload(b"arguments"),
    inputs=((3, 0),),
    new=NewActor(ActorSpec(max_restarts=-1), b"type", name="keeper", detached=True),
)


def test_a_call_comes_back_with_its_arguments():
    sent = plain.loads(plain.dumps(records.flat(records.Submission.of(CALL))))
    assert records.read(records.Submission, sent).call(CALL.arguments, None) == CALL


def test_a_machine_comes_back():
    device = Device("key", "GPU-1", "A100", memory=1 << 30, counts=(1, 2))
    machine = Machine((device,), 20_000, (("disk", 1),), None)
    assert records.read(Machine, plain.loads(plain.dumps(records.flat(machine)))) == machine


def test_options_for_ray_stay_here():
    spec = TaskSpec("f", ray={"scheduling_strategy": object()})
    call = Call(spec, b"", Payload(b""))
    plain.dumps(records.flat(records.Submission.of(call)))


@pytest.mark.parametrize(
    "wrong",
    [
        ("train",),
        (1, *records.flat(SPEC)[1:]),
        (*records.flat(SPEC)[:5], float("nan"), *records.flat(SPEC)[6:]),
        ("train", (-1, 0, 0, (), (), 0), *records.flat(SPEC)[2:]),
        ("train", (15_000, 0, 0, (), (), 0), *records.flat(SPEC)[2:]),
        ("train", (0, 0, 0, (("disk", -1),), (), 0), *records.flat(SPEC)[2:]),
        (*records.flat(SPEC)[:3], -1, *records.flat(SPEC)[4:]),
    ],
)
def test_a_specification_that_no_option_could_make_is_malformed(wrong):
    with pytest.raises(Malformed):
        records.read(TaskSpec, wrong)


@given(values)
def test_any_value_is_a_submission_or_malformed(value):
    with pytest.raises(Malformed):
        records.read(records.Submission, value)
