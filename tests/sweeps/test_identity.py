"""Fingerprints are equal for equal code and values, and for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from gpunb.sweeps.identity import fingerprint, keys
from tests import needs
from tests.sessions import ROOT

CODE = """
import math
TABLE = {"names": {"loss", "rate", "width", "depth"}, "shape": (1, 2)}

class Base:
    names = {"x", "yy", "zzz"}

    def method(self):
        return helper(1)

def helper(x):
    return x + len(TABLE)

def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)

def train(rate, width=3):
    if rate in {"a", "b", "c"}:
        return 0
    return helper(rate) + Base().method() + math.pi + factorial(3)
"""


def train_of(code, lines=0, file="<cell>"):
    space = {"__name__": "__main__"}
    exec(compile("\n" * lines + code, file, "exec"), space)
    return space["train"]


def write_fingerprint():
    sys.stdout.write(fingerprint(train_of(CODE, 7, "<another cell>"), "train"))


def test_the_fingerprint_of_a_function_is_the_same_in_each_process_and_at_each_place():
    run = subprocess.run(
        [sys.executable, "-c", "from tests.sweeps.test_identity import *; write_fingerprint()"],
        env={**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == fingerprint(train_of(CODE), "train")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("math.pi", "math.e"),
        ("width=3", "width=4"),
        ("n * factorial", "n + factorial"),
        ("x + len", "x - len"),
        ("(1, 2)", "(1, 3)"),
        ('"depth"', '"height"'),
        ('"zzz"', '"zz"'),
        ("helper(1)", "helper(2)"),
    ],
)
def test_a_change_of_the_code_or_of_what_it_refers_to_changes_the_fingerprint(old, new):
    assert CODE.count(old) == 1
    changed = fingerprint(train_of(CODE.replace(old, new)), "train")
    assert changed != fingerprint(train_of(CODE), "train")


def test_comments_do_not_count():
    commented = CODE.replace("def helper", "# a comment\ndef helper")
    assert fingerprint(train_of(commented), "train") == fingerprint(train_of(CODE), "train")


def test_a_function_of_a_users_module_counts_by_the_text_of_the_module(tmp_path, monkeypatch):
    module = tmp_path / "sweep_helper_module.py"
    module.write_text("def train(rate):\n    return rate\n")
    monkeypatch.syspath_prepend(tmp_path)
    import sweep_helper_module

    before = fingerprint(sweep_helper_module.train, "train")
    assert before == fingerprint(sweep_helper_module.train, "train")
    module.write_text("def train(rate):\n    return -rate\n")
    assert fingerprint(sweep_helper_module.train, "train") != before
    assert fingerprint(np.sum, "f") != fingerprint(np.mean, "f")
    del sys.modules["sweep_helper_module"]


def test_parameters_are_equal_by_their_values_and_in_any_order():
    one, other = keys(
        "f", [{"rate": 0.1, "width": 3}, {"width": np.int64(3), "rate": np.float64(0.1)}]
    )
    assert one.endswith(".1")
    assert other == one.removesuffix("1") + "2", "the same parameters twice are two trials"
    arrays = [{"x": np.arange(3)}, {"x": np.arange(4)}, {"x": [0, 1, 2]}]
    assert len(set(keys("f", arrays))) == 3
    assert keys("f", arrays) == keys("f", [{"x": each["x"].copy()} for each in arrays])
    assert keys("g", arrays)[0] != keys("f", arrays)[0]
    one, other = "adam", str(b"adam", "ascii")
    assert one is not other
    assert keys("f", [{"a": [one, one]}]) == keys("f", [{"a": [one, other]}])


def test_a_tensor_counts_by_its_values():
    needs.pytorch()
    import torch

    values = [{"x": torch.ones(2, dtype=torch.bfloat16)}, {"x": torch.zeros(2)}]
    assert keys("f", values) == keys("f", [{"x": each["x"].clone()} for each in values])
    assert len(set(keys("f", values))) == 2


def test_a_parameter_that_cannot_be_pickled_is_named():
    import threading

    with pytest.raises(TypeError, match="the parameter lock cannot be compared"):
        keys("f", [{"lock": threading.Lock()}])
