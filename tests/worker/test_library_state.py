"""State of libraries that a cell gets before its names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sessions import ROOT

NOTEBOOK = """
import collections.abc, sys
from gpunb.data import serialize
from gpunb.worker import library_state
kept = []
for _ in range({count}):  # as if its cell ran again and again
    class Tank: pass
    collections.abc.Sized.register(Tank)
    kept.append(Tank)
registered = library_state.taken(random=False)["abc"]
tanks = [each() for each in kept]
print(registered.hex(), bytes(serialize.dumps(tanks).stream).hex())
"""

WORKER = """
import collections.abc, gc, sys
from gpunb.data import serialize
from gpunb.worker import import_hooks, library_state
registered, tanks = map(bytes.fromhex, sys.stdin.read().split())
for cell in range(2):
    watch = library_state.LibraryWatch({"abc": registered}, vars())
    tanks_here = serialize.loads(serialize.Payload(tanks), namespace=vars())
    assert all(isinstance(each, collections.abc.Sized) for each in tanks_here)
    del watch, tanks_here
    import_hooks._waiting.clear()  # as if all libraries were loaded: nothing holds the watch
    gc.collect()
"""


def run(program: str, given: str = "") -> str:
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, check=False, input=given, text=True, capture_output=True, cwd=ROOT, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_session_still_knows_a_class_that_only_a_later_cell_uses_again() -> None:
    run(WORKER, run(NOTEBOOK.replace("{count}", "1")))


def test_classes_of_the_same_name_are_all_registered() -> None:
    run(WORKER, run(NOTEBOOK.replace("{count}", "5")))


def test_of_the_cells_of_a_session_only_the_last_waits_for_libraries() -> None:
    run("""
import gc, weakref
from gpunb.worker import library_state
first = weakref.ref(library_state.LibraryWatch({}, {}))
library_state.LibraryWatch({}, {})
gc.collect()
assert first() is None
""")


@pytest.mark.parametrize("generator", ["MT19937", "PCG64", "Philox"])
def test_random_numbers_of_numpy_go_on_in_the_cell(generator: str) -> None:
    """Also in the middle of a pair of normal ones, with each generator that numpy may have."""
    start = (
        "import numpy as np\nfrom gpunb.worker import library_state\n"
        f"np.random.set_bit_generator(np.random.{generator}(5))\n"
    )
    notebook = (
        "np.random.randn()\nprint(library_state.taken(random=True)['numpy.random'].hex())\n"
        "print(np.random.randn(3).tolist(), np.random.rand())"
    )
    state, numbers = run(start + notebook).splitlines()
    cell = (
        f"library_state.LibraryWatch({{'numpy.random': bytes.fromhex('{state}')}}, vars())\n"
        "print(np.random.randn(3).tolist(), np.random.rand())"
    )
    assert run(start + "np.random.rand(9)\n" + cell).strip() == numbers
