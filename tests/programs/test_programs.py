"""Random programs, each with faults or without, in batches that share a session.

Which programs are run is always the same. Others: ``PROGRAMS_SEED=7``; more of them:
``PROGRAMS=50000`` (that many) or ``PROGRAMS_MINUTES=30``, as `make stress` does.
"""

from __future__ import annotations

import os
import time

import pytest

from tests.programs.making import make
from tests.programs.model import Expected, Model, Value, taken
from tests.programs.replay import BATCH, batch
from tests.programs.running import run, session
from tests.programs.steps import (
    PLANNED,
    Call,
    Cancel,
    Child,
    Generate,
    Get,
    Make,
    Pause,
    Plan,
    Put,
    Strike,
    Task,
    listing,
    mix,
)

QUICK = 5
"""Batches in a usual run."""

FIRST = int(os.environ.get("PROGRAMS_SEED", "0")) * 10_000_000
BATCHES = -(-int(os.environ.get("PROGRAMS", QUICK * BATCH)) // BATCH)
MINUTES = float(os.environ.get("PROGRAMS_MINUTES", "0"))


@pytest.mark.parametrize("number", range(BATCHES))
@pytest.mark.timeout(600)
def test_programs(number):
    batch(FIRST + number * BATCH)


@pytest.mark.timeout(600)
def test_programs_on_spawned_processes():
    batch(FIRST + 500_000, 6, "spawn")


@pytest.mark.skipif(not MINUTES, reason="PROGRAMS_MINUTES says for how long")
@pytest.mark.timeout(MINUTES * 60 + 600)
def test_programs_for_minutes():
    end, seed = time.monotonic() + MINUTES * 60, FIRST + 1_000_000
    while time.monotonic() < end:
        batch(seed)
        seed += BATCH


# ----------------------------------------------------------------------------- what went wrong once

RAISES = Plan(1, fault="raise", fails=9)

FOUND = {
    "a constructor whose process is killed": [
        Make("a1", 1, restarts=-1),
        Strike("a1"),
        Call("c2", "a1", Plan(2, 0.005)),
    ],
    "an actor made of what has failed": [
        Task("t1", RAISES),
        Get("t1"),
        Make("a2", 2, restarts=-1, known=True, args=("t1",)),
        Call("c3", "a2", Plan(3)),
    ],
    "references in what a task caught, before one that has none": [
        Task("t1", Plan(1, children=(Child(Plan(2, 0.01), gpus=0.25, use="cancel"),))),
        Task("t2", Plan(3)),
        Task("t3", Plan(4)),
    ],
    "an interrupt while a task submits another": [
        step
        for number in range(6)
        for step in (
            Task(f"t{number}", Plan(1, children=(Child(Plan(2), use="drop"),) * 40), retries=0),
            Pause(0.004),
            Cancel(f"t{number}", recursive=False),
            Get(f"t{number}"),
        )
    ],
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_what_went_wrong_once(program):
    with session():
        for _ in range(20):
            run(program)


# ---------------------------------------------------------------------------------- the tests' own


def test_a_program_is_the_same_for_the_same_seed():
    assert [make(seed) for seed in range(50)] == [make(seed) for seed in range(50)]


def test_a_program_can_be_typed():
    for seed in range(50):
        names = vars(__import__("tests.programs.steps", fromlist=["steps"]))
        assert eval(listing(make(seed)), dict(names)) == make(seed)


def test_programs_have_all_kinds_of_steps():
    kinds = {type(step).__name__ for seed in range(500) for step in make(seed)}
    assert kinds == set(
        "Put Task Generate Take Make Call Leave Find Get Wait Cancel Interrupt Strike Kill Drop "
        "Pause".split()
    )


def test_the_model_knows_what_must_be():
    model = Model()
    model.made(Put("p1", 5), "p1")
    model.made(Task("t2", Plan(7), args=("p1",)), "t2")
    model.made(Task("t3", Plan(8, fault="kill", fails=4), args=("t2",)), "t3")
    model.made(Task("t4", Plan(9), nested=("t3",)), "t4")
    assert model.expected("t2") == Expected(Value(mix(7, 5)))
    assert model.expected("t3") == Expected(None, frozenset({"crashed"}))
    assert model.expected("t4") == Expected(None, frozenset({"crashed"}))
    model.cancel("t2", recursive=True)
    assert model.expected("t2") == Expected(Value(mix(7, 5)), frozenset({"cancelled"}))
    assert model.expected("t4").errors == {"crashed", "cancelled"}


def test_the_model_counts_the_calls_of_an_actor():
    model = Model()
    model.made(Make("a1", 3), "a1")
    for name in ("c2", "c3"):
        model.made(Call(name, "a1", Plan(4)), name)
    assert model.expected("c3") == Expected(Value(mix(4, mix(3)), "call", (), 2, 2))
    model.kill("a1", restart=False)
    model.made(Call("c4", "a1", Plan(4)), "c4")
    assert model.expected("c3").errors == {"died"}
    assert model.expected("c4") == Expected(None, frozenset({"died"}))


def test_the_model_knows_what_a_generator_gives():
    model = Model()
    node = model.made(Generate("g1", Plan(2), 1), "g1")
    first, over = model.stream(node, 0)
    assert taken(first).number == mix(2, 0)
    assert not over
    assert model.stream(node, 1) == (Expected(None), True)
    late = Plan(2, fault="raise", fails=9, late=True)
    model.made(Generate("g2", late, 3, dynamic=True), "g2")
    kept = Expected(Value(mix(2, 0)))
    failed = Expected(None, frozenset({f"{PLANNED} 2"}))
    assert model.expected("g2") == Expected(Value(0, "dynamic", (kept, failed)))
    assert taken(model.expected("g2")).errors == failed.errors
