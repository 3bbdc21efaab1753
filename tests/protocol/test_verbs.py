"""Requests on the wire: a name and plain fields, which are checked where they arrive."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunb.protocol import plain, records, verbs
from gpunb.protocol.plain import Malformed
from tests.protocol.test_plain import values
from tests.protocol.test_records import CALL

KNOWN = {**verbs.names(verbs.OfWorker), **verbs.names(verbs.OfKernel)}
SINK = verbs.SinkInfo(1, (3, "cell"), False, True, (1, "train", 8))
AROUND = verbs.Surroundings({"A": "b"}, None, ["/"], ["program"])
CALLED = records.Submission.of(CALL)

GOOD: list[verbs.Verb[Any]] = [
    verbs.Put(False),
    verbs.Fetch(((1, 0), (0, 5)), 2.5, True),
    verbs.Wait(((1, 0),), 1, None),
    verbs.Wait(((1, 0),), 1, float("inf")),
    verbs.Watch((1, 0)),
    verbs.Take((1, 0)),
    verbs.FindActor("name", "space"),
    verbs.Kill(1, True),
    verbs.Cancel((1, 0), False, True),
    verbs.Interrupt((1, 0)),
    verbs.Ask("memory", (((0, (1, 2)),),)),
    verbs.Submit(CALLED, False),
    verbs.Input(None, False),
    verbs.Attach(AROUND, (1, 2)),
    verbs.SubmitNumbered(1, CALLED.function, None, (), 0, CALL.new, SINK, AROUND),
    verbs.SubmitNumbered(1, None, 7, ((1, 0),), 0, None, None, None),
    verbs.Numbers(8),
    verbs.Answer(-1, None),
    verbs.SendComm(1, "comm_msg", {"data": {}}, SINK),
    verbs.Control({"do": "status"}),
    verbs.WatchStatus(1, 2),
    verbs.Unwatch(1),
    verbs.ListRetained(),
    verbs.Adopt(1),
    verbs.BroughtHome(1),
    verbs.ReadLog(1, 0),
    verbs.FindSession("name", SINK),
    verbs.CancelAll(),
]


def sent(verb: verbs.Verb[Any]) -> Any:
    """What arrives of a request."""
    return verbs.decode(KNOWN, *plain.loads(plain.dumps(verbs.encode(verb))))


@pytest.mark.parametrize("verb", GOOD, ids=repr)
def test_a_request_arrives_as_it_was(verb: verbs.Verb[Any]) -> None:
    assert type(sent(verb)) is type(verb)
    assert sent(verb) == verb


def test_each_request_is_tried_here() -> None:
    assert {type(each) for each in GOOD} == set(KNOWN.values())
    assert set(get_args(verbs.Shared)) < set(get_args(verbs.OfWorker))
    assert set(get_args(verbs.Shared)) < set(get_args(verbs.OfKernel))


def test_what_is_sent_holds_plain_values_only() -> None:
    for verb in GOOD:
        encoded = verbs.encode(verb)
        assert plain.made(encoded) == encoded
        assert all(type(each) in verbs._PLAIN for each in encoded[1])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("NoSuchVerb", ()),
        ("Verb", ()),
        ("Put", (1,)),
        ("Fetch", (((1, 0),), None)),
        ("Fetch", (((1, 2, 3),), None, True)),
        ("Fetch", ([(1, 0)], None, True)),
        ("Fetch", (((1, True),), None, True)),
        ("Fetch", (((1, 0),), "soon", True)),
        ("Fetch", (((1, 0),), float("nan"), True)),
        ("Take", ([1, 0],)),
        ("Take", (None,)),
        ("FindActor", ("name", b"space")),
        ("Ask", ("status", {})),
        ("Submit", ((), False)),
        ("Submit", (records.flat(CALLED), None)),
        ("Attach", (({}, None, []), (1, 2))),
        ("Attach", (tuple(AROUND), (1, None))),
        ("WatchStatus", (1, float("nan"))),
        ("SendComm", (1, "comm_msg", {}, None)),
        ("SendComm", (1, "comm_msg", {}, (1, None, False))),
        ("FindSession", ("name", (1, "place", False, False))),
    ],
)
def test_a_request_with_wrong_fields_is_malformed(name: str, fields: tuple[Any, ...]) -> None:
    with pytest.raises(Malformed):
        verbs.decode(KNOWN, name, fields)


def test_a_worker_cannot_send_the_requests_of_a_kernel() -> None:
    with pytest.raises(Malformed, match="'Numbers' cannot be asked for"):
        verbs.decode(verbs.names(verbs.OfWorker), "Numbers", (1,))


@given(st.sampled_from(sorted(KNOWN)), st.lists(values, max_size=8))
def test_any_fields_are_a_request_or_malformed(name: str, fields: list[Any]) -> None:
    try:
        verbs.decode(KNOWN, name, tuple(fields))
    except Malformed:
        pass
