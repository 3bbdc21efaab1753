"""The parameters of trials, their metrics, the best one, and the rule that stops one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpunb.api.reports import metrics_of
from gpunb.sweeps.trials import MOST, MedianStoppingRule, Trial, best, expanded


def ended(number, state="done", **metrics):
    return Trial(number, {}, state, metrics=metrics)


def test_a_dict_of_lists_gives_all_combinations_in_order():
    assert expanded({"rate": (0.1, 0.3), "width": range(2)}) == [
        {"rate": 0.1, "width": 0},
        {"rate": 0.1, "width": 1},
        {"rate": 0.3, "width": 0},
        {"rate": 0.3, "width": 1},
    ]


def test_a_list_of_dicts_gives_one_trial_for_each():
    assert expanded([{"rate": 0.1}, {"width": 2}]) == [{"rate": 0.1}, {"width": 2}]


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ("rate", TypeError, "not 'rate'"),
        (3, TypeError, "not 3"),
        ([3], TypeError, "must be a dict, not 3"),
        ({"rate": 0.1}, TypeError, r"for one value write \{'rate': \[0.1\]\}"),
        ({"rate": "ab"}, TypeError, "must be a list, not 'ab'"),
        ({3: [1]}, TypeError, "must be a text, not 3"),
        ({"rate": []}, ValueError, "list of values of 'rate' is empty"),
        ({}, ValueError, "at least one trial"),
        ([], ValueError, "at least one trial"),
        ({"a": range(10**4), "b": range(10**4)}, ValueError, "100,000,000 trials"),
    ],
)
def test_bad_parameters_are_refused_with_the_reason(params, kind, text):
    with pytest.raises(kind, match=text):
        expanded(params)


def test_an_endless_list_of_values_is_refused():
    import itertools

    with pytest.raises(ValueError, match=f"{MOST:,} is the limit"):
        expanded({"a": itertools.count()})


class Slow:
    def __repr__(self) -> str:
        raise AssertionError("the text of a large object takes long")


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"rate": 0.1, "width": np.int64(32)}, "In[4] rate=0.1 width=32"),
        (
            {"kind": "adam", "layers": [64, 32], "decay": None},
            "kind=adam layers=[64, 32] decay=None",
        ),
        ({"data": Slow(), "many": [0] * 7}, "data=<Slow> many=<list>"),
        ({"text": "two\nlines \x1b[31m\u202e"}, "text=two lines \\x1b[31m\\u202e"),
        ({}, "In[4] trial 5"),
    ],
)
def test_the_name_of_a_trial_has_its_parameters_in_short(params, name):
    assert Trial(5, params).title("In[4]").endswith(name)


def test_the_name_of_a_trial_with_many_parameters_is_cut():
    name = Trial(0, {f"parameter_{at}": at for at in range(99)}).title("train")
    assert len(name) == 100
    assert name.endswith("...")


def test_the_metrics_of_a_value_are_its_numbers_and_texts():
    value = {"loss": np.float32(0.5), "model": object(), "name": "a", "none": None}
    assert metrics_of(value) == {"loss": 0.5, "name": "a"}
    assert type(metrics_of(value)["loss"]) is float
    assert metrics_of(np.int64(3)) == {"value": 3}
    assert metrics_of([1, 2]) == {}


def test_the_best_trial_has_the_lowest_or_highest_number():
    trials = [
        ended(0, loss=0.5),
        ended(1, loss=math.nan),
        ended(2, "failed", loss=0.1),
        ended(3, "stopped", loss=0.2),
        ended(4, loss="low"),
    ]
    assert best(trials, "loss", "min").number == 3
    assert best(trials, "loss", "max").number == 0
    with pytest.raises(ValueError, match="'accuracy': the trials have loss"):
        best(trials, "accuracy", "min")
    with pytest.raises(ValueError, match="mode='least'"):
        best(trials, "loss", "least")


def test_a_parameter_is_shown_in_a_short_text_even_if_its_repr_raises():
    class Silent:
        def __repr__(self):
            raise ValueError("no")

    params = {"a": Silent(), "b": np.float64(0.1), "c": "x" * 100, "d": {(1, 2): "y\nz"}}
    text = repr(Trial(3, params, "queued"))
    assert text == f"<Trial 3 a=<Silent>, b=0.1, c={'x' * 57}..., d={{(1, 2): 'y\\nz'}}: queued>"


def reporting(*losses):
    trial = Trial(0, {})
    for each in losses:
        trial.reported({"loss": each})
    return trial


def test_the_median_rule_stops_a_trial_that_is_worse_than_the_median_of_the_others():
    others = [reporting(*[level] * 5) for level in (1.0, 2.0, 3.0)]
    rule = MedianStoppingRule("loss", grace_period=2)
    bad, good = reporting(9.0, 2.5), reporting(9.0, 1.5)
    assert rule(bad, [bad, *others])
    assert not rule(good, [good, *others])
    highest = MedianStoppingRule("loss", "max", grace_period=2)
    assert highest(reporting(0.0, 1.5), others)
    assert not highest(bad, others)


def test_the_median_rule_waits_for_reports_of_the_trial_and_of_enough_others():
    others = [reporting(1.0, 1.0), reporting(1.0, 1.0), reporting(1.0)]
    rule = MedianStoppingRule("loss", grace_period=2)
    bad = reporting(9.0)
    assert not rule(bad, others)
    bad.reported({"loss": 9.0})
    assert not rule(bad, others), "only two others have two reports"
    others[2].reported({"loss": 1.0})
    assert rule(bad, others)


def test_the_median_rule_compares_with_averages_and_takes_no_number_as_the_worst():
    others = [reporting(3.0, 1.0)] * 3
    rule = MedianStoppingRule("loss", grace_period=2)
    assert not rule(reporting(9.0, 1.9), others)
    assert rule(reporting(9.0, 2.1), others)
    assert rule(reporting(math.nan, math.nan), others)


def test_a_bad_grace_period_is_refused():
    with pytest.raises(ValueError, match="grace_period=0"):
        MedianStoppingRule("loss", grace_period=0)
