"""Faults at every boundary of live sessions and of a head process, while jobs run.

A usual run has 2,000 faults, the same ones each time as far as the machine lets them be. Others:
``SEED=7``; more: ``FAULTS=100000``, or ``MINUTES=30`` for so long, as `make chaos` does.
"""

from __future__ import annotations

import os

import pytest

from gpunb.protocol import messages
from tests.chaos import seam
from tests.chaos.faults import calls, kinds
from tests.chaos.seam import SITES, TABLE, describe
from tests.chaos.supervising import WORLDS, chaos
from tests.chaos.unsurvived import UNSURVIVED
from tests.sessions import ROOT

QUICK = 2000
"""Faults in a usual run."""

MINUTES = float(os.environ.get("MINUTES") or 0)
FAULTS = int(os.environ.get("FAULTS") or (10**9 if MINUTES else QUICK))
SEED = int(os.environ.get("SEED") or 0)
PARTS = {"sessions": 0.25, "head": 0.75}
"""Of the faults, in each world. A head process's three kernels share what takes long to start."""

SLOWEST = 0.25
"""Seconds that a fault may take, with the jobs around it, where nothing goes wrong."""


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.timeout(0)  # `seconds` ends it
def test_every_job_ends_as_it_must_and_the_session_serves_on(world):
    count = int(FAULTS * PARTS[world])
    seconds = 60 * MINUTES * PARTS[world] if MINUTES else 120 + SLOWEST * count
    report = chaos(count, SEED, worlds=[world], without=tuple(UNSURVIVED), seconds=seconds)
    text = report.text()
    assert not report.wrong, text
    assert MINUTES or report.total >= count, text
    print(text)  # noqa: T201 - shown with -s, and by `make chaos`


# ------------------------------------------------------------------------------- the tests' own


def test_what_is_left_out_is_a_kind_of_fault():
    names = {f"{'child' if s else 'kernel'} {SITES[n]} {describe(e)}" for s, n, e in calls()}
    assert set(UNSURVIVED) <= names | set(kinds(attached=True))


@pytest.mark.parametrize("site", [each for each in SITES if "." in each.call], ids=str)
def test_each_faulty_call_is_made_in_a_module_that_has_it(site):
    labels = {site.module, "zygote"} if site.module == "control" else {site.module}
    modules = [name for name, label in TABLE.items() if label in labels]
    sources = [(ROOT / f"{name.replace('.', '/')}.py").read_text() for name in modules]
    assert any(f"{site.call.removeprefix('epoll')}(" in each for each in sources), modules


def test_noise_has_the_numbers_of_the_messages_that_it_is_like():
    assert (
        messages.NUMBER[messages.Done],
        messages.NUMBER[messages.Used],
    ) == (seam._DONE, seam._USED)
